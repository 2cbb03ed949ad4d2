package keyring

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"sync/atomic"
)

// SeedBytes is the length of the seed that a Signer is made of.
const SeedBytes = ed25519.SeedSize

// MaxKeys of a Ring: the present one, and one that a rotation has brought or left.
const MaxKeys = 2

// Public is the public half of a key.
type Public [ed25519.PublicKeySize]byte

// Signature is an Ed25519 signature.
type Signature [ed25519.SignatureSize]byte

// ID names a public key: the first 8 bytes of its SHA-256, little endian.
func (p Public) ID() uint64 {
	sum := sha256.Sum256(p[:])
	return binary.LittleEndian.Uint64(sum[:])
}

// Verify says whether the key's holder has signed the message under the label.
func (p Public) Verify(label string, message []byte, s Signature) bool {
	return ed25519.Verify(p[:], labelled(label, message), s[:])
}

// labelled is what is signed: the label, NUL, the message. Labels contain no NUL.
func labelled(label string, message []byte) []byte {
	b := make([]byte, 0, len(label)+1+len(message))
	b = append(append(b, label...), 0)
	return append(b, message...)
}

// Signer is a private key. Safe for many goroutines.
type Signer struct {
	private ed25519.PrivateKey
	public  Public
	id      uint64
	proofs  []byte // the key of Proof
}

// NewSigner makes the key of a seed. The same seed makes the same key.
func NewSigner(seed [SeedBytes]byte) *Signer {
	s := &Signer{private: ed25519.NewKeyFromSeed(seed[:])}
	s.public = Public(s.private.Public().(ed25519.PublicKey))
	s.id = s.public.ID()
	var err error
	// HKDF (RFC 5869): the proofs tell nothing of the seed.
	if s.proofs, err = hkdf.Key(sha256.New, seed[:], nil, "quarry proofs", sha256.Size); err != nil {
		panic(err) // only a length above 255 hashes fails
	}
	return s
}

// ID names the public half.
func (s *Signer) ID() uint64 { return s.id }

// Public is the half that others verify with.
func (s *Signer) Public() Public { return s.public }

// Sign signs a message under a label.
func (s *Signer) Sign(label string, message []byte) Signature {
	return Signature(ed25519.Sign(s.private, labelled(label, message)))
}

// Proof is a secret that only the holder of the seed can make, and can make again: an
// HMAC-SHA-256 of the message under the label.
func (s *Signer) Proof(label string, message []byte) []byte {
	h := hmac.New(sha256.New, s.proofs)
	h.Write(labelled(label, message))
	return h.Sum(nil)
}

// Ring is the public keys that are valid now. The zero Ring verifies nothing. Safe for many
// goroutines.
type Ring struct{ keys atomic.Pointer[[]Public] }

// NewRing holds the keys.
func NewRing(keys ...Public) *Ring {
	r := &Ring{}
	r.Set(keys...)
	return r
}

// Set replaces the keys; those that are not named are valid no more.
func (r *Ring) Set(keys ...Public) { r.keys.Store(&keys) }

// Keys that are valid now. Not to be changed.
func (r *Ring) Keys() []Public {
	if keys := r.keys.Load(); keys != nil {
		return *keys
	}
	return nil
}

// Verify says whether the key of that id is valid, and has signed the message.
func (r *Ring) Verify(id uint64, label string, message []byte, s Signature) bool {
	for _, k := range r.Keys() {
		if k.ID() == id {
			return k.Verify(label, message, s)
		}
	}
	return false
}

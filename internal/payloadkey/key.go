package payloadkey

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
)

const (
	// KeyBytes is the length of a key.
	KeyBytes = 32
	// IDBits is the length of a key's id.
	IDBits     = 48
	nonceBytes = 24
	saltBytes  = 12

	// maxSealed bounds the messages of one salt: with random nonces of 96 bits two are alike among 2^31
	// with a probability of 2^-35. NIST SP 800-38D, 8.3, allows 2^32.
	maxSealed = 1 << 31

	// A reader keeps the derived key of a salt in one of ways places.
	ways, groups = 4, 1024
)

// Key is a secret of 32 random bytes.
type Key [KeyBytes]byte

// NewKey draws a key.
func NewKey() (k Key) {
	_, _ = rand.Read(k[:]) // never fails
	return k
}

// ID names a key: 48 bits of a hash of it. It is no secret.
func (k Key) ID() uint64 {
	sum := sha256.Sum256(append([]byte("quarry payload key id\x00"), k[:]...))
	return binary.LittleEndian.Uint64(sum[:]) & (1<<IDBits - 1)
}

// IDText is an id as files, errors and listings have it.
func IDText(id uint64) string { return fmt.Sprintf("%012x", id) }

// ErrNotAuthentic: the message was not encrypted with this key for this place, or has been changed.
var ErrNotAuthentic = errors.New("not authentic")

// Cipher encrypts and decrypts with one key. Safe for many goroutines.
type Cipher struct {
	id      uint64
	block   cipher.Block // AES-256 with the key
	k1      [aes.BlockSize]byte
	sealing atomic.Pointer[derived]
	met     [groups * ways]atomic.Pointer[derived]
}

// derived is the key of all messages with a salt. Immutable but for the counter.
type derived struct {
	salt   [saltBytes]byte
	aead   cipher.AEAD
	sealed atomic.Uint64
}

// NewCipher expands a key.
func NewCipher(k Key) *Cipher {
	c := &Cipher{id: k.ID()}
	var err error
	if c.block, err = aes.NewCipher(k[:]); err != nil {
		panic(err) // 32 bytes are a key
	}
	// K1 of CMAC (SP 800-38B, 6.1).
	c.block.Encrypt(c.k1[:], c.k1[:])
	top := c.k1[0] >> 7
	for i := range c.k1 {
		c.k1[i] <<= 1
		if i+1 < len(c.k1) {
			c.k1[i] |= c.k1[i+1] >> 7
		}
	}
	c.k1[len(c.k1)-1] ^= top * 0x87
	return c
}

// ID is the id of the key.
func (c *Cipher) ID() uint64 { return c.id }

// derive makes the key of a salt: CMAC in counter mode (SP 800-108) with the label 'X'.
func (c *Cipher) derive(salt [saltBytes]byte) *derived {
	d := &derived{salt: salt}
	var key [KeyBytes]byte
	for i := range 2 {
		m := key[i*aes.BlockSize : (i+1)*aes.BlockSize]
		m[1], m[2] = byte(i+1), 'X'
		copy(m[4:], salt[:])
		for j := range m {
			m[j] ^= c.k1[j]
		}
		c.block.Encrypt(m, m)
	}
	block, err := aes.NewCipher(key[:])
	if err == nil {
		d.aead, err = cipher.NewGCM(block)
	}
	if err != nil {
		panic(err) // 32 bytes are a key
	}
	return d
}

// Seal draws a nonce, and encrypts plaintext to dst[:0]. dst has room for 16 bytes more than
// plaintext and does not overlap it. ad is authenticated and not part of the result.
func (c *Cipher) Seal(dst, nonce, plaintext, ad []byte) []byte {
	d := c.sealing.Load()
	for d == nil || d.sealed.Add(1) > maxSealed {
		var salt [saltBytes]byte
		_, _ = rand.Read(salt[:]) // never fails
		c.sealing.CompareAndSwap(d, c.derive(salt))
		d = c.sealing.Load()
	}
	nonce = nonce[:nonceBytes]
	copy(nonce, d.salt[:])
	_, _ = rand.Read(nonce[saltBytes:])
	return d.aead.Seal(dst[:0], nonce[saltBytes:], plaintext, ad)
}

// Open decrypts to dst[:0], which is the place of the ciphertext or does not overlap it.
// ErrNotAuthentic, and dst is zeros, if the nonce, the ciphertext or ad is not that of one message.
func (c *Cipher) Open(dst, nonce, ciphertext, ad []byte) ([]byte, error) {
	out, err := c.of([saltBytes]byte(nonce)).aead.Open(dst[:0], nonce[saltBytes:nonceBytes], ciphertext, ad)
	if err != nil {
		return nil, ErrNotAuthentic
	}
	return out, nil
}

// of is the derived key of a salt.
func (c *Cipher) of(salt [saltBytes]byte) *derived {
	// Salts are random, so any of their bits choose a group.
	first := int(binary.LittleEndian.Uint16(salt[:])) % groups * ways
	free := first + int(salt[2])%ways
	for i := first; i < first+ways; i++ {
		d := c.met[i].Load()
		if d == nil {
			free = i
		} else if d.salt == salt {
			return d
		}
	}
	d := c.derive(salt)
	c.met[free].Store(d)
	return d
}

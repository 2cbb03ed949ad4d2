package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto"
)

// This file encrypts payloads before they become images, and decrypts them after an image has
// been judged. All that is between, the checksum, copies, repairs and fences, works on
// ciphertext and needs no keys.
//
// A ciphertext is bound to its place and image: region, offset, generation, version, born, tag and
// writer are authenticated with it. So a repair does not copy it to another version, but writes the
// same bytes again (rewrite, rewriteBackups).

var (
	// ErrKey: the payload is encrypted with a key that this session does not have.
	ErrKey = errors.New("no key")
	// ErrNotEncrypted: the payload is not encrypted, and this session reads encrypted ones only.
	ErrNotEncrypted = errors.New("not encrypted")
	// ErrNotAuthentic: the checksum of an encrypted payload is right, and the payload was not
	// written at this place and version by a holder of the key.
	ErrNotAuthentic = errors.New("not authentic")
)

// encryption is what a lane encrypts and decrypts with. Only the lane's goroutine uses it.
type encryption struct {
	keys *payloadkey.Ring
	// ad is scratch memory for the data that is authenticated beside a payload: the region's
	// seed, the slab's offset and generation, the header of the image, the envelope word; of an
	// index also the index itself.
	ad []byte
}

// Encrypt sets the keys. The lane encrypts what it writes with the first of them, and decrypts
// with any. If the ring has no keys, payloads are written as they are, and the ring is used for
// errors only.
// Preconditions: no operation has begun.
func (l *Lane) Encrypt(keys *payloadkey.Ring) {
	l.keys, l.encryption, l.unclear = keys, nil, proto.TagEncrypted
	if keys.First() != nil {
		l.encryption, l.unclear = &encryption{keys: keys}, 0
	}
}

// Overhead is how many bytes encryption adds to a payload; 0 without keys.
func (l *Lane) Overhead() int { return l.encryption.overhead() }

func (e *encryption) overhead() int {
	if e == nil {
		return 0
	}
	return proto.EncryptionBytes
}

// room is the largest payload that the lane writes to a slab; negative if it writes none.
func (l *Lane) room(s proto.Slab) int { return s.Class.PayloadBytes(s.Kind) - l.Overhead() }

// fits returns ErrTooLarge for a payload of more bytes than the lane writes to a slab.
func (l *Lane) fits(bytes int, s proto.Slab) error {
	room := l.room(s)
	switch {
	case bytes <= room:
		return nil
	case room < 0:
		return fmt.Errorf("%w: the slab of %d bytes has no room for the %d that encryption adds", ErrTooLarge, s.Class.Bytes(), l.Overhead())
	}
	return fmt.Errorf("%w: %d bytes, the slab has room for %d", ErrTooLarge, bytes, room)
}

// MaxPayloadBytes is the largest payload that the lane writes to one slab of a kind.
func (l *Lane) MaxPayloadBytes(k proto.Kind) int { return proto.MaxPayloadBytes(k) - l.Overhead() }

// bind sets e.ad to the place of an object, the header of its image and the envelope word.
func (e *encryption) bind(o *object, h proto.ImageHeader, envelope proto.Envelope) {
	var b [16 + proto.ImageHeaderBytes]byte
	proto.PutImageHeader(b[8:], h)
	proto.PutWord(b[:], 0, o.reg.Seed)
	proto.PutWord(b[:], 8, o.slab.Off<<proto.GenerationBits|uint64(o.ref.Incarnation.Generation()))
	proto.PutWord(b[:], 40, uint64(envelope))
	e.ad = append(e.ad[:0], b[:]...)
}

// seal encrypts a payload into img. It sets tag and length of the header as they are for the
// ciphertext.
func (e *encryption) seal(o *object, img []byte, h *proto.ImageHeader, payload []byte) {
	key, index := e.keys.First(), h.Tag&proto.TagIndex != 0
	envelope := proto.MakeEnvelope(h.Tag, key.ID())
	h.Tag, h.Length = h.Tag|proto.TagEncrypted, len(payload)+proto.EncryptionBytes
	at := proto.ImageHeaderBytes
	proto.PutWord(img, at, uint64(envelope))
	e.bind(o, *h, envelope)
	nonce, out := img[at+8:at+proto.EncryptedLead], img[at+proto.EncryptedLead:at+h.Length]
	if index {
		copy(out, payload)
		e.ad = append(e.ad, payload...)
		out, payload = out[len(payload):], nil
	}
	key.Seal(out, nonce, payload, e.ad)
}

// open decrypts the payload of an image in its place. The tag in h is that of the payload inside.
// Preconditions: proto.InnerTag has accepted the payload, with this tag.
func (e *encryption) open(key *payloadkey.Cipher, o *object, h proto.ImageHeader, payload []byte) ([]byte, error) {
	index := h.Tag&proto.TagIndex != 0
	h.Tag |= proto.TagEncrypted
	e.bind(o, h, proto.Envelope(proto.Word(payload, 0)))
	nonce, text := payload[8:proto.EncryptedLead], payload[proto.EncryptedLead:]
	if !index {
		return key.Open(text, nonce, text, e.ad)
	}
	inside := proto.Inside(payload)
	e.ad = append(e.ad, inside...)
	_, err := key.Open(nil, nonce, text[len(inside):], e.ad)
	return inside, err
}

// admit decides whether the lane may use the payload of a live image, and sets the tag to that of
// the payload inside. key is nil for a payload that is not encrypted. ErrNotEncrypted,
// ErrNotAuthentic, ErrKey: the payload must not be used.
func (l *Lane) admit(o *object, s *sight) (key *payloadkey.Cipher, err error) {
	if !proto.IsEncrypted(s.header.Tag) {
		if l.encryption != nil && !l.keys.Clear() {
			l.refuse(payloadkey.NotEncrypted)
			return nil, fmt.Errorf("%v is %w: clients with keys read encrypted objects only, for anything else may be forged; --allow-clear (client.Config.AllowClear) reads both", o.ref, ErrNotEncrypted)
		}
		return nil, nil
	}
	tag, e, ok := proto.InnerTag(s.header.Tag, s.payload)
	if !ok {
		l.refuse(payloadkey.NotAuthentic)
		return nil, fmt.Errorf("%v is %w: it has no envelope of a format that this program knows", o.ref, ErrNotAuthentic)
	}
	if l.keys != nil {
		key = l.keys.Find(e.Key())
	}
	if key == nil {
		l.refuse(payloadkey.NoKey)
		has := "this session has no keys"
		if l.keys != nil {
			has = l.keys.String()
		}
		return nil, fmt.Errorf("%w: %v is encrypted with key %s, and %s: add the key to the file of --key-file (QUARRY_KEY_FILE, client.Config.Keys)", ErrKey, o.ref, payloadkey.IDText(e.Key()), has)
	}
	s.header.Tag = tag
	return key, nil
}

// refuse counts a payload that the lane does not use.
func (l *Lane) refuse(why payloadkey.Refusal) {
	if l.keys != nil {
		l.keys.Refuse(why)
	}
}

// reveal decrypts the payload of a live image in its place, if it is encrypted.
func (l *Lane) reveal(o *object, s *sight) error {
	key, err := l.admit(o, s)
	if err != nil {
		return err
	}
	return l.decrypt(key, o, s)
}

// revealToOverwrite is reveal for an operation that replaces the payload: it decrypts only an
// index.
func (l *Lane) revealToOverwrite(o *object, s *sight) error {
	key, err := l.admit(o, s)
	if err != nil || s.header.Tag&proto.TagIndex == 0 {
		return err
	}
	return l.decrypt(key, o, s)
}

// revealToFree is reveal for an operation that frees the object: it needs a key only for an
// index.
func (l *Lane) revealToFree(o *object, s *sight) error {
	switch tag, _, ok := proto.InnerTag(s.header.Tag, s.payload); {
	case ok && tag&proto.TagIndex != 0:
		return l.reveal(o, s)
	case ok:
		s.header.Tag = tag
	default:
		s.header.Tag &^= proto.TagEncrypted
	}
	return nil
}

// decrypt decrypts a payload with the key that admit has returned; nil: there is nothing to
// decrypt.
func (l *Lane) decrypt(key *payloadkey.Cipher, o *object, s *sight) error {
	if key == nil {
		return nil
	}
	payload, err := l.encryption.open(key, o, s.header, s.payload)
	if err != nil {
		l.refuse(payloadkey.NotAuthentic)
		return fmt.Errorf("%v is %w with key %s of tenant %q: its memory holds what no holder of the key has written there", o.ref, ErrNotAuthentic, payloadkey.IDText(key.ID()), l.keys.Tenant())
	}
	s.payload = payload
	return nil
}

// shown is the answer of a READ that has found a live image.
func (l *Lane) shown(k *reading) ([]byte, Info, error) {
	if k.header.Tag >= l.unclear {
		if err := l.reveal(&k.object, &k.sight); err != nil {
			return nil, Info{}, err
		}
	}
	return k.payload, infoOf(k.header, k.slab), nil
}

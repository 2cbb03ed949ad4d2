package pulse

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// A datagram, big endian:
//
//	magic 4 | sender's incarnation 8 | slot 4 | sequence 8 | sealed body
//
// The first 24 bytes are authenticated with the body; slot and sequence are the nonce. The
// slot numbers the receiver at the sender, so that no nonce is used twice.
const (
	magic           = 0x51500002 // "QP", version 2
	headerBytes     = 24
	fixedBytes      = 1 + 1 + 1 + 4 + 8 + 8 + 4 + 8 + 3
	tagBytes        = 16
	maxIncarnations = 32 // in each list
	maxBytes        = headerBytes + fixedBytes + 3*8*maxIncarnations + tagBytes
)

// Reasons why a datagram is dropped.
var (
	errMalformed = errors.New("malformed")
	errForeign   = errors.New("foreign")
	errReplayed  = errors.New("replayed")
)

// header is what a receiver reads before it can check anything.
type header struct {
	incarnation uint64 // of the sender
	slot        uint32
	seq         uint64
}

// body is what a member says to another.
type body struct {
	kind   Kind
	health Health
	leaves bool
	node   uint32
	to     uint64 // incarnation of the receiver; 0: not known yet
	ack    uint64 // newest sequence number of the receiver
	echo   uint32 // its slot
	term   uint64 // of the leadership; 0: does not lead
	// Incarnations that are silent to the sender, that it asks about, and those that the receiver
	// has asked about and from which the sender receives datagrams.
	silent, asks, hears []uint64
}

// parseHeader reads what is not sealed.
func parseHeader(b []byte) (h header, err error) {
	if len(b) < headerBytes+fixedBytes+tagBytes || len(b) > maxBytes || binary.BigEndian.Uint32(b) != magic {
		return h, errMalformed
	}
	h = header{incarnation: binary.BigEndian.Uint64(b[4:]), slot: binary.BigEndian.Uint32(b[12:]), seq: binary.BigEndian.Uint64(b[16:])}
	if h.incarnation == 0 || h.seq == 0 {
		return h, errMalformed
	}
	return h, nil
}

// appendHeader writes it.
func appendHeader(b []byte, h header) []byte {
	b = binary.BigEndian.AppendUint32(b, magic)
	b = binary.BigEndian.AppendUint64(b, h.incarnation)
	b = binary.BigEndian.AppendUint32(b, h.slot)
	return binary.BigEndian.AppendUint64(b, h.seq)
}

func appendBody(b []byte, p *body) []byte {
	leaves := byte(0)
	if p.leaves {
		leaves = 1
	}
	b = append(b, byte(p.kind), byte(p.health), leaves)
	b = binary.BigEndian.AppendUint32(b, p.node)
	b = binary.BigEndian.AppendUint64(b, p.to)
	b = binary.BigEndian.AppendUint64(b, p.ack)
	b = binary.BigEndian.AppendUint32(b, p.echo)
	b = binary.BigEndian.AppendUint64(b, p.term)
	for _, l := range [][]uint64{p.silent, p.asks, p.hears} {
		l = l[:min(len(l), maxIncarnations)]
		b = append(b, byte(len(l)))
		for _, incarnation := range l {
			b = binary.BigEndian.AppendUint64(b, incarnation)
		}
	}
	return b
}

// parseBody reads an opened body into p, whose lists are used again.
func parseBody(b []byte, p *body) error {
	if len(b) < fixedBytes || b[2] > 1 {
		return errMalformed
	}
	p.kind, p.health, p.leaves, p.node = Kind(b[0]), Health(b[1]), b[2] == 1, binary.BigEndian.Uint32(b[3:])
	p.to, p.ack, p.echo = binary.BigEndian.Uint64(b[7:]), binary.BigEndian.Uint64(b[15:]), binary.BigEndian.Uint32(b[23:])
	p.term = binary.BigEndian.Uint64(b[27:])
	if p.kind != Storage && p.kind != Controller || int(p.health) >= len(healths) || p.kind == Storage && p.term != 0 {
		return errMalformed
	}
	b = b[35:]
	for _, l := range []*[]uint64{&p.silent, &p.asks, &p.hears} {
		if len(b) < 1 || b[0] > maxIncarnations || len(b) < 1+8*int(b[0]) {
			return errMalformed
		}
		n := int(b[0])
		*l = (*l)[:0]
		for i := range n {
			*l = append(*l, binary.BigEndian.Uint64(b[1+8*i:]))
		}
		b = b[1+8*n:]
	}
	if len(b) > 0 {
		return errMalformed
	}
	return nil
}

// keys makes the keys of datagrams. A controller has the cluster's secret, and so the keys of
// all; a storage node has the secret of its own incarnation, and so can neither read nor write
// what others say to each other.
type keys struct {
	secret, salt []byte
}

// NodeSecret is the secret of one incarnation of a storage node, made of the cluster's secret
// and uuid.
func NodeSecret(secret, cluster []byte, incarnation uint64) []byte {
	key, err := hkdf.Key(sha256.New, secret, cluster, fmt.Sprintf("quarry pulse 2 node %016x", incarnation), 32)
	if err != nil {
		panic(err) // only a length above 255 hashes fails
	}
	return key
}

// node is what an incarnation of a storage node has.
// Preconditions: k is the controllers'.
func (k keys) node(incarnation uint64) keys {
	return keys{NodeSecret(k.secret, k.salt, incarnation), k.salt}
}

// controller is the key of what a controller says to others.
// Preconditions: k is the controllers'.
func (k keys) controller(incarnation uint64) (cipher.AEAD, error) {
	return k.key(fmt.Sprintf("quarry pulse 2 controller %016x", incarnation))
}

// up is the key of what a storage node says, and down of what a controller says to it.
// Preconditions: k is the node's.
func (k keys) up() (cipher.AEAD, error) { return k.key("quarry pulse 2 up") }

func (k keys) down(controller uint64) (cipher.AEAD, error) {
	return k.key(fmt.Sprintf("quarry pulse 2 down %016x", controller))
}

func (k keys) key(info string) (cipher.AEAD, error) {
	key, err := hkdf.Key(sha256.New, k.secret, k.salt, info, 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// own is the key of what a member says to controllers.
func (k keys) own(kind Kind, incarnation uint64) (cipher.AEAD, error) {
	if kind == Storage {
		return k.up()
	}
	return k.controller(incarnation)
}

// pair are the keys between two members, the far one of a kind: what it says to the near one is
// opened with one, and what the near one says to it is sealed with the other.
type pair struct {
	far        Kind
	open, seal cipher.AEAD
}

// pairs are the keys with an incarnation that was not heard before, of whichever kind it is.
func (m *machine) pairs(far uint64) (out []pair, err error) {
	if m.kind == Storage { // which exchanges datagrams with controllers only
		down, err := m.keys.down(far)
		return []pair{{Controller, down, m.key}}, err
	}
	theirs, err := m.keys.controller(far)
	if err != nil {
		return nil, err
	}
	k := m.keys.node(far)
	up, err := k.up()
	if err != nil {
		return nil, err
	}
	down, err := k.down(m.incarnation)
	return []pair{{Controller, theirs, m.key}, {Storage, up, down}}, err
}

// seal writes a datagram behind b, which is empty.
func seal(b []byte, key cipher.AEAD, h header, p *body, scratch []byte) []byte {
	b = appendHeader(b, h)
	return key.Seal(b, b[12:headerBytes], appendBody(scratch, p), b[:headerBytes])
}

// open checks a datagram with a readable header, and reads its body into p.
func open(b []byte, key cipher.AEAD, p *body, scratch []byte) error {
	plain, err := key.Open(scratch[:0], b[12:headerBytes], b[headerBytes:], b[:headerBytes])
	if err != nil {
		return errForeign
	}
	return parseBody(plain, p)
}

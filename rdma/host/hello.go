package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// What a connection says before its first chain, the same on tcp and shm: the node
// challenges, the client says hello, the node welcomes it. All fields are little endian;
// sizes are fixed, so nothing can lie about its length.
//
//	challenge     0 magic  8 version (2 bytes)  10 tls (2 bytes)  12 node  16 incarnation  24 nonce (32 bytes)
//	hello         0 magic  8 version  12 lane    16 attempt  24 ticket (152 bytes)  176 proof
//	welcome       0 magic  8 version  12 code    16 node  20 zero  24 incarnation
//	open request  0 tag    4 region    8 slot    12 zero  16 epoch
//	open answer   0 tag    4 code      8 flags   12 zero  16 key   24 bytes
//
// Flags are 1 if a persistent FLUSH is possible, and in bits 8 to 15 its rdma.FlushMethod.
//
// A code is 0 or the place of the cause in rdma.Refusals, counted from 1; 255 is
// any other failure.
const (
	ProtocolVersion = proto.FabricVersion

	ChallengeBytes   = 56
	HelloBytes       = 24 + rdma.TicketBytes + 64
	WelcomeBytes     = 32
	OpenRequestBytes = 24
	OpenAnswerBytes  = 32

	codeBroken     = 255
	flagPersistent = 1
	flagVerifies   = 2
	offsetShift    = 16 // of OpenAnswer.Offset, in units of offsetUnit
	offsetUnit     = 4096
)

var helloMagic = [8]byte{'Q', 'U', 'A', 'R', 'R', 'Y', 'V', '\n'}

// ErrHello: the peer does not speak this protocol.
var ErrHello = errors.New("not a quarry fabric connection of this version")

// Challenge is a node's first message. The nonce is never used twice, so that a hello is
// good for one connection.
type Challenge struct {
	Node        uint32   // number of the node that answers; the client compares it with the one it dialled
	Incarnation uint64   // of that node: one run of its process
	Nonce       [32]byte // 256 random bits; the client's proof covers them
	// TLS that may or must follow the challenge, on tcp alone. It is under the client's proof:
	// a challenge that was changed on the way is refused.
	TLS TLS
}

// TLS is what a node says about encryption.
type TLS uint16

// What a node offers. A client that takes TLS begins with its handshake after the challenge, and says
// hello inside.
const (
	NoTLS       TLS = 0
	OfferedTLS  TLS = 1
	RequiredTLS TLS = 2
)

// Append appends the encoded form.
func (c *Challenge) Append(b []byte) []byte {
	b = append(b, helloMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, ProtocolVersion)
	b = binary.LittleEndian.AppendUint16(b, uint16(c.TLS))
	b = binary.LittleEndian.AppendUint32(b, c.Node)
	b = binary.LittleEndian.AppendUint64(b, c.Incarnation)
	return append(b, c.Nonce[:]...)
}

// DecodeChallenge reads a node's first message.
func DecodeChallenge(b []byte) (c Challenge, err error) {
	if len(b) != ChallengeBytes {
		return c, ErrHello
	}
	if c.TLS = TLS(binary.LittleEndian.Uint16(b[10:])); c.TLS > RequiredTLS {
		return c, fmt.Errorf("%w: the node requires encryption of kind %d, which this build does not have", ErrHello, c.TLS)
	}
	if err := checkVersion(b, uint32(binary.LittleEndian.Uint16(b[8:]))); err != nil {
		return c, err
	}
	return Challenge{TLS: c.TLS, Node: binary.LittleEndian.Uint32(b[12:]), Incarnation: binary.LittleEndian.Uint64(b[16:]), Nonce: [32]byte(b[24:])}, nil
}

// Hello is a client's first message.
type Hello struct {
	Lane   uint32            // number of the lane within its session
	Ticket rdma.Ticket       // names the session and the public key of Proof
	Proof  keyring.Signature // by the ticket's holder
	// Attempt rises with every connection of a lane. A hello whose sender has given
	// up waiting may be read after that of a later one: it must not take the lane.
	Attempt uint64
}

var attempts atomic.Uint64

// NextAttempt is above all earlier ones of this process, and nearly always above
// those of earlier processes.
func NextAttempt() uint64 {
	for {
		old := attempts.Load()
		next := max(old+1, uint64(time.Now().UnixNano()))
		if attempts.CompareAndSwap(old, next) {
			return next
		}
	}
}

// Append appends the encoded form.
func (h *Hello) Append(b []byte) []byte {
	b = append(b, helloMagic[:]...)
	b = binary.LittleEndian.AppendUint32(b, ProtocolVersion)
	b = binary.LittleEndian.AppendUint32(b, h.Lane)
	b = binary.LittleEndian.AppendUint64(b, h.Attempt)
	b, _ = h.Ticket.AppendBinary(b)
	return append(b, h.Proof[:]...)
}

// checkMagic checks length, magic and version of a message of the handshake.
func checkMagic(b []byte, n int) error {
	if len(b) != n {
		return ErrHello
	}
	return checkVersion(b, binary.LittleEndian.Uint32(b[8:]))
}

// checkVersion says whether the peer speaks this build's protocol; the error tells both versions.
func checkVersion(b []byte, v uint32) error {
	if [8]byte(b) != helloMagic {
		return ErrHello
	}
	if v != ProtocolVersion {
		return fmt.Errorf("%w: the peer has version %d, this build %d, with layout version %d%s", ErrHello, v, ProtocolVersion, proto.LayoutVersion, proto.WayFrom(v))
	}
	return nil
}

// DecodeHello reads a client's first message; ticket and proof are not verified yet.
func DecodeHello(b []byte) (h Hello, err error) {
	if err := checkMagic(b, HelloBytes); err != nil {
		return h, err
	}
	h.Lane, h.Attempt = binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	if h.Ticket, err = rdma.DecodeTicket(b[24 : 24+rdma.TicketBytes]); err != nil {
		return h, fmt.Errorf("%w: %w", ErrHello, err)
	}
	h.Proof = keyring.Signature(b[24+rdma.TicketBytes:])
	return h, nil
}

// Welcome is the node's answer.
type Welcome struct {
	Err         error  // why the lane was not admitted, one of rdma.Refusals or rdma.ErrBroken; nil: it was
	Node        uint32 // the node's number
	Incarnation uint64 // of the node; clients compare it with the table
}

// Append appends the encoded form.
func (w *Welcome) Append(b []byte) []byte {
	b = append(b, helloMagic[:]...)
	b = binary.LittleEndian.AppendUint32(b, ProtocolVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(Code(w.Err)))
	b = binary.LittleEndian.AppendUint64(b, uint64(w.Node))
	return binary.LittleEndian.AppendUint64(b, w.Incarnation)
}

// DecodeWelcome reads the node's answer.
func DecodeWelcome(b []byte) (Welcome, error) {
	if err := checkMagic(b, WelcomeBytes); err != nil {
		return Welcome{}, err
	}
	return Welcome{
		Err:         CodeError(byte(min(binary.LittleEndian.Uint32(b[12:]), codeBroken))),
		Node:        binary.LittleEndian.Uint32(b[16:]),
		Incarnation: binary.LittleEndian.Uint64(b[24:]),
	}, nil
}

// OpenRequest asks for a window. The tag comes back with the answer.
type OpenRequest struct {
	Tag    uint32 // chosen by the client; tells late answers from the one awaited
	Region uint32 // number in the table
	Slot   int32  // index of the window on this connection, chosen by the client, below MaxWindows
	Epoch  uint64 // refused with rdma.ErrKey unless the node serves the region under it
}

// Append appends the encoded form.
func (o *OpenRequest) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, o.Tag)
	b = binary.LittleEndian.AppendUint32(b, o.Region)
	b = binary.LittleEndian.AppendUint64(b, uint64(uint32(o.Slot)))
	return binary.LittleEndian.AppendUint64(b, o.Epoch)
}

// DecodeOpenRequest reads a request. Slots out of range are refused by Lane.Open.
func DecodeOpenRequest(b []byte) (OpenRequest, error) {
	if len(b) != OpenRequestBytes {
		return OpenRequest{}, ErrHello
	}
	return OpenRequest{
		Tag:    binary.LittleEndian.Uint32(b),
		Region: binary.LittleEndian.Uint32(b[4:]),
		Slot:   int32(binary.LittleEndian.Uint32(b[8:])),
		Epoch:  binary.LittleEndian.Uint64(b[16:]),
	}, nil
}

// OpenAnswer is a window, or why there is none.
type OpenAnswer struct {
	Tag      uint32           // of the request
	Err      error            // why there is no window; the other fields are zero then
	Flush    rdma.FlushMethod // of rdma.Window
	Key      uint64           // of rdma.Window
	Bytes    uint64           // size of the region
	Verifies bool             // of rdma.Window
	Offset   uint64           // over shm: where the region begins in the descriptor's file; a multiple of 4096
}

// Append appends the encoded form.
func (o *OpenAnswer) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, o.Tag)
	b = binary.LittleEndian.AppendUint32(b, uint32(Code(o.Err)))
	flags := o.Offset / offsetUnit << offsetShift
	if o.Flush != rdma.NoFlush {
		flags |= flagPersistent | uint64(o.Flush)<<8
	}
	if o.Verifies {
		flags |= flagVerifies
	}
	b = binary.LittleEndian.AppendUint64(b, flags)
	b = binary.LittleEndian.AppendUint64(b, o.Key)
	return binary.LittleEndian.AppendUint64(b, o.Bytes)
}

// DecodeOpenAnswer reads an answer.
func DecodeOpenAnswer(b []byte) (OpenAnswer, error) {
	if len(b) != OpenAnswerBytes {
		return OpenAnswer{}, ErrHello
	}
	return OpenAnswer{
		Tag:      binary.LittleEndian.Uint32(b),
		Err:      CodeError(byte(min(binary.LittleEndian.Uint32(b[4:]), codeBroken))),
		Flush:    rdma.FlushMethodOf(b[8]&flagPersistent != 0, b[9]),
		Key:      binary.LittleEndian.Uint64(b[16:]),
		Bytes:    binary.LittleEndian.Uint64(b[24:]),
		Verifies: b[8]&flagVerifies != 0,
		Offset:   binary.LittleEndian.Uint64(b[8:]) >> offsetShift * offsetUnit,
	}, nil
}

// Code is the number of an error on the wire.
func Code(err error) byte {
	if err == nil {
		return 0
	}
	for i, cause := range rdma.Refusals {
		if errors.Is(err, cause) {
			return byte(i + 1)
		}
	}
	return codeBroken
}

// CodeError is the error of a number on the wire: one of the package's own, so
// that making it costs nothing.
func CodeError(code byte) error {
	switch {
	case code == 0:
		return nil
	case int(code) <= len(rdma.Refusals):
		return rdma.Refusals[code-1]
	}
	return rdma.ErrBroken
}

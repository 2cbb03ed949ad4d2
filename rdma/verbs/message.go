package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// What the socket carries. Sizes are fixed, fields little endian.
//
//	node    challenge of package host
//	client  intro     0 magic  4 version  6 zero, then the hello of package host
//	node    welcome of package host, endpoint
//	client  request   0 kind  4 tag  8 region  12 slot   16 epoch
//	node    answer    0 kind  4 tag  8 code    12 flags  16 key    24 bytes   32 rkey  36 zero
//
//	          behind it, where the endpoint has version 5: 40 base
//
//	endpoint  0 magic  4 version  6 port  8 address  24 nonce
//
// A request to connect through librdmacm carries at most 56 bytes, padded to that:
//
//	client  claim     0 magic  4 version  6 length  8 lane  12 nonce
const (
	introBytes    = 8
	endpointBytes = 40
	claimBytes    = 28
	requestBytes  = 24
	answerBytes   = 40
	baseBytes     = 8

	magic   = 0x51425651 // "QVBQ"
	version = 4

	// versionActs is that of an endpoint whose node executes the atomics of its regions: its answers have 8 bytes more. The hello
	// and the claim have version.
	versionActs = 5

	kindOpen     = 1
	kindFarewell = 3

	flagPersistent = 1
	flagFlushes    = 2 // takes native FLUSHes that are visible
	flagVerifies   = 4 // the node hashes ranges that it is asked for
	// Bits 8 to 15 of the flags are the rdma.FlushMethod of a persistent FLUSH.
)

var errPeer = errors.New("the peer does not speak the verbs protocol of this version")

// appendMagic begins a message; checkMagic checks that.
func appendMagic(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, magic)
	return binary.LittleEndian.AppendUint16(b, version)
}

// checkMagic looks at the first 6 of n bytes.
func checkMagic(b []byte, n int) error {
	if len(b) < n || binary.LittleEndian.Uint32(b) != magic {
		return errPeer
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != version {
		return fmt.Errorf("%w: it has version %d, this build %d", errPeer, v, version)
	}
	return nil
}

// appendIntro encodes the first message of either side.
func appendIntro(b []byte) []byte { return append(appendMagic(b), 0, 0) }

// checkIntro checks the peer's first message.
func checkIntro(b []byte) error {
	if err := checkMagic(b, introBytes); err != nil {
		return err
	}
	if b[6] != 0 || b[7] != 0 {
		return errPeer
	}
	return nil
}

// endpoint is where a node's adapter takes requests to connect, and what such a request
// has to name.
type endpoint struct {
	port  uint16   // of the node's connection manager; not 0
	addr  [16]byte // as a GID
	nonce [16]byte // of the lane that this endpoint was made for; not 0
	acts  bool     // the node's processors execute the atomics of its regions
}

// append encodes where the node's queue pairs are connected.
func (e *endpoint) append(b []byte) []byte {
	at := len(b)
	b = binary.LittleEndian.AppendUint16(appendMagic(b), e.port)
	if e.acts {
		binary.LittleEndian.PutUint16(b[at+4:], versionActs)
	}
	b = append(b, e.addr[:]...)
	return append(b, e.nonce[:]...)
}

// decodeEndpoint is the client's side of endpoint.append.
func decodeEndpoint(b []byte) (endpoint, error) {
	acts := len(b) >= endpointBytes && binary.LittleEndian.Uint32(b) == magic && binary.LittleEndian.Uint16(b[4:]) == versionActs
	if err := checkMagic(b, endpointBytes); err != nil && !acts {
		return endpoint{}, err
	}
	e := endpoint{port: binary.LittleEndian.Uint16(b[6:]), addr: [16]byte(b[8:]), nonce: [16]byte(b[24:]), acts: acts}
	if e.port == 0 || e.addr == [16]byte{} || e.nonce == [16]byte{} {
		return endpoint{}, fmt.Errorf("%w: endpoint out of range", errPeer)
	}
	return e, nil
}

// claim says whose queue pair a request to connect is for. The nonce came over the
// socket, where the ticket was shown.
type claim struct {
	lane  uint32   // number within the session
	nonce [16]byte // of the endpoint; proves that its sender has got the welcome
}

// append encodes which lane a queue pair belongs to; the nonce proves it.
func (c *claim) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(appendMagic(b), claimBytes)
	b = binary.LittleEndian.AppendUint32(b, c.lane)
	return append(b, c.nonce[:]...)
}

// decodeClaim reads private data, which is padded.
func decodeClaim(b []byte) (claim, error) {
	if err := checkMagic(b, claimBytes); err != nil {
		return claim{}, err
	}
	if binary.LittleEndian.Uint16(b[6:]) != claimBytes {
		return claim{}, errPeer
	}
	return claim{lane: binary.LittleEndian.Uint32(b[8:]), nonce: [16]byte(b[12:])}, nil
}

// request is what a client asks on the socket: a window.
type request struct {
	kind, tag, region uint32 // kind: kindOpen; tag: comes back in the answer
	slot              int32  // the client's index of the window
	epoch             uint64
}

// append encodes a request of the client.
func (r *request) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, r.kind)
	b = binary.LittleEndian.AppendUint32(b, r.tag)
	b = binary.LittleEndian.AppendUint32(b, r.region)
	b = binary.LittleEndian.AppendUint32(b, uint32(r.slot))
	return binary.LittleEndian.AppendUint64(b, r.epoch)
}

// Preconditions: len(b) == requestBytes.
func decodeRequest(b []byte) request {
	return request{
		kind: binary.LittleEndian.Uint32(b), tag: binary.LittleEndian.Uint32(b[4:]),
		region: binary.LittleEndian.Uint32(b[8:]), slot: int32(binary.LittleEndian.Uint32(b[12:])),
		epoch: binary.LittleEndian.Uint64(b[16:]),
	}
}

// answer is the node's answer to a request, or its farewell.
type answer struct {
	kind, tag  uint32           // kind and tag of the request; or kindFarewell
	err        error            // why the request was refused, or the lane ended
	flush      rdma.FlushMethod // of a persistent FLUSH
	flushes    bool             // the adapter takes native FLUSHes that are visible
	verifies   bool             // of rdma.Window
	key, bytes uint64           // key: of rdma.Window; bytes: size of the region
	rkey       uint32           // the adapter's key of the window
	base       uint64           // the adapter's address of offset 0; of nodes that execute atomics alone
}

// answerLen is how long an answer is.
func answerLen(acts bool) int {
	if acts {
		return answerBytes + baseBytes
	}
	return answerBytes
}

// append encodes an answer of the node.
func (a *answer) append(b []byte, acts bool) []byte {
	var flags uint32
	if a.flush != rdma.NoFlush {
		flags = flagPersistent | uint32(a.flush)<<8
	}
	if a.flushes {
		flags |= flagFlushes
	}
	if a.verifies {
		flags |= flagVerifies
	}
	b = binary.LittleEndian.AppendUint32(b, a.kind)
	b = binary.LittleEndian.AppendUint32(b, a.tag)
	b = binary.LittleEndian.AppendUint32(b, uint32(host.Code(a.err)))
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint64(b, a.key)
	b = binary.LittleEndian.AppendUint64(b, a.bytes)
	b = binary.LittleEndian.AppendUint64(b, uint64(a.rkey))
	if acts {
		b = binary.LittleEndian.AppendUint64(b, a.base)
	}
	return b
}

// Preconditions: len(b) is an answerLen.
func decodeAnswer(b []byte) answer {
	a := answer{
		kind: binary.LittleEndian.Uint32(b), tag: binary.LittleEndian.Uint32(b[4:]),
		err:     host.CodeError(byte(min(binary.LittleEndian.Uint32(b[8:]), 255))),
		flush:   rdma.FlushMethodOf(b[12]&flagPersistent != 0, b[13]),
		flushes: b[12]&flagFlushes != 0, verifies: b[12]&flagVerifies != 0,
		key: binary.LittleEndian.Uint64(b[16:]), bytes: binary.LittleEndian.Uint64(b[24:]),
		rkey: uint32(binary.LittleEndian.Uint64(b[32:])),
	}
	if len(b) > answerBytes {
		a.base = binary.LittleEndian.Uint64(b[answerBytes:])
	}
	return a
}

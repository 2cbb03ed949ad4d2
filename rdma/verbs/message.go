package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma/host"
)

// What the socket carries. Sizes are fixed, fields little endian.
//
//	client  hello of package host, endpoint
//	node    welcome of package host, endpoint
//	client  request   0 kind  4 tag  8 region  12 slot   16 epoch  24 offset  32 bytes
//	node    answer    0 kind  4 tag  8 code    12 flags  16 key    24 bytes   32 rkey  36 zero
//
//	endpoint  0 magic  4 version  6 lid  8 queue pair  12 packet sequence  16 gid  32 mtu  33 reads  34 zero
const (
	endpointBytes = 40
	requestBytes  = 40
	answerBytes   = 40

	endpointMagic   = 0x51425651 // "QVBQ"
	endpointVersion = 1

	kindOpen     = 1
	kindFlush    = 2
	kindFarewell = 3

	flagPersistent = 1
)

var errPeer = errors.New("the peer does not speak the verbs protocol of this version")

// endpoint is one end's queue pair.
type endpoint struct {
	lid   uint16
	qpn   uint32
	psn   uint32
	gid   [16]byte
	mtu   uint8 // enum ibv_mtu
	reads uint8 // READs and atomics that it takes at a time
}

func (e *endpoint) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, endpointMagic)
	b = binary.LittleEndian.AppendUint16(b, endpointVersion)
	b = binary.LittleEndian.AppendUint16(b, e.lid)
	b = binary.LittleEndian.AppendUint32(b, e.qpn)
	b = binary.LittleEndian.AppendUint32(b, e.psn)
	b = append(b, e.gid[:]...)
	b = append(b, e.mtu, e.reads)
	return append(b, make([]byte, 6)...)
}

func decodeEndpoint(b []byte) (endpoint, error) {
	if len(b) != endpointBytes || binary.LittleEndian.Uint32(b) != endpointMagic {
		return endpoint{}, errPeer
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != endpointVersion {
		return endpoint{}, fmt.Errorf("%w: it has version %d, this build %d", errPeer, v, endpointVersion)
	}
	e := endpoint{
		lid: binary.LittleEndian.Uint16(b[6:]),
		qpn: binary.LittleEndian.Uint32(b[8:]),
		psn: binary.LittleEndian.Uint32(b[12:]),
		gid: [16]byte(b[16:]),
		mtu: b[32], reads: b[33],
	}
	if e.qpn >= 1<<24 || e.psn >= 1<<24 || e.mtu < 1 || e.mtu > 5 || e.reads == 0 {
		return endpoint{}, fmt.Errorf("%w: endpoint out of range", errPeer)
	}
	return e, nil
}

type request struct {
	kind, tag, region uint32
	slot              int32
	epoch, off, bytes uint64
}

func (r *request) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, r.kind)
	b = binary.LittleEndian.AppendUint32(b, r.tag)
	b = binary.LittleEndian.AppendUint32(b, r.region)
	b = binary.LittleEndian.AppendUint32(b, uint32(r.slot))
	b = binary.LittleEndian.AppendUint64(b, r.epoch)
	b = binary.LittleEndian.AppendUint64(b, r.off)
	return binary.LittleEndian.AppendUint64(b, r.bytes)
}

// Preconditions: len(b) == requestBytes.
func decodeRequest(b []byte) request {
	return request{
		kind: binary.LittleEndian.Uint32(b), tag: binary.LittleEndian.Uint32(b[4:]),
		region: binary.LittleEndian.Uint32(b[8:]), slot: int32(binary.LittleEndian.Uint32(b[12:])),
		epoch: binary.LittleEndian.Uint64(b[16:]), off: binary.LittleEndian.Uint64(b[24:]), bytes: binary.LittleEndian.Uint64(b[32:]),
	}
}

type answer struct {
	kind, tag  uint32
	err        error
	persistent bool
	key, bytes uint64
	rkey       uint32
}

func (a *answer) append(b []byte) []byte {
	var flags uint32
	if a.persistent {
		flags = flagPersistent
	}
	b = binary.LittleEndian.AppendUint32(b, a.kind)
	b = binary.LittleEndian.AppendUint32(b, a.tag)
	b = binary.LittleEndian.AppendUint32(b, uint32(host.Code(a.err)))
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint64(b, a.key)
	b = binary.LittleEndian.AppendUint64(b, a.bytes)
	return binary.LittleEndian.AppendUint64(b, uint64(a.rkey))
}

// Preconditions: len(b) == answerBytes.
func decodeAnswer(b []byte) answer {
	return answer{
		kind: binary.LittleEndian.Uint32(b), tag: binary.LittleEndian.Uint32(b[4:]),
		err:        host.CodeError(byte(min(binary.LittleEndian.Uint32(b[8:]), 255))),
		persistent: binary.LittleEndian.Uint32(b[12:])&flagPersistent != 0,
		key:        binary.LittleEndian.Uint64(b[16:]), bytes: binary.LittleEndian.Uint64(b[24:]),
		rkey: uint32(binary.LittleEndian.Uint64(b[32:])),
	}
}

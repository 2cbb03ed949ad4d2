package tcp

import (
	"encoding/binary"
	"errors"

	"github.com/quarrystore/quarry/rdma"
)

const (
	kindChain = 1
	kindOpen  = 2

	headBytes   = 24
	verbBytes   = 32
	answerBytes = 16
	farewellSeq = 1<<32 - 1

	flagFence      = 1
	flagPersistent = 2

	// maxHead is the longest part of a frame that is read before any of it runs.
	maxHead = headBytes + rdma.MaxChainVerbs*verbBytes
)

var (
	errFrame  = errors.New("malformed frame")
	errAnswer = errors.New("malformed answer")
)

// head is the start of a frame.
type head struct {
	kind    byte   // kindChain or kindOpen
	verbs   int    // of a chain, 1 to rdma.MaxChainVerbs; 0 in an open
	seq     uint32 // comes back in the answer; farewellSeq is refused
	payload uint32 // bytes of the chain's WRITEs, which follow the verbs
	slot    int32  // of the window
	key     uint64 // of the window
}

// append encodes a frame's head; the layout is in the package comment.
func (h *head) append(b []byte) []byte {
	b = append(b, h.kind, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(h.verbs))
	b = binary.LittleEndian.AppendUint32(b, h.seq)
	b = binary.LittleEndian.AppendUint32(b, h.payload)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.slot))
	return binary.LittleEndian.AppendUint64(b, h.key)
}

// decodeHead reads headBytes.
func decodeHead(b []byte) (head, error) {
	h := head{
		kind:    b[0],
		verbs:   int(binary.LittleEndian.Uint16(b[2:])),
		seq:     binary.LittleEndian.Uint32(b[4:]),
		payload: binary.LittleEndian.Uint32(b[8:]),
		slot:    int32(binary.LittleEndian.Uint32(b[12:])),
		key:     binary.LittleEndian.Uint64(b[16:]),
	}
	switch {
	case b[1] != 0, h.seq == farewellSeq:
		return h, errFrame
	case h.kind == kindChain && h.verbs > 0 && h.verbs <= rdma.MaxChainVerbs && h.payload <= rdma.MaxChainBytes:
		return h, nil
	case h.kind == kindOpen && h.verbs == 0 && h.payload == 0:
		return h, nil
	}
	return h, errFrame
}

// appendVerb encodes a verb, without the bytes of a WRITE.
func appendVerb(b []byte, v *rdma.Verb) []byte {
	var flags byte
	if v.Fence {
		flags = flagFence
	}
	expect, length := v.Expect, uint32(len(v.Buf))
	switch v.Op {
	case rdma.Flush:
		expect = v.Bytes
		if v.Kind == rdma.Persistent {
			flags |= flagPersistent
		}
		fallthrough
	case rdma.CompareSwap, rdma.FetchAdd:
		length = 0
	case rdma.Verify:
		length = uint32(v.Bytes)
	}
	b = append(b, byte(v.Op), flags, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, length)
	b = binary.LittleEndian.AppendUint64(b, v.Off)
	b = binary.LittleEndian.AppendUint64(b, expect)
	return binary.LittleEndian.AppendUint64(b, v.New)
}

// decodeVerbs reads the verbs of a chain, and checks that their lengths agree with
// the payload and the limits. Buf is not set yet: Bytes is the length of a READ or
// WRITE too. results is what the answers to all of them take.
func decodeVerbs(verbs []rdma.Verb, b []byte, payload uint32) (out []rdma.Verb, results int, err error) {
	var reads, writes, words, verified uint64
	for ; len(b) >= verbBytes; b = b[verbBytes:] {
		v := rdma.Verb{
			Op: rdma.Op(b[0]), Fence: b[1]&flagFence != 0, Off: binary.LittleEndian.Uint64(b[8:]),
			Expect: binary.LittleEndian.Uint64(b[16:]), New: binary.LittleEndian.Uint64(b[24:]),
		}
		length := uint64(binary.LittleEndian.Uint32(b[4:]))
		if b[1]&^(flagFence|flagPersistent) != 0 || b[2]|b[3] != 0 || length > rdma.MaxVerbBytes {
			return verbs, 0, errFrame
		}
		switch v.Op {
		case rdma.Read:
			reads += length
			v.Bytes = length
		case rdma.Write:
			writes += length
			v.Bytes = length
		case rdma.CompareSwap, rdma.FetchAdd:
			words += 8
		case rdma.Verify:
			verified += length
			v.Bytes = length
			words += 8
		case rdma.Flush:
			v.Bytes, v.Expect = v.Expect, 0
			if b[1]&flagPersistent != 0 {
				v.Kind = rdma.Persistent
			}
		default:
			return verbs, 0, errFrame
		}
		verbs = append(verbs, v)
	}
	if writes != uint64(payload) || reads+writes+verified > rdma.MaxChainBytes {
		return verbs, 0, errFrame
	}
	return verbs, int(reads + words), nil
}

// answer is the start of an answer's frame.
type answer struct {
	kind    byte   // of the frame that it answers
	code    byte   // of host.Code; 0: no refusal so far
	done    int    // verbs of the chain that have run, with this answer and those before
	seq     uint32 // of the frame that it answers; farewellSeq: the node ends the connection
	results int    // bytes that follow: results of the verbs since the answer before
	last    bool   // no further answer to this frame follows
}

// put writes answerBytes to b.
func (a *answer) put(b []byte) {
	b[0], b[1] = a.kind, a.code
	binary.LittleEndian.PutUint16(b[2:], uint16(a.done))
	binary.LittleEndian.PutUint32(b[4:], a.seq)
	binary.LittleEndian.PutUint32(b[8:], uint32(a.results))
	var last uint32
	if a.last {
		last = 1
	}
	binary.LittleEndian.PutUint32(b[12:], last)
}

// decodeAnswer reads answerBytes.
func decodeAnswer(b []byte) answer {
	return answer{
		kind: b[0], code: b[1],
		done:    int(binary.LittleEndian.Uint16(b[2:])),
		seq:     binary.LittleEndian.Uint32(b[4:]),
		results: int(binary.LittleEndian.Uint32(b[8:])),
		last:    binary.LittleEndian.Uint32(b[12:]) == 1,
	}
}

// resultBytes is what the results of verbs take.
func resultBytes(verbs []rdma.Verb) (n int) {
	for i := range verbs {
		switch v := &verbs[i]; v.Op {
		case rdma.Read:
			n += len(v.Buf)
		case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
			n += 8
		}
	}
	return n
}

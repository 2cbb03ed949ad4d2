package tcp

import (
	"encoding/binary"
	"errors"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

const (
	kindChain = 1
	kindOpen  = 2

	headBytes   = 24
	answerBytes = 16
	farewellSeq = 1<<32 - 1

	// maxHead is the longest part of a frame that is read before any of it runs.
	maxHead = headBytes + rdma.MaxChainVerbs*host.VerbBytes
)

var (
	errFrame  = host.ErrForm
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

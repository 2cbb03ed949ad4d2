package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
)

var magic = [8]byte{'Q', 'R', 'Y', 'T', 'C', 'P', 0, 1}

const (
	helloBytes   = 8 + rdma.TicketBytes + 8
	welcomeBytes = 24
	requestHead  = 24
	answerHead   = 8
	verbHead     = 16
	openBytes    = 16

	kindChain = 1
	kindOpen  = 2

	flagFence      = 1
	flagPersistent = 2

	codeLost = 0xffff

	// maxFrame bounds what a peer can make us allocate: a chain's bytes and what
	// its verbs need around them.
	maxFrame = rdma.MaxChainBytes + rdma.MaxChainVerbs*(verbHead+16+8) + requestHead
)

var le = binary.LittleEndian

func pad(n int) int { return (n + 7) &^ 7 }

// codeOf turns an outcome into its code on the wire.
func codeOf(err error) uint16 {
	if err == nil {
		return 0
	}
	for i, r := range rdma.Refusals {
		if errors.Is(err, r) {
			return uint16(i + 1)
		}
	}
	return codeLost
}

// errOf is the other way.
func errOf(code uint16) error {
	switch {
	case code == 0:
		return nil
	case int(code) <= len(rdma.Refusals):
		return rdma.Refusals[code-1]
	}
	return fmt.Errorf("%w: the node answered with code %d", rdma.ErrBroken, code)
}

// appendRequest encodes a chain. Preconditions: the chain is within the limits.
func appendRequest(b []byte, c *rdma.Chain, slot int32) []byte {
	at := len(b)
	b = append(b, make([]byte, requestHead)...)
	for i := range c.Verbs {
		v := &c.Verbs[i]
		n := len(b)
		b = append(b, make([]byte, verbHead)...)
		b[n] = byte(v.Op)
		if v.Fence {
			b[n+1] |= flagFence
		}
		if v.Kind == rdma.Persistent {
			b[n+1] |= flagPersistent
		}
		le.PutUint32(b[n+4:], uint32(len(v.Buf)))
		le.PutUint64(b[n+8:], v.Off)
		switch v.Op {
		case rdma.Write:
			b = append(b, v.Buf...)
			for range pad(len(v.Buf)) - len(v.Buf) {
				b = append(b, 0)
			}
		case rdma.CompareSwap:
			b = le.AppendUint64(b, v.Expect)
			b = le.AppendUint64(b, v.New)
		case rdma.FetchAdd:
			b = le.AppendUint64(b, v.New)
		case rdma.Flush:
			b = le.AppendUint64(b, v.Bytes)
		}
	}
	le.PutUint32(b[at:], uint32(len(b)-at-4))
	b[at+4] = kindChain
	le.PutUint16(b[at+6:], uint16(len(c.Verbs)))
	le.PutUint32(b[at+8:], uint32(slot))
	le.PutUint64(b[at+16:], c.To.Window.Key)
	return b
}

// request is a decoded frame of the client. verbs alias the frame.
type request struct {
	kind  byte
	slot  int32
	key   uint64
	verbs []rdma.Verb
	// open
	region uint32
	epoch  uint64
}

var errFrame = errors.New("not a frame of this protocol")

// parse decodes a frame without its length word into q, whose verbs it reuses.
// READ buffers are not set: their lengths add up to the returned number of bytes.
func (q *request) parse(b []byte) (answer int, err error) {
	if len(b) < requestHead-4 {
		return 0, errFrame
	}
	q.kind, q.slot, q.key = b[0], int32(le.Uint32(b[4:])), le.Uint64(b[12:])
	n := int(le.Uint16(b[2:]))
	b = b[requestHead-4:]
	q.verbs = q.verbs[:0]
	switch q.kind {
	case kindOpen:
		if len(b) != openBytes || n != 0 {
			return 0, errFrame
		}
		q.region, q.epoch = le.Uint32(b), le.Uint64(b[8:])
		return 16, nil
	case kindChain:
	default:
		return 0, errFrame
	}
	if n == 0 || n > rdma.MaxChainVerbs {
		return 0, errFrame
	}
	for range n {
		if len(b) < verbHead {
			return 0, errFrame
		}
		v := rdma.Verb{Op: rdma.Op(b[0]), Fence: b[1]&flagFence != 0, Off: le.Uint64(b[8:])}
		if b[1]&flagPersistent != 0 {
			v.Kind = rdma.Persistent
		}
		size := uint64(le.Uint32(b[4:]))
		b = b[verbHead:]
		var words int
		switch v.Op {
		case rdma.Read:
			if size > rdma.MaxVerbBytes {
				return 0, errFrame
			}
			v.Bytes = size // until the buffer is there
			answer += pad(int(size))
		case rdma.Write:
			if size > uint64(len(b)) || pad(int(size)) > len(b) {
				return 0, errFrame
			}
			v.Buf = b[:size:size]
			b = b[pad(int(size)):]
		case rdma.CompareSwap:
			words, answer = 2, answer+8
		case rdma.FetchAdd:
			words, answer = 1, answer+8
		case rdma.Flush:
			words = 1
		default:
			return 0, errFrame
		}
		if len(b) < 8*words {
			return 0, errFrame
		}
		switch v.Op {
		case rdma.CompareSwap:
			v.Expect, v.New = le.Uint64(b), le.Uint64(b[8:])
		case rdma.FetchAdd:
			v.New = le.Uint64(b)
		case rdma.Flush:
			v.Bytes = le.Uint64(b)
		}
		b = b[8*words:]
		q.verbs = append(q.verbs, v)
	}
	if len(b) != 0 || answer > maxFrame {
		return 0, errFrame
	}
	return answer, nil
}

// parseAnswer copies an answer's body into the chain it answers.
func parseAnswer(c *rdma.Chain, code uint16, done int, b []byte) error {
	if done > len(c.Verbs) {
		return errFrame
	}
	for i := range c.Verbs[:done] {
		v := &c.Verbs[i]
		switch v.Op {
		case rdma.Read:
			if len(b) < pad(len(v.Buf)) {
				return errFrame
			}
			copy(v.Buf, b)
			b = b[pad(len(v.Buf)):]
		case rdma.CompareSwap, rdma.FetchAdd:
			if len(b) < 8 {
				return errFrame
			}
			v.Old = le.Uint64(b)
			b = b[8:]
		}
	}
	if len(b) != 0 || code == 0 && done != len(c.Verbs) {
		return errFrame
	}
	c.Done, c.Err = done, errOf(code)
	return nil
}

package host

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/quarrystore/quarry/rdma"
)

// Verbs as messages carry them, in frames of tcp and in messages on a queue pair. Fields are little endian:
//
//	verb    0 op | 1 flags | 2 zero | 4 bytes | 8 off | 16 expect | 24 new
//	        flags: 1 fence, 2 persistent; a FLUSH has its length in expect, a VERIFY its length in bytes and
//	        its seed in new
//	result  of READ its bytes, of CAS, FETCH_ADD and VERIFY the 8 bytes of Old, of WRITE and FLUSH nothing
//
// The bytes of WRITEs follow the verbs, one behind the other.
const (
	VerbBytes = 32

	verbFence      = 1
	verbPersistent = 2
)

// ErrForm: a message that is none of this version.
var ErrForm = errors.New("malformed frame")

// AppendVerb encodes a verb, without the bytes of a WRITE.
func AppendVerb(b []byte, v *rdma.Verb) []byte {
	var flags byte
	if v.Fence {
		flags = verbFence
	}
	expect, length := v.Expect, uint32(len(v.Buf))
	switch v.Op {
	case rdma.Flush:
		expect = v.Bytes
		if v.Kind == rdma.Persistent {
			flags |= verbPersistent
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

// DecodeVerbs reads the verbs of a chain, and checks that their lengths agree with
// the payload and the limits. Buf is not set yet: Bytes is the length of a READ or
// WRITE too. results is what the answers to all of them take.
func DecodeVerbs(verbs []rdma.Verb, b []byte, payload uint32) (out []rdma.Verb, results int, err error) {
	var reads, writes, words, verified uint64
	for ; len(b) >= VerbBytes; b = b[VerbBytes:] {
		v := rdma.Verb{
			Op: rdma.Op(b[0]), Fence: b[1]&verbFence != 0, Off: binary.LittleEndian.Uint64(b[8:]),
			Expect: binary.LittleEndian.Uint64(b[16:]), New: binary.LittleEndian.Uint64(b[24:]),
		}
		length := uint64(binary.LittleEndian.Uint32(b[4:]))
		if b[1]&^(verbFence|verbPersistent) != 0 || b[2]|b[3] != 0 || length > rdma.MaxVerbBytes {
			return verbs, 0, ErrForm
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
			if b[1]&verbPersistent != 0 {
				v.Kind = rdma.Persistent
			}
		default:
			return verbs, 0, ErrForm
		}
		verbs = append(verbs, v)
	}
	if writes != uint64(payload) || reads+writes+verified > rdma.MaxChainBytes {
		return verbs, 0, ErrForm
	}
	return verbs, int(reads + words), nil
}

// Work is how many bytes the processors hash and make durable for verbs, which may be malformed.
func Work(b []byte) (bytes uint64) {
	for ; len(b) >= VerbBytes; b = b[VerbBytes:] {
		var n uint64
		switch op := rdma.Op(b[0]); {
		case op == rdma.Verify:
			n = uint64(binary.LittleEndian.Uint32(b[4:]))
		case op == rdma.Flush && b[1]&verbPersistent != 0:
			n = binary.LittleEndian.Uint64(b[16:])
		}
		if bytes += n; bytes < n { // beyond all numbers
			return math.MaxUint64
		}
	}
	return bytes
}

// PutResult writes what READ has not written itself, and returns where the next
// result begins.
func PutResult(b []byte, at int, v *rdma.Verb) int {
	switch v.Op {
	case rdma.Read:
		return at + len(v.Buf)
	case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
		binary.LittleEndian.PutUint64(b[at:], v.Old)
		return at + 8
	}
	return at
}

// ResultBytes is what the results of verbs take.
func ResultBytes(verbs []rdma.Verb) (n int) {
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

package host

import (
	"github.com/quarrystore/quarry/rdma"
	"github.com/zeebo/xxh3"
)

// hashPiece is how many bytes a VERIFY copies at a time: they stay in the processor's first cache.
const hashPiece = 4 << 10

// Hasher computes the hashes of VERIFYs, for one goroutine.
type Hasher struct {
	state xxh3.Hasher
	piece [hashPiece]byte
}

// Hash is rdma.Hash of a range of memory that others may change meanwhile. The bytes are copied before they are hashed: the hash
// looks at some of its input twice, and its answer would then be that of no bytes at all.
// Preconditions: the range lies in mem, which stays mapped.
func (h *Hasher) Hash(mem []byte, off, bytes, seed uint64) uint64 {
	h.state.ResetSeed(seed)
	for at := uint64(0); at < bytes; {
		b := h.piece[:min(hashPiece, bytes-at)]
		copyOut(b, mem, off+at)
		h.state.Write(b)
		at += uint64(len(b))
	}
	return h.state.Sum64()
}

// hash carries out a VERIFY.
// Preconditions: the verb has been checked.
func (r *Runner) hash(mem []byte, v *rdma.Verb) uint64 {
	if r.hasher == nil {
		r.hasher = &Hasher{}
	}
	return r.hasher.Hash(mem, v.Off, v.Bytes, v.New)
}

package host

import (
	"github.com/quarrystore/quarry/rdma"
	"github.com/zeebo/xxh3"
)

// hashPiece is how many bytes a VERIFY copies at a time: they stay in the processor's first cache.
const hashPiece = 4 << 10

// hasher is what a lane computes the hashes of VERIFYs with.
type hasher struct {
	state xxh3.Hasher
	piece [hashPiece]byte
}

// hash carries out a VERIFY. The bytes are copied before they are hashed: the hash looks at some of its input
// twice, which others may change meanwhile, and its answer would then be that of no bytes at all.
// Preconditions: the verb has been checked.
func (r *Runner) hash(mem []byte, v *rdma.Verb) uint64 {
	if r.hasher == nil {
		r.hasher = &hasher{}
	}
	h := r.hasher
	h.state.ResetSeed(v.New)
	for at := uint64(0); at < v.Bytes; {
		b := h.piece[:min(hashPiece, v.Bytes-at)]
		copyOut(b, mem, v.Off+at)
		h.state.Write(b)
		at += uint64(len(b))
	}
	return h.state.Sum64()
}

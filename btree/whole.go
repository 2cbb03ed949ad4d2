package btree

import (
	"sync/atomic"

	"github.com/zeebo/xxh3"
)

// wholeSlots is how many leaves whole remembers: 128 KiB of a tree in this process.
const wholeSlots = 1 << 14

// whole remembers, for some leaves, the hash of a payload that this process has found valid or
// has made of a valid one. The next writer to the leaf then need not examine each entry, which
// takes several times as long as the hash. A payload that another program has written has another
// hash, and is examined. The seed of the hash is known to this process alone, so that no payload
// can be made to match.
type whole struct {
	seed uint64                    // Config.Seed
	sums [wholeSlots]atomic.Uint64 // by reference; leaves share slots
}

// slot is where the hash of a leaf is kept.
func (w *whole) slot(leaf Ref) *atomic.Uint64 {
	return &w.sums[uint64(leaf.Addr)*0x9e3779b97f4a7c15>>32%wholeSlots]
}

// has says whether a payload of a leaf is known to be valid.
func (w *whole) has(leaf Ref, payload []byte) bool {
	return w.slot(leaf).Load() == xxh3.HashSeed(payload, w.seed)
}

// note records that a payload of a leaf is valid.
func (w *whole) note(leaf Ref, payload []byte) {
	w.slot(leaf).Store(xxh3.HashSeed(payload, w.seed))
}

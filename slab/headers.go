package slab

import (
	"fmt"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto"
)

// Headers caches the block headers of one region, for one epoch and one reclaim epoch: when the
// session learns of a later one of either, it starts with an empty cache. The lanes of a session
// share it, and read and write it with atomics. 0 means: not cached (no header of an open block
// is 0).
type Headers struct {
	blocks uint32                          // of the region
	words  atomic.Pointer[[]atomic.Uint64] // nil until there is one: most regions of a large cluster are never used
}

// NewHeaders is an empty cache for so many blocks.
func NewHeaders(blocks uint32) *Headers { return &Headers{blocks: blocks} }

// Load is the cached header, 0 if there is none.
func (h *Headers) Load(block uint32) proto.Header {
	w := h.words.Load()
	if w == nil {
		return 0
	}
	return proto.Header((*w)[block].Load())
}

// Store caches a header that was READ under this epoch. It keeps headers of open blocks only: any
// other state is about to change.
func (h *Headers) Store(block uint32, w proto.Header) {
	if !w.State().Open() {
		w = 0
	}
	words := h.words.Load()
	for words == nil {
		fresh := make([]atomic.Uint64, h.blocks)
		h.words.CompareAndSwap(nil, &fresh)
		words = h.words.Load()
	}
	(*words)[block].Store(uint64(w))
}

// maxHeaderReads bounds how often locate READs a header: once for a cached header that is out of
// date, and three times more for a block that changes its state meanwhile.
const maxHeaderReads = 4

// locate finds the slab that a reference names, by the header of its block. No verb goes to a
// slab before the header has been checked: its class says where slabs are, and its generation
// whether the block was reclaimed since the reference was made.
//
// ErrFreed: the block has a later generation. ErrBadRef: no such object was ever there. errAgain:
// no answer.
func (l *Lane) locate(reg *Region, ref proto.Ref) (proto.Slab, error) {
	off := uint64(ref.Addr.Off())
	block, ok := reg.Geometry.BlockOf(off)
	if !ok || !ref.Valid() {
		return proto.Slab{}, fmt.Errorf("%w: %v", ErrBadRef, ref)
	}
	gen := ref.Incarnation.Generation()
	h := reg.Headers.Load(block)
	for i := 0; ; i++ {
		if h != 0 && h.Generation() > gen {
			return proto.Slab{}, l.answer(ErrFreed)
		}
		if h != 0 && h.Generation() == gen && h.State().Open() {
			if _, ok := reg.Geometry.SlabIndex(off, h.Class()); !ok {
				return proto.Slab{}, l.answer(fmt.Errorf("%w: %v is not on a boundary of its %d-byte slabs", ErrBadRef, ref, h.Class().Bytes()))
			}
			return proto.Slab{Off: off, Class: h.Class(), Kind: h.Kind()}, nil
		}
		if i == maxHeaderReads {
			// The block is older than the ref, or not open: no such object was ever here.
			return proto.Slab{}, l.answer(fmt.Errorf("%w: %v points into a block that is %v", ErrBadRef, ref, h))
		}
		var err error
		if h, err = l.readHeader(reg, block); err != nil {
			return proto.Slab{}, err
		}
	}
}

// readHeader reads a block's header at the primary and caches it.
func (l *Lane) readHeader(reg *Region, block uint32) (proto.Header, error) {
	l.round.Reset()
	l.round.Chain(reg.P()).Read(reg.Geometry.HeaderOff(block), l.word)
	l.do()
	if l.round.At(0).Err != nil {
		if err := l.settle(reg); err != nil {
			return 0, err
		}
		return 0, errAgain
	}
	h := proto.Header(proto.Word(l.word, 0))
	if h.Kind() >= proto.Kinds {
		return 0, fmt.Errorf("%w: block %d of region %d has slabs of the kind %v; use a build that is as new as the one that wrote them", ErrKind, block, reg.ID, h.Kind())
	}
	if !h.Valid() {
		return 0, fmt.Errorf("%w: header of block %d of region %d is %#x", ErrCorrupt, block, reg.ID, uint64(h))
	}
	reg.Headers.Store(block, h)
	return h, nil
}

package slab

import (
	"fmt"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto"
)

// Headers caches the block headers of a region for one epoch and one reclaim
// epoch: when the session learns of a later one, it starts an empty cache.
// Shared by the lanes of a session; 0 is not cached (no open header is 0).
type Headers struct {
	blocks uint32
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

// Store caches a header just read under this epoch. Only open blocks are kept:
// any other state is about to change.
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

// maxHeaderReads bounds the READs behind the cached header in the search for an open header
// of the ref's generation: one, and three more for blocks that change their state.
const maxHeaderReads = 4

// locate finds the slab that a ref names: header first, no verb goes to a slab
// whose header was not checked. ErrFreed when the block has moved on.
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
				return proto.Slab{}, fmt.Errorf("%w: %v is not on a boundary of its %d-byte slabs", ErrBadRef, ref, h.Class().Bytes())
			}
			return proto.Slab{Off: off, Class: h.Class(), Kind: h.Kind()}, nil
		}
		if i == maxHeaderReads {
			// The block is older than the ref, or not open: no such object was ever here.
			return proto.Slab{}, fmt.Errorf("%w: %v points into a block that is %v", ErrBadRef, ref, h)
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

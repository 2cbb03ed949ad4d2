//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// pieceBytes is how much of registered memory is pinned at a time: large enough
// to be rare, small enough that an arena of gigabytes costs what is used.
const pieceBytes = 4 << 20

// buffers is what a dialer's lanes may give to the device.
type buffers struct {
	pd     *C.struct_ibv_pd // the dialer's protection domain
	access C.int            // of registrations

	mu         sync.Mutex             // guards ranges and the replacement of pieces; readers of pieces do not take it
	ranges     []span                 // as given to Register
	pieces     atomic.Pointer[[]span] // registered, by start; replaced, never changed
	registered atomic.Uint64          // bytes pinned now
}

// span is memory at [start, end), mr is nil in ranges.
type span struct {
	start, end uint64           // addresses; end is behind the last byte
	mem        []byte           // the same bytes
	mr         *C.struct_ibv_mr // nil in ranges
	lkey       uint32           // of mr, 0 in ranges
}

// has says whether the span covers the bytes from start to end.
func (s *span) has(start, end uint64) bool { return s.start <= start && end <= s.end }

// add makes memory known. It is pinned when first used.
func (b *buffers) add(mem []byte) error {
	start := addressOf(mem)
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.ranges {
		if r := &b.ranges[i]; start < r.end && r.start < start+uint64(len(mem)) {
			return fmt.Errorf("memory at %#x of %d bytes is registered already", start, len(mem))
		}
	}
	b.ranges = append(b.ranges, span{start: start, end: start + uint64(len(mem)), mem: mem})
	return nil
}

// find returns the piece that holds a buffer. cached is the caller's own, from last time.
func (b *buffers) find(buf []byte, cached *span) bool {
	start := addressOf(buf)
	end := start + uint64(len(buf))
	if cached.has(start, end) {
		return true
	}
	if all := b.pieces.Load(); all != nil {
		for i := range *all {
			if p := &(*all)[i]; p.has(start, end) {
				*cached = *p
				return true
			}
		}
	}
	return b.pin(start, end, cached)
}

// pin registers the piece around a buffer, if it lies in known memory.
func (b *buffers) pin(start, end uint64, cached *span) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.ranges {
		r := &b.ranges[i]
		if !r.has(start, end) {
			continue
		}
		from := (start - r.start) / pieceBytes * pieceBytes
		to := min((end-r.start+pieceBytes-1)/pieceBytes*pieceBytes, r.end-r.start)
		p := span{start: r.start + from, end: r.start + to, mem: r.mem[from:to]}
		var err error
		if p.mr, err = register(b.pd, p.mem, p.start, b.access); err != nil {
			return false // the caller copies
		}
		p.lkey = uint32(p.mr.lkey)
		b.registered.Add(uint64(len(p.mem)))
		var all []span
		if old := b.pieces.Load(); old != nil {
			all = slices.Clone(*old)
		}
		all = append(all, p)
		b.pieces.Store(&all)
		*cached = p
		return true
	}
	return false
}

// forget deregisters the pieces of memory given to add. Lanes that hold one of them
// cached must not be given buffers in it any more.
func (b *buffers) forget(mem []byte) error {
	start := addressOf(mem)
	end := start + uint64(len(mem))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranges = slices.DeleteFunc(b.ranges, func(s span) bool { return s.start >= start && s.end <= end })
	old := b.pieces.Load()
	if old == nil {
		return nil
	}
	var errs []error
	var keep []span
	for _, p := range *old {
		if p.start < start || p.end > end {
			keep = append(keep, p)
			continue
		}
		errs = append(errs, problem("deregistering buffers", C.q_deregister(p.mr)))
		b.registered.Add(-uint64(len(p.mem)))
	}
	b.pieces.Store(&keep)
	return errors.Join(errs...)
}

// close deregisters all buffers.
// Preconditions: no verb uses them.
func (b *buffers) close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if all := b.pieces.Swap(nil); all != nil {
		for i := range *all {
			if err := problem("deregistering buffers", C.q_deregister((*all)[i].mr)); err != nil {
				return err
			}
		}
	}
	b.ranges = nil
	return nil
}

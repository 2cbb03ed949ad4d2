package pager

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"
)

// frame is a page that is in memory. Its fields are guarded by cache.mu.
type frame struct {
	of   *memory
	page uint64 // in the space
	// Neighbours in the circle of the clock.
	before, behind *frame

	busy  bool // one goroutine works on the page
	dirty bool // stored into since it was read or written back
	ref   bool // faulted since the hand of the clock came by
}

// cache are the frames of all spaces.
type cache struct {
	mu     sync.Mutex // guards all frames, and memory.frames
	freed  sync.Cond  // a frame is not busy any more, or is gone
	budget int        // frames
	hand   *frame     // the next victim, unless its reference bit is set; the frame before it is the newest. nil: there is none
	frames int        // in the circle
	dirty  int        // of them
}

func newCache(budget int) *cache {
	c := &cache{budget: budget}
	c.freed.L = &c.mu
	return c
}

// tryAdd makes a busy frame for a page that has none. nil: there is no room.
// Preconditions: mu is held.
func (c *cache) tryAdd(of *memory, page uint64) *frame {
	if c.frames >= c.budget {
		return nil
	}
	f := &frame{of: of, page: page, busy: true, ref: true}
	if c.hand == nil {
		c.hand, f.before, f.behind = f, f, f
	} else {
		f.before, f.behind = c.hand.before, c.hand
		f.before.behind, f.behind.before = f, f
	}
	c.frames++
	of.frames[page] = f
	return f
}

// drop forgets the frame of a page whose memory was given back.
// Preconditions: mu is held, the frame is the caller's.
func (c *cache) drop(f *frame) {
	c.clean(f)
	f.before.behind, f.behind.before = f.behind, f.before
	if c.hand == f {
		c.hand = f.behind
	}
	if c.frames--; c.frames == 0 {
		c.hand = nil
	}
	delete(f.of.frames, f.page)
}

// clean and soil change whether a frame is dirty.
// Preconditions: mu is held, the frame is the caller's.
func (c *cache) clean(f *frame) {
	if f.dirty {
		f.dirty = false
		c.dirty--
	}
}

func (c *cache) soil(f *frame) {
	if !f.dirty {
		f.dirty = true
		c.dirty++
	}
}

// release gives frames up that the caller had.
func (c *cache) release(frames ...*frame) {
	c.mu.Lock()
	for _, f := range frames {
		f.busy = false
	}
	c.mu.Unlock()
	c.freed.Broadcast()
}

// victims takes at most n frames that are not busy, by CLOCK.
// Preconditions: mu is held.
func (c *cache) victims(n int) (out []*frame) {
	for range 2 * c.frames {
		if len(out) == n {
			break
		}
		f := c.hand
		c.hand = f.behind
		switch {
		case f.busy:
		case f.ref:
			f.ref = false
		default:
			f.busy = true
			out = append(out, f)
		}
	}
	return out
}

// errBusy: other work on a page has not ended in time.
var errBusy = errors.New("the page is still being read or written back")

// wait waits until a frame has become free, or until a time.
// Preconditions: mu is held.
func (c *cache) wait(until time.Time) error {
	left := time.Until(until)
	if left <= 0 {
		return errBusy
	}
	t := time.AfterFunc(left, func() {
		c.mu.Lock() // it waits by now
		defer c.mu.Unlock()
		c.freed.Broadcast()
	})
	defer t.Stop()
	c.freed.Wait()
	return nil
}

// take makes the frame of a page the caller's, when it is not busy any more; nil if the page is in none.
func (c *cache) take(of *memory, page uint64, until time.Time) (*frame, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		f := of.frames[page]
		if f == nil || !f.busy {
			if f != nil {
				f.busy = true
			}
			return f, nil
		}
		if err := c.wait(until); err != nil {
			return nil, err
		}
	}
}

// within are the pages of a range that are in frames for which want holds, in order.
func (c *cache) within(of *memory, first, n uint64, want func(*frame) bool) (pages []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n <= uint64(len(of.frames)) {
		for p := first; p < first+n; p++ {
			if f := of.frames[p]; f != nil && want(f) {
				pages = append(pages, p)
			}
		}
		return pages
	}
	for p, f := range of.frames {
		if p-first < n && want(f) {
			pages = append(pages, p)
		}
	}
	slices.Sort(pages)
	return pages
}

// count is how many pages of a space are in frames.
func (c *cache) count(of *memory) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(of.frames)
}

// run is frames of one memory whose pages follow each other.
type run []*frame

func (r run) first() uint64 { return r[0].page }
func (r run) bytes() uint64 { return uint64(len(r)) * pageBytes }

// runs sorts frames and cuts them into runs of at most most pages.
func runs(frames []*frame, most int) (out []run) {
	slices.SortFunc(frames, func(a, b *frame) int {
		return cmp.Or(cmp.Compare(a.of.serial, b.of.serial), cmp.Compare(a.page, b.page))
	})
	for i, f := range frames {
		if i > 0 {
			last := &out[len(out)-1]
			if before := frames[i-1]; before.of == f.of && before.page+1 == f.page && len(*last) < most {
				*last = append(*last, f)
				continue
			}
		}
		out = append(out, run{f})
	}
	return out
}

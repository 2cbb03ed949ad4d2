package vmm

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/pagerlink"
)

// failures are the pages whose accesses have failed lately. Their poison is taken away once for all goroutines that have met it: behind that another
// one may have stored into the page, and the memory of a private mapping has the store alone.
type failures struct {
	mu    sync.Mutex // held while the poison of a page is taken away
	turns uint64     // how often one was
	pages map[uint64]failure
	floor uint64 // turn of the latest one that is not in pages
}

// failure is why a page could not be had, and the turn in which its poison was taken away.
type failure struct {
	turn uint64
	err  error
}

// maxFailures bounds the pages.
const maxFailures = 256

// turn is the latest turn.
func (f *failures) turn() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.turns
}

// why is the reason for which an access failed of a function that began at a turn. The next access asks the pager again.
func (m *Mapping) why(va, began uint64) error {
	page := va &^ (PageBytes - 1)
	f := &m.fails
	f.mu.Lock()
	defer f.mu.Unlock()
	last, ok := f.pages[page]
	if !ok {
		last = failure{turn: f.floor, err: errors.New("the pager knows no reason any more")}
	}
	// It may have failed before another goroutine took the poison away, or behind that: then the page is poisoned still, and the next access fails at once.
	// Stores into shared memory are in the memory's file, whatever is mapped.
	if last.turn <= began || m.mode != Private {
		if err := m.unpoison(page); err != nil {
			last.err = err
		}
		if len(f.pages) >= maxFailures || f.pages == nil {
			f.pages, f.floor = map[uint64]failure{}, f.turns
		}
		f.turns++
		last.turn = f.turns
		f.pages[page] = last
	}
	return fmt.Errorf("access to %#x: %w", va, last.err)
}

// unpoison takes the poison of a page away, then has the pager say the reason, which is nil if another goroutine was told. The pager maps the page of a private
// mapping again only when it was asked.
func (m *Mapping) unpoison(page uint64) error {
	off := page - m.base
	_ = unix.Madvise(m.mem[off:off+PageBytes], unix.MADV_DONTNEED)
	_, err := m.call(context.Background(), pagerlink.OpWhy, page, PageBytes)
	if err == nil {
		err = m.Err()
	}
	return err
}

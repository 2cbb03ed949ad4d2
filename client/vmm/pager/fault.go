package pager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/uffd"
)

// fault serves one fault.
func (s *Server) fault(m *mapping, e uffd.Event) {
	began := time.Now()
	end := began.Add(s.cfg.FaultTimeout)
	page := (e.Addr - m.of.base()) / pageBytes
	if page < m.first || page-m.first >= m.n {
		return // not of this mapping: a descriptor that was registered elsewhere, too
	}
	if m.isPoisoned(page) { // a thread that began to wait before, or a program that does not ask why
		if m.poison(page, false) != nil {
			m.wake(page)
		}
		return
	}
	store := e.Write && m.shared
	f, err := s.cache.take(m.of, page, end)
	switch {
	case err != nil:
		s.fail(m, page, fmt.Errorf("%w after %v", err, s.cfg.FaultTimeout), nil)
	case f == nil && e.Protected:
		m.wake(page) // it was removed meanwhile: it faults again, as a missing page
		return
	case f == nil:
		s.count.missing.Add(1)
		s.missing(m, page, store, end)
	case e.Protected:
		s.count.protected.Add(1)
		s.firstStore(m, f)
	default:
		s.count.minor.Add(1)
		s.present(m, f, store)
	}
	s.latency.Observe(time.Since(began))
}

// firstStore serves a store into a page that is protected.
func (s *Server) firstStore(m *mapping, f *frame) {
	defer s.cache.release(f)
	s.touch(f, m.shared)
	// Dirty before it can be stored into: see the invariant of the package.
	if err := m.allow(f.page); err != nil && !errors.Is(err, errGone) {
		m.wake(f.page) // its page tables changed meanwhile
	}
}

// fail ends the accesses that wait for a page with SIGBUS, and keeps the reason. mine is the page's frame if the caller has made it, and nothing is in it yet.
func (s *Server) fail(m *mapping, page uint64, reason error, mine *frame) {
	m.keep(page, reason)
	c := s.cache
	c.mu.Lock() // nobody else makes a frame for the page meanwhile, and maps it
	f := m.of.frames[page]
	err := m.poison(page, f == mine)
	c.mu.Unlock()
	if err != nil { // it is mapped, or poisoned, or another goroutine has just read it
		m.wake(page)
	}
}

// touch sets a frame's reference bit, and makes it dirty for a store.
func (s *Server) touch(f *frame, store bool) {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	f.ref = true
	if store {
		s.cache.soil(f)
	}
}

// present serves a fault on a page that is in memory and not mapped in the program.
func (s *Server) present(m *mapping, f *frame, store bool) {
	s.touch(f, store)
	err := m.show(f.page, 1, store)
	if errors.Is(err, unix.EFAULT) {
		// A program has taken the page out of the shared memory. It has no bytes.
		if err = s.forget(run{f}); err == nil {
			m.wake(f.page)
		} else {
			s.fail(m, f.page, err, f)
		}
		return
	}
	page := f.page
	if err == nil && store {
		err = m.allow(page) // it may have been mapped, and protected, all the time
	}
	s.cache.release(f)
	switch {
	case err == nil:
		m.wake(page)
		m.mu.Lock()
		next, n := m.ahead.marked(page, s.maxAhead())
		m.mu.Unlock()
		if n > 0 {
			m.tasks.Go(func() { s.readAhead(m, next, n) })
		}
	case errors.Is(err, errGone):
	case errors.Is(err, unix.EAGAIN): // its page tables changed meanwhile: it faults again
		m.wake(page)
	default:
		s.fail(m, page, fmt.Errorf("mapping a page of process %d: %w", m.pid, err), nil)
	}
}

// missing reads a page, and further ones where the faults of the mapping go up in sequence, and maps them.
func (s *Server) missing(m *mapping, page uint64, store bool, end time.Time) {
	ctx, cancel := until(end)
	defer cancel()
	f, err := s.make(ctx, m.of, page)
	if f == nil && err == nil {
		m.wake(page) // another program has it read meanwhile
		return
	}
	if err != nil {
		s.fail(m, page, err, nil)
		return
	}
	m.mu.Lock()
	n, ahead := m.ahead.missed(page, s.maxAhead())
	m.mu.Unlock()
	all := run{f}
	if n > 1 {
		if all, err = s.fillMore(ctx, m, f, n, ahead, store); err != nil { // perhaps another page of them cannot be read
			_ = s.forget(all[1:])
			all = all[:1]
		}
	}
	switch {
	case errors.Is(err, errStored): // its bytes must not be read again
		err = nil
	case len(all) == 1:
		err = s.fill(ctx, m, all, visible{store: store})
	}
	if err != nil {
		s.fail(m, page, err, f) // before the frame is given up
		_ = s.forget(all)
		return
	}
	s.cache.release(all...)
}

// fillMore reads the page of a new frame and further ones, n of them if there is memory. It takes half of the time that is left, so that the page can
// be read alone where that fails. If it is the only one it is not read.
func (s *Server) fillMore(ctx context.Context, m *mapping, f *frame, n, ahead uint64, store bool) (run, error) {
	end, _ := ctx.Deadline()
	ctx, cancel := until(time.Now().Add(time.Until(end) / 2))
	defer cancel()
	more, _ := s.makeMore(ctx, m, f.page+1, n-1) // without memory there is no read-ahead
	all := append(run{f}, more...)
	if ahead > 0 { // beside this READ
		m.tasks.Go(func() { s.readAhead(m, f.page+n, ahead) })
	}
	if len(all) == 1 {
		return all, nil
	}
	return all, s.fill(ctx, m, all, visible{store: store})
}

func (s *Server) faultContext() (context.Context, context.CancelFunc) {
	return until(time.Now().Add(s.cfg.FaultTimeout))
}

// readAhead reads pages that the program has not asked for yet. The first of them is not mapped: its fault says that the program has come there.
func (s *Server) readAhead(m *mapping, page, n uint64) {
	ctx, cancel := s.faultContext()
	defer cancel()
	more, _ := s.makeMore(ctx, m, page, n)
	all := run(more)
	if len(all) == 0 {
		return
	}
	if err := s.fill(ctx, m, all, visible{hidden: 1}); err != nil {
		_ = s.forget(all)
		return
	}
	s.count.ahead.Add(uint64(len(all)))
	s.cache.release(all...)
}

// visible says what of pages that are filled the program sees: not the first hidden ones; store: it stores into the first one.
type visible struct {
	hidden uint64
	store  bool
}

// fill reads the bytes of pages that follow each other, and maps them in the program. Pages that cannot be mapped fault again, as pages that are in
// memory.
// Preconditions: the frames are the caller's, and new.
func (s *Server) fill(ctx context.Context, m *mapping, r run, v visible) error {
	of := r[0].of
	buf := s.buffers.Get().(*[]byte)
	defer s.buffers.Put(buf)
	b := (*buf)[:r.bytes()]
	n, err := of.space.Read(ctx, b, of.address(r.first()))
	s.count.readBytes.Add(uint64(n))
	if err == nil {
		if v.store { // dirty before it can be stored into: see the invariant of the package
			s.touch(r[0], true)
		}
		err = m.bring(r.first(), b, v)
	}
	if err != nil {
		return fmt.Errorf("reading %d bytes at %#x of space %q: %w", r.bytes(), of.address(r.first()), of.id.Name, err)
	}
	return nil
}

// make makes the frame of a page that is in none, the caller's, and frees another one for it where there is no room. nil without an error: the page
// has one by now.
func (s *Server) make(ctx context.Context, of *memory, page uint64) (*frame, error) {
	c := s.cache
	end, _ := ctx.Deadline()
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("no memory became free: %w", err)
		}
		c.mu.Lock()
		if of.frames[page] != nil {
			c.mu.Unlock()
			return nil, nil
		}
		if f := c.tryAdd(of, page); f != nil {
			c.mu.Unlock()
			return f, nil
		}
		list := c.victims(s.batch())
		var err error
		if len(list) == 0 { // all are busy
			err = c.wait(end)
		}
		c.mu.Unlock()
		if len(list) > 0 {
			err = s.evict(ctx, list)
		}
		if err != nil {
			return nil, err
		}
	}
}

// makeMore makes frames for at most n pages from one on, up to the first page that has one, the end of the mapping, or the last frame that is to be had without
// waiting for busy ones. An error: why no memory could be freed for all of them.
func (s *Server) makeMore(ctx context.Context, m *mapping, page, n uint64) (all []*frame, err error) {
	c := s.cache
	n = min(n, m.first+m.n-min(page, m.first+m.n))
	for n > 0 {
		c.mu.Lock()
		var list []*frame
		for n > 0 && m.of.frames[page] == nil {
			f := c.tryAdd(m.of, page)
			if f == nil {
				list = c.victims(int(min(n, uint64(s.batch()))))
				break
			}
			all, page, n = append(all, f), page+1, n-1
		}
		c.mu.Unlock()
		if len(list) == 0 {
			break
		}
		if err := s.evict(ctx, list); err != nil {
			return all, err
		}
	}
	return all, nil
}

// maxAhead is how many pages one fault reads at most: others need memory, too.
func (s *Server) maxAhead() uint64 {
	return max(1, min(s.cfg.ReadAhead/pageBytes, uint64(s.cache.budget)/8))
}

// batch is how many frames are freed at once.
func (s *Server) batch() int { return max(1, min(64, s.cache.budget/16)) }

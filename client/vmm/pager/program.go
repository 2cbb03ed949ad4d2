package pager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/client/vmm/internal/kinds"
	"github.com/quarrystore/quarry/internal/pagerlink"
)

// program serves a connection: one mapping of one program.
func (s *Server) program(ctx context.Context, link *pagerlink.Conn) {
	var q pagerlink.Request
	fds, err := link.Receive(&q)
	pagerlink.CloseAll(fds)
	if err != nil {
		return
	}
	m, err := s.admitMapping(ctx, link, &q)
	if err != nil {
		_ = link.Send(replyTo(&q, err))
		return
	}
	defer s.leave(context.WithoutCancel(ctx), m.of)
	defer s.watchOwner(m)()
	attached, err := s.attach(m, &q)
	if err != nil {
		s.cfg.Logger.Warn("a program has not mapped a space that it has asked for", "pid", m.pid, "space", m.of.id.Name, "reason", err)
	}
	if attached == 0 {
		return
	}
	// At the end of the pager the program may be alive, and the guard ends its mapping. Otherwise it has ended, or its end of the connection was closed
	// behind the unmapping.
	alive := errors.Is(s.requests(ctx, m), os.ErrDeadlineExceeded)
	m.stopFaults()
	if alive && m.shared { // its next store waits for the guard
		for _, page := range s.cache.within(m.of, m.first, m.n, func(f *frame) bool { return f.dirty }) {
			_ = m.protect(page, 1)
		}
	}
	if m.detach(); !alive {
		s.guard.drop(attached)
	}
	// Now, and not when the last mapping ends: whatever takes over the locks of a program that was killed must not find its stores written later.
	if m.shared {
		s.writeLast(m)
	}
}

// watchOwner ends the connection of a mapping when its program has ended, until the returned function is called. The program's end of it may be open still,
// in a child that it has forked.
func (s *Server) watchOwner(m *mapping) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var task sync.WaitGroup
	task.Go(func() {
		err := m.link.WaitOwner(ctx)
		switch {
		case ctx.Err() != nil:
		case err == nil:
			m.link.Close()
		default:
			s.cfg.Logger.Warn("the end of a program is told by its connection alone", "pid", m.pid, "space", m.of.id.Name, "reason", err)
		}
	})
	return func() {
		cancel()
		task.Wait()
	}
}

// writeLast writes back what is dirty where a mapping was.
func (s *Server) writeLast(m *mapping) {
	ctx, cancel := s.faultContext()
	defer cancel()
	if err := s.sync(ctx, m.of, m.first, m.n); err != nil {
		s.cfg.Logger.Warn("stores of a program are not written back", "pid", m.pid, "space", m.of.id.Name, "reason", err)
	}
}

// admitMapping checks a map request and enters the memory that it is for.
func (s *Server) admitMapping(ctx context.Context, link *pagerlink.Conn, q *pagerlink.Request) (*mapping, error) {
	switch {
	case q.Op != pagerlink.OpMap:
		return nil, fmt.Errorf("%w: request %q before a mapping", client.ErrArgument, q.Op)
	case q.Version != pagerlink.Version:
		return nil, fmt.Errorf("%w: this pager speaks version %d of its protocol, the program version %d: run the same build", client.ErrArgument, pagerlink.Version, q.Version)
	}
	if err := vmm.Mode(q.Mode).Check(); err != nil {
		return nil, err
	}
	_, pid, err := link.Peer()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.FaultTimeout)
	defer cancel()
	of, err := s.enter(ctx, q)
	if err != nil {
		return nil, err
	}
	first, n, err := of.pagesOf(q.Address, q.Bytes)
	if err == nil && (q.Address%pageBytes != 0 || q.Bytes%pageBytes != 0) {
		err = fmt.Errorf("%w: mapping of %d bytes at %#x: want whole pages of %d bytes", client.ErrArgument, q.Bytes, q.Address, pageBytes)
	}
	if err != nil {
		s.leave(ctx, of)
		return nil, err
	}
	return &mapping{of: of, link: link, first: first, n: n, pid: pid, uffd: -1, shared: q.Mode != string(vmm.Private)}, nil
}

// pagesOf are the pages that a range of addresses touches.
func (m *memory) pagesOf(va, n uint64) (first, pages uint64, err error) {
	size := m.pages() * pageBytes
	if va < m.base() || n == 0 || n > size || va-m.base() > size-n {
		return 0, 0, fmt.Errorf("%w: %d bytes at %#x: space %q has %#x to %#x", client.ErrArgument, n, va, m.id.Name, m.base(), m.base()+size)
	}
	first = (va - m.base()) / pageBytes
	return first, (va-m.base()+n-1)/pageBytes - first + 1, nil
}

// attach gives the program the memory, waits for its userfaultfd and begins to serve its faults. It returns the guard's number of the mapping, 0: the
// program has given up.
func (s *Server) attach(m *mapping, q *pagerlink.Request) (number uint64, _ error) {
	r := replyTo(q, nil)
	// A read-only program maps the memory for loads alone. Its descriptor must allow stores, or the kernel would not register the mapping.
	r.PID, r.ReadOnly = os.Getpid(), s.cfg.Client.ReadOnly()
	if err := m.link.Send(r, m.of.fd); err != nil {
		return 0, nil
	}
	var a pagerlink.Request
	fds, err := m.link.Receive(&a)
	if err != nil {
		return 0, nil // the program says why
	}
	if a.Op != pagerlink.OpAttach || len(fds) != 1 {
		pagerlink.CloseAll(fds)
		err := fmt.Errorf("%w: request %q with %d descriptors: want attach with one", client.ErrArgument, a.Op, len(fds))
		return 0, errors.Join(err, m.link.Send(replyTo(&a, err)))
	}
	s.mu.Lock()
	s.serial++
	number = s.serial
	s.mu.Unlock()
	// The guard first: from the first fault on it can end the program's waits.
	if err = s.guard.add(number, m, fds[0]); err == nil {
		if err = m.attach(fds[0]); err != nil {
			s.guard.drop(number)
		}
	}
	if err != nil {
		pagerlink.CloseAll(fds)
		return 0, errors.Join(err, m.link.Send(replyTo(&a, err)))
	}
	s.startServing(m)
	_ = m.link.Send(replyTo(&a, nil))
	return number, nil
}

// requests serves a program's calls until its connection ends.
func (s *Server) requests(ctx context.Context, m *mapping) error {
	var calls sync.WaitGroup
	defer calls.Wait()
	slots := make(chan struct{}, pagerlink.MaxCalls)
	for {
		var q pagerlink.Request
		fds, err := m.link.Receive(&q)
		pagerlink.CloseAll(fds)
		if err != nil {
			return err
		}
		slots <- struct{}{}
		calls.Go(func() {
			r := s.call(ctx, m, &q)
			<-slots
			_ = m.link.Send(r)
		})
	}
}

// call serves one call.
func (s *Server) call(ctx context.Context, m *mapping, q *pagerlink.Request) pagerlink.Reply {
	first, n, err := m.of.pagesOf(q.Address, q.Bytes)
	if err == nil {
		if _, in := m.clip(first, n); in != n {
			err = fmt.Errorf("%w: %s of %d bytes at %#x: outside of the mapping", client.ErrArgument, q.Op, q.Bytes, q.Address)
		}
	}
	if err != nil {
		return replyTo(q, err)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.FaultTimeout)
	defer cancel()
	var dropped uint64
	switch q.Op {
	case pagerlink.OpSync:
		err = s.sync(ctx, m.of, first, n)
	case pagerlink.OpAcquire:
		dropped, err = s.acquire(ctx, m.of, first, n)
	case pagerlink.OpPrefetch:
		err = s.prefetch(ctx, m, first, n)
	case pagerlink.OpWhy:
		err = m.why(first)
	default:
		err = fmt.Errorf("%w: request %q: this pager does not know it", client.ErrArgument, q.Op)
	}
	r := replyTo(q, err)
	r.Dropped = dropped
	return r
}

// replyTo is the answer to a request.
func replyTo(q *pagerlink.Request, err error) pagerlink.Reply {
	r := pagerlink.Reply{ID: q.ID}
	if err != nil {
		r.Error, r.Kind = cut(err.Error()), kinds.Of(err)
	}
	return r
}

// maxReason bounds the text of an error in a message.
const maxReason = 2000

func cut(text string) string { return text[:min(len(text), maxReason)] }

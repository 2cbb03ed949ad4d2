package vmm

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm/internal/kinds"
	"github.com/quarrystore/quarry/internal/pagerlink"
)

// Sync writes back the pages of a range that any program of this host has stored into before. nil: the stores are at every replica, as by space.Write.
// client.ErrUnknown: they may be, in part; the pages stay dirty, so a later Sync writes them again.
func (m *Mapping) Sync(ctx context.Context, va, n uint64) error {
	if err := m.stores("Sync"); err != nil {
		return err
	}
	_, err := m.call(ctx, pagerlink.OpSync, va, n)
	return err
}

// Release is Sync at the end of an access that a lock protects: behind it other hosts that Acquire see the stores.
func (m *Mapping) Release(ctx context.Context, va, n uint64) error {
	if err := m.stores("Release"); err != nil {
		return err
	}
	_, err := m.call(ctx, pagerlink.OpSync, va, n)
	return err
}

// Acquire drops the pages of a range that differ from the space, so that loads behind it see what other hosts have released before. Pages that programs of this host
// have stored into since their last Release stay. It returns how many pages were dropped.
func (m *Mapping) Acquire(ctx context.Context, va, n uint64) (dropped int, err error) {
	r, err := m.call(ctx, pagerlink.OpAcquire, va, n)
	return int(r.Dropped), err
}

// Prefetch reads pages of a range that are not in memory, as many as half of the pager's memory holds, and maps them.
func (m *Mapping) Prefetch(ctx context.Context, va, n uint64) error {
	_, err := m.call(ctx, pagerlink.OpPrefetch, va, n)
	return err
}

// stores refuses calls that write stores back, where there are none.
func (m *Mapping) stores(call string) error {
	switch {
	case m.mode == Private:
		return fmt.Errorf("%w: %s of a private mapping: its stores are not the space's", client.ErrArgument, call)
	case m.readOnly:
		return fmt.Errorf("%s: the pager may only read the space: %w", call, client.ErrReadOnly)
	}
	return nil
}

// call sends a request about a range, which may begin and end within pages, and waits for its reply. A call whose context ends goes on at
// the pager.
func (m *Mapping) call(ctx context.Context, op string, va, n uint64) (pagerlink.Reply, error) {
	if err := ctx.Err(); err != nil {
		return pagerlink.Reply{}, err
	}
	if size := uint64(len(m.mem)); va < m.base || n > size || va-m.base > size-n {
		return pagerlink.Reply{}, fmt.Errorf("%w: %s of %d bytes at %#x: the mapping has %#x to %#x", space.ErrAddress, op, n, va, m.base, m.base+size)
	}
	if n == 0 {
		return pagerlink.Reply{}, m.Err()
	}
	ch := make(chan replied, 1)
	m.mu.Lock()
	switch {
	case m.closed:
		m.mu.Unlock()
		return pagerlink.Reply{}, fmt.Errorf("%w: the mapping is closed", client.ErrArgument)
	case m.lost != nil:
		defer m.mu.Unlock()
		return pagerlink.Reply{}, m.lost
	}
	m.lastID++
	id := m.lastID
	m.waiting[id] = ch
	m.mu.Unlock()
	if err := m.link.Send(pagerlink.Request{ID: id, Op: op, Address: va, Bytes: n}); err != nil {
		m.forget(id)
		<-m.done // the connection has ended
		return pagerlink.Reply{}, m.Err()
	}
	select {
	case got := <-ch:
		if got.err == nil && got.r.Error != "" {
			got.err = kinds.Error(got.r.Kind, got.r.Error)
		}
		return got.r, got.err
	case <-ctx.Done():
		m.forget(id)
		return pagerlink.Reply{}, ctx.Err()
	}
}

func (m *Mapping) forget(id uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.waiting, id)
}

// Do runs f, which may touch the mapping. If an access of its goroutine fails, f is left there, and Do returns why the page could not be had; a
// later access tries again. Other panics go on.
func (m *Mapping) Do(f func()) (err error) {
	began := m.fails.turn()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		at, ok := p.(interface{ Addr() uintptr })
		if !ok || uint64(at.Addr())-m.base >= uint64(len(m.mem)) {
			panic(p)
		}
		err = m.why(uint64(at.Addr()), began)
	}()
	f()
	return nil
}

package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/client"
)

// Remote is an open pool of a cluster that a Host reaches, by way of a pool agent there. Its owner is the agent's session. Safe for concurrent use: what several
// goroutines call is sent without waiting for earlier answers.
//
// Its calls promise what those of Pool do. When the stream to the agent ends, calls that wait for an answer fail with client.ErrUnknown, and later ones with ErrAgent: open the pool again.
// The agent closes the pool then, as Dirty; that of a host which is lost does so within half a minute, or its session ends.
type Remote struct {
	h     Host
	s     *stream
	name  string
	local []byte
	info  Info // as it was opened
	// failed and clean are as in Pool.
	failed, clean atomic.Uint64

	mu       sync.RWMutex // held for writing by Close
	closed   bool
	released bool

	setting sync.Mutex // guards attr, last, isTorn
	attr    Attr
	last    string
	isTorn  bool
}

// Create is as the package function Create, in the cluster that the Host reaches.
func (h Host) Create(ctx context.Context, name string, local []byte, o Options) (*Remote, error) {
	return h.create(ctx, name, local, o, "", false)
}

func (h Host) create(ctx context.Context, name string, local []byte, o Options, last string, torn bool) (*Remote, error) {
	return h.begin(ctx, opCreate, local, control{Name: name, Bytes: uint64(len(local)), Attr: encodeAttr(o.Attr), Replicas: o.Replicas, RegionBytes: o.RegionBytes, Durable: o.Durable, Token: last, Torn: torn})
}

// Open is as the package function Open, in the cluster that the Host reaches.
func (h Host) Open(ctx context.Context, name string, local []byte, attr *Attr) (*Remote, error) {
	return h.open(ctx, name, local, attr, false)
}

func (h Host) open(ctx context.Context, name string, local []byte, attr *Attr, keep bool) (*Remote, error) {
	c := control{Name: name, Bytes: uint64(len(local)), Keep: keep}
	if attr != nil {
		c.Attr = encodeAttr(*attr)
	}
	return h.begin(ctx, opOpen, local, c)
}

// OpenBare is as the package function OpenBare, in the cluster that the Host reaches.
func (h Host) OpenBare(ctx context.Context, name string) (*Remote, error) {
	return h.begin(ctx, opOpen, nil, control{Name: name, Bare: true})
}

// begin starts an agent and has it open a pool.
func (h Host) begin(ctx context.Context, op byte, local []byte, c control) (*Remote, error) {
	if len(c.Name) > MaxNameBytes {
		return nil, fmt.Errorf("%w: the name of a pool has at most %d bytes, not %d", client.ErrArgument, MaxNameBytes, len(c.Name))
	}
	s, err := h.dial(ctx)
	if err != nil {
		return nil, err
	}
	r := &Remote{h: h, s: s, name: c.Name, local: local}
	got, err := s.control(ctx, op, c)
	if err == nil && got.Info == nil {
		err = fmt.Errorf("%w: %w: an answer that does not describe the pool", client.ErrUnknown, errFrame)
	}
	if err == nil {
		r.attr, err = got.attr()
	}
	if err != nil {
		s.close()
		return nil, err
	}
	r.info, r.last, r.isTorn = *got.Info, got.Token, got.Info.Torn
	if r.info.Dirty {
		r.failed.Add(1)
	}
	return r, nil
}

// with runs f with an agent that opens nothing.
func (h Host) with(ctx context.Context, f func(*stream) error) error {
	s, err := h.dial(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	return f(s)
}

// Remove is as the package function Remove, in the cluster that the Host reaches.
func (h Host) Remove(ctx context.Context, name string) error {
	return h.with(ctx, func(s *stream) error {
		_, err := s.control(ctx, opRemove, control{Name: name})
		return err
	})
}

// Stat is as the package function Stat, in the cluster that the Host reaches.
func (h Host) Stat(ctx context.Context, name string) (i Info, err error) {
	err = h.with(ctx, func(s *stream) error { i, err = s.look(ctx, name); return err })
	return i, err
}

func (s *stream) look(ctx context.Context, name string) (Info, error) {
	c, err := s.control(ctx, opLook, control{Name: name})
	if err != nil {
		return Info{}, err
	}
	if c.Info == nil {
		return Info{}, fmt.Errorf("%w on %s: an answer that does not describe the pool", ErrAgent, s.host)
	}
	c.Info.Attr, err = c.attr()
	return *c.Info, err
}

// Check is as the package function Check, in the cluster that the Host reaches.
func (h Host) Check(ctx context.Context, name string, local []byte, progress func(done uint64)) (r Report, err error) {
	err = h.with(ctx, func(s *stream) error {
		i, err := s.look(ctx, name)
		switch {
		case err != nil:
			return err
		case i.State != Ready:
			return fmt.Errorf("%w: pool %q: %s", ErrUnfinished, name, i.State)
		case i.Bytes != uint64(len(local)):
			return fmt.Errorf("%w: pool %q has %d bytes, the local memory %d", ErrMismatch, name, i.Bytes, len(local))
		}
		r, err = s.compare(ctx, local, i.Bytes, progress, func(context.Context, uint64, uint64, bool, bool) error { return nil })
		return err
	})
	return r, err
}

// inFlight is how many batches of parts, or ranges of a large Persist, are under way at a time.
const inFlight = 8

// compare compares local memory with the pool, some batches at a time, and calls f for each part.
func (s *stream) compare(ctx context.Context, local []byte, size uint64, progress func(done uint64), f func(ctx context.Context, off, n uint64, same, alike bool) error) (total Report, err error) {
	var mu sync.Mutex // guards total, and calls of progress
	err = eachRange(ctx, size, maxData, func(ctx context.Context, off, n uint64) error {
		ask := func(ctx context.Context, at, n uint64, hashes []uint64, alike []bool) error {
			answer := make([]byte, hashBytes*len(hashes))
			if err := s.do(ctx, opCompare, []uint64{off + at, n, uint64(len(hashes))}, nil, answer); err != nil {
				return err
			}
			return decodeHashes(answer, hashes, alike)
		}
		var r Report
		var mine []byte
		if local != nil {
			mine = local[off : off+n]
		}
		err := compare(ctx, ask, mine, n, nil, func(at, n uint64, same, alike bool) error {
			r.note(n, same, alike)
			return f(ctx, off+at, n, same, alike)
		})
		mu.Lock()
		defer mu.Unlock()
		if total.add(r); progress != nil && err == nil {
			progress(total.Bytes)
		}
		return err
	})
	return total, err
}

// eachRange calls f for ranges of at most each bytes, inFlight at a time. Behind an error it begins no other one.
func eachRange(ctx context.Context, size, each uint64, f func(ctx context.Context, off, n uint64) error) error {
	if size <= each {
		return f(ctx, 0, size)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	failed := func() error { mu.Lock(); defer mu.Unlock(); return first }
	room := make(chan struct{}, inFlight)
	for off := uint64(0); off < size && failed() == nil; off += each {
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			if err := f(ctx, off, min(each, size-off)); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil || errors.Is(err, client.ErrUnknown) && !errors.Is(first, client.ErrUnknown) {
					first = err
				}
			}
		})
	}
	wg.Wait()
	return first
}

// enter begins a call on a range. The caller calls r.mu.RUnlock at its end, unless there is an error.
func (r *Remote) enter(off, n uint64) error {
	r.mu.RLock()
	err := inRange(off, n, r.Bytes(), r.name)
	if r.closed {
		err = ErrClosed
	}
	if err != nil {
		r.mu.RUnlock()
	}
	return err
}

// Persist is as Pool.Persist.
func (r *Remote) Persist(off, n uint64) error {
	if err := r.enter(off, n); err != nil {
		return err
	}
	defer r.mu.RUnlock()
	if r.local == nil {
		return errBare
	}
	return r.write(context.Background(), opPersist, r.local[off:off+n], off)
}

// DeepPersist is as Pool.DeepPersist.
func (r *Remote) DeepPersist(off, n uint64) error {
	if err := r.enter(off, n); err != nil {
		return err
	}
	defer r.mu.RUnlock()
	if r.local == nil {
		return errBare
	}
	return r.deepPut(r.local[off:off+n], off)
}

// deepPut is DeepPersist of bytes. Preconditions: enter.
func (r *Remote) deepPut(b []byte, off uint64) error {
	if !r.info.Durable {
		return fmt.Errorf("%w: %q", ErrNotDurable, r.name)
	}
	return r.write(context.Background(), opDeepPersist, b, off)
}

// DeepWrite is as Pool.DeepWrite.
func (r *Remote) DeepWrite(b []byte, off uint64) error {
	if err := r.enter(off, uint64(len(b))); err != nil {
		return err
	}
	defer r.mu.RUnlock()
	return r.deepPut(b, off)
}

func (r *Remote) put(b []byte, off uint64) error { return r.Write(b, off) }

// Write is as Pool.Write.
func (r *Remote) Write(b []byte, off uint64) error {
	if err := r.enter(off, uint64(len(b))); err != nil {
		return err
	}
	defer r.mu.RUnlock()
	return r.write(context.Background(), opPersist, b, off)
}

// write sends bytes, a large range in some pieces at a time.
func (r *Remote) write(ctx context.Context, op byte, b []byte, off uint64) error {
	var arrived atomic.Bool
	err := eachRange(ctx, uint64(len(b)), maxData, func(ctx context.Context, at, n uint64) error {
		err := r.s.do(ctx, op, []uint64{off + at}, b[at:at+n], nil)
		if err == nil {
			arrived.Store(true)
		}
		return err
	})
	if err == nil {
		return nil
	}
	r.failed.Add(1)
	if arrived.Load() && !errors.Is(err, client.ErrUnknown) {
		err = fmt.Errorf("%w: %w", client.ErrUnknown, err)
	}
	return fmt.Errorf("pool %q: %d bytes at %d: %w", r.name, len(b), off, err)
}

// Read is as Pool.Read.
func (r *Remote) Read(dst []byte, off uint64) error {
	if err := r.enter(off, uint64(len(dst))); err != nil {
		return err
	}
	defer r.mu.RUnlock()
	return r.read(context.Background(), dst, off)
}

func (r *Remote) read(ctx context.Context, dst []byte, off uint64) error {
	return eachRange(ctx, uint64(len(dst)), maxData, func(ctx context.Context, at, n uint64) error {
		return r.s.do(ctx, opRead, []uint64{off + at, n}, nil, dst[at:at+n])
	})
}

// SetAttr is as Pool.SetAttr.
func (r *Remote) SetAttr(a Attr) error {
	if err := r.enter(0, 0); err != nil {
		return err
	}
	defer r.mu.RUnlock()
	r.setting.Lock()
	defer r.setting.Unlock()
	_, err := r.s.control(context.Background(), opSetAttr, control{Attr: encodeAttr(a)})
	if err == nil {
		r.attr = a
	}
	return err
}

// Attr are the attributes that the pool had when it was opened, or got by SetAttr since.
func (r *Remote) Attr() Attr {
	r.setting.Lock()
	defer r.setting.Unlock()
	return r.attr
}

// Bytes is the size of the pool.
func (r *Remote) Bytes() uint64 { return r.info.Bytes }

// Dirty is as Pool.Dirty.
func (r *Remote) Dirty() bool { return r.failed.Load() != r.clean.Load() }

// Sync is as Pool.Sync.
func (r *Remote) Sync(ctx context.Context, progress func(done uint64)) (Report, error) {
	if r.local == nil {
		return Report{}, errBare
	}
	return r.whole(ctx, r.local, progress, func(ctx context.Context, off, n uint64, same, alike bool) error {
		if same && alike {
			return nil
		}
		return r.write(ctx, opPersist, r.local[off:off+n], off)
	})
}

// Restore is as Pool.Restore.
func (r *Remote) Restore(ctx context.Context, progress func(done uint64)) (Report, error) {
	if r.local == nil {
		return Report{}, errBare
	}
	return r.whole(ctx, r.local, progress, func(ctx context.Context, off, n uint64, same, alike bool) error {
		if !same {
			if err := r.read(ctx, r.local[off:off+n], off); err != nil {
				return err
			}
		}
		if alike {
			return nil
		}
		return r.write(ctx, opPersist, r.local[off:off+n], off)
	})
}

// Reconcile is as Pool.Reconcile.
func (r *Remote) Reconcile(ctx context.Context) (Report, error) {
	return r.whole(ctx, nil, nil, func(ctx context.Context, off, n uint64, _, alike bool) error {
		if alike {
			return nil
		}
		b := make([]byte, n)
		if err := r.read(ctx, b, off); err != nil {
			return err
		}
		return r.write(ctx, opPersist, b, off)
	})
}

// whole runs f over the parts of the pool, and has it on stable storage if the pool is durable.
func (r *Remote) whole(ctx context.Context, local []byte, progress func(done uint64), f func(ctx context.Context, off, n uint64, same, alike bool) error) (rep Report, err error) {
	if err := ctx.Err(); err != nil {
		return rep, err
	}
	if err := r.enter(0, 0); err != nil {
		return rep, err
	}
	defer r.mu.RUnlock()
	failed := r.failed.Add(1)
	if rep, err = r.s.compare(ctx, local, r.Bytes(), progress, f); err == nil {
		err = r.s.do(ctx, opFlush, []uint64{0, r.Bytes()}, nil, nil)
	}
	if err != nil {
		return rep, fmt.Errorf("pool %q: %w", r.name, err)
	}
	r.clean.Store(failed)
	return rep, nil
}

// Close is as Pool.Close. It waits for the agent's end. Behind an error the agent closes the pool as Dirty.
func (r *Remote) Close(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.released {
		return nil
	}
	if _, err := r.s.control(ctx, opClose, control{Dirty: r.Dirty()}); err != nil {
		return fmt.Errorf("pool %q: %w", r.name, err)
	}
	r.released = true
	r.s.close()
	return nil
}

// discard closes and removes a pool that was made in vain, by another agent if the stream has ended.
func (r *Remote) discard() error {
	ctx, cancel := context.WithTimeout(context.Background(), tidyTimeout)
	defer cancel()
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err := r.s.control(ctx, opClose, control{Dirty: true})
	if err == nil {
		_, err = r.s.control(ctx, opRemove, control{Name: r.name})
	}
	r.closed, r.released = true, true
	r.s.close()
	if !errors.Is(err, ErrAgent) {
		return err
	}
	for { // the agent may not have closed it yet
		if err = r.h.Remove(ctx, r.name); !errors.Is(err, ErrOpen) {
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

func (r *Remote) check(ctx context.Context, progress func(done uint64)) (Report, error) {
	return r.s.compare(ctx, r.local, r.Bytes(), progress, func(context.Context, uint64, uint64, bool, bool) error { return nil })
}

func (r *Remote) set() [16]byte { return r.Attr().PoolsetUUID }

func (r *Remote) behind() { r.failed.Add(1) }

func (r *Remote) owner() string { r.setting.Lock(); defer r.setting.Unlock(); return r.last }

func (r *Remote) torn() bool { r.setting.Lock(); defer r.setting.Unlock(); return r.isTorn }

func (r *Remote) own(ctx context.Context, token string, torn bool) error {
	r.setting.Lock()
	defer r.setting.Unlock()
	_, err := r.s.control(ctx, opOwn, control{Token: token, Torn: torn})
	if err == nil {
		r.last, r.isTorn = token, torn
	}
	return err
}

func (r *Remote) String() string { return r.s.host + " " + r.name }

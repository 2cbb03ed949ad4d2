package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/client"
)

// MemoryOptions say how a Set is opened.
type MemoryOptions struct {
	// Attr, unless it is nil, is what the attributes of all pools have to be. A PoolsetUUID of zeros stands for that of the set.
	Attr *Attr
	// Queue, unless it is 0, lets Persist return when the local part has the range: at most so many bytes of copies wait for the replicas, and Persist
	// waits while there is no room. From MinQueue to MaxQueue.
	Queue int
	// Progress, unless it is nil, gets how many bytes have been compared with a replica.
	Progress func(done uint64)
}

func (o MemoryOptions) check() error {
	if o.Queue != 0 && (o.Queue < MinQueue || o.Queue > MaxQueue) {
		return fmt.Errorf("%w: a queue of %d bytes: want 0, or %d to %d", client.ErrArgument, o.Queue, MinQueue, MaxQueue)
	}
	return nil
}

// Memory is the local part of a Set, mapped, and what it is replicated to. Safe for concurrent use.
//
// Invariant: a replica has nothing that the local part has not, but for what a crash has kept it from making durable.
type Memory struct {
	part     *part
	replicas []replica
	gaps     []gap  // of the replicas
	queue    *queue // nil: Persist waits for the replicas

	opened Report       // of the replicas that Open has brought up
	mu     sync.RWMutex // held for writing by Sync and Close
	closed bool
}

// Bytes is the memory. It is not valid behind Close: an access ends the process.
func (m *Memory) Bytes() []byte { return m.part.memory() }

// Durable says whether the local part survives a loss of power.
func (m *Memory) Durable() bool { return m.part.mapping.Mem != nil && m.part.medium.persistent() }

// Dirty says that a replica may lack something, beside what waits in the queue, until the next Sync or Open.
func (m *Memory) Dirty() bool {
	for _, r := range m.replicas {
		if r.Dirty() {
			return true
		}
	}
	return false
}

// enter begins a call on a range. The caller calls m.mu.RUnlock at its end, unless there is an error.
func (m *Memory) enter(off, n uint64) error {
	m.mu.RLock()
	if m.closed {
		m.mu.RUnlock()
		return ErrClosed
	}
	if size := uint64(len(m.part.memory())); off > size || n > size-off {
		m.mu.RUnlock()
		return fmt.Errorf("%w: %d bytes at %d, the memory has %d", ErrRange, n, off, size)
	}
	return nil
}

// Persist makes a range durable in the local part, and then has it at all replicas; with a queue, some time later. Nobody changes the range during the call.
//
// Errors: ErrBehind: the local part has it. ErrRange, ErrClosed: nothing was done. Others: any of the bytes may be in the local part, and no replica has them.
func (m *Memory) Persist(off, n uint64) error {
	if err := m.enter(off, n); err != nil {
		return err
	}
	defer m.mu.RUnlock()
	if n == 0 {
		return nil
	}
	if err := m.part.flush(off, n); err != nil {
		return fmt.Errorf("%w: %w", client.ErrUnknown, err)
	}
	b := m.part.memory()[off : off+n]
	if m.queue != nil {
		return m.queue.add(b, off)
	}
	if err := m.put(b, off); err != nil {
		return fmt.Errorf("%w: %w", ErrBehind, err)
	}
	return nil
}

// gap is what a replica lacks because a put has failed, while later ones may succeed. With a queue there is none: nothing is put behind an error.
type gap struct {
	open   atomic.Bool // a put has failed, and the replica does not say so yet
	mu     sync.Mutex
	marked bool // it says that it is torn
}

// put writes bytes to all replicas at a time.
func (m *Memory) put(b []byte, off uint64) error {
	if len(m.replicas) == 1 {
		return m.putTo(0, b, off)
	}
	return m.putAll(b, off)
}

// putTo writes bytes to a replica. If that fails the replica is torn from then on, until a Sync, so that Restore prefers another one. It gets nothing more while it
// cannot be told so.
func (m *Memory) putTo(i int, b []byte, off uint64) error {
	r := m.replicas[i]
	if m.queue != nil {
		return r.put(b, off)
	}
	g := &m.gaps[i]
	if g.open.Load() {
		if err := g.mark(r); err != nil {
			return fmt.Errorf("%s lacks an earlier range, and this one is not sent: %w", r, err)
		}
	}
	err := r.put(b, off)
	if err != nil {
		g.open.Store(true)
		err = errors.Join(err, g.mark(r))
	}
	return err
}

// mark has the replica torn.
func (g *gap) mark(r replica) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.marked {
		ctx, cancel := context.WithTimeout(context.Background(), tidyTimeout)
		defer cancel()
		r.behind()
		if err := r.own(ctx, r.owner(), true); err != nil {
			return err
		}
		g.marked = true
	}
	g.open.Store(false)
	return nil
}

func (m *Memory) putAll(b []byte, off uint64) error {
	errs := make([]error, len(m.replicas))
	var wg sync.WaitGroup
	for i := range m.replicas[1:] {
		wg.Go(func() { errs[i+1] = m.putTo(i+1, b, off) })
	}
	errs[0] = m.putTo(0, b, off)
	wg.Wait()
	return errors.Join(errs...)
}

// behind has all replicas Dirty.
func (m *Memory) behind() {
	for _, r := range m.replicas {
		r.behind()
	}
}

// Drain returns when the replicas have what was persisted before. ErrBehind: they will not, before a Sync.
func (m *Memory) Drain(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := m.enter(0, 0); err != nil {
		return err
	}
	defer m.mu.RUnlock()
	if m.queue == nil {
		return nil
	}
	return m.queue.wait(ctx)
}

// Sync makes all replicas as the memory is, which nobody changes meanwhile, and lets a queue that has failed go on. progress may be nil; it gets what has been compared
// with each replica, and does not call the Memory. After an error Sync can be called again.
func (m *Memory) Sync(ctx context.Context, progress func(done uint64)) (Report, error) {
	if err := ctx.Err(); err != nil {
		return Report{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return Report{}, ErrClosed
	}
	if m.queue != nil {
		m.queue.drop()
	}
	var all Report
	err := m.part.mend()
	if err == nil {
		err = m.part.flush(0, m.part.head.Bytes)
	}
	if err != nil {
		return all, err
	}
	for i, r := range m.replicas {
		m.gaps[i].marked = false // also where it fails: the replica may not be torn any more, if the answer that says so was lost
		one, err := resync(ctx, r, r.owner(), progress)
		if all.add(one); err != nil {
			return all, err
		}
		m.gaps[i].open.Store(false)
	}
	if m.queue != nil {
		m.queue.again()
	}
	return all, nil
}

// Close ends the mapping when the calls that are running have ended and the queue is empty, and gives the replicas up. What was stored and not persisted is in the local part
// alone, and the next Open does not look for it. After an error the
// memory is closed, replicas may be Dirty, which the next Open mends, and the Client's session may have pools until it ends; Close can be called again.
func (m *Memory) Close(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	if m.queue != nil && !m.closed {
		if errs = append(errs, m.queue.wait(ctx)); errs[0] != nil {
			m.queue.drop()
		}
		m.queue.end()
	}
	m.closed = true
	clean := true
	for _, r := range m.replicas {
		clean = clean && !r.Dirty()
		if err := r.Close(ctx); err != nil {
			errs, clean = append(errs, fmt.Errorf("%s: %w", r, err)), false
		}
	}
	if m.part.file != nil {
		if h := m.part.head; clean && h.State == partOpen && h.Next == (token{}) {
			h.State = partClosed
			// The next program sees what was stored and not persisted, and acts on it: Open flushes behind a crash alone.
			err := m.part.flush(0, h.Bytes)
			if err == nil {
				err = m.part.change(h)
			}
			errs = append(errs, err)
		}
		errs = append(errs, m.part.close())
	}
	return errors.Join(errs...)
}

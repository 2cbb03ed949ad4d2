package pool

import (
	"context"
	"fmt"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/rdma"
)

// PartBytes is what Sync, Restore and Check compare at once by a hash, and move if it differs.
const PartBytes = 64 << 10

// parts is how many hashes one round asks for.
const parts = client.MaxRawBytes / PartBytes

// Report is the answer of Check, Sync and Restore.
type Report struct {
	Bytes   uint64 `json:"bytes"`   // compared
	Differ  uint64 `json:"differ"`  // bytes of the parts in which the local memory differs from the pool
	Unalike uint64 `json:"unalike"` // bytes of the parts that not all replicas have, or have alike
}

// Same says that the pool and all its replicas are as the local memory is.
func (r Report) Same() bool { return r.Differ == 0 && r.Unalike == 0 }

// add adds the counts of another comparison.
func (r *Report) add(o Report) {
	r.Bytes += o.Bytes
	r.Differ += o.Differ
	r.Unalike += o.Unalike
}

// comparer stores the hashes of parts of n bytes from an offset on, and whether all replicas have them alike.
type comparer func(ctx context.Context, off, n uint64, hashes []uint64, alike []bool) error

// comparerOf is that of a space which has a pool's bytes.
func comparerOf(s *space.Space) comparer {
	return func(ctx context.Context, off, n uint64, hashes []uint64, alike []bool) error {
		return s.Compare(ctx, s.Base()+off, n, hashes, alike)
	}
}

// compare calls f for each part of a pool of some size, in order, and progress behind each round. same is false if local is nil.
func compare(ctx context.Context, ask comparer, local []byte, size uint64, progress func(done uint64), f func(off, n uint64, same, alike bool) error) error {
	var hashes [parts]uint64
	var alike [parts]bool
	for off := uint64(0); off < size; {
		n := min(PartBytes, size-off)
		count := max(1, min(parts, (size-off)/PartBytes))
		if err := ask(ctx, off, n, hashes[:count], alike[:count]); err != nil {
			return err
		}
		for i := range count {
			same := local != nil && rdma.Hash(local[off:off+n], 0) == hashes[i]
			if err := f(off, n, same, alike[i]); err != nil {
				return err
			}
			off += n
		}
		if progress != nil {
			progress(off)
		}
	}
	return nil
}

// note counts a part.
func (r *Report) note(n uint64, same, alike bool) {
	r.Bytes += n
	if !same {
		r.Differ += n
	}
	if !alike {
		r.Unalike += n
	}
}

// Check compares local memory with a pool, which may be open, and changes nothing. progress may be nil. ErrMismatch: the sizes differ.
func Check(ctx context.Context, c *client.Client, name string, local []byte, progress func(done uint64)) (r Report, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	i, err := Stat(ctx, c, name)
	switch {
	case err != nil:
		return r, err
	case i.State != Ready:
		return r, fmt.Errorf("%w: pool %q: %s", ErrUnfinished, name, i.State)
	case i.Bytes != uint64(len(local)):
		return r, fmt.Errorf("%w: pool %q has %d bytes, the local memory %d", ErrMismatch, name, i.Bytes, len(local))
	}
	s, err := space.Open(ctx, c, i.Space)
	if err != nil {
		return r, err
	}
	err = compare(ctx, comparerOf(s), local, uint64(len(local)), progress, func(_, n uint64, same, alike bool) error { r.note(n, same, alike); return nil })
	return r, err
}

// check is Check of an open pool.
func (p *Pool) check(ctx context.Context, progress func(done uint64)) (r Report, err error) {
	err = compare(ctx, comparerOf(p.s), p.local, p.size, progress, func(_, n uint64, same, alike bool) error { r.note(n, same, alike); return nil })
	return r, err
}

// Sync makes the pool, at every replica, as the local memory is, which nobody changes meanwhile. progress, if it is not nil, gets how many bytes
// have been compared; it does not call the Pool. After an error the pool is Dirty, and Sync can be called again.
func (p *Pool) Sync(ctx context.Context, progress func(done uint64)) (Report, error) {
	if p.local == nil {
		return Report{}, errBare
	}
	return p.whole(ctx, p.local, progress, func(ctx context.Context, off, n uint64, same, alike bool) error {
		if same && alike {
			return nil
		}
		return p.send(ctx, off, n)
	})
}

// Restore makes the local memory as the pool is, to which nobody persists meanwhile. It does not flush the local memory. After an error the local memory is the pool's in part.
func (p *Pool) Restore(ctx context.Context, progress func(done uint64)) (Report, error) {
	if p.local == nil {
		return Report{}, errBare
	}
	return p.whole(ctx, p.local, progress, func(ctx context.Context, off, n uint64, same, alike bool) error {
		if !same {
			if _, err := p.s.Read(ctx, p.local[off:off+n], p.base+off); err != nil {
				return err
			}
		}
		if alike {
			return nil
		}
		return p.send(ctx, off, n) // or else another replica would show other bytes after a failover
	})
}

// whole runs f over the parts of the pool, and has it on stable storage if the pool is durable: the bytes of a former owner's last Persist may be at
// the replicas and not be flushed.
func (p *Pool) whole(ctx context.Context, local []byte, progress func(done uint64), f func(ctx context.Context, off, n uint64, same, alike bool) error) (r Report, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	if err := p.enter(0, p.Bytes()); err != nil {
		return r, err
	}
	defer p.mu.RUnlock()
	ctx, cancel := p.claim.within(ctx)
	defer cancel()
	failed := p.failed.Add(1)
	err = compare(ctx, comparerOf(p.s), local, p.size, progress, func(off, n uint64, same, alike bool) error {
		r.note(n, same, alike)
		return f(ctx, off, n, same, alike)
	})
	if err == nil {
		err = p.s.Flush(ctx, p.base, p.Bytes())
	}
	if err != nil {
		return r, p.claim.because(err)
	}
	p.clean.Store(failed) // a Persist that has failed meanwhile counts more
	return r, nil
}

// Reconcile makes all replicas of the pool as its primary is, where a Persist that did not return has left them different, and does not look at the local memory. Nobody persists
// meanwhile. The pool is not Dirty then. It is for programs that find out by themselves what the pool lacks.
func (p *Pool) Reconcile(ctx context.Context) (Report, error) {
	var buf [PartBytes]byte
	return p.whole(ctx, nil, nil, func(ctx context.Context, off, n uint64, _, alike bool) error {
		if alike {
			return nil
		}
		if _, err := p.s.Read(ctx, buf[:n], p.base+off); err != nil {
			return err
		}
		return p.write(ctx, buf[:n], off)
	})
}

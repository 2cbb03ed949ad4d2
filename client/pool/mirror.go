package pool

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
)

// replica is what a Memory is replicated to: a Pool or a mirror.
type replica interface {
	// set is the UUID of the set that it is of.
	set() [16]byte
	// put writes bytes. They are there, in order with earlier ones, when it returns nil.
	put(b []byte, off uint64) error
	// check compares the memory with the replica, and changes nothing.
	check(ctx context.Context, progress func(done uint64)) (Report, error)
	Sync(ctx context.Context, progress func(done uint64)) (Report, error)
	Restore(ctx context.Context, progress func(done uint64)) (Report, error)
	// owner is the token of its last owner, before this one.
	owner() string
	// own makes the memory its last owner. torn says that a Sync follows, until own is called again behind it: what a crash leaves of that has no order.
	own(ctx context.Context, token string, torn bool) error
	torn() bool
	// behind has it Dirty until the next Sync.
	behind()
	Dirty() bool
	Close(ctx context.Context) error
	String() string
}

// mirror is a local part that has what a Memory has.
type mirror struct {
	*part
	local []byte
	dirty atomic.Bool
}

func newMirror(p *part, local []byte) *mirror {
	m := &mirror{part: p, local: local}
	m.dirty.Store(p.head.State != partClosed || p.lost())
	return m
}

func (m *mirror) put(b []byte, off uint64) error {
	err := m.part.put(off, b)
	if err != nil {
		m.behind()
	}
	return err
}

// eachPart calls f for each part in which two memories differ.
func eachPart(ctx context.Context, a, b []byte, progress func(uint64), f func(a, b []byte, off uint64) error) (r Report, err error) {
	for off := 0; off < len(a); off += PartBytes {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		end := min(off+PartBytes, len(a))
		same := bytes.Equal(a[off:end], b[off:end])
		r.note(uint64(end-off), same, true)
		if !same {
			if err := f(a[off:end], b[off:end], uint64(off)); err != nil {
				return r, err
			}
		}
		if progress != nil {
			progress(uint64(end))
		}
	}
	return r, nil
}

// comparePart compares two memories.
func comparePart(ctx context.Context, a, b []byte, progress func(uint64)) (Report, error) {
	return eachPart(ctx, a, b, progress, func(_, _ []byte, _ uint64) error { return nil })
}

func (m *mirror) check(ctx context.Context, progress func(uint64)) (Report, error) {
	return comparePart(ctx, m.local, m.memory(), progress)
}

func (m *mirror) Sync(ctx context.Context, progress func(uint64)) (Report, error) {
	m.behind()
	if err := m.mend(); err != nil {
		return Report{}, err
	}
	r, err := eachPart(ctx, m.local, m.memory(), progress, func(memory, _ []byte, off uint64) error { return m.put(memory, off) })
	if err == nil {
		err = m.flush(0, uint64(len(m.local))) // a put may have been killed before its flush
	}
	if err == nil {
		m.dirty.Store(false)
	}
	return r, err
}

func (m *mirror) Restore(ctx context.Context, progress func(uint64)) (Report, error) {
	return eachPart(ctx, m.local, m.memory(), progress, func(memory, mine []byte, _ uint64) error { copy(memory, mine); return nil })
}

func (m *mirror) owner() string { return m.now().Token.String() }

func (m *mirror) own(_ context.Context, t string, torn bool) error {
	h := m.now()
	if h.Token, h.State = tokenOf(t), partOpen; torn {
		h.State = partTorn
	}
	return m.change(h)
}

func (m *mirror) torn() bool { return m.now().State == partTorn || m.lost() }

func (m *mirror) set() [16]byte { return m.head.Set }

func (m *mirror) behind() { m.dirty.Store(true) }

func (m *mirror) Dirty() bool { return m.dirty.Load() }

func (m *mirror) Close(ctx context.Context) error {
	if err := ctx.Err(); err != nil || m.file == nil {
		return err
	}
	var err error
	if !m.Dirty() && m.head.State == partOpen {
		h := m.head
		h.State = partClosed
		err = m.change(h)
	}
	return errors.Join(err, m.close()) // the next Open mends a mirror that does not say that it is closed
}

func (m *mirror) String() string { return m.Path }

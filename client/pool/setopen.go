package pool

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/quarrystore/quarry/client"
)

// Create makes the local parts and the pools of a set, all zero, and opens them. No file and no pool is there before. o.Attr.PoolsetUUID is made if it is zero.
//
// Errors: os.ErrExist, client.ErrNameExists: what was there stays as it was; others as of package function Create.
func (s *Set) Create(ctx context.Context, c *client.Client, o Options, mo MemoryOptions) (_ *Memory, err error) {
	if err := errors.Join(ctx.Err(), mo.check()); err != nil {
		return nil, err
	}
	if o.Attr.PoolsetUUID == ([16]byte{}) {
		rand.Read(o.Attr.PoolsetUUID[:])
	}
	owner := newToken()
	head := partHead{Set: o.Attr.PoolsetUUID, State: partMaking, Token: tokenOf(owner)}
	m := &Memory{}
	var undo []func() error // in the order of making
	defer func() {
		if err == nil {
			return
		}
		for i := len(undo) - 1; i >= 0; i-- {
			err = errors.Join(err, undo[i]())
		}
	}()
	if m.part, err = makePart(s.Part, head); err != nil {
		return nil, err
	}
	undo = append(undo, func() error { return errors.Join(m.part.close(), os.Remove(s.Part.Path)) })
	for _, want := range s.Mirrors {
		p, err := makePart(want, head)
		if err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return errors.Join(p.close(), os.Remove(want.Path)) })
		m.replicas = append(m.replicas, newMirror(p, m.Bytes()))
	}
	for _, name := range s.Pools {
		p, err := create(ctx, c, name, m.Bytes(), o, owner)
		if err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return p.discard(c) })
		m.replicas = append(m.replicas, p)
	}
	if err := m.begin(ctx, owner, m.replicas, mo); err != nil {
		return nil, err
	}
	return m, nil
}

// discard closes and removes a pool that was made in vain.
func (p *Pool) discard(c *client.Client) error {
	ctx, cancel := p.claim.tidy()
	defer cancel()
	if err := p.Close(ctx); err != nil {
		return err
	}
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
	defer cancel()
	return Remove(ctx, c, p.claim.e.Name)
}

// begin makes the memory the last owner of all replicas and brings those that may be behind to it.
func (m *Memory) begin(ctx context.Context, owner string, behind []replica, o MemoryOptions) error {
	for _, r := range m.replicas {
		if slices.Contains(behind, r) {
			continue
		}
		if err := r.own(ctx, owner, false); err != nil {
			return fmt.Errorf("%s: %w", r, err)
		}
	}
	for _, r := range behind {
		rep, err := resync(ctx, r, owner, o.Progress)
		if m.opened.add(rep); err != nil {
			return err
		}
	}
	h := m.part.head
	h.Token, h.Next, h.State = tokenOf(owner), token{}, partOpen
	if err := m.part.change(h); err != nil {
		return err
	}
	if o.Queue != 0 {
		m.queue = newQueue(o.Queue, m.put, m.behind)
	}
	return nil
}

// resync makes a replica as the memory is.
func resync(ctx context.Context, r replica, owner string, progress func(done uint64)) (Report, error) {
	// The parts are not sent in the order in which they were persisted.
	err := r.own(ctx, owner, true)
	var rep Report
	if err == nil {
		rep, err = r.Sync(ctx, progress)
	}
	if err == nil {
		err = r.own(ctx, owner, false)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", r, err)
	}
	return rep, err
}

// Open opens a set that Create or Restore has made. If it was not closed in order, Open makes the replicas as the local part is.
//
// Errors: ErrNoPart: see Restore. ErrMismatch: a replica is of another set, or another owner has changed it since this local part was used: Sync, if the
// local part is to be kept. ErrOpen, ErrNotPart, ErrUnfinished; others as of package function Open.
func (s *Set) Open(ctx context.Context, c *client.Client, o MemoryOptions) (*Memory, error) {
	return s.open(ctx, c, o, nil)
}

// Sync copies the local part to all replicas, also where another owner has changed a replica since. It creates missing replicas with the options. The
// report is the sum over all replicas.
func (s *Set) Sync(ctx context.Context, c *client.Client, o Options, progress func(done uint64)) (r Report, err error) {
	m, err := s.open(ctx, c, MemoryOptions{Progress: progress}, &o)
	if err != nil {
		return r, err
	}
	return m.opened, m.Close(context.WithoutCancel(ctx))
}

// open opens a set. missing, unless it is nil, are the options of replicas that are missing; the local part wins over all owners then.
func (s *Set) open(ctx context.Context, c *client.Client, o MemoryOptions, missing *Options) (_ *Memory, err error) {
	if err := errors.Join(ctx.Err(), o.check()); err != nil {
		return nil, err
	}
	p, err := openPart(s.Part)
	if err != nil {
		return nil, err
	}
	m := &Memory{part: p}
	if p.head.State == partTorn {
		err := fmt.Errorf("%w: %s was a mirror, and its Sync has not returned", ErrTorn, p.Path)
		return nil, m.abandon(ctx, err)
	}
	defer func() {
		if err != nil {
			err = m.abandon(ctx, err)
		}
	}()
	was := p.head
	if err := m.openReplicas(ctx, c, s, o.Attr, missing); err != nil {
		return nil, err
	}
	var behind []replica
	for _, r := range m.replicas {
		last := tokenOf(r.owner())
		mine := last != (token{}) && (last == was.Token || last == was.Next)
		if !mine && missing == nil {
			if rep, err := r.check(ctx, o.Progress); err != nil {
				return nil, fmt.Errorf("%s: %w", r, err)
			} else if !rep.Same() {
				return nil, fmt.Errorf("%w: %s has changed since the local part %s was used last, and differs: sync the set, which keeps the local part, or move the part away and restore the set, which keeps the replica", ErrMismatch, r, p.Path)
			}
		}
		// Invariant: a replica that is not Dirty and whose last owner is Token has had everything when that closed the set.
		if was.State != partClosed || was.Next != (token{}) || !mine || r.Dirty() || missing != nil {
			behind = append(behind, r)
		}
	}
	if was.State != partClosed {
		// A program that was killed may have stored what it did not flush. The next one acts on what it sees.
		if err := p.flush(0, was.Bytes); err != nil {
			return nil, fmt.Errorf("%s: %w", p.Path, err)
		}
	}
	// Before a replica names it: if this process dies now, the next Open knows that the owner was this part.
	if h := was; h.Next == (token{}) {
		h.Next = tokenOf(newToken())
		if err := p.change(h); err != nil {
			return nil, err
		}
	}
	if err := m.begin(ctx, p.head.Next.String(), behind, o); err != nil {
		return nil, err
	}
	return m, nil
}

// openReplicas opens what the set names, and checks that it is of the set.
func (m *Memory) openReplicas(ctx context.Context, c *client.Client, s *Set, want *Attr, missing *Options) error {
	head := m.part.head
	for _, named := range s.Mirrors {
		p, err := openPart(named)
		if missing != nil && (errors.Is(err, ErrNoPart) || errors.Is(err, ErrUnfinished)) {
			p, err = remakePart(named, partHead{Set: head.Set, State: partOpen})
		}
		if err != nil {
			return err
		}
		m.replicas = append(m.replicas, newMirror(p, m.Bytes()))
		if p.head.Set != head.Set {
			return fmt.Errorf("%w: mirror %s is of another set", ErrMismatch, named.Path)
		}
	}
	for _, name := range s.Pools {
		var attr *Attr
		if want != nil {
			a := *want
			if a.PoolsetUUID == ([16]byte{}) {
				a.PoolsetUUID = head.Set
			}
			attr = &a
		}
		p, err := open(ctx, c, name, m.Bytes(), attr, true)
		if missing != nil && errors.Is(err, client.ErrNoName) {
			o := *missing
			o.Attr.PoolsetUUID = head.Set
			p, err = create(ctx, c, name, m.Bytes(), o, newToken())
		}
		if err != nil {
			return err
		}
		m.replicas = append(m.replicas, p)
		if p.Attr().PoolsetUUID != head.Set {
			return fmt.Errorf("%w: %s is of another set: its UUID is %x, that of %s is %x", ErrMismatch, p, p.Attr().PoolsetUUID, m.part.Path, head.Set)
		}
	}
	return nil
}

// abandon closes what a call that has failed with err has opened.
func (m *Memory) abandon(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
	defer cancel()
	errs := []error{err}
	for _, r := range m.replicas {
		if err := r.Close(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r, err))
		}
	}
	return errors.Join(append(errs, m.part.close())...)
}

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

// Create makes the local parts and the pools of a set, all zero, and opens them. No file and no pool is there before. c may be nil if the set has no Pools. o.Attr.PoolsetUUID is made if it is zero.
//
// Errors: os.ErrExist, client.ErrNameExists: what was there stays as it was; others as of package function Create.
func (s *Set) Create(ctx context.Context, c *client.Client, o Options, mo MemoryOptions) (*Memory, error) {
	w, err := s.in(ctx, c)
	if err != nil {
		return nil, err
	}
	return s.create(ctx, w, o, mo)
}

func (s *Set) create(ctx context.Context, w *world, o Options, mo MemoryOptions) (_ *Memory, err error) {
	if err := errors.Join(ctx.Err(), mo.check(), s.check()); err != nil {
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
	if m.part, err = w.makePart(s.Part, head); err != nil {
		return nil, err
	}
	undo = append(undo, func() error { return errors.Join(m.part.close(), os.Remove(s.Part.Path)) })
	for _, want := range s.Mirrors {
		p, err := w.makePart(want, head)
		if err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return errors.Join(p.close(), os.Remove(want.Path)) })
		m.replicas = append(m.replicas, newMirror(p, m.Bytes()))
	}
	for _, t := range w.targets(s) {
		p, err := t.make(ctx, m.Bytes(), o, owner, false)
		if err != nil {
			return nil, err
		}
		undo = append(undo, p.discard)
		m.replicas = append(m.replicas, p)
	}
	if err := m.begin(ctx, owner, m.replicas, mo); err != nil {
		return nil, err
	}
	return m, nil
}

// discard closes and removes a pool that was made in vain.
func (p *Pool) discard() error {
	ctx, cancel := p.claim.tidy()
	defer cancel()
	if err := p.Close(ctx); err != nil {
		return err
	}
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
	defer cancel()
	return Remove(ctx, p.c, p.name)
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
	m.gaps = make([]gap, len(m.replicas))
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
	w, err := s.in(ctx, c)
	if err != nil {
		return nil, err
	}
	return s.open(ctx, w, o, nil)
}

// Sync copies the local part to all replicas, also where another owner has changed a replica since. It creates missing replicas with the options. The
// report is the sum over all replicas.
func (s *Set) Sync(ctx context.Context, c *client.Client, o Options, progress func(done uint64)) (r Report, err error) {
	w, err := s.in(ctx, c)
	if err != nil {
		return r, err
	}
	return s.sync(ctx, w, o, progress)
}

func (s *Set) sync(ctx context.Context, w *world, o Options, progress func(done uint64)) (r Report, err error) {
	m, err := s.open(ctx, w, MemoryOptions{Progress: progress}, &o)
	if err != nil {
		return r, err
	}
	return m.opened, m.Close(context.WithoutCancel(ctx))
}

// open opens a set. missing, unless it is nil, are the options of replicas that are missing; the local part wins over all owners then.
func (s *Set) open(ctx context.Context, w *world, o MemoryOptions, missing *Options) (_ *Memory, err error) {
	if err := errors.Join(ctx.Err(), o.check(), s.check()); err != nil {
		return nil, err
	}
	p, err := w.openPart(s.Part)
	if errors.Is(err, ErrUnfinished) {
		err = fmt.Errorf("%w: if a Create was killed, remove the set and create it again, or else move the file away and restore the set", err)
	}
	if err != nil {
		return nil, err
	}
	m := &Memory{part: p}
	if p.head.State == partTorn {
		err := fmt.Errorf("%w: %s was a mirror, and may have later Persists and lack earlier ones", ErrTorn, p.Path)
		return nil, m.abandon(ctx, err)
	}
	defer func() {
		if err != nil {
			err = m.abandon(ctx, err)
		}
	}()
	was := p.head
	absent, err := m.openReplicas(ctx, w, s, o.Attr, missing != nil)
	if err != nil {
		return nil, err
	}
	mine, err := m.mine(ctx, o.Progress, missing != nil)
	if err != nil {
		return nil, err
	}
	if was.State != partClosed {
		// A program that was killed may have stored what it did not flush. The next one acts on what it sees.
		if err := p.flush(0, was.Bytes); err != nil {
			return nil, err
		}
	}
	if err := m.next(ctx, mine); err != nil {
		return nil, err
	}
	var behind []replica
	for i, r := range m.replicas {
		// Invariant: a replica that is not Dirty and whose last owner is Token has had everything when that closed the set.
		if was.State != partClosed || was.Next != (token{}) || !mine[i] || r.Dirty() || missing != nil {
			behind = append(behind, r)
		}
	}
	for _, remake := range absent {
		r, err := remake(missing)
		if err != nil {
			return nil, err
		}
		m.replicas, behind = append(m.replicas, r), append(behind, r)
	}
	if err := m.begin(ctx, p.head.Next.String(), behind, o); err != nil {
		return nil, err
	}
	return m, nil
}

// mine says which replicas this local part was the last owner of. The others have to be as it is, unless it wins over all.
func (m *Memory) mine(ctx context.Context, progress func(done uint64), wins bool) (mine []bool, err error) {
	p := m.part
	doubt := p.doubt()
	for _, r := range m.replicas {
		last := tokenOf(r.owner())
		is := doubt == "" && last != (token{}) && (last == p.head.Token || last == p.head.Next)
		if mine = append(mine, is); is || wins {
			continue
		}
		rep, err := r.check(ctx, progress)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r, err)
		}
		if !rep.Same() {
			why := "has changed since the local part " + p.Path + " was used last, and differs"
			if doubt != "" {
				why = "differs from the local part " + p.Path + ", which may lack what was persisted: " + doubt
			}
			return nil, fmt.Errorf("%w: %s %s: sync the set, which keeps the local part, or move the part away and restore the set, which keeps the replica", ErrMismatch, r, why)
		}
	}
	return mine, nil
}

// next gives the header the token of the next owner, before a replica names it: if this process dies then, the next Open knows that the owner was this part.
func (m *Memory) next(ctx context.Context, mine []bool) error {
	h := m.part.head
	if h.Next != (token{}) {
		// Another Open has not returned. Its token is not used for a program that persists: another local part may have it, a copy or one that Restore has made.
		for i, r := range m.replicas {
			if mine[i] && tokenOf(r.owner()) != h.Next {
				if err := r.own(ctx, h.Next.String(), r.torn()); err != nil {
					return fmt.Errorf("%s: %w", r, err)
				}
			}
		}
		h.Token, h.State = h.Next, partOpen
	}
	h.Next = tokenOf(newToken())
	return m.part.change(h)
}

// openReplicas opens what the set names, and checks that it is of the set. If wanted, absent makes what is not there, as the next owner's.
func (m *Memory) openReplicas(ctx context.Context, w *world, s *Set, want *Attr, wanted bool) (absent []func(*Options) (replica, error), err error) {
	set := m.part.head.Set
	for _, named := range s.Mirrors {
		p, err := w.openPart(named)
		if wanted && (errors.Is(err, ErrNoPart) || errors.Is(err, ErrUnfinished)) {
			absent = append(absent, func(*Options) (replica, error) {
				p, err := w.remakePart(named, partHead{Set: set, State: partTorn, Token: m.part.head.Next})
				if err != nil {
					return nil, err
				}
				return newMirror(p, m.Bytes()), nil
			})
			continue
		}
		if errors.Is(err, ErrUnfinished) {
			err = fmt.Errorf("mirror: %w: sync the set, which makes it again", err)
		}
		if err != nil {
			return nil, err
		}
		m.replicas = append(m.replicas, newMirror(p, m.Bytes()))
		if p.head.Set != set {
			return nil, fmt.Errorf("%w: mirror %s is of another set", ErrMismatch, named.Path)
		}
	}
	for _, t := range w.targets(s) {
		var attr *Attr
		if want != nil {
			a := *want
			if a.PoolsetUUID == ([16]byte{}) {
				a.PoolsetUUID = set
			}
			attr = &a
		}
		p, err := t.open(ctx, m.Bytes(), attr)
		if wanted && errors.Is(err, client.ErrNoName) {
			absent = append(absent, func(missing *Options) (replica, error) {
				o := *missing
				o.Attr.PoolsetUUID = set
				return t.make(ctx, m.Bytes(), o, m.part.head.Next.String(), true)
			})
			continue
		}
		if err != nil {
			return nil, err
		}
		m.replicas = append(m.replicas, p)
		if p.set() != set {
			return nil, fmt.Errorf("%w: %s is of another set: its UUID is %x, that of %s is %x", ErrMismatch, p, p.set(), m.part.Path, set)
		}
	}
	return absent, nil
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

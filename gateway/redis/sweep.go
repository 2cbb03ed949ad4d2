package redis

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/quarrystore/quarry/btree"
)

// leftover is something to be removed soon: a key past its expiry, or the owner and fields of an id
// that no key names any more.
type leftover struct {
	key []byte // of the tree; nil: the id alone is to be removed
	id  uint64 // of the key's hash or sorted set; 0: it has none
}

// later has an id dropped soon. If the queue is full, a later pass of the sweep finds the id.
func (s *Server) later(id uint64) {
	select {
	case s.swept <- leftover{id: id}:
	default:
	}
}

// expired has a key removed that is past its expiry. If the queue is full, the sweep finds it.
func (s *Server) expired(key []byte, id uint64) {
	if len(s.swept) == cap(s.swept) {
		return
	}
	select {
	case s.swept <- leftover{key: bytes.Clone(key), id: id}:
	default:
	}
}

// leave takes the error of a clean-up behind a change that has already taken effect. The command does
// not fail for it: the sweep, or the next command that meets the remains, completes the clean-up.
func (s *Server) leave(err error) {
	if err != nil && s.ctx.Err() == nil {
		s.cfg.Logger.Debug("gateway leaves to the sweep what a command could not remove", "error", err)
	}
}

const (
	// sweepTick is the time between two portions of the sweep.
	sweepTick = 100 * time.Millisecond
	// busyRest is the pause between two passes while there are keys that will expire.
	busyRest = time.Second
	// maxRest bounds the pause between two passes that find nothing.
	maxRest = 30 * time.Second
)

// noteTime wakes the sweep if a record that was written will expire.
func (s *Server) noteTime(raw []byte) {
	if raw[0]&flagTime != 0 && !s.timed.Load() {
		s.timed.Store(true)
	}
}

// rest is the pause after a pass, given the one before it.
func (p *pass) rest(last time.Duration) time.Duration {
	if p.removed > 0 || p.timed > 0 {
		return busyRest
	}
	return min(2*last, maxRest)
}

// sweep removes what readers treat as absent: keys past their expiry, hashes without fields,
// and what dead gateways have left. It reads Config.SweepKeys records a second, and the pause
// between two passes doubles while they find nothing.
func (s *Server) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepTick)
	defer tick.Stop()
	p := pass{s: s}
	var until time.Time
	rest := busyRest
	for {
		select {
		case <-ctx.Done():
			return
		case l := <-s.swept:
			s.tidy(ctx, l)
		case now := <-tick.C:
			if s.timed.Swap(false) && until.Sub(now) > busyRest {
				until = now.Add(busyRest)
			}
			if now.Before(until) {
				continue
			}
			done, err := p.step(ctx, max(1, s.cfg.SweepKeys/int(time.Second/sweepTick)))
			switch {
			case err != nil && ctx.Err() == nil:
				s.cfg.Logger.Warn("gateway cannot sweep", "error", err)
				until, p = now.Add(maxRest), pass{s: s}
			case done:
				rest = p.rest(rest)
				until, p = now.Add(rest), pass{s: s}
			}
		}
	}
}

// tidy removes one leftover.
func (s *Server) tidy(ctx context.Context, l leftover) {
	var err error
	if l.key == nil {
		err = s.drop(ctx, l.id)
	} else {
		_, err = s.expire(ctx, l.key)
	}
	if err != nil && ctx.Err() == nil {
		s.cfg.Logger.Warn("gateway cannot remove what has expired", "error", err)
	}
}

// expire removes a key if it is past its expiry.
func (s *Server) expire(ctx context.Context, key []byte) (bool, error) {
	raw, version, err := s.tree.GetVersion(ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	r, err := decode(raw, version, s.clock().UnixMilli())
	if err == nil && r.mark != 0 {
		err = s.settle(ctx, key, &r)
	}
	if err != nil || r.kind != kindNone || r.mark != 0 || r.newborn != 0 {
		return false, err
	}
	if err = s.tree.DeleteIf(ctx, key, r.cond()); err != nil {
		if lost(err) {
			err = nil
		}
		return false, err
	}
	s.stats.expired.Add(1)
	if r.id != 0 {
		err = s.drop(ctx, r.id)
	}
	return true, err
}

// pass is a walk over everything that a gateway keeps in the tree.
type pass struct {
	s       *Server // whose tree is walked
	stage   int     // of the stages of step
	cursor  []byte  // key at which the stage goes on; nil: at its start
	removed int     // so far
	timed   int     // keys that will expire
}

// step visits about budget records, and says whether the pass is over.
func (p *pass) step(ctx context.Context, budget int) (done bool, err error) {
	stages := []struct {
		all  btree.Range
		look func(ctx context.Context, r btree.Range, budget int) (next []byte, err error)
	}{
		{btree.Range{To: []byte{Databases}}, p.keys},
		{within([]byte{moveFamily}), p.moves},
		{within([]byte{ownerFamily}), p.owners},
		{within([]byte{fieldFamily}), p.remains},
		{within([]byte{orderFamily}), p.remains},
	}
	st := stages[p.stage]
	r := st.all
	if p.cursor != nil {
		r.From = p.cursor
	}
	if p.cursor, err = st.look(ctx, r, budget); err != nil {
		return false, err
	}
	if p.cursor == nil {
		p.stage++
	}
	return p.stage == len(stages), nil
}

// keys removes keys past their expiry, and hashes and sorted sets without fields.
func (p *pass) keys(ctx context.Context, r btree.Range, budget int) (next []byte, err error) {
	now := p.s.clock().UnixMilli()
	var past, families arena
	var ids []uint64
	r.Limit = budget
	n := 0
	err = p.s.tree.Scan(ctx, r, func(key, value []byte, version uint64) bool {
		if n++; n == budget {
			next = append(bytes.Clone(key), 0)
		}
		switch rec, err := decode(value, version, now); {
		case err != nil, rec.mark != 0: // see moves
		case rec.kind != kindNone && rec.expiry != 0 && rec.id == 0:
			p.timed++
		case rec.kind == kindNone && rec.newborn == 0:
			past.b = append(past.b, key...)
			past.end()
		case rec.id != 0:
			families.b = append(families.b, key...)
			families.end()
			ids = append(ids, rec.id)
			if rec.expiry != 0 {
				p.timed++
			}
		}
		return true
	})
	for _, key := range past.all() {
		if err == nil {
			var ok bool
			if ok, err = p.s.expire(ctx, key); ok {
				p.removed++
			}
		}
	}
	for i, key := range families.all() {
		if err == nil {
			err = p.s.reap(ctx, key, ids[i])
		}
	}
	return next, err
}

// old is the time before which an unfinished operation counts as abandoned. A wrong guess
// costs only work: a gateway that was suspended for longer finds its operation removed, and
// starts again.
func (p *pass) old() int64 { return p.s.clock().Add(-p.s.cfg.OrphanAge).UnixMilli() }

// moves ends moves whose gateways are gone.
func (p *pass) moves(ctx context.Context, r btree.Range, budget int) (next []byte, err error) {
	var forgotten []*move
	old := p.old()
	r.Limit = budget
	n := 0
	err = p.s.tree.Scan(ctx, r, func(key, value []byte, version uint64) bool {
		if n++; n == budget {
			next = append(bytes.Clone(key), 0)
		}
		if m, err := decodeMove(bytes.Clone(value)); err == nil && m.made <= old {
			m.id, m.version = idOf(key), version
			forgotten = append(forgotten, &m)
		}
		return true
	})
	for _, m := range forgotten {
		if err == nil {
			p.removed++
			err = p.s.giveUp(ctx, m)
		}
	}
	return next, err
}

// owners drops ids that their keys do not name. See family.go.
func (p *pass) owners(ctx context.Context, r btree.Range, budget int) (next []byte, err error) {
	type suspect struct {
		owner
		id, version uint64
	}
	var suspects []suspect
	old := p.old()
	r.Limit = budget
	n := 0
	err = p.s.tree.Scan(ctx, r, func(key, value []byte, version uint64) bool {
		if n++; n == budget {
			next = append(bytes.Clone(key), 0)
		}
		if o, err := decodeOwner(value); err == nil && o.made <= old {
			o.key = bytes.Clone(o.key)
			suspects = append(suspects, suspect{o, idOf(key), version})
		}
		return true
	})
	for _, o := range suspects {
		if err != nil {
			break
		}
		err = p.suspect(ctx, o.owner, o.id, o.version)
	}
	return next, err
}

// suspect drops an id unless the key of its owner names it.
func (p *pass) suspect(ctx context.Context, o owner, id, version uint64) error {
	s := p.s
	named, err := s.names(ctx, o, id)
	if err == nil && named == namedNot && !o.condemned {
		if o.building {
			if _, err := s.touch(ctx, o.treeKey(), o.replaces); err != nil {
				return err
			}
		}
		if version, err = s.condemn(ctx, o, id, version); err != nil || version == 0 {
			return err
		}
		// The maker reads the owner after it has put the key's record. So either the maker
		// finds the owner condemned, or this second look finds the record.
		o.condemned = true
		named, err = s.names(ctx, o, id)
	}
	switch {
	case err == nil && named == namedNewborn:
		// The maker is dead or suspended.
		return s.bear(ctx, o.treeKey(), id, o.condemned)
	case err != nil || !o.condemned:
		return err
	case named == namedConfirmed:
		return s.acquit(ctx, o, id, version)
	}
	if err := s.tree.DeleteIf(ctx, appendID(nil, ownerFamily, id), btree.IfVersion(version)); err != nil {
		return ignoreLost(err)
	}
	p.removed++
	return s.disown(ctx, id, true) // the fields: see remains
}

// bear confirms the newborn record of an id, or removes it if its owner is condemned or it
// has no fields.
func (s *Server) bear(ctx context.Context, key []byte, id uint64, condemned bool) error {
	r, raw, err := s.peek(ctx, key)
	if err != nil || r.id != id || r.newborn == 0 {
		return err
	}
	if condemned {
		return ignoreLost(s.tree.DeleteIf(ctx, key, r.cond()))
	}
	empty, err := s.empty(ctx, id, r.newborn)
	switch {
	case err != nil:
		return err
	case empty:
		return s.reap(ctx, key, id)
	}
	raw[0] &^= flagNew
	_, err = s.tree.PutIf(ctx, key, raw, r.cond())
	return ignoreLost(err)
}

// maxOwnerless bounds the ids that a gateway watches until their fields are old.
const maxOwnerless = 64 << 10

// aged says whether a pass at least the orphan age ago already found an id without an owner.
// A writer that was suspended for a shorter time still finds its fields, and removes them.
func (s *Server) aged(id uint64) bool {
	now := s.clock()
	since, ok := s.ownerless[id]
	switch {
	case ok && now.Sub(since) >= s.cfg.OrphanAge:
		return true // the entry goes when nothing of the id is left
	case !ok && len(s.ownerless) < maxOwnerless:
		s.ownerless[id] = now
	}
	return false
}

// remains removes fields and places of ids that have had no owner for long.
func (p *pass) remains(ctx context.Context, r btree.Range, budget int) (next []byte, err error) {
	for range budget {
		first, err := p.s.some(ctx, r, 1)
		if err != nil || len(first) == 0 {
			return nil, err
		}
		id := idOf(first[0])
		prefix := appendID(nil, first[0][0], id)
		_, err = p.s.tree.Get(ctx, appendID(nil, ownerFamily, id), nil)
		switch {
		case !errors.Is(err, btree.ErrNoKey):
			delete(p.s.ownerless, id)
		case p.s.aged(id):
			p.removed++
			err = p.s.clear(ctx, prefix)
		default:
			err = nil
		}
		if err != nil {
			return nil, err
		}
		if r.From = after(prefix); r.From == nil {
			return nil, nil
		}
	}
	return r.From, nil
}

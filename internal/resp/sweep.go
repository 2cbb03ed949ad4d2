package resp

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/quarrystore/quarry/btree"
)

// leftover is something to be swept soon: a key past its expiry, or what hangs on
// an id to which no key leads any more.
type leftover struct {
	key []byte
	id  uint64
}

// later has what hangs on an id removed soon. If there is too much to remember, the
// sweep finds it.
func (s *Server) later(id uint64) {
	select {
	case s.swept <- leftover{id: id}:
	default:
	}
}

// expired has a key removed that was found past its expiry.
func (s *Server) expired(key []byte, id uint64) {
	if len(s.swept) == cap(s.swept) {
		return
	}
	select {
	case s.swept <- leftover{key: bytes.Clone(key), id: id}:
	default:
	}
}

const (
	// sweepTick is how often the sweep takes its share.
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

// rest is the pause after a pass, when that before it was so long.
func (p *pass) rest(last time.Duration) time.Duration {
	if p.removed > 0 || p.timed > 0 {
		return busyRest
	}
	return min(2*last, maxRest)
}

// sweep removes what readers treat as absent already: keys past their expiry,
// hashes without fields, and what the dead have left. It looks at so many records a
// second, and rests longer the less it finds.
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

// tidy removes one thing.
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
	r, err := decode(raw, version, time.Now().UnixMilli())
	if err != nil || r.kind != kindNone {
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
	s       *Server
	stage   int
	cursor  []byte
	removed int
	timed   int // keys that will expire
}

// step looks at so many records, and says whether the pass is over.
func (p *pass) step(ctx context.Context, budget int) (done bool, err error) {
	stages := []struct {
		all  btree.Range
		look func(ctx context.Context, r btree.Range, budget int) (next []byte, err error)
	}{
		{btree.Range{To: []byte{Databases}}, p.keys},
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
	now := time.Now().UnixMilli()
	var past, families arena
	var ids []uint64
	r.Limit = budget
	n := 0
	err = p.s.tree.Scan(ctx, r, func(key, value []byte, version uint64) bool {
		if n++; n == budget {
			next = append(bytes.Clone(key), 0)
		}
		switch rec, err := decode(value, version, now); {
		case err != nil:
		case rec.kind != kindNone && rec.expiry != 0 && rec.id == 0:
			p.timed++
		case rec.kind == kindNone:
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

// owners drops ids that their keys do not name.
func (p *pass) owners(ctx context.Context, r btree.Range, budget int) (next []byte, err error) {
	type suspect struct {
		owner
		id, version uint64
	}
	var suspects []suspect
	old := time.Now().Add(-p.s.cfg.OrphanAge).UnixMilli()
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
		named, e := p.named(ctx, o.owner, o.id)
		if err = e; err != nil || named {
			continue
		}
		key := appendID(nil, ownerFamily, o.id)
		if err = p.s.tree.DeleteIf(ctx, key, btree.IfVersion(o.version)); err != nil {
			if lost(err) {
				err = nil
			}
			continue
		}
		// Whoever slept over its making looks for the owner after writing the key: one
		// of us sees the other.
		if named, err = p.named(ctx, o.owner, o.id); err == nil && named {
			_, err = p.s.tree.PutIf(ctx, key, o.append(nil), btree.IfAbsent())
			if lost(err) {
				err = nil
			}
			continue
		}
		if err == nil {
			p.removed++
			err = p.s.drop(ctx, o.id)
		}
	}
	return next, err
}

// named says whether the key of an owner names its id.
func (p *pass) named(ctx context.Context, o owner, id uint64) (bool, error) {
	raw, version, err := p.s.tree.GetVersion(ctx, AppendKey(nil, int(o.db), o.key), nil)
	if errors.Is(err, btree.ErrNoKey) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	r, err := decode(raw, version, 0)
	return err == nil && r.id == id, err
}

// remains removes fields of ids that have no owner.
func (p *pass) remains(ctx context.Context, r btree.Range, budget int) (next []byte, err error) {
	for range budget {
		first, err := p.s.some(ctx, r, 1)
		if err != nil || len(first) == 0 {
			return nil, err
		}
		id := idOf(first[0])
		prefix := appendID(nil, first[0][0], id)
		_, err = p.s.tree.Get(ctx, appendID(nil, ownerFamily, id), nil)
		if errors.Is(err, btree.ErrNoKey) {
			p.removed++
			err = p.s.clear(ctx, prefix)
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

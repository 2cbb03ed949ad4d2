package btree

import "errors"

// Write is one change of a key that can share a reservation with others.
type Write struct {
	Key, Value []byte // Value is not used by a removal
	Cond       Cond   // must hold for the write
	Remove     bool   // the key is removed
	// Edit, if it is set, computes Value and Remove from what the key has; there is no Cond then.
	// version is 0 if the key is absent. An error from it is the answer. It may be called more
	// than once, on another goroutine, and must not keep old. Both the old and the new value must
	// be in the leaf, not in objects of their own: otherwise the write is Alone.
	Edit func(old []byte, version uint64) (value []byte, remove bool, err error)

	// Behind: the write is made only if the one before it in the group is made, or was refused by
	// its Edit. Otherwise it is Alone. So the writes of one caller keep their order when the leaf
	// has changed and the group is made again.
	Behind bool

	// Version and Err are the answer, unless Alone says that the write has to be
	// made by Put or Delete: nothing of it was done.
	Version uint64 // of the new value
	Base    uint64 // version of what the write replaced; 0: the key was not there
	Err     error  // nil, a condition that does not hold, or why the write failed
	Alone   bool   // nothing was done: make it by Put or Delete

	old  Ref  // external value that was replaced; freed after the commit
	full bool // Alone because the leaf has no room for it
}

// MaxGroup bounds the writes that share a reservation: other processes wait for the leaf
// meanwhile.
const MaxGroup = 64

// Leaf is the leaf that should have a key, as far as the cache knows. ok is false for a write
// that cannot be part of a group, and if the cache does not know.
func (p *Program) Leaf(w *Write) (ref Ref, ok bool) {
	if n := len(w.Key); n == 0 || n > p.limits.InlineKeyBytes || !w.Remove && p.outOfLine(w.Key, w.Value) {
		return ref, false
	}
	p.root = p.Shared.root
	return p.quick(w.Key, 0)
}

// groups is the state of a WriteGroup or of WriteGroups. It belongs to its Program, and is used again.
type groups struct {
	p     *Program
	apply func(old []byte) ([]byte, error)        // the callback of Update, bound once
	each  func(i int, old []byte) ([]byte, error) // the callback of UpdateMany, bound once
	of    []group                                 // one for each leaf; those behind len keep their memory
	refs  []Ref                                   // the leaves
	errs  []error                                 // of UpdateMany
	full  Ref                                     // a leaf, if its first write found no room: the next write splits it first
	bufs  [2][]byte                               // a leaf after a write, in turn
}

// group is the writes to one leaf under one reservation.
type group struct {
	leaf  Ref
	next  func() *Write // gives the next write; nil: no more
	taken []*Write      // those of this group, in their order
	left  int           // bytes in the leaf after the last write
	empty bool          // a removal left the leaf under-full
}

var errNothing = errors.New("no write of the group changes anything")

// begin makes room for the groups of n leaves.
func (s *groups) begin(n int) {
	s.full = Ref{}
	for len(s.of) < n {
		s.of = append(s.of, group{})
	}
}

// WriteGroup makes writes to one leaf under one reservation. While it holds the leaf it calls
// next, until next returns nil or there are MaxGroup writes. On return each of them has its
// answer.
//
// Linearizes at: the commit of the leaf, one write after the other. Answers that change nothing:
// at the READ under the reservation.
func (p *Program) WriteGroup(leaf Ref, next func() *Write) {
	p.begin()
	s := &p.groups
	s.begin(1)
	g := &s.of[0]
	g.leaf, g.next, g.taken = leaf, next, g.taken[:0]
	p.settleGroup(g, p.store.Update(leaf, s.apply))
	p.end()
}

// ManyUpdater is a Store that updates several objects in fewer rounds than one after the other.
type ManyUpdater interface {
	// UpdateMany is Update of each object by itself: the ith error is the answer for refs[i], and f makes the payload of object i.
	// What f returns is used before f is called again. f may be called more than once for an object. The errors take the memory of
	// errs, where that is enough.
	UpdateMany(refs []Ref, f func(i int, old []byte) ([]byte, error), errs []error) []error
}

// WriteGroups is WriteGroup of several leaves, each by itself: next[i] gives the writes to leaves[i]. Where the Store is a ManyUpdater
// all of them take the rounds of one. A leaf that is named twice is written twice.
func (p *Program) WriteGroups(leaves []Ref, next []func() *Write) {
	many, ok := p.store.(ManyUpdater)
	if !ok {
		for i, leaf := range leaves {
			p.WriteGroup(leaf, next[i])
		}
		return
	}
	p.begin()
	s := &p.groups
	s.begin(len(leaves))
	s.refs = append(s.refs[:0], leaves...)
	for i, leaf := range leaves {
		g := &s.of[i]
		g.leaf, g.next, g.taken = leaf, next[i], g.taken[:0]
	}
	s.errs = many.UpdateMany(s.refs, s.each, s.errs)
	for i, err := range s.errs {
		p.settleGroup(&s.of[i], err)
	}
	clear(s.errs)
	p.end()
}

// settleGroup gives the writes of a group their answers, from that of the Update of their leaf.
func (p *Program) settleGroup(g *group, err error) {
	committed := err == nil
	for _, w := range g.taken {
		switch {
		case committed, errors.Is(err, errNothing):
		case unknown(err) && !w.Alone && w.Err == nil:
			w.Err = err
		default:
			// Not done. A condition may have failed because of an earlier write of the group.
			w.Err, w.Alone = nil, true
		}
		if committed && !w.Alone && w.Err == nil && !w.old.IsZero() {
			_ = p.store.Free(w.old)
		}
	}
	if committed && g.empty && p.underFull(g.left) {
		p.mergeAround(g.taken[0].Key, 0)
	}
	if len(g.taken) == 0 {
		// Refused before the callback ran: the leaf is gone, or cannot be reached.
		for w := g.next(); w != nil; w = g.next() {
			w.Alone = true
			g.taken = append(g.taken, w)
		}
	}
	g.next, g.taken = nil, g.taken[:0]
}

// one is the callback of Update. It may run more than once.
func (s *groups) one(b []byte) ([]byte, error) { return s.run(0, b) }

// run is the callback of UpdateMany. It may run more than once.
func (s *groups) run(of int, b []byte) ([]byte, error) {
	p, g := s.p, &s.of[of]
	g.empty = false
	changed, at := false, 0
	held := false // the write before was not made
	w := &p.w
	mine := w.out
	whole := p.whole.has(g.leaf, b)
	for i := 0; i < MaxGroup; i++ {
		if i == len(g.taken) {
			next := g.next()
			if next == nil {
				break
			}
			g.taken = append(g.taken, next)
		}
		x := g.taken[i]
		x.Err, x.Alone, x.old, x.full = nil, false, Ref{}, false
		if held = held && x.Behind; held {
			x.Alone = true
			continue
		}
		*w = write{key: x.Key, name: x.Key, value: x.Value, remove: x.Remove, cond: x.Cond, edit: x.Edit, most: p.inlineBytes(x.Key), enc: w.enc, out: s.bufs[at], room: p.limits.Room, ours: whole || changed}
		out, err := w.apply(b)
		s.bufs[at] = w.out
		switch {
		case err == nil:
			x.Version, x.Base, x.old = w.version, w.base, w.old
			if g.left = w.left; w.remove {
				g.empty = true
			}
			changed, b, at = true, out, 1-at // the buffers take turns
		case errors.Is(err, ErrKeyExists), errors.Is(err, ErrNoKey), errors.Is(err, ErrConflict):
			x.Err, held = err, true
		case errors.Is(err, errRefused):
			x.Err = w.refusal
		default:
			held = true
			x.Alone, x.full = true, errors.Is(err, errFull)
			if i == 0 && x.full {
				s.full = g.leaf
			}
		}
	}
	if w.out = mine; !changed {
		return nil, errNothing
	}
	p.whole.note(g.leaf, b) // also if it is not committed
	return b, nil
}

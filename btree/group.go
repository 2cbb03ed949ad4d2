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

// group is the state of one WriteGroup. It belongs to its Program, and is used again.
type group struct {
	p     *Program
	apply func([]byte) ([]byte, error) // the callback of Update, bound once
	next  func() *Write                // gives the next write; nil: no more
	taken []*Write                     // those of this group, in their order
	left  int                          // bytes in the leaf after the last write
	empty bool                         // a removal left the leaf under-full
	full  Ref                          // the leaf, if the first write found no room: the next write splits it first
	leaf  Ref                          // that all writes are for
	bufs  [2][]byte                    // the leaf after a write, in turn
}

var errNothing = errors.New("no write of the group changes anything")

// WriteGroup makes writes to one leaf under one reservation. While it holds the leaf it calls
// next, until next returns nil or there are MaxGroup writes. On return each of them has its
// answer.
//
// Linearizes at: the commit of the leaf, one write after the other. Answers that change nothing:
// at the READ under the reservation.
func (p *Program) WriteGroup(leaf Ref, next func() *Write) {
	p.begin()
	g := &p.group
	g.next, g.taken, g.leaf, g.full = next, g.taken[:0], leaf, Ref{}
	err := p.store.Update(leaf, g.apply)
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
		for w := next(); w != nil; w = next() {
			w.Alone = true
			g.taken = append(g.taken, w)
		}
	}
	g.next, g.taken = nil, g.taken[:0]
	p.end()
}

// run is the callback of Update. It may run more than once.
func (g *group) run(b []byte) ([]byte, error) {
	p := g.p
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
		*w = write{key: x.Key, name: x.Key, value: x.Value, remove: x.Remove, cond: x.Cond, edit: x.Edit, most: p.inlineBytes(x.Key), enc: w.enc, out: g.bufs[at], room: p.limits.Room, ours: whole || changed}
		out, err := w.apply(b)
		g.bufs[at] = w.out
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
				g.full = g.leaf
			}
		}
	}
	if w.out = mine; !changed {
		return nil, errNothing
	}
	p.whole.note(g.leaf, b) // also if it is not committed
	return b, nil
}

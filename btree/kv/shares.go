package kv

import (
	"bytes"
	"context"

	"github.com/quarrystore/quarry/btree"
)

// A call that writes to several leaves leads at all of their gates at once, and changes them with the rounds of one. It takes
// only gates at which nobody leads, and waits for none while it has others, so that no two calls wait for each other. The
// writes to leaves behind the other gates are made afterwards, leaf by leaf.

// share is the writes of one call to one leaf, and those of others that wait for the leaf meanwhile.
type share struct {
	leaf   btree.Ref
	writes []btree.Write // the call's own
	at     int           // of writes: how many were made, or have to be made in another way; 0: the gate was busy
	gate   *gate         // at which the call leads; nil: it does not
	first  bool          // of the shares with this gate
	giver  *program      // whose writes are made at present; nil: the call's own
}

// shares is a program's room for the shares of a call.
type shares struct {
	of     [window]share
	next   [window]func() *btree.Write // of each share, bound once
	leaves []btree.Ref                 // of those whose gate was taken
	taken  []func() *btree.Write       // likewise
}

// init binds the callbacks.
func (s *shares) init(p *program) {
	for i := range s.of {
		s.next[i] = func() *btree.Write { return p.nextShared(&s.of[i]) }
	}
}

// combineMany makes the writes of the first n shares, each for a leaf of its own, together with those of others. On return those with
// at > 0 have their answers, as behind combine.
func (t *Tree) combineMany(p *program, n int) {
	s := &p.many.shares
	s.leaves, s.taken = s.leaves[:0], s.taken[:0]
	for i := range s.of[:n] {
		x := &s.of[i]
		x.at, x.giver = 0, nil
		if x.gate, x.first = t.gateOf(x.leaf).enter(p); x.gate != nil {
			s.leaves, s.taken = append(s.leaves, x.leaf), append(s.taken, s.next[i])
		}
	}
	if len(s.leaves) > 0 {
		p.WriteGroups(s.leaves, s.taken)
	}
	t.wakeGiven(p)
	for i := range s.of[:n] {
		if x := &s.of[i]; x.first {
			x.gate.leave()
		}
	}
}

// enter takes the gate for a call that writes to several leaves; nil: another call leads there. first: this call did not lead there
// before.
func (g *gate) enter(p *program) (_ *gate, first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case !g.busy:
		g.busy, g.owner = true, p
		return g, true
	case g.owner == p:
		return g, false
	}
	return nil, false
}

// nextShared is nextWrite for one of several leaves.
func (p *program) nextShared(x *share) *btree.Write {
	if x.giver == nil && x.at < len(x.writes) && (x.at == 0 || !x.writes[x.at-1].Alone) {
		x.at++
		return &x.writes[x.at-1]
	}
	for y := x.giver; ; x.giver = y {
		if y != nil && y.at < len(y.writes) && (y.at == 0 || !y.writes[y.at-1].Alone) {
			y.at++
			return &y.writes[y.at-1]
		}
		if y = p.another(x.gate, x.leaf); y == nil {
			return nil
		}
	}
}

// WriteEach makes up to 64 writes, which are in the order of their keys: those of one leaf as WriteRun does, and all leaves with the rounds of
// one. Alone says of a write that nothing was done, as of those behind the first 64: the caller makes it by WriteRun, and those of
// its key that are Alone too behind it, in their order. Those that are not Alone have their answers. err is not nil only if the context
// ended before any write was made: all are Alone then.
//
// Linearizes like as many Puts and Deletes, those of one leaf at one instant.
func (t *Tree) WriteEach(ctx context.Context, writes []btree.Write) error {
	for i := range writes {
		writes[i].Alone = true
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	p := t.program(ctx)
	defer t.done(p)
	s := &p.manyOf().shares
	n := p.shareOut(writes[:min(len(writes), window)])
	t.combineMany(p, n)
	for i := range s.of[:n] {
		x := &s.of[i]
		spreadUnknown(x.writes[:x.at])
		x.writes = nil
	}
	return nil
}

// shareOut makes a share for each leaf of writes in the order of their keys, and returns their number. Those that cannot be part of a
// group are in none.
func (p *program) shareOut(writes []btree.Write) (n int) {
	s := &p.many.shares
	last := -1 // write of the newest share
	for i := range writes {
		w := &writes[i]
		leaf, ok := p.Leaf(w)
		if again := i > 0 && bytes.Equal(writes[i-1].Key, w.Key); again && last < i-1 {
			continue // the write before it is alone
		} else if again && ok {
			leaf = s.of[n-1].leaf
		}
		switch {
		case !ok:
			continue
		case last == i-1 && n > 0 && s.of[n-1].leaf == leaf:
			w.Behind = true
			s.of[n-1].writes = s.of[n-1].writes[:len(s.of[n-1].writes)+1]
		default:
			w.Behind = false
			s.of[n].leaf, s.of[n].writes = leaf, writes[i:i+1]
			n++
		}
		last = i
	}
	return n
}

package btree

import (
	"bytes"
	"errors"
	"fmt"
	"sort"
)

// This file fills leaves that have room to spare: see Shift in the package comment.

// Compacted counts what Compact has done.
type Compacted struct {
	Leaves int `json:"leaves"` // of the stretch, before
	Freed  int `json:"freed"`  // how many fewer there are now
	Merges int `json:"merges"` // leaves that their left neighbour has absorbed
	Shifts int `json:"shifts"` // leaves of which the left neighbour has absorbed a part
}

// Add adds the counts of another stretch.
func (c *Compacted) Add(o Compacted) {
	c.Leaves += o.Leaves
	c.Freed += o.Freed
	c.Merges += o.Merges
	c.Shifts += o.Shifts
}

// MinCompactFill is the least share of a leaf, in percent, that Compact fills: with less, later removals would merge what it has made.
const MinCompactFill = 50

// Compact fills the leaves below one inner node, that of the first key of a stretch, up to fill percent of their room, from left to right, if the
// stretch needs fewer leaves then. It returns where the next stretch begins; nil: this was the last one. Keys, values and versions stay as they are,
// and other clients read and write meanwhile. Leaves of layers (see layer.go) stay as they are.
//
// Linearizes at: nothing changes for readers. Each step is a merge or a shift.
//
// Errors: those of the store. What was done before stays done, and Compact may be called again from the same key.
func (p *Program) Compact(from []byte, fill int) (next []byte, c Compacted, err error) {
	if fill < MinCompactFill || fill > 100 {
		return nil, c, fmt.Errorf("fill %d %%: a leaf is filled to between %d and 100 %%", fill, MinCompactFill)
	}
	if p.readOnly {
		return nil, c, errors.New("a session that only reads cannot compact a tree")
	}
	p.begin()
	defer p.end()
	parent, err := p.find(probe{key: from}, 1)
	if errors.Is(err, errNoLevel) {
		return nil, c, nil // one leaf, the root
	} else if err != nil {
		return nil, c, err
	}
	low := bytes.Clone(parent.low)
	if parent.bounded() {
		next = bytes.Clone(parent.high)
	}
	full := p.limits.Room * fill / 100
	worth, err := p.worthCompacting(parent, full, &c)
	if err != nil || !worth {
		return next, c, err
	}
	first, err := p.find(probe{key: low}, 0)
	if err == nil {
		err = p.compactRun(first.ref, next, full, &c)
	}
	if err == nil && c.Merges > 0 {
		err = p.mergeParent(low)
	}
	return next, c, err
}

// worthCompacting counts the leaves below a node, and says whether fewer would hold their entries.
func (p *Program) worthCompacting(parent *page, full int, c *Compacted) (bool, error) {
	kids := make([]Ref, parent.count)
	for i := range kids {
		var ok bool
		if kids[i], ok = parent.child(i); !ok {
			return false, corrupt("%v: entry %d", parent.ref, i)
		}
	}
	entries, fences := 0, 0 // bytes
	var bad error
	err := p.store.ReadMany(kids, func(i int, payload []byte, err error) {
		if freed(err) {
			return // absorbed meanwhile
		}
		var v view
		if err == nil {
			v, err = parse(payload)
		}
		if err != nil {
			bad = fmt.Errorf("%v: %w", kids[i], err)
			return
		}
		c.Leaves++
		entries += v.filled() - headBytes - len(v.low) - fenceBytes(v.high)
		fences += len(v.low) + fenceBytes(v.high)
	})
	if err = errors.Join(err, bad); err != nil || c.Leaves < 2 {
		return false, err
	}
	return entries <= (c.Leaves-1)*(full-headBytes-fences/c.Leaves), nil
}

// compactRun fills leaves from one on to the right, up to the one that ends at end; nil: to the last one.
func (p *Program) compactRun(at Ref, end []byte, full int, c *Compacted) error {
	for tries := 0; tries < maxTries; {
		p.giveBack()
		p.store.Begin()
		l, err := p.readWhole(at)
		switch {
		case freed(err):
			return nil // another client has merged it
		case err != nil:
			return err
		case l.right.IsZero() || end != nil && bytes.Compare(l.high, end) >= 0:
			return nil
		}
		r, err := p.readWhole(l.right)
		switch {
		case freed(err):
			tries++
			continue
		case err != nil:
			return err
		case l.frozen() || r.frozen():
			if err := errors.Join(p.settle(l.ref), p.settle(r.ref)); err != nil {
				return err
			}
			tries++
			continue
		case r.level != 0 || !bytes.Equal(l.high, r.low):
			tries++
			continue
		}
		u := union(l.node(), r.node())
		whole := u.size() <= full
		if !whole && u.shiftAt(l.count, r.low, full, p.limits.Room) <= l.count {
			at, tries = r.ref, 0
			continue
		}
		done := false
		frozen, err := p.freeze(l, r)
		if err == nil {
			done, err = p.absorb(l, frozen, full)
		}
		switch {
		case errors.Is(err, errChanged) || freed(err) || err == nil && !done:
			tries++
		case err != nil:
			return err
		case whole:
			c.Merges, c.Freed, tries = c.Merges+1, c.Freed+1, 0
		default:
			c.Shifts, tries = c.Shifts+1, 0
		}
	}
	return ErrBusy
}

// readWhole reads a node and checks its entries.
func (p *Program) readWhole(ref Ref) (*page, error) {
	pg, err := p.read(ref)
	if err == nil {
		err = pg.valid()
	}
	return pg, err
}

// mergeParent merges the inner node above a key, whose leaves have become fewer, or has the root absorb it.
func (p *Program) mergeParent(key []byte) error {
	pg, err := p.find(probe{key: key}, 1)
	switch {
	case errors.Is(err, errNoLevel):
		return nil
	case err != nil:
		return err
	case pg.ref == p.root && pg.count == 1:
		if err := p.shrink(pg); !errors.Is(err, errChanged) && !freed(err) {
			return err
		}
	case p.underFull(pg.filled()):
		p.mergeAround(key, 1)
	}
	return nil
}

// shiftAt is where to cut the union of two leaves so that the left part takes as much as it can of full bytes. The first border entries are
// those of the left leaf, and low is the fence between the two. It is at least border: the leaves as they are fit.
func (n *node) shiftAt(border int, low []byte, full, room int) int {
	fits := func(i int) bool {
		l, r := n.shifted(i, border, low)
		return l.size() <= full && r.size() <= room
	}
	// A longer prefix may make the left part of more entries the smaller one, so the last one that fits is found from the right.
	more := sort.Search(len(n.entries)-border, func(k int) bool { l, _ := n.shifted(border+k, border, low); return l.size() > full })
	for i := min(border+more, len(n.entries)-1); i > border; i-- {
		if fits(i) {
			return i
		}
	}
	return border
}

// shifted are the parts of the union of two leaves, cut before entry i. The caller sets the right link of the left part.
func (n *node) shifted(i, border int, low []byte) (l, r *node) {
	left := *n
	if i != border {
		low = between(n.entries[i-1].key, n.entries[i].key)
	}
	r = left.cut(i, low)
	return &left, r
}

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
// and other clients read and write meanwhile, and a leaf that they change
// all the time stays as it is. So do leaves of layers (see layer.go).
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
	if parent.bounded() {
		next = bytes.Clone(parent.high)
	}
	at, low := 0, bytes.Clone(parent.low)
	again := bytes.Compare(from, low) > 0
	if again {
		// It has absorbed the node of the stretch before. The last leaf of that one may take entries of the next leaf now.
		var ok bool
		if at, ok = parent.childFor(probe{key: from, before: true}); !ok {
			return nil, c, corrupt("%v: entry %d", parent.ref, at)
		}
		low = parent.appendKey(nil, at)
	}
	full := p.limits.Room * fill / 100
	worth, err := p.worthCompacting(parent, at, full, &c)
	if again && c.Leaves > 0 {
		c.Leaves-- // counted before
	}
	if err != nil || !worth {
		return next, c, err
	}
	err = p.compactRun(low, next, full, &c)
	if err == nil && c.Merges > 0 {
		err = p.mergeParent(low)
	}
	return next, c, err
}

// worthCompacting counts the leaves below a node from entry at on, and says whether fewer would hold their entries.
func (p *Program) worthCompacting(parent *page, at, full int, c *Compacted) (bool, error) {
	kids := make([]Ref, parent.count-at)
	for i := range kids {
		var ok bool
		if kids[i], ok = parent.child(at + i); !ok {
			return false, corrupt("%v: entry %d", parent.ref, at+i)
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

// compactTries bounds how often Compact begins again with two leaves that others change: then it passes over them.
const compactTries = 8

// compactRun fills leaves from that of a key on to the right, up to the one that ends at end; nil: to the last one.
func (p *Program) compactRun(key, end []byte, full int, c *Compacted) error {
	for tries := 0; ; {
		p.giveBack()
		p.store.Begin()
		l, err := p.find(probe{key: key}, 0)
		if err == nil {
			err = l.valid()
		}
		if err != nil || !l.bounded() || end != nil && bytes.Compare(l.high, end) >= 0 {
			return err
		}
		done := false
		if tries < compactTries {
			if done, err = p.compactPair(l, full, c); err == errKept {
				tries = compactTries
			} else if err != nil && !errors.Is(err, errChanged) && !freed(err) {
				return err
			}
		}
		switch {
		case done:
			tries = 0
		case tries < compactTries:
			tries++
		default:
			key, tries = bytes.Clone(l.high), 0
		}
	}
}

// errKept: the left leaf of two has no room for entries of the right one.
var errKept = errors.New("nothing to fill the leaf with")

// compactPair has a leaf absorb its right neighbour, or a part of it. Not done: another client has changed one of them.
func (p *Program) compactPair(l *page, full int, c *Compacted) (done bool, err error) {
	r, err := p.readWhole(l.right)
	switch {
	case err != nil:
		return false, err
	case l.frozen() || r.frozen():
		return false, errors.Join(p.settle(l.ref), p.settle(r.ref))
	case r.level != 0 || !bytes.Equal(l.high, r.low):
		return false, errChanged
	case max(l.filled(), r.filled()) > p.limits.Room:
		return false, errKept // of a client that does not encrypt: this one could not write them as they are
	}
	u := union(l.node(), r.node())
	whole := u.size() <= full
	if !whole && u.shiftAt(l.count, r.low, full, p.limits.Room) <= l.count {
		return false, errKept
	}
	frozen, err := p.freeze(l, r)
	if err == nil {
		done, err = p.absorb(l, frozen, full)
	}
	switch {
	case err != nil || !done:
	case whole:
		c.Merges, c.Freed = c.Merges+1, c.Freed+1
	default:
		c.Shifts++
	}
	return done && err == nil, err
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

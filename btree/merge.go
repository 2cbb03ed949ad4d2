package btree

import (
	"bytes"
	"errors"
	"slices"

	"github.com/quarrystore/quarry/slab"
)

// This file merges neighbouring nodes: see Merge in the package comment.

// A merged node must have room for later writes: two nodes merge if together they fill at most this
// share of a node, or if one of them is idle.
const mergeNum, mergeDen = 2, 3

// idle says whether a node has no entries, or only the first one of an inner node.
func (v *view) idle() bool { return v.count == min(v.level, 1) }

// underFull says whether a node with so many bytes should be merged with a neighbour.
func (p *Program) underFull(bytes int) bool { return bytes < p.limits.Room*2/5 }

// mergeAround merges the node of a level that holds key with a neighbour, if both have the same
// parent and fit into one node; then the same one level up. Errors are ignored: an under-full
// node does no harm.
func (p *Program) mergeAround(key []byte, level int) {
	for ; level < maxLevel; level++ {
		again, err := p.mergeOnce(key, level)
		if err != nil || !again {
			return
		}
	}
}

// mergeOnce merges at one level. true: the parent has lost an entry, and may need a merge next.
func (p *Program) mergeOnce(key []byte, level int) (bool, error) {
	parent, err := p.find(probe{key: key}, level+1)
	if err != nil || parent.frozen() {
		return false, err // errNoLevel: the node is the root
	}
	if parent.count == 1 {
		if parent.ref == p.root {
			return false, p.shrink(parent)
		}
		return true, nil
	}
	i, ok := parent.childFor(probe{key: key})
	if !ok {
		return false, corrupt("%v: entry %d", parent.ref, i)
	}
	err = errTooFull
	if i > 0 {
		err = p.mergeChildren(parent, i)
	}
	if errors.Is(err, errTooFull) && i+1 < parent.count {
		err = p.mergeChildren(parent, i+1)
	}
	if err != nil {
		return false, err
	}
	parent, err = p.find(probe{key: key}, level+1)
	if err != nil {
		return false, err
	}
	if parent.ref == p.root {
		if parent.count == 1 {
			return false, p.shrink(parent)
		}
		return false, nil
	}
	return p.underFull(parent.filled()), nil
}

// mergeChildren merges child i of a parent into the one before it.
func (p *Program) mergeChildren(parent *page, i int) error {
	lref, _ := parent.child(i - 1)
	rref, _ := parent.child(i)
	l, err1 := p.read(lref)
	r, err2 := p.read(rref)
	if err := errors.Join(err1, err2, validBoth(l, r)); err != nil {
		return err
	}
	if l.right != rref || l.frozen() || r.frozen() || l.level != parent.level-1 || r.level != l.level || !bytes.Equal(l.high, r.low) {
		return errChanged
	}
	return p.merge(l, r)
}

// validBoth checks the entries of both nodes before they are joined.
func validBoth(l, r *page) error {
	for _, pg := range []*page{l, r} {
		if pg != nil {
			if err := pg.valid(); err != nil {
				return err
			}
		}
	}
	return nil
}

// errTooFull: the entries of both nodes do not fit into one.
var errTooFull = errors.New("too full to merge")

// merge has l absorb r: freeze, absorb, bury.
// Preconditions: both have just been read, neither is frozen, and r is the right sibling of l.
func (p *Program) merge(l, r *page) error {
	size, room := union(l.node(), r.node()).size(), p.limits.Room
	if l.idle() || r.idle() {
		room = room * mergeDen / mergeNum
	}
	if size*mergeDen > room*mergeNum {
		return errTooFull
	}
	frozen, err := p.freeze(l, r)
	if err != nil {
		return err
	}
	_, err = p.absorb(l, frozen, p.limits.Room)
	return err
}

// freeze marks r as frozen by l, with l's stamp: no client writes to r as long as l has that
// stamp. It returns r as frozen.
func (p *Program) freeze(l, r *page) (*page, error) {
	p.out = r.freeze(p.out, l.ref, l.stamp, r.stamp+1, p.limits.Room)
	if err := p.swap(r.ref, r.stamp, p.out); err != nil {
		return nil, err
	}
	pg := p.page()
	return pg, p.take(pg, r.ref, append(pg.buf[:0], p.out...))
}

// absorb moves the entries of the frozen r into l, if l still has the stamp that r names. If l
// has another one, it thaws r. Of leaves whose entries take more than full bytes a new node gets those that l has no room for.
//
// Linearizes at: the commit of l. The keys are the same before and after.
func (p *Program) absorb(l, r *page, full int) (done bool, err error) {
	shrinks := l.ref == p.root && l.level > r.level
	var u, rest *node
	var more []*node
	var made []Ref
	if shrinks {
		u = r.node()
		u.by, u.at, u.stamp = Ref{}, 0, max(l.stamp, r.stamp)+1
		if u.size() > p.limits.Room {
			return false, p.giveUp(l, r)
		}
	} else if u = union(l.node(), r.node()); u.level == 0 && u.size() > full {
		u, rest = u.shifted(u.shiftAt(l.count, r.low, full, p.limits.Room), l.count, r.low)
		more = slices.Concat(u.fit(p.limits.Room), []*node{rest}, rest.fit(p.limits.Room))
		if made, err = p.allocRight(u, more); err != nil {
			return false, p.notShifted(err, l, r)
		}
	}
	done, err = p.commit(l.ref, l.stamp, u, made...)
	switch {
	case err != nil:
		return false, err
	case !done:
		return false, p.settle(r.ref)
	case shrinks:
		p.stats.shrinks.Add(1)
	case rest != nil:
		p.stats.shifts.Add(1)
	default:
		p.stats.merges.Add(1)
	}
	p.cache.drop(l.ref)
	p.cacheNode(l.ref, u)
	if err := p.bury(r); err != nil {
		return true, err
	}
	p.postRight(more, made)
	return true, nil
}

// fit cuts a node in halves until its parts have room, and returns those to the right of n. There are some only for a client that encrypts, of a node that one
// without keys has filled.
func (n *node) fit(room int) []*node {
	if n.size() <= room {
		return nil
	}
	r := n.cut(n.half())
	return slices.Concat(n.fit(room), []*node{r}, r.fit(room))
}

// allocRight makes new nodes to the right of n, the last one first, and links each to the next. If it fails it has freed them.
func (p *Program) allocRight(n *node, more []*node) (made []Ref, err error) {
	made = make([]Ref, len(more))
	for i := len(more) - 1; i >= 0; i-- {
		if made[i], err = p.alloc(more[i]); err != nil {
			for _, ref := range made[i+1:] {
				_ = p.store.Free(ref)
			}
			return nil, err
		}
		if i > 0 {
			more[i-1].right = made[i]
		} else {
			n.right = made[i]
		}
	}
	return made, nil
}

// postRight adds the entries of new nodes to their parent.
func (p *Program) postRight(nodes []*node, refs []Ref) {
	for i, n := range nodes {
		if err := p.post(n.level+1, n.low, refs[i]); err != nil {
			p.later(repair{level: n.level, sep: n.low, child: refs[i]})
		}
	}
}

// errNotShifted: there is no memory for a new node. The node that was frozen may be written again.
var errNotShifted = errors.New("the leaves stay as they are")

// notShifted is the error of absorb for an error of allocRight.
func (p *Program) notShifted(err error, l, r *page) error {
	if gaveUp := p.giveUp(l, r); gaveUp != nil {
		return errors.Join(err, gaveUp)
	}
	return errors.Join(errNotShifted, err)
}

// giveUp ends the frozen state of r without a merge: a new stamp of l takes away the effect of the freeze.
func (p *Program) giveUp(l, r *page) error {
	n := l.node()
	n.stamp++
	if _, err := p.commit(l.ref, l.stamp, n); err != nil {
		return err
	}
	return p.settle(r.ref)
}

// bury removes the entry of an absorbed node from its parent, and frees the node.
func (p *Program) bury(r *page) error {
	p.cache.drop(r.ref)
	if len(r.low) > 0 {
		if err := p.unlink(r.level+1, r.low, r.ref); err != nil {
			return err
		}
	}
	if err := p.store.Free(r.ref); err != nil && !freed(err) {
		return err
	}
	return nil
}

// settle ends the frozen state of a node: it completes the merge, or thaws the node because the
// one that was to absorb it has changed. A writer that meets a frozen node calls it, and so waits
// for no other client.
func (p *Program) settle(ref Ref) error {
	r, err := p.read(ref)
	if freed(err) || err == nil && !r.frozen() {
		return nil
	} else if err != nil {
		return err
	}
	if err := r.valid(); err != nil {
		return err
	}
	l, err := p.read(r.by)
	switch {
	case err == nil && l.stamp == r.at:
		if err := l.valid(); err != nil {
			return err
		}
		_, err = p.absorb(l, r, p.limits.Room)
		if errors.Is(err, errNotShifted) && !errors.Is(err, slab.ErrUnknown) {
			err = nil // a write that meets r needs no memory
		}
		return err
	case err != nil && !freed(err):
		return err
	}
	gone, err := p.absorbed(r)
	if err != nil {
		return err
	}
	if gone {
		return p.bury(r)
	}
	return p.thaw(r)
}

// thaw allows writes to a frozen node again. Preconditions: the node that was to absorb it has another
// stamp, and has not absorbed it.
func (p *Program) thaw(r *page) error {
	var more []*node
	var made []Ref
	if r.filled() <= p.limits.Room {
		p.out = r.freeze(p.out, Ref{}, 0, r.stamp+1, p.limits.Room)
	} else {
		n := r.node()
		n.by, n.at, n.stamp = Ref{}, 0, n.stamp+1
		more = n.fit(p.limits.Room)
		var err error
		if made, err = p.allocRight(n, more); err != nil {
			return err
		}
		p.out = n.encode(p.out, p.limits.Room)
	}
	err := p.store.Update(r.ref, func(old []byte) ([]byte, error) {
		v, err := open(old)
		switch {
		case err != nil:
			return nil, err
		case !v.frozen() || v.stamp != r.stamp:
			return nil, errChanged // or frozen once more, perhaps by the same node at the same stamp
		}
		return p.out, nil
	})
	if err == nil {
		p.stats.thawed.Add(1)
		p.postRight(more, made)
	} else if !unknown(err) {
		for _, ref := range made {
			_ = p.store.Free(ref)
		}
	}
	if errors.Is(err, errChanged) || freed(err) {
		return nil
	}
	return err
}

// unlink removes the entry of a freed node from its parent. The first entry of a parent cannot be
// removed, because it stands for the low fence: it gets the Ref of the node that has the keys
// now.
func (p *Program) unlink(level int, sep []byte, dead Ref) error {
	for range maxTries {
		pg, err := p.find(probe{key: sep}, level)
		if errors.Is(err, errNoLevel) {
			return nil
		} else if err != nil {
			return err
		}
		n := pg.node()
		i, there := n.find(sep)
		if !there || n.entries[i].child != dead {
			return nil
		}
		if pg.frozen() {
			if err := p.settle(pg.ref); err != nil {
				return err
			}
			continue
		}
		if i > 0 {
			n.entries = append(n.entries[:i], n.entries[i+1:]...)
		} else {
			heir, err := p.find(probe{key: sep}, level-1)
			if err != nil {
				return err
			}
			n.entries[0].child = heir.ref
		}
		stamp := n.stamp
		n.stamp++
		done, err := p.commit(pg.ref, stamp, n)
		if err != nil {
			return err
		}
		if done {
			p.stats.unlinked.Add(1)
			p.cacheNode(pg.ref, n)
			return nil
		}
	}
	return ErrBusy
}

// shrink moves the entries of the root's only child into the root: the tree loses a level.
func (p *Program) shrink(root *page) error {
	child, _ := root.child(0)
	c, err := p.read(child)
	if err != nil {
		return err
	}
	if err := c.valid(); err != nil {
		return err
	}
	if c.frozen() || c.bounded() || len(c.low) > 0 || c.level != root.level-1 || c.filled() > p.limits.Room {
		return nil // it has a right sibling without an entry, which the next descent there adds, or is too full for a client that encrypts
	}
	frozen, err := p.freeze(root, c)
	if err != nil {
		return err
	}
	_, err = p.absorb(root, frozen, p.limits.Room)
	return err
}

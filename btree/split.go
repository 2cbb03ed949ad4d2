package btree

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/quarrystore/quarry/slab"
)

// This file splits full nodes: see Split in the package comment.

// errChanged: the node is not as it was read; nothing was done.
var errChanged = errors.New("node has changed")

// unknown says whether an operation may have been done.
func unknown(err error) bool { return errors.Is(err, slab.ErrUnknown) }

// tagOf is the tag of the slabs of a level.
func tagOf(level int) uint32 {
	if level == 0 {
		return TagLeaf
	}
	return TagInner
}

// alloc makes a new node, which no other node names yet.
func (p *Program) alloc(n *node) (Ref, error) {
	return p.store.Alloc(n.encode(nil, p.limits.Room), tagOf(n.level), p.limits.Room, false)
}

// replace commits n in the place of a node, if that still has a stamp and is not frozen;
// errChanged otherwise.
func (p *Program) replace(ref Ref, stamp uint64, n *node) error {
	p.out = n.encode(p.out, p.limits.Room)
	return p.swap(ref, stamp, p.out)
}

// swap is replace for an encoded node.
func (p *Program) swap(ref Ref, stamp uint64, now []byte) error {
	return p.store.Update(ref, func(old []byte) ([]byte, error) {
		v, err := parse(old)
		if err == nil && !p.whole.has(ref, old) {
			err = v.valid()
		}
		switch {
		case err != nil:
			return nil, err
		case v.stamp != stamp || v.frozen():
			return nil, errChanged
		}
		return now, nil
	})
}

// commit is replace for a node whose new neighbours have been made: if it is not done they are
// freed.
func (p *Program) commit(ref Ref, stamp uint64, n *node, made ...Ref) (done bool, err error) {
	err = p.replace(ref, stamp, n)
	if err == nil {
		return true, nil
	}
	if !unknown(err) {
		for _, r := range made {
			_ = p.store.Free(r)
		}
	}
	if errors.Is(err, errChanged) || freed(err) {
		err = nil
	}
	return false, err
}

// split makes room in a node for a key, once. nil means done, or that another client has changed
// the node: the caller looks again.
//
// Linearizes at: the commit of the left node. The keys are the same before and after.
func (p *Program) split(ref Ref, key []byte) error {
	pg, err := p.read(ref)
	if freed(err) {
		return nil
	} else if err != nil {
		return err
	}
	if err := pg.valid(); err != nil {
		return err
	}
	if pg.frozen() {
		return p.settle(ref)
	}
	if pg.count < 2 || pg.place(probe{key: key}) != 0 {
		return nil
	}
	n := pg.node()
	if ref == p.root {
		return p.grow(n, key)
	}
	right, atKey := n.cutFor(key, p.limits.Room)
	if n.right, err = p.alloc(right); err != nil {
		return err
	}
	done, err := p.commit(ref, pg.stamp, n, n.right)
	if err != nil || !done {
		return err
	}
	p.stats.splits.Add(1)
	if atKey {
		p.stats.splitsAtKey.Add(1)
	}
	p.cacheNode(ref, n)
	if err := p.post(right.level+1, right.low, n.right); err != nil {
		p.later(repair{level: right.level, sep: right.low, child: n.right})
	}
	return nil
}

// cacheNode caches a node that was just committed.
func (p *Program) cacheNode(ref Ref, n *node) {
	if n.level == 0 {
		return
	}
	pg := page{ref: ref}
	if v, err := parse(n.encode(nil, 0)); err == nil {
		pg.view = v
		p.cache.store(&pg)
	}
}

// grow copies the root's parts into two new nodes and makes the root their parent.
//
// Linearizes at: the commit of the root.
func (p *Program) grow(n *node, key []byte) error {
	stamp := n.stamp
	right, _ := n.cutFor(key, p.limits.Room)
	rref, err := p.alloc(right)
	if err != nil {
		return err
	}
	n.right = rref
	lref, err := p.alloc(n)
	if err != nil {
		_ = p.store.Free(rref)
		return err
	}
	root := &node{level: n.level + 1, class: n.class, wide: n.wide, stamp: n.stamp + 1,
		entries: []entry{{child: lref}, {key: right.low, child: rref}}}
	done, err := p.commit(p.root, stamp, root, rref, lref)
	if done {
		p.stats.grows.Add(1)
		p.cacheNode(p.root, root)
		p.cacheNode(lref, n)
	}
	return err
}

// post adds the entry of a node to its parent. It does no harm if it comes late: if the node has
// been freed meanwhile, the next search finds the entry and removes it.
func (p *Program) post(level int, sep []byte, child Ref) error {
	if done, err := p.postQuick(level, []kid{{sep, child}}); done || err != nil {
		return err
	}
	for range maxTries {
		pg, err := p.find(probe{key: sep}, level)
		if errors.Is(err, errNoLevel) {
			return nil // the root has absorbed the level, and the node with it
		} else if err != nil {
			return err
		}
		if pg.frozen() {
			if err := p.settle(pg.ref); err != nil {
				return err
			}
			continue
		}
		n := pg.node()
		i, there := n.find(sep)
		if there && n.entries[i].child == child {
			return nil
		}
		if !there {
			n.entries = append(n.entries, entry{})
			copy(n.entries[i+1:], n.entries[i:])
		}
		n.entries[i] = entry{key: sep, child: child}
		stamp := n.stamp
		n.stamp++
		if n.size() > p.limits.Room {
			if err := p.split(pg.ref, sep); err != nil {
				return err
			}
			continue
		}
		done, err := p.commit(pg.ref, stamp, n)
		if err != nil {
			return err
		}
		if done {
			p.stats.posted.Add(1)
			p.cacheNode(pg.ref, n)
			return nil
		}
	}
	return ErrBusy
}

// kid is a node and the key at which it begins, as its parent names it.
type kid struct {
	sep []byte
	ref Ref
}

// postQuick is post, of nodes beside each other, where the cache knows the parent, and the parent has room
// and none of the entries yet: one Update that does not decode the whole node.
func (p *Program) postQuick(level int, kids []kid) (done bool, err error) {
	ref, ok := p.quick(kids[0].sep, level)
	if !ok {
		return false, nil
	}
	var now []byte
	err = p.store.Update(ref, func(old []byte) ([]byte, error) {
		now = old
		for i := range kids {
			v, err := parse(now)
			if err == nil && i == 0 && !p.whole.has(ref, old) {
				err = v.valid()
			}
			if err == nil && v.level != level {
				err = errChanged
			}
			if err != nil {
				return nil, err
			}
			out := &p.groups.bufs[i%2] // in turn: the other one has the node with the entry before
			if *out, err = p.withKid(*out, &v, &kids[i]); err != nil {
				return nil, err
			}
			now = *out
		}
		p.whole.note(ref, now)
		return now, nil
	})
	switch {
	case err == nil:
		p.stats.posted.Add(uint64(len(kids)))
		pg := page{ref: ref}
		if pg.view, err = parse(now); err == nil {
			p.cache.store(&pg)
		}
		return true, nil
	case errors.Is(err, errChanged), freed(err):
		return false, nil
	}
	return false, err
}

// withKid writes to b a copy of an inner node with one more entry; errChanged where that is not possible.
func (p *Program) withKid(b []byte, v *view, k *kid) ([]byte, error) {
	if v.frozen() || v.place(probe{key: k.sep}) != 0 || bytes.Equal(k.sep, v.low) {
		return b, errChanged
	}
	i, ok := v.search(k.sep, false)
	if !ok {
		return b, corrupt("node %q: entry %d", v.low, i)
	}
	if i < v.count {
		if s, _ := v.suffix(i); bytes.Equal(s, k.sep[v.prefix:]) {
			return b, errChanged
		}
	}
	enc := binary.AppendUvarint(p.enc[:0], uint64(len(k.sep)-v.prefix))
	enc = append(enc, k.sep[v.prefix:]...)
	p.enc, _ = k.ref.AppendBinary(enc)
	b, used := v.splice(b, change{i: i, j: i, enc: p.enc, stamp: v.stamp + 1}, p.limits.Room)
	if used > p.limits.Room {
		return b, errChanged
	}
	return b, nil
}

// repairAll completes the splits and merges that the operation has found half done. Errors are
// ignored: the next operation that comes there finds the same again.
func (p *Program) repairAll() {
	todo := p.repairs
	p.repairs = nil
	for i := range todo {
		m := &todo[i]
		p.root = m.root
		p.store.Begin()
		switch _, err := p.read(m.child); {
		case freed(err):
			_ = p.unlink(m.level+1, m.sep, m.child)
		case m.dead:
			_ = p.settle(m.child)
		default:
			_ = p.link(m)
		}
	}
	p.repairs = todo[:0]
}

// link adds the entry of a node that its parent does not name, if the node is still part of the
// tree.
func (p *Program) link(m *repair) error {
	pg, err := p.find(probe{key: m.sep}, m.level+1)
	if errors.Is(err, errNoLevel) {
		return nil
	} else if err != nil {
		return err
	}
	i, child, ok := pg.childOf(probe{key: m.sep})
	if !ok {
		return corrupt("%v: entry %d", pg.ref, i)
	}
	if child == m.child {
		return nil // the path here was out of date
	}
	return p.post(m.level+1, m.sep, m.child)
}

package btree

import (
	"bytes"
	"slices"
)

// This file splits a leaf that has no room for several new keys beside each other, such as the fields of a new hash:
// the keys are in the new nodes before these become part of the tree. If keys are put singly, each key that finds no
// room costs a split, which rewrites the leaf before the key is put.

// SplitRun makes the first n writes in the split of their leaf, in which a group has just found no room for the first
// of them. These are writes of new keys that stand close together in the leaf; their order does not
// matter, because all have their answers at once. n is 0 if there are no such writes, or if the split is not made:
// then nothing was done, and the first write has to be made by Put.
//
// Linearizes at: the commit of the left node, all n writes at one instant.
func (p *Program) SplitRun(leaf Ref, writes []Write) (n int) {
	if len(writes) == 0 || !writes[0].full || !writes[0].plain() || leaf == p.Shared.root {
		return 0
	}
	p.begin()
	defer p.end()
	p.store.Begin()
	pg, err := p.read(leaf)
	if err != nil || pg.level != 0 || pg.frozen() || !p.whole.has(leaf, pg.raw) && pg.valid() != nil {
		return 0
	}
	r := splitRun{p: p, stamp: pg.stamp}
	if r.collect(&pg.view, writes); len(r.fresh) == 0 || r.to-r.from > len(r.fresh) {
		return 0
	}
	r.old = pg.node()
	if len(r.fresh) < run && !r.old.rising(r.from) {
		return 0 // halves are better: Put makes them
	}
	if r.pack(); !r.fits() {
		return 0
	}
	made, err := r.alloc()
	if err != nil {
		return 0
	}
	done, err := p.commit(leaf, r.stamp, r.nodes[0], made...)
	if !done && !unknown(err) {
		return 0
	}
	n = len(r.fresh)
	for i := range writes[:n] {
		w := &writes[i]
		w.Version, w.Base, w.Err, w.Alone = r.stamp+uint64(i)+1, 0, err, false
	}
	if !done {
		return n // unknown
	}
	p.groups.full = Ref{}
	p.whole.note(leaf, p.out)
	if len(made) > 0 { // else another client has made room since, and all entries are in the leaf
		p.stats.splits.Add(uint64(len(made)))
		p.stats.splitsAtKey.Add(uint64(len(made)))
		p.postAll(r.nodes[1:], made)
	}
	return n
}

// splitRun is one call of SplitRun.
type splitRun struct {
	p     *Program
	stamp uint64  // of the leaf as it was read
	from  int     // place of the first new key among the leaf's entries
	to    int     // that of the last one: the new keys stand among the entries [from, to)
	fresh []entry // the new keys, in order
	old   *node   // the leaf as it was read
	nodes []*node // the left node and the new ones, from left to right
	used  int     // bytes of the last of them so far, at most, without its high fence
}

// plain says whether a write puts its Value if the key is absent. An Edit is left out: what it puts, as the claim of a
// member of a sorted set, often grows soon, and a new leaf that it has filled would be split again.
func (w *Write) plain() bool {
	k := w.Cond.kind
	return !w.Remove && w.Edit == nil && (k == 0 || k == condAbsent || k == condUnless)
}

// collect takes the leading writes that put new keys into a leaf.
func (r *splitRun) collect(v *view, writes []Write) {
	for i := range writes {
		w := &writes[i]
		if !w.plain() || v.place(probe{key: w.Key}) != 0 {
			return
		}
		at, _, found, err := v.lookup(w.Key)
		if err != nil || found {
			return
		}
		place, twice := slices.BinarySearchFunc(r.fresh, w.Key, func(e entry, key []byte) int { return bytes.Compare(e.key, key) })
		if twice {
			return
		}
		if len(w.Value) > r.p.inlineBytes(w.Key) {
			return
		}
		if len(r.fresh) == 0 {
			r.from, r.to = at, at
		}
		r.from, r.to = min(r.from, at), max(r.to, at)
		r.fresh = slices.Insert(r.fresh, place, entry{key: w.Key, value: w.Value, version: r.stamp + uint64(i) + 1})
	}
}

// pack divides the entries among nodes. What was before the new keys, and as many of these as find room, stay in the
// left node. The others fill new nodes one after the other, as in a load: the next keys of the same feed
// come behind them. The entries behind the new keys go into the last node if it has room for them. If keys
// arrive in rising order, those entries get a node of their own, so that later keys do not move them.
func (r *splitRun) pack() {
	before, among, behind := r.old.entries[:r.from], slices.Clone(r.fresh), r.old.entries[r.to:]
	among = append(among, r.old.entries[r.from:r.to]...)
	slices.SortFunc(among, func(a, b entry) int { return bytes.Compare(a.key, b.key) })
	r.nodes = []*node{{class: r.old.class, wide: r.old.wide, stamp: r.stamp + uint64(len(r.fresh)) + 1, low: r.old.low}}
	r.used = headBytes + len(r.old.low)
	for i := range before {
		r.add(&before[i])
	}
	for i := range among {
		e := &among[i]
		high := r.old.high // of the node, if e is its last entry
		switch {
		case i+1 < len(among):
			high = between(e.key, among[i+1].key)
		case len(behind) > 0:
			high = between(e.key, behind[0].key)
		}
		if len(r.last().entries) > 0 && r.used+r.entryBytes(e)+fenceBytes(high) > r.p.limits.Room {
			r.open(e)
		}
		r.add(e)
	}
	if len(behind) > 0 {
		rest := fenceBytes(r.old.high)
		for i := range behind {
			rest += r.entryBytes(&behind[i])
		}
		if len(r.nodes) == 1 || r.used+rest > r.p.limits.Room || r.old.rising(r.from) {
			r.open(&behind[0])
		}
		for i := range behind {
			r.add(&behind[i])
		}
	}
	r.last().high, r.last().right = r.old.high, r.old.right
}

// last is the node that pack fills.
func (r *splitRun) last() *node { return r.nodes[len(r.nodes)-1] }

// add puts an entry into the last node.
func (r *splitRun) add(e *entry) {
	n := r.last()
	n.entries, r.used = append(n.entries, *e), r.used+r.entryBytes(e)
}

// open begins a new node with e.
// Preconditions: the last node has entries, and all of them are below e.
func (r *splitRun) open(e *entry) {
	n := r.last()
	n.high = bytes.Clone(between(n.entries[len(n.entries)-1].key, e.key))
	r.nodes = append(r.nodes, &node{class: n.class, wide: n.wide, stamp: r.stamp + uint64(len(r.fresh)), low: n.high})
	r.used = headBytes + len(n.high)
}

// entryBytes is the most that an entry takes: a node whose prefix is longer than that of the old leaf needs less.
func (r *splitRun) entryBytes(e *entry) int {
	return leafBytes(len(e.key)-r.old.prefix(), len(e.value), e.external, e.version)
}

// fits says whether all nodes have room for their fences too, which may be longer than what has moved out.
func (r *splitRun) fits() bool {
	for _, n := range r.nodes {
		if n.size() > r.p.limits.Room {
			return false
		}
	}
	return true
}

// alloc makes the new nodes, the last one first, and links each to its right neighbour. If it fails it
// has freed them.
func (r *splitRun) alloc() (made []Ref, err error) {
	p := r.p
	made = make([]Ref, len(r.nodes)-1)
	for i := len(r.nodes) - 1; i > 0; i-- {
		b := r.nodes[i].encode(p.groups.bufs[0], p.limits.Room)
		p.groups.bufs[0] = b
		if made[i-1], err = p.store.Alloc(b, TagLeaf, p.limits.Room, false); err != nil {
			for _, ref := range made[i:] {
				_ = p.store.Free(ref)
			}
			return nil, err
		}
		p.whole.note(made[i-1], b)
		r.nodes[i-1].right = made[i-1]
	}
	return made, nil
}

// postAll adds the entries of new leaves beside each other to their parent, all by one Update if that is possible.
// Preconditions: there are some.
func (p *Program) postAll(nodes []*node, refs []Ref) {
	kids := make([]kid, len(refs))
	for i, n := range nodes {
		kids[i] = kid{n.low, refs[i]}
	}
	done, err := p.postQuick(1, kids)
	for i := 0; i < len(kids) && !done; i++ {
		if err == nil {
			err = p.post(1, kids[i].sep, kids[i].ref)
		}
		if err != nil {
			p.later(repair{sep: kids[i].sep, child: kids[i].ref})
		}
	}
}

package btree

import (
	"bytes"
	"errors"
	"slices"
)

// GetMany calls fn once for each key, in any order. Slices are valid during the call of fn, which
// must not use the tree. With the inner nodes cached it takes one round for the leaves, each of
// which is READ once, and another one if some values are external.
func (p *Program) GetMany(keys [][]byte, fn func(i int, value []byte, version uint64, err error)) error {
	p.begin()
	defer p.end()
	g := gather{p: p, keys: keys, fn: fn}
	if err := g.groupByLeaf(); err != nil {
		return err
	}
	if err := p.store.ReadMany(g.leaves, g.leaf); err != nil {
		return err
	}
	if err := g.readExternal(); err != nil {
		return err
	}
	for _, i := range g.alone {
		v, version, err := p.Get(keys[i], nil)
		fn(i, v, version, err)
	}
	return nil
}

// gather is one GetMany. Keys are named by their index in keys.
type gather struct {
	p    *Program
	keys [][]byte
	fn   func(i int, value []byte, version uint64, err error)

	leaves   []Ref       // each once
	first    []int       // a key of each leaf; -1 for none
	next     []int       // another key of the same leaf; -1 for none
	external []int       // keys whose values are outside the leaf
	entries  []leafEntry // their entries, by key
	alone    []int       // keys that Get looks for: longer than an inline key, or their leaf has changed
}

// groupByLeaf finds the leaf of each key.
func (g *gather) groupByLeaf() error {
	at := map[Ref]int{} // of leaves
	g.next = make([]int, len(g.keys))
	for i, k := range g.keys {
		if err := g.p.checkKey(k); err != nil {
			g.fn(i, nil, 0, err)
			continue
		}
		if len(k) > g.p.limits.InlineKeyBytes {
			g.alone = append(g.alone, i)
			continue
		}
		ref, err := g.p.leafOf(k)
		g.p.giveBack()
		if err != nil {
			return err
		}
		j, ok := at[ref]
		if !ok {
			j = len(g.leaves)
			at[ref], g.leaves, g.first = j, append(g.leaves, ref), append(g.first, -1)
		}
		g.next[i], g.first[j] = g.first[j], i
	}
	return nil
}

// leaf answers the keys of leaf j from its bytes.
func (g *gather) leaf(j int, b []byte, err error) {
	var v view
	if err == nil {
		v, err = parse(b)
	}
	for i := g.first[j]; i >= 0; i = g.next[i] {
		if err != nil || v.level != 0 || v.frozen() || v.place(probe{key: g.keys[i]}) != 0 {
			g.alone = append(g.alone, i)
			continue
		}
		_, e, found, err := v.lookup(g.keys[i])
		switch {
		case err != nil:
			g.fn(i, nil, 0, err)
		case !found:
			g.fn(i, nil, 0, ErrNoKey)
		case e.external:
			g.keep(i, e)
		default:
			g.fn(i, e.value, e.version, nil)
		}
	}
}

// keep records a key with an external value. The entry's bytes are valid until leaf returns.
func (g *gather) keep(i int, e leafEntry) {
	if g.entries == nil {
		g.entries = make([]leafEntry, len(g.keys))
	}
	e.value, e.suffix = bytes.Clone(e.value), nil
	g.entries[i], g.external = e, append(g.external, i)
}

// readExternal answers the keys with external values, in one round.
func (g *gather) readExternal() error {
	if len(g.external) == 0 {
		return nil
	}
	refs := make([]Ref, len(g.external))
	for k, i := range g.external {
		refs[k], _ = g.entries[i].outside()
	}
	return g.p.store.ReadMany(refs, func(k int, b []byte, err error) {
		i := g.external[k]
		if freed(err) { // replaced since its leaf was read
			g.alone = append(g.alone, i)
			return
		}
		if _, n := g.entries[i].outside(); err == nil && n != len(b) {
			err = corrupt("value %v has %d bytes, its leaf says %d", refs[k], len(b), n)
		}
		g.fn(i, b, g.entries[i].version, err)
	})
}

// PutMany sets keys, each by itself: errs[i] is the answer for keys[i]. Keys of one
// leaf share an Update. Of equal keys the last one stays.
func (p *Program) PutMany(keys, values [][]byte) (errs []error) {
	errs = make([]error, len(keys))
	if len(values) != len(keys) {
		for i := range errs {
			errs[i] = errors.New("btree: as many values as keys, please")
		}
		return errs
	}
	order := make([]int, len(keys))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return bytes.Compare(keys[a], keys[b]) })
	for len(order) > 0 {
		n := p.putSome(keys, values, order, errs)
		order = order[n:]
	}
	return errs
}

// putSome puts as many of the first keys as fit into one leaf, at least one.
func (p *Program) putSome(keys, values [][]byte, order []int, errs []error) int {
	small := func(i int) bool { return p.inline(keys[i], values[i]) }
	alone := func(i int) int {
		_, errs[i] = p.Put(keys[i], values[i], Cond{})
		return 1
	}
	first := order[0]
	if len(order) == 1 || !small(first) || !small(order[1]) {
		return alone(first)
	}
	p.begin()
	leaf, err := p.leafOf(keys[first])
	p.end()
	if err != nil {
		errs[first] = err
		return 1
	}
	if p.batch == nil {
		p.batch = make([]Write, MaxGroup)
	}
	defer clear(p.batch)
	n := 0
	p.WriteGroup(leaf, func() *Write {
		// The keys are sorted: behind one that does not fit the leaf none does.
		if n == MaxGroup || n == len(order) || n > 0 && p.batch[n-1].Alone || !small(order[n]) {
			return nil
		}
		p.batch[n] = Write{Key: keys[order[n]], Value: values[order[n]]}
		n++
		return &p.batch[n-1]
	})
	for n > 0 && p.batch[n-1].Alone {
		n--
	}
	if n == 0 {
		return alone(first)
	}
	for k := range n {
		errs[order[k]] = p.batch[k].Err
	}
	// The callback ran again, on a leaf that had changed: what did not go in then goes
	// in now, unless a write of the same key behind it went in.
	for k := n - 1; k >= 0; k-- {
		switch i := order[k]; {
		case !p.batch[k].Alone:
		case k+1 < n && bytes.Equal(keys[i], keys[order[k+1]]):
			errs[i] = errs[order[k+1]]
		default:
			alone(i)
		}
	}
	return n
}

// inline says whether an entry fits a leaf with its key and its value.
func (p *Program) inline(key, value []byte) bool {
	return p.checkKey(key) == nil && len(key) <= p.limits.InlineKeyBytes && !p.outOfLine(key, value)
}

package btree

import (
	"bytes"
	"slices"
)

// Stretch is a stretch of a tree's keys: those from Low up to the Low of the next one.
type Stretch struct {
	Low    []byte  // nil for the first stretch of a range
	Leaves float64 // in it, estimated from the nodes above
	Leaf   Ref     // one of its leaves; zero if none was looked for
	Read   bool    // Leaf was read
	Keys   int     // of Leaf; those of a layer count as one
	Bytes  int     // of the keys and values of Leaf, the large values included
}

const (
	// stretchNodes bounds the leaves that Stretches reads, and the paths to them that it follows.
	stretchNodes = 4096
	// stretchesEach is how many times more stretches than were asked for are kept of a level.
	stretchesEach = 4
)

// Stretches cuts a range of keys into at least so many stretches of about as many leaves each, or into its leaves if
// there are fewer. It reads the nodes of the upper levels down to the one that names enough, and some leaves:
// all of a level together, so in about as many rounds as the tree has levels, and one for each 128 nodes of a memory node more.
//
// The result is for planning: nodes are split and freed meanwhile. Whatever happens, the stretches are in order and hold each key
// of the range once.
func (p *Program) Stretches(r Range, least int) ([]Stretch, error) {
	if r.To != nil && bytes.Compare(r.From, r.To) >= 0 {
		return nil, nil
	}
	p.begin()
	defer p.end()
	root, err := p.read(p.root)
	switch {
	case freed(err):
		return nil, ErrNoTree
	case err != nil:
		return nil, err
	}
	c := cutter{p: p, most: stretchesEach * max(least, 1)}
	c.from, c.to = p.bounds(r)
	all, level := []Stretch{{Leaf: p.root, Leaves: 1}}, root.level
	if level > 0 {
		if all, err = c.children(root, 1, c.most); err != nil {
			return nil, err
		}
		level--
	}
	for level > 0 && len(all) < least {
		next, err := c.below(all, level)
		if err != nil {
			return nil, err
		}
		if len(next) == 0 {
			break // all of them have been freed since
		}
		all, level = next, level-1
	}
	if err := c.sample(all, level); err != nil {
		return nil, err
	}
	// A node that was absorbed since its parent was read names the same children as the one that has absorbed it.
	slices.SortStableFunc(all, func(a, b Stretch) int { return bytes.Compare(a.Low, b.Low) })
	all = slices.CompactFunc(all, func(a, b Stretch) bool { return bytes.Equal(a.Low, b.Low) })
	for len(all) > 1 && bytes.Compare(all[1].Low, r.From) <= 0 {
		all = all[1:]
	}
	for len(all) > 1 && r.To != nil && bytes.Compare(all[len(all)-1].Low, r.To) >= 0 {
		all = all[:len(all)-1]
	}
	all[0].Low = nil
	return all, nil
}

// cutter is one call of Stretches.
type cutter struct {
	p        *Program
	from, to []byte // bounds in the present layer
	most     int    // stretches of a level
}

// children are the stretches that the children of a node have, in the range, at most so many. Each stands for some nodes of its
// level: Leaves of them for each node that the parent stood for.
func (c *cutter) children(pg *page, weight float64, most int) (out []Stretch, err error) {
	first, last := 0, pg.count
	if len(c.from) > 0 && pg.place(probe{key: c.from}) == 0 {
		i, ok := pg.childFor(probe{key: c.from})
		if !ok {
			return nil, corrupt("%v: entry %d", pg.ref, i)
		}
		first = i
	}
	if c.to != nil && pg.place(probe{key: c.to, before: true}) == 0 {
		i, ok := pg.childFor(probe{key: c.to, before: true})
		if !ok {
			return nil, corrupt("%v: entry %d", pg.ref, i)
		}
		last = i + 1
	}
	step := max(1, (last-first+most-1)/most)
	for i := first; i < last; i += step {
		child, ok := pg.child(i)
		if !ok {
			return nil, corrupt("%v: entry %d", pg.ref, i)
		}
		out = append(out, Stretch{Low: pg.appendKey(nil, i), Leaf: child, Leaves: weight * float64(min(step, last-i))})
	}
	return out, nil
}

// below are the stretches of the children of some nodes.
func (c *cutter) below(nodes []Stretch, level int) ([]Stretch, error) {
	each := max(1, c.most/len(nodes))
	lists := make([][]Stretch, len(nodes))
	err := c.read(nodes, level, func(i int, pg *page) (err error) {
		if c.outside(pg) {
			return nil
		}
		lists[i], err = c.children(pg, nodes[i].Leaves, each)
		return err
	})
	return slices.Concat(lists...), err
}

// outside says whether a node has no key of the range: one that was split since its parent was read may have none any more.
func (c *cutter) outside(pg *page) bool {
	return pg.bounded() && bytes.Compare(pg.high, c.from) <= 0 || c.to != nil && bytes.Compare(pg.low, c.to) >= 0
}

// read reads the Leaf of each of some stretches, a node of a level, and leaves out what is freed or of another level by now.
func (c *cutter) read(nodes []Stretch, level int, fn func(i int, pg *page) error) error {
	const batch = 128
	var refs [batch]Ref
	for at := 0; at < len(nodes); at += batch {
		n := min(batch, len(nodes)-at)
		for i := range n {
			refs[i] = nodes[at+i].Leaf
		}
		c.p.giveBack()
		var failed error
		err := c.p.store.ReadMany(refs[:n], func(i int, b []byte, err error) {
			pg := c.p.page()
			if err == nil {
				err = c.p.take(pg, refs[i], append(pg.buf[:0], b...))
			}
			if err == nil && pg.level == level {
				err = fn(at+i, pg)
			}
			if err != nil && !freed(err) && failed == nil {
				failed = err
			}
		})
		if err == nil {
			err = failed
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sample looks for one leaf in each of the stretches, or in some if there are very many, reads it, and turns Leaves from nodes of a
// level into leaves.
func (c *cutter) sample(all []Stretch, level int) error {
	n := min(len(all), stretchNodes)
	paths, places := make([]Stretch, n), make([]int, n) // places in all
	for k := range paths {
		places[k] = k * len(all) / n
		paths[k] = all[places[k]]
	}
	leaves := 1.0 // below a node of the level
	for at := level; at > 0; at-- {
		count, next, found := 0, []Stretch(nil), []int(nil)
		err := c.read(paths, at, func(k int, pg *page) error {
			child, ok := pg.child(pg.count / 2)
			if !ok {
				return corrupt("%v: entry %d", pg.ref, pg.count/2)
			}
			count, next, found = count+pg.count, append(next, Stretch{Leaf: child}), append(found, places[k])
			return nil
		})
		if err != nil {
			return err
		}
		leaves *= float64(count) / float64(max(1, len(next)))
		paths, places = next, found
	}
	if level > 0 {
		for i := range all {
			all[i].Leaf, all[i].Leaves = Ref{}, all[i].Leaves*leaves
		}
		for k, i := range places {
			all[i].Leaf = paths[k].Leaf
		}
	}
	return c.read(paths, 0, func(k int, pg *page) error {
		if err := pg.valid(); err != nil {
			return err
		}
		s := &all[places[k]]
		s.Read, s.Keys = true, pg.count
		for i := range pg.count {
			e, _ := pg.leaf(i)
			if s.Bytes += pg.prefix + len(e.suffix); !e.external {
				s.Bytes += len(e.value)
			} else if !e.layer() {
				_, large := e.outside()
				s.Bytes += large
			}
		}
		return nil
	})
}

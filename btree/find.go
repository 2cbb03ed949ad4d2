package btree

import (
	"errors"
	"fmt"
)

var (
	// errStale: the way to the node was out of date; look again from the root.
	errStale = errors.New("stale path")
	// errNoLevel: the tree is not that high (any more).
	errNoLevel = errors.New("no such level")
)

// mending is something found wanting on the way, to be put right afterwards: a
// child that its parent does not name, or one that it names and that is freed.
type mending struct {
	root  Ref // of the layer
	level int // of the child
	sep   []byte
	child Ref
	dead  bool
}

// find returns the node of a level that a probe looks for, as it was at one moment
// within the call: fresh from the store, whole, and not absorbed.
//
// Linearizes at: the READ of the node returned, or, for a frozen one, at that READ
// too: it is returned only if it had not been absorbed by then.
func (p *Program) find(pr probe, level int) (*page, error) {
	if p.depth++; p.depth > maxDepth {
		return nil, fmt.Errorf("%w: left neighbours %d deep", ErrBusy, p.depth)
	}
	defer func() { p.depth-- }()
	if level == 0 && !pr.before && !pr.end {
		if leaf, err := p.quickLeaf(pr); leaf != nil || err != nil {
			return leaf, err
		}
	}
	for try := range maxTries {
		pg, err := p.descend(pr, level, try > 0)
		if !errors.Is(err, errStale) {
			return pg, err
		}
		p.stats.restarts.Add(1)
	}
	return nil, fmt.Errorf("%w: the tree kept changing", ErrBusy)
}

// quickLeaf reads the leaf that the cache leads to; nil if that is not the one, or
// needs a closer look.
func (p *Program) quickLeaf(pr probe) (*page, error) {
	ref, ok := p.quick(pr.key, 0)
	if !ok {
		return nil, nil
	}
	leaf, err := p.read(ref)
	switch {
	case freed(err):
		return nil, nil // descend drops the way that led there
	case err != nil:
		return nil, err
	case leaf.level > 0 || leaf.frozen() || leaf.place(pr) != 0:
		return nil, nil
	}
	return leaf, nil
}

// descend is one try of find; with fresh it does not trust the cache.
func (p *Program) descend(pr probe, level int, fresh bool) (*page, error) {
	ref, want := p.root, -1
	var parent *page // the node that named ref as a child; nil: the root, or a sibling did
	slot, moved := 0, false
	for range maxSteps {
		var pg *page
		if !fresh && want != level {
			if pg = p.cache.load(ref); pg != nil && want < 0 && pg.level <= level {
				pg = nil
			}
		}
		if pg != nil {
			p.cache.hits.Add(1)
		} else {
			var err error
			if pg, err = p.read(ref); err != nil {
				switch {
				case !freed(err):
					return nil, err
				case ref == p.root:
					return nil, ErrNoTree
				}
				p.cache.drop(ref)
				if parent == nil || parent.cached || parent.frozen() {
					p.drop(parent)
					return nil, errStale
				}
				if pg, err = p.aroundDead(parent, slot, want); err != nil {
					return nil, err
				}
			}
			if pg.level > 0 && pg.level != level {
				p.cache.miss.Add(1)
			}
		}
		switch {
		case want >= 0 && pg.level != want:
			if fresh && (parent == nil || !parent.cached) {
				return nil, corrupt("%v has level %d, not %d", ref, pg.level, want)
			}
			return nil, errStale
		case want < 0 && pg.level < level:
			return nil, errNoLevel
		}
		want = pg.level
		if pg.frozen() && (fresh || want == level) && !pg.cached {
			un, err := p.resolve(pg, pr)
			if err != nil {
				return nil, err
			}
			pg = un
		}
		at := pg.place(pr)
		if bug(bugFencesUnchecked) && want == level && level == 0 {
			at = 0
		}
		switch at {
		case -1:
			if fresh {
				return nil, corrupt("%v begins at %q, to the right of what its parent says", ref, pg.low)
			}
			p.drop(parent)
			return nil, errStale
		case 1:
			p.stats.rightSteps.Add(1)
			ref, parent, moved = pg.right, nil, true
			continue
		}
		if moved {
			// The parent did not name this node.
			p.later(mending{level: want, sep: pg.low, child: pg.ref})
			moved = false
		}
		if want == level {
			return pg, nil
		}
		i, child, ok := pg.childOf(pr)
		if !ok {
			return nil, corrupt("%v: entry %d", pg.ref, i)
		}
		ref, parent, slot, want = child, pg, i, want-1
	}
	return nil, fmt.Errorf("%w: %d nodes visited", ErrBusy, maxSteps)
}

func (p *Program) drop(pg *page) {
	if pg != nil {
		p.cache.drop(pg.ref)
	}
}

func (p *Program) later(m mending) {
	if p.readOnly || len(p.mend) >= 8 {
		return
	}
	m.root, m.sep = p.root, append([]byte(nil), m.sep...)
	p.mend = append(p.mend, m)
}

// aroundDead finds a way past a child that has been freed although its parent, just
// read, names it: the node before it has taken over what it had.
func (p *Program) aroundDead(parent *page, slot, level int) (*page, error) {
	sep := parent.appendKey(nil, slot)
	if len(sep) == 0 {
		return nil, errStale // the root has taken it over meanwhile
	}
	dead, _ := parent.child(slot)
	p.later(mending{level: level, sep: sep, child: dead, dead: true})
	pg, err := p.find(probe{key: sep, before: true}, level)
	if errors.Is(err, errNoLevel) {
		err = errStale
	}
	return pg, err
}

// resolve returns the node that holds what a frozen one held: itself, if it has
// not been absorbed, or else the one that has it now. It asks, it does not wait.
func (p *Program) resolve(r *page, pr probe) (*page, error) {
	if bug(bugFrozenRead) {
		return r, nil
	}
	absorbed, err := p.absorbed(r)
	if err != nil || !absorbed {
		return r, err
	}
	if len(r.low) == 0 {
		return nil, errStale // by the root
	}
	p.later(mending{level: r.level, sep: r.low, child: r.ref, dead: true})
	y, err := p.find(probe{key: r.low, before: true}, r.level)
	for steps := 0; err == nil && y.place(pr) > 0; steps++ {
		if steps > maxSteps {
			return nil, fmt.Errorf("%w: %d nodes visited", ErrBusy, maxSteps)
		}
		right := y.right
		if y, err = p.read(right); err == nil && y.frozen() {
			y, err = p.resolve(y, pr)
		}
		if freed(err) {
			err = errStale
		}
	}
	if errors.Is(err, errNoLevel) {
		err = errStale
	}
	return y, err
}

// absorbed says whether a frozen node has been taken over. What it held when it was
// read was in force then if not: the question comes later than that READ.
func (p *Program) absorbed(r *page) (bool, error) {
	l, err := p.read(r.by)
	switch {
	case err == nil && l.stamp == r.at:
		return false, nil
	case err != nil && !freed(err):
		return false, err
	}
	// Its freezer has moved on, by taking r over or by anything else. Who has r as
	// its right link, or as its only child, has not taken it over.
	if len(r.low) == 0 {
		y, err := p.find(probe{}, r.level+1)
		if errors.Is(err, errNoLevel) {
			return true, nil
		} else if err != nil {
			return false, err
		}
		child, _ := y.child(0)
		return child != r.ref, nil
	}
	y, err := p.find(probe{key: r.low, before: true}, r.level)
	if errors.Is(err, errNoLevel) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return y.right != r.ref, nil
}

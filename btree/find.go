package btree

import (
	"errors"
	"fmt"
)

var (
	// errStale: the path to the node was out of date; descend again from the root.
	errStale = errors.New("stale path")
	// errNoLevel: the tree is not that high (any more).
	errNoLevel = errors.New("no such level")
)

// repair completes a split or merge that ended half-way: it adds the entry of a node that its
// parent does not name, or removes the entry of a node that is freed.
type repair struct {
	root  Ref // of the layer
	level int // of the child
	sep   []byte
	child Ref
	dead  bool
}

// find returns the node of a level that a probe looks for, as it was at one moment within the
// call: READ from the store, valid, and not absorbed.
//
// Linearizes at: the READ of the node returned. That holds for a frozen node too, because it is
// returned only if it had not been absorbed at its READ.
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

// quickLeaf reads the leaf that the cache leads to; nil if that is the wrong leaf, frozen, or freed:
// then descend finds the right one.
func (p *Program) quickLeaf(pr probe) (*page, error) {
	ref, ok := p.quick(pr.key, 0)
	if !ok {
		return nil, nil
	}
	leaf, err := p.read(ref)
	switch {
	case freed(err):
		return nil, nil // descend drops the cached nodes that led there
	case err != nil:
		return nil, err
	case leaf.level > 0 || leaf.frozen() || leaf.place(pr) != 0:
		return nil, nil
	}
	return leaf, nil
}

// walk is one descent to a node. Only the goroutine of its Program uses it.
type walk struct {
	p     *Program
	probe probe
	to    int  // level of the node that the walk looks for
	fresh bool // no node is taken from the cache

	ref    Ref   // the node to visit next
	level  int   // that it must have; -1: any, for the root
	parent *page // the node that names ref in entry slot; nil: ref is the root, or a right link led to it
	slot   int
	linked bool // a right link led to ref: its parent does not name it
}

// descend is one try of find. With fresh it takes nothing from the cache. errStale: it has met a
// node that is out of date, and find tries again with fresh.
func (p *Program) descend(pr probe, level int, fresh bool) (*page, error) {
	w := walk{p: p, probe: pr, to: level, fresh: fresh, ref: p.root, level: -1}
	for range maxSteps {
		pg, err := w.visit()
		if err != nil {
			return nil, err
		}
		switch pg.place(pr) {
		case -1:
			return nil, w.tooFarRight(pg)
		case 1:
			p.stats.rightSteps.Add(1)
			w.ref, w.parent, w.linked = pg.right, nil, true
			continue
		}
		if w.linked {
			p.later(repair{level: w.level, sep: pg.low, child: pg.ref})
			w.linked = false
		}
		if w.level == level {
			return pg, nil
		}
		i, child, ok := pg.childOf(pr)
		if !ok {
			return nil, corrupt("%v: entry %d", pg.ref, i)
		}
		w.ref, w.parent, w.slot, w.level = child, pg, i, w.level-1
	}
	return nil, fmt.Errorf("%w: %d nodes visited", ErrBusy, maxSteps)
}

// visit returns the node that the walk has come to, or the one that has absorbed it.
func (w *walk) visit() (pg *page, err error) {
	if pg = w.cached(); pg != nil {
		w.p.cache.hits.Add(1)
	} else {
		if pg, err = w.p.read(w.ref); err != nil {
			if pg, err = w.around(err); err != nil {
				return nil, err
			}
		}
		if pg.level > 0 && pg.level != w.to {
			w.p.cache.miss.Add(1)
		}
	}
	switch {
	case w.level >= 0 && pg.level != w.level:
		if w.fresh && (w.parent == nil || !w.parent.cached) {
			return nil, corrupt("%v has level %d, not %d", w.ref, pg.level, w.level)
		}
		return nil, errStale
	case w.level < 0 && pg.level < w.to:
		return nil, errNoLevel
	}
	w.level = pg.level
	if pg.frozen() && (w.fresh || w.level == w.to) && !pg.cached {
		return w.p.resolve(pg, w.probe)
	}
	return pg, nil
}

// cached is the node if the walk may take it from the cache: the node that it looks for
// is always read.
func (w *walk) cached() *page {
	if w.fresh || w.level == w.to {
		return nil
	}
	pg := w.p.cache.load(w.ref)
	if pg != nil && w.level < 0 && pg.level <= w.to {
		return nil
	}
	return pg
}

// around returns the node that has the keys of a freed node, if the entry that led there is
// current.
func (w *walk) around(err error) (*page, error) {
	switch {
	case !freed(err):
		return nil, err
	case w.ref == w.p.root:
		return nil, ErrNoTree
	}
	w.p.cache.drop(w.ref)
	if w.parent == nil || w.parent.cached || w.parent.frozen() {
		w.p.drop(w.parent)
		return nil, errStale
	}
	return w.p.aroundDead(w.parent, w.slot, w.level)
}

// tooFarRight is the error for a node that begins to the right of the probe. From the cache that
// is an outdated entry; in a fresh walk it is damage.
func (w *walk) tooFarRight(pg *page) error {
	if w.fresh {
		return corrupt("%v begins at %q, to the right of what its parent says", w.ref, pg.low)
	}
	w.p.drop(w.parent)
	return errStale
}

// drop takes a node out of the cache.
func (p *Program) drop(pg *page) {
	if pg != nil {
		p.cache.drop(pg.ref)
	}
}

// later notes a repair for the end of the call.
func (p *Program) later(m repair) {
	if p.readOnly || len(p.repairs) >= 8 {
		return
	}
	m.root, m.sep = p.root, append([]byte(nil), m.sep...)
	p.repairs = append(p.repairs, m)
}

// aroundDead returns the node that has the entries of a freed child which its parent, just read,
// still names. The node to the left of the child has absorbed them.
func (p *Program) aroundDead(parent *page, slot, level int) (*page, error) {
	sep := parent.appendKey(nil, slot)
	if len(sep) == 0 {
		return nil, errStale // the root has absorbed it meanwhile
	}
	dead, _ := parent.child(slot)
	p.later(repair{level: level, sep: sep, child: dead, dead: true})
	pg, err := p.find(probe{key: sep, before: true}, level)
	if errors.Is(err, errNoLevel) {
		err = errStale
	}
	return pg, err
}

// resolve returns the node that has the entries of a frozen one: that node itself if it has not
// been absorbed, else the one that absorbed it. It only reads, and waits for no client.
func (p *Program) resolve(r *page, pr probe) (*page, error) {
	absorbed, err := p.absorbed(r)
	if err != nil || !absorbed {
		return r, err
	}
	if len(r.low) == 0 {
		return nil, errStale // absorbed by the root
	}
	p.later(repair{level: r.level, sep: r.low, child: r.ref, dead: true})
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

// absorbed says whether a frozen node r has been absorbed. If it has not, its entries were
// current when r was READ, because this check comes after that READ.
func (p *Program) absorbed(r *page) (bool, error) {
	l, err := p.read(r.by)
	switch {
	case err == nil && l.stamp == r.at:
		return false, nil
	case err != nil && !freed(err):
		return false, err
	}
	// L has changed since, by absorbing r or otherwise. If r is still a right link, or the
	// root's only child, it has not been absorbed.
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

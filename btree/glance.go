package btree

import (
	"errors"
	"fmt"
)

// glance looks at a leaf where it lies in the lane's memory, so that most Gets copy only the
// value. It belongs to its Program.
type glance struct {
	look  func([]byte) error // run, bound once
	key   []byte             // looked for; set for one look
	dst   []byte             // the value is appended to it
	entry leafEntry          // of the key, if found
	found bool               // the leaf has the key
	here  bool               // the key is in the range of the leaf
	ext   []byte             // memory for a copy of an external entry
}

// look finds a key in the leaf that the cache leads to. Not ok: that leaf is the wrong one, frozen or
// freed. A value in the leaf is appended to dst.
//
// Linearizes at: the READ of the leaf.
func (p *Program) look(key, dst []byte) (value []byte, e leafEntry, found, ok bool, err error) {
	ref, ok := p.quick(key, 0)
	if !ok {
		return dst, e, false, false, nil
	}
	g := &p.glance
	g.key, g.dst, g.here = key, dst, false
	err = p.store.View(ref, g.look)
	value, e, found, ok = g.dst, g.entry, g.found, g.here
	g.key, g.dst, g.entry = nil, nil, leafEntry{}
	switch {
	case freed(err):
		return dst, e, false, false, nil // entry drops the cached nodes that led there
	case errors.Is(err, ErrCorrupt):
		return dst, e, false, true, fmt.Errorf("%v: %w", ref, err)
	case err != nil:
		return dst, e, false, true, err
	}
	return value, e, found, ok, nil
}

// run is the callback of View.
func (g *glance) run(b []byte) error {
	v, err := parse(b)
	if err != nil {
		return err
	}
	if v.level > 0 || v.frozen() || v.place(probe{key: g.key}) != 0 {
		return nil
	}
	if _, g.entry, g.found, err = v.lookup(g.key); err != nil {
		return err
	}
	e := &g.entry
	g.here = true
	switch e.suffix = nil; {
	case !g.found:
		e.value = nil
	case e.external:
		g.ext = append(g.ext[:0], e.value...)
		e.value = g.ext
	default:
		g.dst, e.value = append(g.dst, e.value...), nil
	}
	return nil
}

package btree

import (
	"bytes"
	"errors"
)

// Leaves calls fn with the leaves of a range and their first keys, in order, until fn returns false.
// It shows where a tree may be cut into parts, and where they lie. It reads only the nodes above, one
// for some hundred leaves, so its result is for planning: a leaf may have been split or freed. The
// first key is nil.
func (p *Program) Leaves(r Range, fn func(low []byte, leaf Ref) bool) error {
	p.begin()
	defer p.end()
	from, to := p.bounds(r)
	cursor, key := bytes.Clone(from), []byte(nil)
	for {
		p.giveBack()
		pg, err := p.find(probe{key: cursor}, 1)
		if errors.Is(err, errNoLevel) {
			fn(nil, p.root)
			return nil
		} else if err != nil {
			return err
		}
		if err := pg.valid(); err != nil {
			return err
		}
		first, ok := pg.childFor(probe{key: cursor})
		if !ok {
			return corrupt("%v: entry %d", pg.ref, first)
		}
		for i := first; i < pg.count; i++ {
			child, ok := pg.child(i)
			if !ok {
				return corrupt("%v: entry %d", pg.ref, i)
			}
			if key = pg.appendKey(key[:0], i); to != nil && bytes.Compare(key, to) >= 0 {
				return nil
			}
			if !fn(key, child) {
				return nil
			}
		}
		if !pg.bounded() || to != nil && bytes.Compare(pg.high, to) >= 0 {
			return nil
		}
		cursor = append(cursor[:0], pg.high...)
	}
}

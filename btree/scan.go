package btree

import (
	"bytes"
	"errors"
	"fmt"
)

// Range of keys: From <= key < To. An empty From is the first key, a nil To the end.
type Range struct {
	From, To []byte
	// Limit is the largest number of entries, 0 for all.
	Limit int
	// Reverse gives the entries from the last to the first.
	Reverse bool
}

// prefetchLeaves is how many leaves a scan reads in one round at most, after it
// has shown by reading that it goes on: the memory of an iterator.
const prefetchLeaves = 16

// Scan calls fn with the entries of a range in order, each key once, until it
// returns false. Slices are good during the call. It is not a snapshot: each leaf
// is as it was at some moment of the scan.
//
// Each key once: the scan goes on at the fence where the last leaf ended, with the
// leaf that begins there or holds it by then.
func (p *Program) Scan(r Range, fn func(key, value []byte, version uint64) bool) error {
	p.begin()
	defer p.end()
	s := scan{p: p, Range: r, ahead: 1}
	if r.Reverse {
		s.cursor, s.probe = bytes.Clone(r.To), probe{before: true, end: r.To == nil}
	} else {
		s.cursor = bytes.Clone(r.From)
	}
	if r.To != nil && bytes.Compare(r.From, r.To) >= 0 {
		return nil
	}
	for {
		p.giveBack()
		s.probe.key = s.cursor
		if err := s.fetch(); err != nil {
			return err
		}
		for _, leaf := range s.leaves {
			more, err := s.emit(leaf, fn)
			if err != nil || !more {
				return err
			}
		}
	}
}

type scan struct {
	Range
	p      *Program
	probe  probe
	cursor []byte // the fence that the scan has come to
	ahead  int    // leaves to read in the next round
	refs   []Ref
	leaves []*page
	slots  []*page
	key    []byte
	given  int
}

// fetch reads the next leaves, at least one, each beginning where the last ends.
func (s *scan) fetch() error {
	s.leaves, s.refs = s.leaves[:0], s.refs[:0]
	parent, err := s.parent()
	if err != nil {
		return err
	}
	if parent != nil {
		if err := s.readAhead(parent); err != nil {
			return err
		}
	}
	if len(s.leaves) > 0 {
		s.ahead = min(2*s.ahead, prefetchLeaves)
		return nil
	}
	if parent != nil {
		s.p.cache.drop(parent.ref)
	}
	leaf, err := s.p.find(s.probe, 0)
	if err == nil {
		s.leaves = append(s.leaves, leaf)
	}
	return err
}

// parent is the node above the next leaf, from the cache if possible; nil if the
// root is a leaf.
func (s *scan) parent() (*page, error) {
	p, ref := s.p, s.p.root
	for range maxLevel {
		pg := p.cache.load(ref)
		if pg == nil || pg.level == 0 || pg.place(s.probe) != 0 {
			break
		}
		if pg.level == 1 {
			return pg, nil
		}
		i, ok := pg.childFor(s.probe)
		if ref, _ = pg.child(max(i, 0)); !ok {
			break
		}
	}
	pg, err := p.find(s.probe, 1)
	if errors.Is(err, errNoLevel) {
		return nil, nil
	}
	return pg, err
}

// readAhead reads leaves that a parent names and keeps those that prove to be next.
func (s *scan) readAhead(parent *page) error {
	i, ok := parent.childFor(s.probe)
	if !ok {
		return corrupt("%v: entry %d", parent.ref, i)
	}
	step := 1
	if s.Reverse {
		step = -1
	}
	for ; i >= 0 && i < parent.count && len(s.refs) < s.ahead; i += step {
		ref, ok := parent.child(i)
		if !ok {
			return corrupt("%v: entry %d", parent.ref, i)
		}
		s.refs = append(s.refs, ref)
		if s.Limit > 0 && s.given+8*len(s.refs) > s.Limit+8 {
			break
		}
	}
	s.slots = s.slots[:0]
	for range s.refs {
		s.slots = append(s.slots, nil)
	}
	var failed error
	err := s.p.store.ReadMany(s.refs, func(i int, b []byte, err error) {
		if err == nil {
			pg := s.p.page()
			if err = s.p.take(pg, s.refs[i], append(pg.buf[:0], b...)); err == nil {
				s.slots[i] = pg
			}
		}
		if err != nil && !freed(err) && failed == nil {
			failed = err
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	pr := s.probe
	for _, pg := range s.slots {
		if pg == nil || pg.level != 0 || pg.frozen() || pg.place(pr) != 0 && !bug(bugScanFollowsLinks) {
			break
		}
		s.leaves = append(s.leaves, pg)
		if pr.key, pr.end = pg.high, false; s.Reverse {
			pr.key = pg.low
		}
		if len(pr.key) == 0 {
			break
		}
	}
	return nil
}

// emit gives out the entries of a leaf from the cursor on, and moves the cursor.
func (s *scan) emit(leaf *page, fn func(key, value []byte, version uint64) bool) (more bool, err error) {
	if err := leaf.valid(); err != nil {
		return false, err
	}
	from, to := 0, leaf.count
	if leaf.place(probe{key: s.From}) == 0 {
		from, _ = leaf.search(s.From, false)
	}
	if s.To != nil && leaf.place(probe{key: s.To}) == 0 {
		to, _ = leaf.search(s.To, false)
	}
	if !s.Reverse && leaf.place(probe{key: s.cursor}) == 0 {
		at, _ := leaf.search(s.cursor, false)
		from = max(from, at)
	}
	if s.Reverse && !s.probe.end && leaf.place(probe{key: s.cursor}) == 0 {
		at, _ := leaf.search(s.cursor, false)
		to = min(to, at)
	}
	for n := range to - from {
		i := from + n
		if s.Reverse {
			i = to - 1 - n
		}
		if s.Limit > 0 && s.given == s.Limit {
			return false, nil
		}
		s.key = leaf.appendKey(s.key[:0], i)
		e, _ := leaf.leaf(i)
		value, version, there := e.value, e.version, true
		if e.external {
			if value, version, there, err = s.outside(&e); err != nil {
				return false, err
			}
		}
		if there {
			if s.given++; !fn(s.key, value, version) {
				return false, nil
			}
		}
	}
	if s.Reverse {
		s.cursor, s.probe.end = append(s.cursor[:0], leaf.low...), false
		return len(s.cursor) > 0 && bytes.Compare(s.cursor, s.From) > 0, nil
	}
	s.cursor = append(s.cursor[:0], leaf.high...)
	return leaf.bounded() && (s.To == nil || bytes.Compare(s.cursor, s.To) < 0), nil
}

// outside reads an external value; one that has been replaced since its leaf was
// read is looked up again.
func (s *scan) outside(e *leafEntry) (value []byte, version uint64, there bool, err error) {
	version = e.version
	now := *e
	for range maxTries {
		value, err = s.p.outside(&now, nil)
		if !freed(err) {
			return value, version, err == nil, err
		}
		leaf, err := s.p.find(probe{key: s.key}, 0)
		if err != nil {
			return nil, 0, false, err
		}
		_, found, there, err := leaf.lookup(s.key)
		if err != nil || !there {
			return nil, 0, false, err
		}
		if now, version = found, found.version; !now.external {
			return now.value, version, true, nil
		}
	}
	return nil, 0, false, fmt.Errorf("%w: %q kept changing", ErrBusy, s.key)
}

// Count is the number of keys of a range, not a snapshot. It reads every leaf.
func (p *Program) Count(r Range) (n int, err error) {
	p.begin()
	defer p.end()
	err = p.walkLeaves(r, func(from, to int) { n += to - from })
	return n, err
}

// walkLeaves goes over the leaves of a range as Scan does, without the entries.
func (p *Program) walkLeaves(r Range, fn func(from, to int)) error {
	if r.To != nil && bytes.Compare(r.From, r.To) >= 0 {
		return nil
	}
	s := scan{p: p, Range: Range{From: r.From, To: r.To}, ahead: 1, cursor: bytes.Clone(r.From)}
	for {
		p.giveBack()
		s.probe.key = s.cursor
		if err := s.fetch(); err != nil {
			return err
		}
		for _, leaf := range s.leaves {
			from, to := 0, leaf.count
			ok1, ok2 := true, true
			if leaf.place(s.probe) == 0 {
				from, ok1 = leaf.search(s.cursor, false)
			}
			if r.To != nil && leaf.place(probe{key: r.To}) == 0 {
				to, ok2 = leaf.search(r.To, false)
			}
			if !ok1 || !ok2 {
				return corrupt("leaf %v", leaf.ref)
			}
			fn(from, to)
			if !leaf.bounded() || r.To != nil && bytes.Compare(leaf.high, r.To) >= 0 {
				return nil
			}
			s.cursor = append(s.cursor[:0], leaf.high...)
			s.probe.key = s.cursor
		}
	}
}

package btree

import (
	"bytes"
	"errors"
	"fmt"
)

// This file scans ranges of keys: it reads leaves ahead, several in a round, and continues by
// fence keys.

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
// returns false. Slices are valid during the call of fn. It is not a snapshot: each leaf
// is as it was at some moment of the scan.
//
// Each key once: the scan goes on at the fence where the last leaf ended, with the
// leaf that begins there or holds it by then.
func (p *Program) Scan(r Range, fn func(key, value []byte, version uint64) bool) error {
	p.begin()
	defer p.end()
	s := scan{p: p, Range: r, fn: fn}
	_, err := s.run()
	return err
}

// run scans the present layer. more: the scan goes on in the layer above.
func (s *scan) run() (more bool, err error) {
	if s.To != nil && bytes.Compare(s.From, s.To) >= 0 {
		return true, nil
	}
	s.from, s.to = s.p.bounds(s.Range)
	if s.ahead = 1; s.Reverse {
		s.cursor, s.probe = bytes.Clone(s.to), probe{before: true, end: s.to == nil}
	} else {
		s.cursor = bytes.Clone(s.from)
	}
	for {
		s.p.giveBack()
		s.probe.key = s.cursor
		if err := s.fetch(); err != nil {
			return false, err
		}
		for _, leaf := range s.leaves {
			next, err := s.emit(leaf)
			if err != nil || next != goOn {
				return next == atEnd, err
			}
		}
	}
}

// What comes after a leaf.
type after uint8

const (
	goOn  after = iota // the next leaf
	atEnd              // nothing more in this layer
	enough
)

// scan is one Scan in one layer. A layer below has a scan of its own.
type scan struct {
	Range
	p      *Program
	fn     func(key, value []byte, version uint64) bool // gets the entries; false ends the scan
	prefix []byte                                       // of all keys of the layer
	from   []byte                                       // bounds in the present layer
	to     []byte                                       // nil: no upper end
	probe  probe                                        // of the next leaf
	cursor []byte                                       // the fence that the scan has come to
	ahead  int                                          // leaves to read in the next round
	refs   []Ref                                        // of the leaves to read
	leaves []*page                                      // read, in the order of the scan
	slots  []*page                                      // leaves as READ, by their index in refs; nil: freed
	values valuesAhead                                  // external values, read
	key    []byte                                       // memory of the key that fn gets
	given  int                                          // entries, for Limit
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
		var ok bool
		if _, ref, ok = pg.childOf(s.probe); !ok {
			break
		}
	}
	pg, err := p.find(s.probe, 1)
	if errors.Is(err, errNoLevel) {
		return nil, nil
	}
	return pg, err
}

// readAhead reads leaves that a parent names, in one round, and keeps those whose fences show that they
// come next.
func (s *scan) readAhead(parent *page) error {
	if err := s.nameLeaves(parent); err != nil {
		return err
	}
	if err := s.readLeaves(); err != nil {
		return err
	}
	pr := s.probe
	for _, pg := range s.slots {
		if pg == nil || pg.level != 0 || pg.frozen() || pg.place(pr) != 0 {
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

// nameLeaves puts into refs the next leaves that a parent names.
func (s *scan) nameLeaves(parent *page) error {
	i, _, ok := parent.childOf(s.probe)
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
	return nil
}

// readLeaves reads refs into slots; the slot of a leaf that has been freed stays nil.
func (s *scan) readLeaves() error {
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
	return errors.Join(err, failed)
}

// emit calls fn with the entries of a leaf from the cursor on, and moves the cursor.
func (s *scan) emit(leaf *page) (after, error) {
	if err := leaf.valid(); err != nil {
		return enough, err
	}
	from, to := s.entriesOf(leaf)
	s.key = append(append(s.key[:0], s.prefix...), leaf.low[:leaf.prefix]...)
	shared := len(s.key)
	for n := range to - from {
		if s.Limit > 0 && s.given == s.Limit {
			return enough, nil
		}
		e, _ := leaf.leaf(s.index(from, to, n))
		s.key = append(s.key[:shared], e.suffix...)
		if !e.external {
			if s.given++; !s.fn(s.key, e.value, e.version) {
				return enough, nil
			}
		} else if more, err := s.emitExternal(leaf, &e, from, to, n); err != nil || !more {
			return enough, err
		}
	}
	return s.leave(leaf), nil
}

// entriesOf bounds the entries of a leaf that belong to the range and lie behind the cursor.
func (s *scan) entriesOf(leaf *page) (from, to int) {
	from, to = 0, leaf.count
	if leaf.place(probe{key: s.from}) == 0 {
		from, _ = leaf.search(s.from, false)
	}
	if s.to != nil && leaf.place(probe{key: s.to}) == 0 {
		to, _ = leaf.search(s.to, false)
	}
	if s.Reverse && s.probe.end || leaf.place(probe{key: s.cursor}) != 0 {
		return from, to
	}
	at, _ := leaf.search(s.cursor, false)
	if s.Reverse {
		return from, min(to, at)
	}
	return max(from, at), to
}

// emitExternal calls fn with an entry whose value is external, or with all entries of its layer.
func (s *scan) emitExternal(leaf *page, e *leafEntry, from, to, n int) (more bool, err error) {
	if e.layer() {
		return s.below(e)
	}
	if value := s.valueAhead(leaf, e, from, to, n); value != nil {
		s.given++
		return s.fn(s.key, value, e.version), nil
	}
	value, version, there, err := s.outside(e)
	if err != nil || !there {
		return err == nil, err
	}
	s.given++
	return s.fn(s.key, value, version), nil
}

// leave moves the cursor to the fence where a leaf ends.
func (s *scan) leave(leaf *page) after {
	if s.Reverse {
		s.cursor, s.probe.end = append(s.cursor[:0], leaf.low...), false
		if len(s.cursor) > 0 && bytes.Compare(s.cursor, s.from) > 0 {
			return goOn
		}
		return atEnd
	}
	s.cursor = append(s.cursor[:0], leaf.high...)
	if leaf.bounded() && (s.to == nil || bytes.Compare(s.cursor, s.to) < 0) {
		return goOn
	}
	return atEnd
}

// below scans the layer of an entry. A layer that was removed meanwhile had become empty.
func (s *scan) below(e *leafEntry) (more bool, err error) {
	ref, _ := e.outside()
	prefix := s.key[len(s.prefix) : len(s.key)-1]
	t := scan{p: s.p.below(ref), fn: s.fn, prefix: bytes.Clone(s.key[:len(s.key)-1]),
		Range: Range{From: within(s.From, prefix), To: within(s.To, prefix), Reverse: s.Reverse}}
	if s.Limit > 0 {
		t.Limit = s.Limit - s.given
	}
	more, err = t.run()
	t.p.end()
	s.given += t.given
	if errors.Is(err, ErrNoTree) {
		return true, nil
	}
	return more, err
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
		key := s.key[len(s.prefix):]
		leaf, err := s.p.find(probe{key: key}, 0)
		if err != nil {
			return nil, 0, false, err
		}
		_, found, there, err := leaf.lookup(key)
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
	return p.count(Range{From: r.From, To: r.To})
}

// count counts the keys of a range in the present layer and those below.
func (p *Program) count(r Range) (n int, err error) {
	err = p.walkLeaves(r, func(leaf *page, from, to int) error {
		n += to - from
		if !leaf.layers() {
			return nil
		}
		for i := from; i < to; i++ {
			e, ok := leaf.leaf(i)
			if !ok {
				return corrupt("leaf %v: entry %d", leaf.ref, i)
			}
			if !e.layer() {
				continue
			}
			ref, _ := e.outside()
			key := leaf.appendKey(nil, i)
			prefix := key[:len(key)-1]
			sub := p.below(ref)
			m, err := sub.count(Range{From: within(r.From, prefix), To: within(r.To, prefix)})
			sub.end()
			if err != nil && !errors.Is(err, ErrNoTree) {
				return err
			}
			n += m - 1
		}
		return nil
	})
	return n, err
}

// walkLeaves goes over the leaves of a range as Scan does, without the entries.
func (p *Program) walkLeaves(r Range, fn func(leaf *page, from, to int) error) error {
	if r.To != nil && bytes.Compare(r.From, r.To) >= 0 {
		return nil
	}
	first, end := p.bounds(r)
	s := scan{p: p, ahead: 1, cursor: bytes.Clone(first)}
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
			if end != nil && leaf.place(probe{key: end}) == 0 {
				to, ok2 = leaf.search(end, false)
			}
			if !ok1 || !ok2 {
				return corrupt("leaf %v", leaf.ref)
			}
			if err := fn(leaf, from, to); err != nil {
				return err
			}
			if !leaf.bounded() || end != nil && bytes.Compare(leaf.high, end) >= 0 {
				return nil
			}
			s.cursor = append(s.cursor[:0], leaf.high...)
			s.probe.key = s.cursor
		}
	}
}

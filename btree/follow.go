package btree

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sort"
)

// ErrFollowed: the keys that a Follower would have to know take more memory than it may use.
var ErrFollowed = errors.New("too many keys to follow: choose a longer prefix, or allow more memory")

// Watching is the Store of a Follower: reads tell the version of an object, and the caller learns of later ones.
type Watching interface {
	Store
	// ReadVersion is Read that also returns the version of the object.
	ReadVersion(ref Ref, dst []byte) (payload []byte, version uint64, err error)
	// Expect has the caller of the Follower call Changed, at some time, once the object is at another version than this one or
	// freed. It replaces the version given before.
	Expect(ref Ref, version uint64) error
	// Forget ends Expect.
	Forget(ref Ref)
}

// Change is one change of a key. Its slices are the receiver's.
type Change struct {
	Key     []byte
	Value   []byte // none of a removal
	Version uint64 // of the write; of a removal, above all versions that the key had before, and below those it gets later
	Deleted bool
}

// FollowOptions of a Follower.
type FollowOptions struct {
	// Range of the keys. Limit and Reverse do not count.
	Range Range
	// Known are keys and versions that the receiver has, in rising order of keys: what differs from them is told first.
	Known iter.Seq2[[]byte, uint64]
	// Quiet: what the tree has when the Follower begins is not told. Known does not count then.
	Quiet bool
	// KeysOnly: changes have no values. LeafValues: they have those that stand in leaves. Neither reads values outside of leaves.
	KeysOnly, LeafValues bool
	// MaxBytes bounds the memory for known keys; 0: DefaultFollowBytes.
	MaxBytes int
}

// DefaultFollowBytes holds some two million keys.
const DefaultFollowBytes = 256 << 20

// knownBytes is what a known key takes beside its bytes.
const knownBytes = 56

// Follower tells the changes of a range of keys. It knows the range's keys with their versions, leaf by leaf, and has the
// store tell which leaves have changed. Of these it tells the difference. So it tells each change of a key or a later one of
// the same key, and the versions of one key rise.
//
// Leaves alone are watched, and of the inner nodes the root: a new leaf comes of a commit of the leaf that had its keys, and who drops a tree frees
// its root first, and may die before it frees the leaves.
//
// Invariant: the segments of a layer divide the followed part of its keys, and known of a segment is what was told of it. A
// segment is in dirty, or its leaf had, at the version expected, exactly these keys, and has them as long as it has that
// version. Of a frozen leaf that holds only as long as the node that is to absorb it has its version too, so both are expected.
//
// One goroutine at a time uses a Follower.
type Follower struct {
	p       *Program
	store   Watching
	options FollowOptions
	top     *followed
	root    *segment // without keys, of the root's object: whether that was freed
	looked  map[Ref]*looked
	dirty   []*segment
	told    []told // to return; those before at were returned
	at      int
	bytes   int   // of known keys
	ended   error // all that Next returns
}

// followed is a layer of the tree, or its top, as far as it is followed.
type followed struct {
	root     Ref // zero: not known yet
	prefix   []byte
	floor    uint64 // version of its entry: at least that of all keys in earlier layers of the entry
	bounds   Range  // in the layer
	from, to []byte // bounds of its entries
	segments []*segment
}

// segment is a stretch of keys, of one leaf when it was looked at last.
type segment struct {
	of        *followed
	low, high []byte  // no high: no upper end
	known     []known // in order
	leaf      Ref     // that had the keys; a hint
	expected  []Ref
	dirty     bool // in Follower.dirty
	gone      bool // replaced by others
}

// known is a key that was told, or the entry of a layer.
type known struct {
	key     string // in the layer
	version uint64
	below   *followed // of a layer
}

// looked is an object whose changes are expected.
type looked struct {
	version uint64
	by      []*segment
}

// told is a Change whose value may have to be read.
type told struct {
	Change
	outside Ref
}

// Follow makes a Follower.
func Follow(s *Shared, store Watching, o FollowOptions) *Follower {
	if o.MaxBytes == 0 {
		o.MaxBytes = DefaultFollowBytes
	}
	f := &Follower{p: NewProgram(s, store), store: store, options: o, looked: map[Ref]*looked{}}
	f.p.versions = store
	f.top = f.layer(s.root, nil, o.Range)
	f.root = &segment{of: f.top}
	f.mark(f.root)
	if o.Known != nil && !o.Quiet {
		for key, version := range o.Known {
			if r := o.Range; bytes.Compare(key, r.From) >= 0 && (r.To == nil || bytes.Compare(key, r.To) < 0) {
				f.know(f.top, key, version)
				if f.tooMany(); f.ended != nil {
					break
				}
			}
		}
	}
	return f
}

// tooMany ends the Follower if it knows more than it may.
func (f *Follower) tooMany() {
	if f.bytes > f.options.MaxBytes {
		f.ended = fmt.Errorf("%w: %d bytes, at most %d", ErrFollowed, f.bytes, f.options.MaxBytes)
	}
}

// layer makes a followed layer with one segment, which was not looked at.
func (f *Follower) layer(root Ref, prefix []byte, r Range) *followed {
	t := &followed{root: root, prefix: prefix, bounds: r}
	t.from, t.to = f.p.bounds(r)
	s := &segment{of: t, low: t.from, high: t.to, leaf: root}
	t.segments = []*segment{s}
	if !root.IsZero() {
		f.mark(s)
	}
	return t
}

// know adds a key that the receiver has.
func (f *Follower) know(t *followed, key []byte, version uint64) {
	s := t.segments[len(t.segments)-1]
	if !f.p.isLayerKey(key) {
		f.bytes += knownBytes + len(key)
		s.known = append(s.known, known{key: string(key), version: version})
		return
	}
	mark := string(f.p.layerKey(key))
	if n := len(s.known); n == 0 || s.known[n-1].key != mark {
		s.known = append(s.known, known{key: mark, below: f.layerOf(t, mark, Ref{})})
	}
	f.know(s.known[len(s.known)-1].below, key[f.p.limits.InlineKeyBytes:], version)
}

// layerOf is the layer of an entry.
func (f *Follower) layerOf(t *followed, mark string, root Ref) *followed {
	prefix := []byte(mark[:len(mark)-1])
	return f.layer(root, slices.Concat(t.prefix, prefix), Range{From: within(t.bounds.From, prefix), To: within(t.bounds.To, prefix)})
}

// mark has a segment looked at again.
func (f *Follower) mark(s *segment) {
	if !s.dirty && !s.gone {
		s.dirty = true
		f.dirty = append(f.dirty, s)
	}
}

// Changed says that an object of the tree is, or may be, at another version than was expected.
func (f *Follower) Changed(ref Ref) {
	if l := f.looked[ref]; l != nil {
		for _, s := range l.by {
			if s != f.root || len(l.by) == 1 { // else it is a leaf, and looked at for its keys
				f.mark(s)
			}
		}
	}
}

// Known is how many bytes the known keys take.
func (f *Follower) Known() int { return f.bytes }

// Next returns the next change. Not ok: all changes are told of which Changed has said anything.
//
// Errors: those of the store, behind which Next may be called again, and nothing is lost; ErrNoTree, ErrFollowed, for ever.
func (f *Follower) Next() (c Change, ok bool, err error) {
	for {
		for f.at < len(f.told) {
			t := &f.told[f.at]
			there := true
			if !t.outside.IsZero() {
				t.Value, err = f.store.Read(t.outside, nil)
				if there = !freed(err); there && err != nil {
					return c, false, err
				}
			}
			c = t.Change
			*t = told{}
			if f.at++; there { // else the leaf has a later version of the key by now, or none, and is expected to change
				return c, true, nil
			}
		}
		f.told, f.at = f.told[:0], 0
		if f.ended != nil {
			return c, false, f.ended
		}
		if len(f.dirty) == 0 {
			f.options.Quiet = false
			return c, false, nil
		}
		s := f.dirty[0]
		f.dirty = f.dirty[1:]
		if s.dirty = false; s.gone {
			continue
		}
		look := f.renew
		if s == f.root {
			look = f.lookAtRoot
		}
		if err := look(s); err != nil {
			f.mark(s)
			return c, false, err
		}
	}
}

// lookAtRoot ends the Follower if the root was freed.
func (f *Follower) lookAtRoot(s *segment) error {
	f.p.begin()
	defer f.p.end()
	pg, err := f.p.read(f.top.root)
	switch {
	case freed(err):
		f.ended = ErrNoTree
		return nil
	case err != nil:
		return err
	}
	return f.expect(s, pg)
}

// renew looks at the leaf that has the first keys of a segment now, and tells what is different in it.
func (f *Follower) renew(s *segment) error {
	t, p := s.of, f.p
	p.begin()
	defer p.end()
	p.root = t.root
	pg, by, err := f.look(s)
	switch {
	case errors.Is(err, ErrNoTree) && t != f.top:
		f.leave(s) // the leaf above has changed: the entry of the layer was removed before
		return nil
	case errors.Is(err, ErrNoTree):
		f.ended = err
		return nil
	case err != nil:
		return err
	}
	low, high := []byte(pg.low), pg.high
	if bytes.Compare(low, t.from) < 0 {
		low = t.from
	}
	if !pg.bounded() || t.to != nil && bytes.Compare(high, t.to) > 0 {
		high = t.to
	}
	now, was, old := f.replace(t, bytes.Clone(low), bytes.Clone(high), pg.ref)
	now.known = f.compare(now, was, pg)
	err = f.expect(now, pg)
	if err == nil && by != nil {
		err = f.expect(now, by)
	}
	for _, s := range old {
		f.leave(s)
	}
	if err != nil {
		f.mark(now)
	}
	f.tooMany()
	return err
}

// look returns the leaf that has the first key of a segment: READ, valid, and not absorbed when it was READ. by is the node
// that may absorb it.
func (f *Follower) look(s *segment) (pg, by *page, err error) {
	p, pr := f.p, probe{key: s.low}
	hint := s.leaf
	for range maxTries {
		p.giveBack()
		if !hint.IsZero() {
			pg, err = p.read(hint)
			if hint = (Ref{}); freed(err) || err == nil && (pg.level > 0 || pg.place(pr) != 0) {
				continue
			}
		} else {
			pg, err = p.find(pr, 0)
		}
		if err == nil {
			err = pg.valid()
		}
		if err != nil || !pg.frozen() {
			return pg, nil, err
		}
		by, err = p.read(pg.by)
		switch {
		case err == nil && by.stamp == pg.at:
			return pg, by, nil
		case err != nil && !freed(err):
			return nil, nil, err
		}
		// That node has changed since: by absorbing the leaf, or it never will before the leaf changes too.
		absorbed, err := p.absorbed(pg)
		if err != nil || !absorbed {
			return pg, nil, err
		}
	}
	return nil, nil, fmt.Errorf("%w: %q kept moving", ErrBusy, s.low)
}

// replace puts a new segment in the place of all that lie in [low, high). was is what they knew there. What they have beside is
// looked at again.
func (f *Follower) replace(t *followed, low, high []byte, leaf Ref) (now *segment, was []known, old []*segment) {
	i := sort.Search(len(t.segments), func(i int) bool { return ends(t.segments[i].high, low) })
	j := i
	now = &segment{of: t, low: low, high: high, leaf: leaf}
	put := make([]*segment, 0, 3)
	var right *segment
	for ; j < len(t.segments) && (high == nil || bytes.Compare(t.segments[j].low, high) < 0); j++ {
		s := t.segments[j]
		a, b := 0, len(s.known)
		if bytes.Compare(s.low, low) < 0 {
			a = s.place(low)
			put = append(put, &segment{of: t, low: s.low, high: low, known: s.known[:a:a], leaf: s.leaf})
		}
		if high != nil && ends(s.high, high) {
			b = s.place(high)
			right = &segment{of: t, low: high, high: s.high, known: s.known[b:], leaf: s.leaf}
		}
		was = append(was, s.known[a:b]...)
		s.gone = true
	}
	old = slices.Clone(t.segments[i:j])
	put = append(put, now)
	if right != nil {
		put = append(put, right)
	}
	t.segments = slices.Replace(t.segments, i, j, put...)
	for _, s := range put {
		if s != now {
			f.mark(s)
		}
	}
	return now, was, old
}

// ends says whether a stretch that ends at high has keys from at on.
func ends(high, at []byte) bool { return high == nil || bytes.Compare(high, at) > 0 }

// place is how many known keys are below a key.
func (s *segment) place(key []byte) int {
	return sort.Search(len(s.known), func(i int) bool { return s.known[i].key >= string(key) })
}

// compare tells how the leaf of a segment differs from what was known, and returns what is known now.
func (f *Follower) compare(s *segment, was []known, pg *page) []known {
	from, to := 0, pg.count
	if !bytes.Equal(s.low, pg.low) {
		from, _ = pg.search(s.low, false)
	}
	if s.high != nil && !bytes.Equal(s.high, pg.high) {
		to, _ = pg.search(s.high, false)
	}
	now := make([]known, 0, max(0, to-from))
	stamp := max(pg.stamp, s.of.floor) // a new layer's leaves begin at 0; the layer before it may have had the keys
	var key []byte
	for i := from; i < to; i++ {
		e, _ := pg.leaf(i)
		key = pg.appendKey(key[:0], i)
		for len(was) > 0 && was[0].key < string(key) {
			f.remove(s.of, &was[0], stamp)
			was = was[1:]
		}
		k := known{version: e.version}
		if len(was) > 0 && was[0].key == string(key) {
			k.key, k.below = was[0].key, was[0].below
			if e.version != was[0].version && !e.layer() {
				f.put(s.of, key, &e)
			}
			was = was[1:]
		} else {
			k.key = string(key)
			if f.bytes += knownBytes + len(key); !e.layer() {
				f.put(s.of, key, &e)
			}
		}
		if e.layer() {
			root, _ := e.outside()
			k.below = f.enter(s.of, &k, root)
			k.below.floor = e.version
		}
		now = append(now, k)
	}
	for i := range was {
		f.remove(s.of, &was[i], stamp)
	}
	return now
}

// enter follows the layer of an entry. Another layer than before is compared with what is known of that one.
func (f *Follower) enter(t *followed, k *known, root Ref) *followed {
	switch below := k.below; {
	case below == nil:
		return f.layerOf(t, k.key, root)
	case below.root != root:
		below.root = root
		for _, s := range below.segments {
			s.leaf = root
			f.mark(s)
		}
	}
	return k.below
}

// put tells of a key's value.
func (f *Follower) put(t *followed, key []byte, e *leafEntry) {
	if f.options.Quiet {
		return
	}
	c := told{Change: Change{Key: slices.Concat(t.prefix, key), Version: e.version}}
	switch {
	case f.options.KeysOnly, e.external && f.options.LeafValues:
	case e.external:
		c.outside, _ = e.outside()
	default:
		c.Value = bytes.Clone(e.value)
	}
	f.told = append(f.told, c)
}

// remove tells that a key is gone, or all keys of a layer are.
func (f *Follower) remove(t *followed, k *known, stamp uint64) {
	f.bytes -= knownBytes + len(k.key)
	if k.below == nil {
		f.told = append(f.told, told{Change: Change{Key: append(bytes.Clone(t.prefix), k.key...), Version: stamp, Deleted: true}})
		return
	}
	for _, s := range k.below.segments {
		s.gone = true
		f.leave(s)
		for i := range s.known {
			f.remove(k.below, &s.known[i], stamp)
		}
	}
}

// expect has a segment looked at again when a node changes that was read. Other segments that know an earlier version of the node
// are looked at again at once: the store tells of versions behind this one alone.
func (f *Follower) expect(s *segment, pg *page) error {
	l := f.looked[pg.ref]
	if l == nil {
		l = &looked{version: pg.version}
		f.looked[pg.ref] = l
	}
	if l.version != pg.version {
		l.version = pg.version
		for _, other := range l.by {
			if other != f.root { // which knows no keys
				f.mark(other)
			}
		}
	}
	if !slices.Contains(l.by, s) {
		l.by = append(l.by, s)
		s.expected = append(s.expected, pg.ref)
	}
	return f.store.Expect(pg.ref, pg.version)
}

// leave ends what a segment expects.
func (f *Follower) leave(s *segment) {
	for _, ref := range s.expected {
		l := f.looked[ref]
		l.by = slices.DeleteFunc(l.by, func(other *segment) bool { return other == s })
		switch {
		case len(l.by) == 0:
			delete(f.looked, ref)
			f.store.Forget(ref)
		case len(l.by) == 1 && l.by[0] == f.root:
			f.mark(f.root) // it was a leaf
		}
	}
	s.expected = nil
}

// PrefixRange is the range of all keys that begin with a prefix.
func PrefixRange(prefix string) Range {
	r := Range{From: []byte(prefix)}
	n := len(prefix)
	for n > 0 && prefix[n-1] == 0xff {
		n--
	}
	if n > 0 {
		r.To = []byte(prefix[:n])
		r.To[n-1]++
	}
	return r
}

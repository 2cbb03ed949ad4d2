package btree

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto"
)

const (
	// DefaultCacheBytes holds the inner nodes of some ten million small entries.
	DefaultCacheBytes = 32 << 20
	// cacheWays is how many places a node may have: four keep 90 % of a full cache useful.
	cacheWays = 4
)

// Cache keeps copies of inner nodes. Commits do not invalidate it: an outdated node may lead a
// descent to the wrong leaf, and the fences of that leaf, which is always READ, show that. It is
// bounded in bytes and safe for many goroutines without locks: the Ref of a node determines the
// four slots that it may be in, and slots are changed by atomics.
type Cache struct {
	slots []atomic.Pointer[page] // sets of cacheWays; nil: empty. A page in a slot is never changed, but for its atomics
	node  int                    // bytes of one node, with its page
	hits  atomic.Uint64          // inner nodes taken from the cache
	miss  atomic.Uint64          // inner nodes READ
}

// newCache makes a cache for nodes of so many bytes of payload; 0 bytes keep nothing.
func newCache(bytes, room int) *Cache {
	// Beside the payload: copies of beginnings and children, pointers to cached children, and Go's headers.
	each := room + room/minInner*(17+proto.RefBytes) + 8*groupWords + 512
	return &Cache{slots: make([]atomic.Pointer[page], bytes/each/cacheWays*cacheWays), node: each}
}

// minInner is the least that an entry of an inner node takes: slot, length, Ref.
const minInner = 2 + 1 + proto.RefBytes

// head is the beginning of a key as a number of the same order.
func head(key []byte) uint64 {
	if len(key) >= 8 {
		return binary.BigEndian.Uint64(key)
	}
	var h uint64
	for i, c := range key {
		h |= uint64(c) << (56 - 8*i)
	}
	return h
}

// short is the beginning of a key and its length as a number of the same order: seven
// bytes, and 8 for all that is longer. Of keys that are not, equal numbers are equal
// keys: most separators need not be looked at themselves.
func short(key []byte) uint64 { return head(key)&^0xff | uint64(min(len(key), 8)) }

// groupEntries is how many beginnings of separators fill a cache line. A cached node
// keeps them in groups, each with its children behind it, and the first beginning of
// each group beside its head: a descent waits for memory twice in a node, for the
// lines of the head and for those of a group.
//
//	index: 8 beginnings, 8 children | 8 beginnings, 8 children | ...
const (
	groupEntries = 8
	groupWords   = 3 * groupEntries
	nearGroups   = 2 * groupEntries
	// beyond is above all beginnings: it fills what is left of a line.
	beyond = ^uint64(0)
)

// groups is how many groups of entries a cached node has.
func (pg *page) groups() int { return (int(pg.kids) + groupEntries - 1) / groupEntries }

// indexed prepares a node for the cache: it makes the numbers that descents compare in place of
// keys.
func (pg *page) indexed() {
	pg.shared, pg.height, pg.kids = uint16(pg.prefix), uint8(pg.level), uint16(pg.count)
	if pg.count > 1 {
		// What all separators begin with need not be compared one by one: the fences of
		// the outermost nodes share nothing.
		first, _ := pg.suffix(1)
		last, _ := pg.suffix(pg.count - 1)
		n := 0
		for n < min(len(first), len(last)) && first[n] == last[n] {
			n++
		}
		pg.lead = append(pg.space[:0], first[:n]...)
	}
	groups := pg.groups()
	fronts := pg.near[:]
	if groups > nearGroups {
		pg.far = make([]uint64, groups)
		fronts = pg.far
	}
	for i := range fronts {
		fronts[i] = beyond
	}
	pg.index = make([]uint64, groups*groupWords)
	if pg.level > 1 {
		pg.below = make([]atomic.Pointer[page], pg.count)
	}
	for g := range groups {
		group := pg.index[g*groupWords:][:groupWords]
		for j := range groupEntries {
			i := g*groupEntries + j
			if i >= pg.count {
				group[j] = beyond
				continue
			}
			if i > 0 {
				s, _ := pg.suffix(i)
				group[j] = short(s[len(pg.lead):])
			}
			kid, _ := pg.child(i)
			group[groupEntries+2*j], group[groupEntries+2*j+1] = uint64(kid.Addr), uint64(kid.Incarnation)
		}
		fronts[g] = group[0]
	}
}

// childOf is the entry that a descent follows, and its child. In a cached node it
// compares numbers, keys only where these are equal.
// Preconditions: place(pr) == 0, level > 0.
func (pg *page) childOf(pr probe) (i int, child proto.Ref, ok bool) {
	switch {
	case pg.index == nil:
		if i, ok = pg.childFor(pr); ok && i >= 0 {
			child, ok = pg.child(i)
		}
		return i, child, ok && i >= 0
	case pr.end:
		i = int(pg.kids) - 1
	default:
		i, _ = pg.route(pr.key[pg.shared:], !pr.before)
	}
	return i, pg.kid(i), true
}

// upTo counts the numbers of a line that are not above want. It has no branches, so that a processor
// that waits for the line mispredicts none.
func upTo(line *[groupEntries]uint64, want uint64) int {
	_, a := bits.Sub64(want, line[0], 0)
	_, b := bits.Sub64(want, line[1], 0)
	_, c := bits.Sub64(want, line[2], 0)
	_, d := bits.Sub64(want, line[3], 0)
	_, e := bits.Sub64(want, line[4], 0)
	_, f := bits.Sub64(want, line[5], 0)
	_, g := bits.Sub64(want, line[6], 0)
	_, h := bits.Sub64(want, line[7], 0)
	return groupEntries - int(a+b+c+d+e+f+g+h)
}

// route is the entry of a cached node that a descent for a key follows; the key is
// given without the node's prefix. touched depends on the lines that have the children
// next to it: they come together with the line that tells which of them it is.
func (pg *page) route(key []byte, orEqual bool) (i int, touched uint64) {
	if n := len(pg.lead); n > 0 {
		switch c := bytes.Compare(key[:min(n, len(key))], pg.lead); {
		case c < 0:
			return 0, 0
		case c > 0:
			return int(pg.kids) - 1, 0
		}
		key = key[n:]
	}
	want := short(key)
	groups := pg.groups()
	if groups > nearGroups {
		return pg.routeFar(key, want, orEqual), 0
	}
	// The first beginning of all is 0.
	g := upTo((*[groupEntries]uint64)(pg.near[:]), want) - 1
	if groups > groupEntries {
		g += upTo((*[groupEntries]uint64)(pg.near[groupEntries:]), want)
	}
	group := pg.index[g*groupWords:][:groupWords]
	touched = group[groupEntries] | group[2*groupEntries]
	j := upTo((*[groupEntries]uint64)(group), want) - 1
	if i = g*groupEntries + j; group[j] != want || i == 0 {
		return i, touched
	}
	return pg.routeFar(key, want, orEqual), touched
}

// routeFar is route where numbers do not decide, and for nodes of many groups.
func (pg *page) routeFar(key []byte, want uint64, orEqual bool) int {
	lo, hi := 1, int(pg.kids)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if at := pg.beginning(mid); at < want || at == want && pg.reached(mid, at, key, orEqual) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo - 1
}

// beginning is the number of separator i: its first bytes behind prefix and lead, and their
// count.
func (pg *page) beginning(i int) uint64 {
	if g := i / groupEntries; i%groupEntries == 0 && pg.far != nil {
		return pg.far[g]
	}
	return pg.index[i/groupEntries*groupWords+i%groupEntries]
}

// reached says whether a key, given without prefix and lead, comes behind the separator
// i, or with orEqual at it, if both have the same beginning.
func (pg *page) reached(i int, same uint64, key []byte, orEqual bool) bool {
	if same&0xff < 8 {
		return orEqual
	}
	s, _ := pg.suffix(i)
	c := bytes.Compare(s[len(pg.lead):], key)
	return c < 0 || c == 0 && orEqual
}

// kid is child i of a cached node.
func (pg *page) kid(i int) proto.Ref {
	at := i/groupEntries*groupWords + groupEntries + 2*(i%groupEntries)
	return proto.Ref{Addr: proto.Addr(pg.index[at]), Incarnation: proto.Incarnation(pg.index[at+1])}
}

// quick is the node of a level that should have a key, as far as the cache leads there. It
// compares no fences on the way: those of the node, once READ, show whether it is the right one.
func (p *Program) quick(key []byte, level int) (ref Ref, ok bool) {
	pg := p.cache.load(p.root)
	if pg != nil && int(pg.height) == level {
		return p.root, true
	}
	for n := uint64(1); pg != nil && len(key) >= int(pg.shared) && int(pg.height) > level; n++ {
		i, touched := pg.route(key[pg.shared:], true)
		if int(pg.height) == level+1 {
			p.touched |= touched // keeps the loads of these lines in the program
			p.hits += n
			return pg.kid(i), true
		}
		next := pg.below[i].Load()
		if next == nil {
			next = p.cache.link(pg, i)
		} else if !next.used.Load() {
			next.used.Store(true)
		}
		pg = next
	}
	return ref, false
}

// link finds child i of a cached node in the cache, and stores a pointer to it in the node, so
// that the next descent need not search.
func (c *Cache) link(pg *page, i int) *page {
	kid := c.load(pg.kid(i))
	if kid == nil {
		return nil
	}
	way := &pg.below[i]
	kid.above.Store(way)
	way.Store(kid)
	if kid.gone.Load() {
		way.CompareAndSwap(kid, nil)
	}
	return kid
}

// leave removes the pointer to a node that has left the cache. leave stores gone and then loads
// above; link stores above and then loads gone. So whichever comes second sees the other's store,
// and no node keeps a pointer to one that has left.
func (pg *page) leave() {
	pg.gone.Store(true)
	if way := pg.above.Load(); way != nil {
		way.CompareAndSwap(pg, nil)
	}
}

// set is the slots that a node may be in.
func (c *Cache) set(ref proto.Ref) []atomic.Pointer[page] {
	if len(c.slots) == 0 {
		return nil
	}
	h := uint64(ref.Addr)*0x9e3779b97f4a7c15 ^ uint64(ref.Incarnation)
	h ^= h >> 32
	at := int(h%uint64(len(c.slots)/cacheWays)) * cacheWays
	return c.slots[at : at+cacheWays]
}

// load is the cached node of a Ref, and marks it as used; nil: it is not cached.
func (c *Cache) load(ref proto.Ref) *page {
	set := c.set(ref)
	for i := range set {
		if p := set[i].Load(); p != nil && p.ref == ref {
			if !p.used.Load() {
				p.used.Store(true)
			}
			return p
		}
	}
	return nil
}

// store caches a copy of an inner node that has just been READ. It replaces an outdated copy, or
// takes an empty slot, or the slot of a node that has not been used since the last store in the
// set.
func (c *Cache) store(from *page) {
	set := c.set(from.ref)
	if set == nil || from.level == 0 {
		return
	}
	at := -1
	for i := range set {
		p := set[i].Load()
		if p == nil || p.ref == from.ref {
			at = i
			break
		}
	}
	if at < 0 {
		for i := range set {
			p := set[i].Load()
			if p == nil {
				at = i
				break
			}
			if !p.used.Swap(false) && at < 0 {
				at = i
			}
		}
		if at < 0 {
			at = int(from.stamp) % cacheWays
		}
	}
	cp := &page{ref: from.ref, cached: true}
	b := append(make([]byte, 0, len(from.raw)), from.raw...)
	cp.view, _ = parse(b)
	cp.indexed()
	if old := set[at].Swap(cp); old != nil {
		old.leave()
	}
}

// drop takes a node out of the cache, because it led a descent to a wrong place or is freed.
func (c *Cache) drop(ref proto.Ref) {
	set := c.set(ref)
	for i := range set {
		if p := set[i].Load(); p != nil && p.ref == ref {
			if set[i].CompareAndSwap(p, nil) {
				p.leave()
			}
		}
	}
}

// CacheStats are the counters of a cache.
type CacheStats struct {
	Hits     uint64 `json:"hits"`      // inner nodes taken from the cache
	Misses   uint64 `json:"misses"`    // inner nodes READ
	Nodes    int    `json:"nodes"`     // in the cache now
	Bytes    int    `json:"bytes"`     // that they take
	MaxBytes int    `json:"max_bytes"` // that the cache may take
	Levels   int    `json:"levels"`    // of the tree as far as the cache knows: 1 where it has no inner node
}

// Stats of the cache. Not for the hot path.
func (c *Cache) Stats() CacheStats {
	s := CacheStats{Hits: c.hits.Load(), Misses: c.miss.Load(), MaxBytes: len(c.slots) * c.node, Levels: 1}
	for i := range c.slots {
		if p := c.slots[i].Load(); p != nil {
			s.Nodes++
			s.Levels = max(s.Levels, int(p.height)+1)
			s.Bytes += cap(p.raw) + 8*(cap(p.index)+cap(p.far)+cap(p.below)) + 512
		}
	}
	return s
}

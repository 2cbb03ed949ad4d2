package btree

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto"
)

const (
	// DefaultCacheBytes holds the inner nodes of some ten million small entries.
	DefaultCacheBytes = 32 << 20
	// cacheWays is how many places a node may have: four keep 90 % of a full cache useful.
	cacheWays = 4
)

// Cache keeps inner nodes, never told when they change: what is read through it
// proves itself. Bounded in bytes, safe for many goroutines, no locks: a node is
// in one of four places that its Ref names.
type Cache struct {
	slots []atomic.Pointer[page]
	node  int
	hits  atomic.Uint64
	miss  atomic.Uint64
}

// newCache makes a cache for nodes of so many bytes of payload; 0 bytes keep nothing.
func newCache(bytes, room int) *Cache {
	// Beside the payload: its heads and children once more, and what Go needs.
	each := room + room/minInner*(9+proto.RefBytes) + 8*(groupWords+groupEntries) + 256
	return &Cache{slots: make([]atomic.Pointer[page], bytes/each/cacheWays*cacheWays), node: each}
}

// minInner is the least that an entry of an inner node takes: offset, length, Ref.
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
// keeps them in groups, each with its children behind it, and in front of the groups
// the first beginning of each, filled up to whole lines: a descent looks at few lines,
// the last ones neighbours.
//
//	index: first of group 0, 1, ... | 8 beginnings, 8 children | 8 beginnings, 8 children | ...
const (
	groupEntries = 8
	groupWords   = 3 * groupEntries
)

// frontWords is what the first beginnings of so many groups take.
func frontWords(groups int) int { return (groups + groupEntries - 1) &^ (groupEntries - 1) }

// indexed prepares a cached node for descents.
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
		pg.lead = first[:n]
	}
	groups := (pg.count + groupEntries - 1) / groupEntries
	front := frontWords(groups)
	pg.index = make([]uint64, front+groups*groupWords)
	for i := range pg.count {
		s, _ := pg.suffix(i)
		kid, _ := pg.child(i)
		at := front + i/groupEntries*groupWords + i%groupEntries
		if i > 0 {
			pg.index[at] = short(s[len(pg.lead):])
		}
		if i%groupEntries == 0 {
			pg.index[i/groupEntries] = pg.index[at]
		}
		at += groupEntries + i%groupEntries
		pg.index[at], pg.index[at+1] = uint64(kid.Addr), uint64(kid.Life)
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
		i = pg.route(pr.key[pg.shared:], !pr.before)
	}
	return i, pg.kid(i), true
}

// route is the entry of a cached node that a descent for a key follows; the key is
// given without the node's prefix.
func (pg *page) route(key []byte, orEqual bool) int {
	n := len(pg.lead)
	if n > 0 {
		switch c := bytes.Compare(key[:min(n, len(key))], pg.lead); {
		case c < 0:
			return 0
		case c > 0:
			return int(pg.kids) - 1
		}
	}
	want := short(key[n:])
	groups := (int(pg.kids) + groupEntries - 1) / groupEntries
	lo, hi := 1, groups
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if at := pg.index[mid]; at < want || at == want && pg.reached(mid*groupEntries, at, key, orEqual) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	first := (lo - 1) * groupEntries
	i := first + 1
	group := pg.index[frontWords(groups)+(lo-1)*groupWords:][:groupEntries]
	for end := min(first+groupEntries, int(pg.kids)); i < end; i++ {
		if at := group[i-first]; at > want || at == want && !pg.reached(i, at, key, orEqual) {
			break
		}
	}
	return i - 1
}

// reached says whether a key comes behind the separator i, or with orEqual at it, if
// both have the same beginning.
func (pg *page) reached(i int, same uint64, key []byte, orEqual bool) bool {
	if same&0xff < 8 {
		return orEqual
	}
	s, _ := pg.suffix(i)
	c := bytes.Compare(s, key)
	return c < 0 || c == 0 && orEqual
}

// kid is child i of a cached node.
func (pg *page) kid(i int) proto.Ref {
	groups := (int(pg.kids) + groupEntries - 1) / groupEntries
	at := frontWords(groups) + i/groupEntries*groupWords + groupEntries + 2*(i%groupEntries)
	return proto.Ref{Addr: proto.Addr(pg.index[at]), Life: proto.Life(pg.index[at+1])}
}

// quick is the node of a level that should have a key, as far as the cache knows. It
// looks at no fences: the node's own tell whether it is the right one.
func (p *Program) quick(key []byte, level int) (ref Ref, ok bool) {
	ref = p.root
	for n := uint64(1); n < maxLevel; n++ {
		pg := p.cache.load(ref)
		if pg == nil || len(key) < int(pg.shared) {
			return ref, false
		}
		if int(pg.height) == level {
			return ref, true // the root
		}
		ref = pg.kid(pg.route(key[pg.shared:], true))
		if int(pg.height) == level+1 {
			p.cache.hits.Add(n)
			return ref, true
		}
	}
	return ref, false
}

func (c *Cache) set(ref proto.Ref) []atomic.Pointer[page] {
	if len(c.slots) == 0 {
		return nil
	}
	h := uint64(ref.Addr)*0x9e3779b97f4a7c15 ^ uint64(ref.Life)
	h ^= h >> 32
	at := int(h%uint64(len(c.slots)/cacheWays)) * cacheWays
	return c.slots[at : at+cacheWays]
}

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

// store keeps a copy of an inner node just read. The place of a node that has not
// been used since another was stored beside it goes first, the lowest level before others.
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
	set[at].Store(cp)
}

func (c *Cache) drop(ref proto.Ref) {
	set := c.set(ref)
	for i := range set {
		if p := set[i].Load(); p != nil && p.ref == ref {
			set[i].CompareAndSwap(p, nil)
		}
	}
}

// CacheStats tell how well the cache does.
type CacheStats struct {
	Hits     uint64 `json:"hits"`
	Misses   uint64 `json:"misses"`
	Nodes    int    `json:"nodes"`
	Bytes    int    `json:"bytes"`
	MaxBytes int    `json:"max_bytes"`
	Levels   int    `json:"levels"` // of the tree as far as the cache knows: 1 where it has no inner node
}

// Stats of the cache. Not for the hot path.
func (c *Cache) Stats() CacheStats {
	s := CacheStats{Hits: c.hits.Load(), Misses: c.miss.Load(), MaxBytes: len(c.slots) * c.node, Levels: 1}
	for i := range c.slots {
		if p := c.slots[i].Load(); p != nil {
			s.Nodes++
			s.Levels = max(s.Levels, int(p.height)+1)
			s.Bytes += cap(p.raw) + 8*cap(p.index) + 256
		}
	}
	return s
}

package btree

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/quarrystore/quarry/proto"
)

// This file makes whole nodes: it decodes a node into entries, changes these, and encodes them
// again. Splits, merges and loads use it; a write of one key changes the encoded node
// (splice.go).

// entry is one entry with its whole key. In a leaf it is a value, in an inner node a child.
type entry struct {
	key      []byte    // with the node's prefix
	value    []byte    // or Ref and length of an external one
	external bool      // the value is an object of its own, or a layer
	version  uint64    // stamp of the commit that put the value
	child    proto.Ref // of an inner entry
}

// node is a decoded node. Its fields are those of the layout in the package comment.
type node struct {
	level   int         // 0: a leaf
	class   proto.Class // of its slab
	stamp   uint64      // rises with every commit of the node
	right   proto.Ref   // its right sibling; zero: none
	by      proto.Ref   // the node that is to absorb it; zero: not frozen
	at      uint64      // the stamp that by had when it froze this node
	dead    bool        // the root of a layer that has been given up
	wide    bool        // of a tree whose keys go by the room of STAGED slabs
	low     []byte      // low fence: the smallest key that it may hold
	high    []byte      // nil: no upper end
	entries []entry     // in the order of their keys
}

// node decodes v. The copy owns its keys; values alias v.
// Preconditions: v is valid.
func (v *view) node() *node {
	n := &node{level: v.level, class: v.class, stamp: v.stamp, right: v.right, by: v.by, at: v.at, dead: v.dead(), wide: v.wide(),
		low: bytes.Clone(v.low), entries: make([]entry, v.count)}
	if v.bounded() {
		n.high = bytes.Clone(v.high)
	}
	keys := make([]byte, 0, len(v.raw)+v.count*v.prefix)
	for i := range n.entries {
		from := len(keys)
		keys = v.appendKey(keys, i)
		e := entry{key: keys[from:len(keys):len(keys)]}
		if v.level > 0 {
			e.child, _ = v.child(i)
		} else {
			l, _ := v.leaf(i)
			e.value, e.external, e.version = l.value, l.external, l.version
		}
		n.entries[i] = e
	}
	return n
}

// common is the number of bytes that two keys share at their beginning.
func common(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// prefix is how many bytes all keys of the node share, by its fences.
func (n *node) prefix() int {
	if n.high == nil {
		return 0
	}
	return common(n.low, n.high)
}

// varintBytes is the length of a varint.
func varintBytes(x uint64) int {
	k := 1
	for ; x >= 0x80; x >>= 7 {
		k++
	}
	return k
}

// valueHead is what the length of a value is written as.
func valueHead(value int, external bool) uint64 {
	if external {
		return uint64(value)<<(1+codecBits) | 1
	}
	return uint64(value) << 1
}

// leafBytes is the room of a leaf entry, its slot included.
func leafBytes(suffix, value int, external bool, version uint64) int {
	return 2 + varintBytes(uint64(suffix)) + varintBytes(valueHead(value, external)) + varintBytes(version) + suffix + value
}

// entrySize is how many bytes entry i takes in a node with that prefix.
func (n *node) entrySize(i, prefix int) int {
	e := &n.entries[i]
	if n.level == 0 {
		return leafBytes(len(e.key)-prefix, len(e.value), e.external, e.version)
	}
	s := len(e.key) - prefix
	if i == 0 {
		s = 0
	}
	return 2 + varintBytes(uint64(s)) + s + proto.RefBytes
}

// fenceBytes is the room of a high fence.
func fenceBytes(high []byte) int {
	if high == nil {
		return 0
	}
	return varintBytes(uint64(len(high))) + len(high)
}

// size is the length of the node's encoding without spare slots.
func (n *node) size() int {
	total, p := headBytes+len(n.low)+fenceBytes(n.high), n.prefix()
	for i := range n.entries {
		total += n.entrySize(i, p)
	}
	return total
}

// encode writes the node's payload to b, in order and without waste. Of the room that is left,
// spare slots take their part.
func (n *node) encode(b []byte, room int) []byte {
	p, size := n.prefix(), n.size()
	slots := len(n.entries)
	slots += spareSlots(slots, size-headBytes-len(n.low)-fenceBytes(n.high), room-size)
	b = appendHead(b[:0], n, p, slots)
	at := len(b)
	b = append(b, make([]byte, 2*slots)...)
	if n.high != nil {
		binary.LittleEndian.PutUint16(b[36:], uint16(len(b)))
		b = binary.AppendUvarint(b, uint64(len(n.high)))
		b = append(b, n.high...)
	}
	for i := range n.entries {
		binary.LittleEndian.PutUint16(b[at+2*i:], uint16(len(b)))
		e := &n.entries[i]
		if n.level == 0 {
			b = appendLeaf(b, e.key[p:], e.value, e.external, e.version)
			continue
		}
		var s []byte
		if i > 0 {
			s = e.key[p:]
		}
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
		b, _ = e.child.AppendBinary(b)
	}
	return b
}

// appendHead appends all that stands before the slots. The high fence is not there.
func appendHead(b []byte, n *node, prefix, slots int) []byte {
	var flags uint8
	if n.dead {
		flags |= flagDead
	}
	if n.wide {
		flags |= flagWide
	}
	for i := range n.entries {
		if e := &n.entries[i]; e.external && e.value[len(e.value)-1] == 0 {
			flags |= flagLayers
		}
	}
	b = append(b, nodeFormat, byte(n.level), byte(n.class), flags)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(n.entries)))
	b = binary.LittleEndian.AppendUint16(b, uint16(slots))
	b = binary.LittleEndian.AppendUint64(b, n.stamp)
	b, _ = n.right.AppendBinary(b)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(n.low)))
	b = binary.LittleEndian.AppendUint16(b, uint16(prefix))
	b = append(b, 0, 0, 0, 0)
	b, _ = n.by.AppendBinary(b)
	b = binary.LittleEndian.AppendUint64(b, n.at)
	return append(b, n.low...)
}

// appendLeaf encodes an entry of a leaf.
func appendLeaf(b, suffix, value []byte, external bool, version uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(suffix)))
	b = append(b, suffix...)
	b = binary.AppendUvarint(b, valueHead(len(value), external))
	b = binary.AppendUvarint(b, version)
	return append(b, value...)
}

// between is the shortest key above a and not above b: separators of leaves need
// not be whole keys. Preconditions: a < b.
func between(a, b []byte) []byte { return b[:common(a, b)+1] }

// cut splits n before entry i, with sep as the fence between the two nodes: n keeps the lower
// entries, the returned node has the upper ones. The caller sets n.right.
func (n *node) cut(i int, sep []byte) *node {
	r := &node{level: n.level, class: n.class, wide: n.wide, stamp: n.stamp, right: n.right, low: bytes.Clone(sep), high: n.high, entries: n.entries[i:]}
	n.entries, n.high, n.stamp = n.entries[:i:i], r.low, n.stamp+1
	return r
}

// run is how many keys make a run: they rise in the order in which they were put, and belong to the
// newest third of their leaf, or are the newest. Of keys in random order three neighbours often rise, but seldom are the newest.
const run = 3

// cutFor splits n to make room for a key, at the key or in halves.
func (n *node) cutFor(key []byte, room int) (right *node, atKey bool) {
	if i, sep, ok := n.place(key); ok {
		// The fence may be longer than what moves out.
		left := *n
		if right = left.cut(i, sep); left.size() <= room && right.size() <= room {
			*n = left
			return right, true
		}
	}
	return n.cut(n.half()), false
}

// place is where to cut n other than in halves, and the fence there. A leaf is cut at the key if
// the key continues a run: what follows the key moves out, or nothing does and the new node
// begins with the key. So the node that the run has filled stays full. ok is false: cut in
// halves.
// Preconditions: low <= key < high.
func (n *node) place(key []byte) (i int, sep []byte, ok bool) {
	end := len(n.entries)
	i, there := n.find(key)
	last := i == end && n.high == nil
	switch {
	case n.level > 0:
		return end - 1, n.entries[end-1].key, last
	case there || i == 0 || !last && !n.rising(i):
		return 0, nil, false
	case i == end:
		return i, between(n.entries[i-1].key, key), true
	}
	return i, between(key, n.entries[i].key), true
}

// rising says whether a run ends before place i of a leaf. Versions tell the order of the puts. One
// older entry may lie within the run: key:10 does within key:1, key:2 ... key:10, key:11.
func (n *node) rising(i int) bool {
	last, found, older := ^uint64(0), 0, 0
	for k := i - 1; k >= 0 && found < run && older < 2; k-- {
		v := n.entries[k].version
		if v < last && n.newer(v) < max(run, (len(n.entries)+2)/3) {
			last = v
			found++
		} else {
			older++
		}
	}
	return found == run && older < 2
}

// newer is how many entries were put behind version v.
func (n *node) newer(v uint64) (k int) {
	for i := range n.entries {
		if n.entries[i].version > v {
			k++
		}
	}
	return k
}

// half is where to cut n so that both sides have about the same size, and the fence there.
// 1 <= i < len.
func (n *node) half() (i int, sep []byte) {
	p := n.prefix()
	total := 0
	for i := range n.entries {
		total += n.entrySize(i, p)
	}
	last := len(n.entries) - 1
	for sum := 0; i < last; i++ {
		s := n.entrySize(i, p)
		if 2*sum+s >= total {
			break
		}
		sum += s
	}
	i = max(1, i)
	if sep = n.entries[i].key; n.level == 0 {
		sep = between(n.entries[i-1].key, sep)
	}
	return i, sep
}

// union is l with all entries of r, its right sibling.
func union(l, r *node) *node {
	return &node{level: l.level, class: l.class, wide: l.wide, stamp: max(l.stamp, r.stamp) + 1, right: r.right, low: l.low, high: r.high,
		entries: slices.Concat(l.entries, r.entries)}
}

// find is the place of a key among the entries, and whether it is there.
func (n *node) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(n.entries, key, func(e entry, k []byte) int { return bytes.Compare(e.key, k) })
}

package btree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

const (
	nodeFormat = 2
	headBytes  = 64

	flagDead   = 1 // the root of a layer that is no longer in use; see layer.go
	flagLayers = 2 // a leaf that may have entries which lead to layers
	flagWide   = 4 // of all nodes of a tree: its keys may be as long as the room of STAGED slabs allows; see limits

	// codecBits, beside the bit that marks an external value, are to say how it is compressed: 0 for not at all.
	// Others are refused.
	codecBits = 2
	codecMask = 1<<codecBits - 1

	// maxLevel: a tree of two-way nodes of that height does not fit the address space.
	maxLevel = 60
)

var (
	// ErrCorrupt: a slab of the tree does not hold a valid node, or holds another node than its parent
	// says.
	ErrCorrupt = errors.New("btree: damaged tree: run fsck")
	// ErrFormat: the tree is of a build whose nodes have another format. Nothing is changed.
	ErrFormat = errors.New("btree: tree of another format")
)

// view is an encoded node whose head has been parsed. Its slices alias raw.
// Invariant: valid has accepted raw, or the caller does so before it follows an offset.
type view struct {
	raw    []byte      // the payload
	level  int         // 0: a leaf
	class  proto.Class // of its slab
	flags  uint8       // flagDead, flagLayers, flagWide
	count  int         // entries
	stamp  uint64      // rises with every commit of the node
	right  proto.Ref   // its right sibling; zero: none
	by     proto.Ref   // the node that is to absorb this one, as long as it has the stamp at; zero: not frozen
	at     uint64      // see by
	low    []byte      // low fence
	high   []byte      // none: no upper end
	prefix int         // bytes that all keys share, and entries leave out
	slots  int         // where the slots begin
	heap   int         // where they end, and the heap begins
	waste  int         // bytes of the heap that belong to nothing
}

// bounded says whether the node has an upper end.
func (v *view) bounded() bool { return len(v.high) > 0 }

// frozen says whether another node is about to absorb it, or has.
func (v *view) frozen() bool { return !v.by.IsZero() }

// dead says whether it is the root of a layer that has been given up.
func (v *view) dead() bool { return v.flags&flagDead != 0 }

// layers says whether entries may lead to layers.
func (v *view) layers() bool { return v.flags&flagLayers != 0 }

// wide says whether keys and values go by the room of STAGED slabs.
func (v *view) wide() bool { return v.flags&flagWide != 0 }

// filled is the length of the node without waste and spare slots.
func (v *view) filled() int { return len(v.raw) - v.waste - (v.heap - v.slots) + 2*v.count }

// corrupt is the error for a node that no program of this version has written.
func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// parse decodes and checks a node's head. Entries are checked when they are used, or all by valid.
func parse(b []byte) (v view, err error) {
	if len(b) > 0 && b[0] != nodeFormat {
		return v, fmt.Errorf("%w: node format %d, this build reads %d: %s", ErrFormat, b[0], nodeFormat, proto.WayOver)
	}
	if len(b) < headBytes || len(b) > 1<<16 {
		return v, corrupt("node of %d bytes", len(b))
	}
	v = view{raw: b, level: int(b[1]), class: proto.Class(b[2]), flags: b[3],
		count: int(binary.LittleEndian.Uint16(b[4:])), stamp: proto.Word(b, 8), right: proto.DecodeRef(b[16:]),
		prefix: int(binary.LittleEndian.Uint16(b[34:])), waste: int(binary.LittleEndian.Uint16(b[38:])),
		by: proto.DecodeRef(b[40:]), at: proto.Word(b, 56)}
	slots := int(binary.LittleEndian.Uint16(b[6:]))
	v.slots = headBytes + int(binary.LittleEndian.Uint16(b[32:]))
	v.heap = v.slots + 2*slots
	if v.level > maxLevel || v.flags&^(flagDead|flagLayers|flagWide) != 0 || v.count > slots || v.heap+v.waste > len(b) {
		return v, corrupt("head %x of %d bytes", b[:headBytes], len(b))
	}
	v.low = b[headBytes:v.slots]
	if high := int(binary.LittleEndian.Uint16(b[36:])); high != 0 {
		if v.high = v.text(high); len(v.high) == 0 {
			return v, corrupt("node %q: no fence at %d of %d", v.low, high, len(b))
		}
	}
	return v, v.validHead()
}

// text is what lies at a place of the heap behind its length; nil if that leads out of it.
func (v *view) text(at int) []byte {
	if at < v.heap || at >= len(v.raw) {
		return nil
	}
	b := v.raw[at:]
	n, k := uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return nil
	}
	return b[k : k+int(n) : k+int(n)]
}

// validHead checks that fences, flags and counts agree.
func (v *view) validHead() error {
	low, high := len(v.low), len(v.high)
	switch {
	case v.prefix > min(low, high), v.bounded() != !v.right.IsZero(), v.level > 0 && v.count == 0:
		return corrupt("fences %q %q, prefix %d, right %v, %d entries at level %d", v.low, v.high, v.prefix, v.right, v.count, v.level)
	case v.bounded() && (bytes.Compare(v.low, v.high) >= 0 || !bytes.Equal(v.low[:v.prefix], v.high[:v.prefix])):
		return corrupt("fences %q and %q with a prefix of %d bytes", v.low, v.high, v.prefix)
	case v.layers() && v.level > 0, v.dead() && (v.level > 0 || v.count > 0 || v.bounded() || v.frozen()), !v.frozen() && v.at != 0:
		return corrupt("flags %#x at level %d with %d entries, frozen by %v at %d", v.flags, v.level, v.count, v.by, v.at)
	}
	return nil
}

// from is where entry i begins; not ok if its slot leads out of the heap.
func (v *view) from(i int) (at int, ok bool) {
	at = int(binary.LittleEndian.Uint16(v.raw[v.slots+2*i:]))
	return at, at >= v.heap && at < len(v.raw)
}

// suffix is the key of entry i without the node's prefix.
func (v *view) suffix(i int) (suffix []byte, ok bool) {
	at, ok := v.from(i)
	if !ok {
		return nil, false
	}
	b := v.raw[at:]
	n, k := uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return nil, false
	}
	return b[k : k+int(n)], true
}

// uvarint is binary.Uvarint with the one-byte case inlined.
func uvarint(b []byte) (uint64, int) {
	if len(b) > 0 && b[0] < 0x80 {
		return uint64(b[0]), 1
	}
	return binary.Uvarint(b)
}

// leafEntry is an entry of a leaf; its slices alias the node.
type leafEntry struct {
	suffix   []byte // of the key
	value    []byte // or Ref and length of an external one
	external bool   // the value is an object of its own, or a layer
	version  uint64 // stamp of the commit that put the value
}

// leaf is entry i of a leaf; false if it is damaged.
func (v *view) leaf(i int) (e leafEntry, ok bool) {
	at, ok := v.from(i)
	if !ok {
		return e, false
	}
	b := v.raw[at:]
	n, k := uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return e, false
	}
	e.suffix, b = b[k:k+int(n)], b[k+int(n):]
	m, k := uvarint(b)
	if k <= 0 {
		return e, false
	}
	b = b[k:]
	if e.version, k = uvarint(b); k <= 0 {
		return e, false
	}
	b = b[k:]
	n, e.external = valueBytes(m)
	if n > uint64(len(b)) {
		return e, false
	}
	e.value = b[:n:n]
	return e, !e.external || validOutside(e.value)
}

// valueBytes is the length of a value, from what it is written as; more than any value has if its codec is
// unknown.
func valueBytes(m uint64) (n uint64, external bool) {
	if n = m >> 1; m&1 == 0 {
		return n, false
	}
	if n&codecMask != 0 {
		return ^uint64(0), true
	}
	return n >> codecBits, true
}

// validOutside checks an external value: a Ref, and a length that a value can have.
func validOutside(b []byte) bool {
	if len(b) <= proto.RefBytes || !proto.DecodeRef(b).Valid() {
		return false
	}
	n, k := uvarint(b[proto.RefBytes:])
	// A last byte of 0 is a layer's: no longer length may end with it.
	return k == len(b)-proto.RefBytes && n <= MaxValueBytes && (k == 1 || b[len(b)-1] != 0)
}

// outside is where an external value is, and how long it is.
func (e *leafEntry) outside() (proto.Ref, int) {
	n, _ := binary.Uvarint(e.value[proto.RefBytes:])
	return proto.DecodeRef(e.value), int(n)
}

// layer says whether the entry leads to a layer: see layer.go. External values are
// never empty.
func (e *leafEntry) layer() bool { return e.external && e.value[len(e.value)-1] == 0 }

// child is the child in entry i of an inner node; false if the entry is damaged.
func (v *view) child(i int) (proto.Ref, bool) {
	at, ok := v.from(i)
	if !ok {
		return proto.Ref{}, false
	}
	_, child, end := v.innerAt(at)
	return child, end > 0
}

// innerAt is the entry at a place of an inner node, and where it ends; 0: no valid entry is there.
// Preconditions: heap <= at < len.
func (v *view) innerAt(at int) (suffix []byte, child proto.Ref, end int) {
	b := v.raw[at:]
	n, k := uvarint(b)
	if k <= 0 || len(b)-k < proto.RefBytes || n > uint64(len(b)-k-proto.RefBytes) {
		return nil, child, 0
	}
	to := k + int(n)
	return b[k:to], proto.DecodeRef(b[to:]), at + to + proto.RefBytes
}

// search is the number of entries whose key is below key, or, with orEqual, not
// above it. Preconditions: low <= key <= high. ok is false for a damaged node.
func (v *view) search(key []byte, orEqual bool) (int, bool) {
	key = key[v.prefix:]
	lo, hi := 0, v.count
	if v.level > 0 {
		lo = 1 // the first entry stands for the low fence
	}
	want := head(key)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		below, certain := v.below(mid, want)
		if !certain {
			s, ok := v.suffix(mid)
			if !ok {
				return 0, false
			}
			c := bytes.Compare(s, key)
			below = c < 0 || c == 0 && orEqual
		}
		if below {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, true
}

// below says whether entry i comes before all keys that begin with want, or behind
// them, if its first bytes tell.
func (v *view) below(i int, want uint64) (below, certain bool) {
	at := int(binary.LittleEndian.Uint16(v.raw[v.slots+2*i:]))
	if at < v.heap || at+9 > len(v.raw) || v.raw[at] >= 0x80 {
		return false, false
	}
	have := binary.BigEndian.Uint64(v.raw[at+1:])
	if n := v.raw[at]; n < 8 {
		have &^= ^uint64(0) >> (8 * n)
	}
	return have < want, have != want
}

// lookup finds a key in a leaf: its place, and whether it is there.
func (v *view) lookup(key []byte) (i int, e leafEntry, found bool, err error) {
	i, ok := v.search(key, false)
	if ok && i < v.count {
		if e, ok = v.leaf(i); ok {
			return i, e, bytes.Equal(e.suffix, key[v.prefix:]), nil
		}
	}
	if !ok {
		err = corrupt("leaf %q: entry %d of %d", v.low, i, v.count)
	}
	return i, e, false, err
}

// probe is the target of a descent: the node whose range has key; with before, the one whose range has
// the keys directly before key; with end, the last of the level.
type probe struct {
	key    []byte // within the layer
	before bool   // the keys directly before key
	end    bool   // the last keys of the level; key is not used
}

// place says where the probe's node is, relative to v: -1 left, 0 v itself, 1 right.
func (v *view) place(p probe) int {
	if p.end {
		if v.bounded() {
			return 1
		}
		return 0
	}
	if c := bytes.Compare(p.key, v.low); c < 0 || c == 0 && p.before {
		return -1
	}
	if v.bounded() {
		if c := bytes.Compare(p.key, v.high); c > 0 || c == 0 && !p.before {
			return 1
		}
	}
	return 0
}

// childFor is the entry that a descent follows. Preconditions: place(p) == 0, level > 0.
func (v *view) childFor(p probe) (i int, ok bool) {
	if p.end {
		return v.count - 1, true
	}
	i, ok = v.search(p.key, !p.before)
	return i - 1, ok
}

// appendKey appends the whole key of entry i.
func (v *view) appendKey(b []byte, i int) []byte {
	if v.level > 0 && i == 0 {
		return append(b, v.low...)
	}
	s, _ := v.suffix(i)
	return append(append(b, v.low[:v.prefix]...), s...)
}

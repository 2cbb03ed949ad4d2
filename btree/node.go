package btree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

const (
	nodeFormat  = 1
	headBytes   = 40
	frozenBytes = proto.RefBytes + 8

	flagBounded = 1 // the node has a high fence
	flagFrozen  = 2 // the node waits to be absorbed
	flagDead    = 4 // the root of a layer that is no longer in use; see layer.go
	flagLayers  = 8 // a leaf that may have entries which lead to layers

	// maxLevel: a tree of two-way nodes of that height does not fit the address space.
	maxLevel = 60
)

// ErrCorrupt: a slab of the tree does not hold a valid node, or holds another node than its parent
// says.
var ErrCorrupt = errors.New("btree: damaged tree: run fsck")

// view is an encoded node. It aliases the payload.
type view struct {
	raw    []byte
	level  int
	class  proto.Class
	flags  uint8
	count  int
	stamp  uint64
	right  proto.Ref
	by     proto.Ref // the node that is to absorb this one, as long as it has the stamp at
	at     uint64
	low    []byte
	high   []byte
	prefix int
	slots  int // where the offsets of the entries begin
}

func (v *view) bounded() bool { return v.flags&flagBounded != 0 }
func (v *view) frozen() bool  { return v.flags&flagFrozen != 0 }
func (v *view) dead() bool    { return v.flags&flagDead != 0 }
func (v *view) layers() bool  { return v.flags&flagLayers != 0 }

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// parse decodes and checks a node's head. Entries are checked when they are used, or all by valid.
func parse(b []byte) (v view, err error) {
	if len(b) < headBytes || len(b) > 1<<16 {
		return v, corrupt("node of %d bytes", len(b))
	}
	v = view{raw: b, level: int(b[1]), class: proto.Class(b[2]), flags: b[3],
		count: int(binary.LittleEndian.Uint16(b[4:])), stamp: proto.Word(b, 8), right: proto.DecodeRef(b[16:]),
		prefix: int(binary.LittleEndian.Uint16(b[34:]))}
	if b[0] != nodeFormat || v.level > maxLevel || v.flags&^(flagBounded|flagFrozen|flagDead|flagLayers) != 0 || binary.LittleEndian.Uint32(b[36:]) != 0 {
		return v, corrupt("head %x", b[:headBytes])
	}
	at := headBytes
	if v.frozen() {
		at += frozenBytes
	}
	low := int(binary.LittleEndian.Uint16(b[6:]))
	high := int(binary.LittleEndian.Uint16(b[32:]))
	v.slots = at + low + high
	if v.slots+2*v.count > len(b) {
		return v, corrupt("%d entries and fences of %d and %d bytes in %d", v.count, low, high, len(b))
	}
	if v.frozen() {
		v.by, v.at = proto.DecodeRef(b[headBytes:]), proto.Word(b, headBytes+proto.RefBytes)
	}
	v.low, v.high = b[at:at+low], b[at+low:v.slots]
	return v, v.validHead()
}

// validHead checks that fences, flags and counts agree.
func (v *view) validHead() error {
	low, high := len(v.low), len(v.high)
	switch {
	case v.prefix > min(low, high), v.bounded() != (high > 0), v.bounded() != !v.right.IsZero(), v.level > 0 && v.count == 0:
		return corrupt("fences %q %q, prefix %d, right %v, %d entries at level %d", v.low, v.high, v.prefix, v.right, v.count, v.level)
	case v.bounded() && (bytes.Compare(v.low, v.high) >= 0 || !bytes.Equal(v.low[:v.prefix], v.high[:v.prefix])):
		return corrupt("fences %q and %q with a prefix of %d bytes", v.low, v.high, v.prefix)
	case v.layers() && v.level > 0, v.dead() && (v.level > 0 || v.count > 0 || v.bounded() || v.frozen()):
		return corrupt("flags %#x at level %d with %d entries", v.flags, v.level, v.count)
	}
	return nil
}

// entryBytes is the encoded entry i; nil if its offsets are invalid.
func (v *view) entryBytes(i int) []byte {
	from, to := int(binary.LittleEndian.Uint16(v.raw[v.slots+2*i:])), len(v.raw)
	if i+1 < v.count {
		to = int(binary.LittleEndian.Uint16(v.raw[v.slots+2*i+2:]))
	}
	if from < v.slots+2*v.count || from >= to || to > len(v.raw) {
		return nil
	}
	return v.raw[from:to]
}

// suffix is the key of entry i without the node's prefix.
func (v *view) suffix(i int) (suffix []byte, ok bool) {
	b := v.entryBytes(i)
	n, at := uvarint(b)
	if at <= 0 || n > uint64(len(b)-at) {
		return nil, false
	}
	return b[at : at+int(n)], true
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
	suffix   []byte
	value    []byte // or Ref and length of an external one
	external bool
	version  uint64
}

func (v *view) leaf(i int) (e leafEntry, ok bool) {
	b := v.entryBytes(i)
	n, at := uvarint(b)
	if at <= 0 || n > uint64(len(b)-at) {
		return e, false
	}
	e.suffix, b = b[at:at+int(n)], b[at+int(n):]
	m, at := uvarint(b)
	if at <= 0 {
		return e, false
	}
	b = b[at:]
	if e.version, at = uvarint(b); at <= 0 {
		return e, false
	}
	e.value, e.external = b[at:], m&1 != 0
	return e, m>>1 == uint64(len(e.value)) && (!e.external || len(e.value) > proto.RefBytes)
}

// outside is where an external value is, and how long it is.
func (e *leafEntry) outside() (proto.Ref, int) {
	n, _ := binary.Uvarint(e.value[proto.RefBytes:])
	return proto.DecodeRef(e.value), int(n)
}

// layer says whether the entry leads to a layer: see layer.go. External values are
// never empty.
func (e *leafEntry) layer() bool { return e.external && e.value[len(e.value)-1] == 0 }

func (v *view) child(i int) (proto.Ref, bool) {
	b := v.entryBytes(i)
	n, at := uvarint(b)
	if at <= 0 || n != uint64(len(b)-at-proto.RefBytes) {
		return proto.Ref{}, false
	}
	return proto.DecodeRef(b[len(b)-proto.RefBytes:]), true
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
	if at < v.slots+2*v.count || at+9 > len(v.raw) || v.raw[at] >= 0x80 {
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
	key    []byte
	before bool
	end    bool
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

// valid checks all entries of a node. Every operation calls it, but those that read one entry of a
// leaf.
func (v *view) valid() error {
	b, next := v.raw, v.slots+2*v.count
	last := v.low[v.prefix:]
	for i := range v.count {
		from, to := int(binary.LittleEndian.Uint16(b[v.slots+2*i:])), len(b)
		if i+1 < v.count {
			to = int(binary.LittleEndian.Uint16(b[v.slots+2*i+2:]))
		}
		if from != next || from >= to || to > len(b) {
			return corrupt("node %q: entry %d of %d does not lie where it should", v.low, i, v.count)
		}
		e := b[from:to]
		next = to
		n, at := uvarint(e)
		if at <= 0 || n > uint64(len(e)-at) {
			return corrupt("node %q: entry %d of %d is cut short", v.low, i, v.count)
		}
		s, rest := e[at:at+int(n)], e[at+int(n):]
		if !v.validRest(i, s, rest) {
			return corrupt("node %q: entry %d of %d", v.low, i, v.count)
		}
		// In order, so only the first has to be compared with the low fence, which it
		// stands for in an inner node, and only the last with the high one.
		if v.level > 0 && i == 0 {
			continue
		}
		if c := bytes.Compare(last, s); c > 0 || c == 0 && i > 0 {
			return corrupt("node %q: entry %d of %d is out of order", v.low, i, v.count)
		}
		last = s
	}
	if v.bounded() && v.count > 0 && bytes.Compare(last, v.high[v.prefix:]) >= 0 {
		return corrupt("node %q: the last of %d entries is out of order", v.low, v.count)
	}
	if next != len(b) {
		return corrupt("node %q: %d bytes behind the last entry", v.low, len(b)-next)
	}
	return nil
}

// validRest checks what follows the suffix of entry i: a value, or the reference to a child, whose
// first has no suffix.
func (v *view) validRest(i int, suffix, rest []byte) bool {
	if v.level == 0 {
		return validValue(rest)
	}
	return len(rest) == proto.RefBytes && proto.DecodeRef(rest).Valid() && (i > 0 || len(suffix) == 0)
}

// validValue checks what follows the suffix of a leaf's entry: length, version, value.
func validValue(b []byte) bool {
	n, at := uvarint(b)
	if at <= 0 {
		return false
	}
	b = b[at:]
	for at = 0; at < len(b) && b[at] >= 0x80; at++ {
	}
	if at++; at > len(b) || at > binary.MaxVarintLen64 || at == binary.MaxVarintLen64 && b[at-1] > 1 {
		return false
	}
	size := uint64(len(b) - at)
	return n>>1 == size && (n&1 == 0 || size > proto.RefBytes)
}

// open is parse and valid.
func open(b []byte) (view, error) {
	v, err := parse(b)
	if err == nil {
		err = v.valid()
	}
	return v, err
}

package btree

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// open is parse and valid.
func open(b []byte) (view, error) {
	v, err := parse(b)
	if err == nil {
		err = v.valid()
	}
	return v, err
}

// valid checks all entries of a node. Every operation calls it, but those that read one entry of a
// leaf.
func (v *view) valid() error {
	if len(v.raw) > 4<<10 {
		return v.validLarge()
	}
	var edges [4<<10/64 + 1]uint64
	return v.validIn(edges[:len(v.raw)/64+1])
}

// validLarge is valid for nodes whose bits do not fit a small array.
func (v *view) validLarge() error {
	var edges [64<<10/64 + 1]uint64
	return v.validIn(edges[:len(v.raw)/64+1])
}

// validIn is valid with a bit for each byte of the node, and one behind them, all 0.
func (v *view) validIn(edges []uint64) error {
	last := v.low[v.prefix:]
	fence, tail := v.fence()
	edge(edges, fence)
	sum, rising := tail-fence, true
	for i := range v.count {
		from, ok := v.from(i)
		if !ok {
			return corrupt("node %q: slot %d of %d leads to %d, its heap is from %d to %d", v.low, i, v.count, from, v.heap, len(v.raw))
		}
		s, end := v.entryAt(i, from)
		if end == 0 {
			return corrupt("node %q: entry %d of %d", v.low, i, v.count)
		}
		if from != tail {
			edge(edges, tail)
			edge(edges, from)
			rising = rising && from > tail
		}
		sum += end - from
		tail = end
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
	edge(edges, tail)
	switch {
	case v.bounded() && v.count > 0 && bytes.Compare(last, v.high[v.prefix:]) >= 0:
		return corrupt("node %q: the last of %d entries is out of order", v.low, v.count)
	case sum+v.waste != len(v.raw)-v.heap:
		return corrupt("node %q: %d bytes of entries and %d of none in a heap of %d", v.low, sum, v.waste, len(v.raw)-v.heap)
	case !rising && covered(edges) != sum:
		return corrupt("node %q: entries overlap", v.low)
	}
	return nil
}

// edge marks where entries that lie side by side begin or end. Two marks in one place are none.
func edge(edges []uint64, at int) { edges[at/64] ^= 1 << (at % 64) }

// covered counts the bytes that lie in an odd number of entries. If no two overlap, that is the sum of their lengths.
func covered(edges []uint64) (n int) {
	in := uint64(0) // all ones where the last byte before a word belongs to such a number
	for _, x := range edges {
		if x == 0 {
			n += int(in & 64)
			continue
		}
		x ^= x << 1
		x ^= x << 2
		x ^= x << 4
		x ^= x << 8
		x ^= x << 16
		x ^= x<<32 ^ in
		n += bits.OnesCount64(x)
		in = uint64(int64(x) >> 63)
	}
	return n
}

// entryAt is the suffix of entry i, which begins at from, and where the entry ends; 0 if it is not valid.
func (v *view) entryAt(i, from int) (suffix []byte, end int) {
	if v.level > 0 {
		s, child, end := v.innerAt(from)
		if !child.Valid() || i == 0 && len(s) > 0 {
			return nil, 0
		}
		return s, end
	}
	b := v.raw[from:]
	n, k := uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return nil, 0
	}
	suffix, b = b[k:k+int(n)], b[k+int(n):]
	m, k := uvarint(b)
	if k <= 0 {
		return nil, 0
	}
	// The version is passed over: at most ten bytes, of which the last one is 0 or 1.
	b = b[k:]
	for k = 0; k < len(b) && b[k] >= 0x80; k++ {
	}
	if k++; k > len(b) || k > binary.MaxVarintLen64 || k == binary.MaxVarintLen64 && b[k-1] > 1 {
		return nil, 0
	}
	b = b[k:]
	n, external := valueBytes(m)
	if n > uint64(len(b)) || external && !validOutside(b[:n]) {
		return nil, 0
	}
	return suffix, len(v.raw) - len(b) + int(n)
}

// fence is where the high fence lies in the heap, with its length; nothing at the beginning if there is none.
func (v *view) fence() (from, to int) {
	if !v.bounded() {
		return v.heap, v.heap
	}
	from = int(binary.LittleEndian.Uint16(v.raw[36:]))
	_, k := uvarint(v.raw[from:])
	return from, from + k + len(v.high)
}

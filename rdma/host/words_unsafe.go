package host

import (
	"sync/atomic"
	"unsafe"

	"github.com/quarrystore/quarry/rdma"
)

// Region memory is touched by many processes at once. Everything here moves whole
// aligned words, so that 8 aligned bytes never tear:
//
//   - An aligned 8-byte MOV is single-copy atomic on amd64 (Intel SDM 3A 9.1.1,
//     AMD APM 2 7.3.2) and on arm64 (Arm ARM B2.2.1), the two architectures this
//     package is written for; both are little endian. Go's compiler neither splits,
//     repeats nor invents word accesses through a pointer. Plain stores are used for
//     WRITE because a sequentially consistent store costs twenty times as much. What
//     is longer goes by aligned 16-byte moves where these do not tear either: see
//     copy_amd64_unsafe.go.
//   - A word that a WRITE covers only in part is merged by CAS, so that a
//     neighbour's bytes in the same word are never put back to an older value.
//   - Order between verbs is made by Runner, not here.
//
// The race detector does not watch mapped memory. The simulator, whose regions are
// heap words, is where races are looked for.

// wordAt is the word of mem at off.
// Preconditions: off is a multiple of 8, off+8 <= len(mem), mem is aligned to 8.
func wordAt(mem []byte, off uint64) *uint64 {
	return (*uint64)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(mem)), off))
}

// halfAt is the low half of that word, on which threads sleep.
func halfAt(mem []byte, off uint64) *uint32 { return (*uint32)(unsafe.Pointer(wordAt(mem, off))) }

// copyOut copies len(dst) bytes of mem at off into private memory.
// Preconditions: off+len(dst) <= len(mem), a multiple of 8.
func copyOut(dst, mem []byte, off uint64) {
	if head := off & 7; head != 0 {
		k := min(8-head, uint64(len(dst)))
		spill(dst[:k], *wordAt(mem, off-head)>>(8*head))
		dst, off = dst[k:], off+k
	}
	src, to := unsafe.Add(unsafe.Pointer(unsafe.SliceData(mem)), off), unsafe.Pointer(unsafe.SliceData(dst))
	words := uint64(len(dst)) &^ 7
	i := uint64(0)
	if wide && words > shortBytes {
		loadWords(to, src, words)
		i = words
	}
	for ; i+32 <= words; i += 32 {
		s, t := (*[4]uint64)(unsafe.Add(src, i)), (*[4]uint64)(unsafe.Add(to, i))
		a, b, c, d := s[0], s[1], s[2], s[3]
		t[0], t[1], t[2], t[3] = a, b, c, d
	}
	for ; i < words; i += 8 {
		*(*uint64)(unsafe.Add(to, i)) = *(*uint64)(unsafe.Add(src, i))
	}
	if words < uint64(len(dst)) {
		spill(dst[words:], *wordAt(mem, off+words))
	}
}

// aheadBytes is how much memory is asked for ahead of the verb that runs: what the
// processor can have under way at once.
const aheadBytes = 4 << 10

// prefetch asks for the memory that the verbs after the first are going to touch, so
// that it is on its way while the first waits for its own. from is the first verb
// that has not been asked for yet, and so is what is returned.
func (w *window) prefetch(verbs []rdma.Verb, from int) int {
	var asked uint64
	for ; from < len(verbs) && asked < aheadBytes; from++ {
		v := &verbs[from]
		if n, size := uint64(len(v.Buf)), uint64(len(w.mem)); v.Op == rdma.Read && n > 0 && v.Off < size && n <= size-v.Off {
			n = min(n, aheadBytes)
			askFor(unsafe.Add(unsafe.Pointer(unsafe.SliceData(w.mem)), v.Off), n)
			asked += n
		}
	}
	return from
}

// Prefetch asks for memory that a verb is about to touch. That the window may have been
// unmapped meanwhile does not matter: asking never faults.
func (r *Runner) Prefetch(slot int32, off uint64, bytes int) {
	if uint(slot) >= uint(len(r.windows)) {
		return
	}
	w := &r.windows[slot]
	if n, size := uint64(bytes), uint64(len(w.mem)); bytes > 0 && w.target == nil && off < size && n <= size-off {
		askFor(unsafe.Add(unsafe.Pointer(unsafe.SliceData(w.mem)), off), n)
	}
}

// spill stores the low bytes of a word.
func spill(dst []byte, w uint64) {
	for i := range dst {
		dst[i] = byte(w)
		w >>= 8
	}
}

// copyIn copies private memory into mem at off.
// Preconditions: off+len(src) <= len(mem), a multiple of 8.
func copyIn(mem []byte, off uint64, src []byte) {
	if head := off & 7; head != 0 {
		k := min(8-head, uint64(len(src)))
		merge(wordAt(mem, off-head), src[:k], head)
		src, off = src[k:], off+k
	}
	from, to := unsafe.Pointer(unsafe.SliceData(src)), unsafe.Add(unsafe.Pointer(unsafe.SliceData(mem)), off)
	words := uint64(len(src)) &^ 7
	i := uint64(0)
	if wide && words > shortBytes {
		storeWords(to, from, words)
		i = words
	}
	for ; i+32 <= words; i += 32 {
		s, t := (*[4]uint64)(unsafe.Add(from, i)), (*[4]uint64)(unsafe.Add(to, i))
		a, b, c, d := s[0], s[1], s[2], s[3]
		t[0], t[1], t[2], t[3] = a, b, c, d
	}
	for ; i < words; i += 8 {
		*(*uint64)(unsafe.Add(to, i)) = *(*uint64)(unsafe.Add(from, i))
	}
	if words < uint64(len(src)) {
		merge(wordAt(mem, off+words), src[words:], 0)
	}
}

// merge replaces len(src) < 8 bytes of a word, from byte at on.
func merge(p *uint64, src []byte, at uint64) {
	var w, mask uint64
	for i, b := range src {
		shift := 8 * (at + uint64(i))
		w |= uint64(b) << shift
		mask |= 0xff << shift
	}
	for {
		old := atomic.LoadUint64(p)
		if atomic.CompareAndSwapUint64(p, old, old&^mask|w) {
			return
		}
	}
}

// compareSwap is CAS as the fabric knows it: it returns the word as it was before.
func compareSwap(p *uint64, expect, new uint64) uint64 {
	for {
		old := atomic.LoadUint64(p)
		if old != expect {
			return old
		}
		if atomic.CompareAndSwapUint64(p, expect, new) {
			return expect
		}
	}
}

// pageAt views the start of mapped memory as a gate page.
// Preconditions: len(mem) >= PageBytes.
func pageAt(mem []byte) *page { return (*page)(unsafe.Pointer(unsafe.SliceData(mem))) }

var _ = [1]struct{}{}[unsafe.Sizeof(page{})-PageBytes]

// put stores a word that only this lane writes and others only read for
// statistics. Not a Go atomic, which would cost more than the copy of a slab;
// hidden from the race detector for that reason.
//
//go:norace
func put(p *uint64, w uint64) { *p = w }

//go:norace
func peek(p *uint64) uint64 { return *p }

package cxl

import (
	"sync/atomic"
	"unsafe"
)

// words is how a side of the litmus touches the shared memory. Offsets of words are multiples of 8.
type words interface {
	load(off int) uint64
	store(off int, v uint64)
	add(off int, v uint64) (old uint64)
	cas(off int, expect, v uint64) (old uint64)
	// write and read copy whole words at a multiple of 8; within a copy nothing is ordered.
	write(off int, b []byte)
	read(off int, b []byte)
}

// mapped are the words of mapped memory, by the processor's own instructions: those that lanes use.
type mapped struct{ mem []byte }

// wordAt is a word of memory. Preconditions: off is a multiple of 8 within mem, whose address is one too.
func wordAt(mem []byte, off int) *uint64 { return (*uint64)(unsafe.Pointer(&mem[off : off+8][0])) }

func (m mapped) load(off int) uint64     { return atomic.LoadUint64(wordAt(m.mem, off)) }
func (m mapped) store(off int, v uint64) { atomic.StoreUint64(wordAt(m.mem, off), v) }

func (m mapped) add(off int, v uint64) uint64 { return atomic.AddUint64(wordAt(m.mem, off), v) - v }

// cas returns expect where it has stored, and another value where it has not.
func (m mapped) cas(off int, expect, v uint64) uint64 {
	for {
		if atomic.CompareAndSwapUint64(wordAt(m.mem, off), expect, v) {
			return expect
		}
		if old := m.load(off); old != expect {
			return old
		}
	}
}

func (m mapped) write(off int, b []byte) { copy(m.mem[off:off+len(b)], b) }
func (m mapped) read(off int, b []byte)  { copy(b, m.mem[off:off+len(b)]) }

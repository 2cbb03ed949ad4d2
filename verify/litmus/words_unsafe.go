package litmus

import (
	"sync/atomic"
	"unsafe"
)

// Processor accesses to the region that the device writes to as well.
// Preconditions: off is a multiple of 8, off+8 <= len(mem), mem is mapped.

func word(mem []byte, off uint64) *uint64 {
	return (*uint64)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(mem)), off))
}

func load(mem []byte, off uint64) uint64 { return atomic.LoadUint64(word(mem, off)) }
func add(mem []byte, off, n uint64)      { atomic.AddUint64(word(mem, off), n) }

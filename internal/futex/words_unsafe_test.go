package futex

import (
	"sync/atomic"
	"unsafe"
)

func wordOf(w *atomic.Uint32) *uint32 { return (*uint32)(unsafe.Pointer(w)) }

// nowhere is an address that nothing is mapped at.
func nowhere() *uint32 { return (*uint32)(unsafe.Add(unsafe.Pointer(nil), 4096)) }

func at(mem []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&mem[off])) }

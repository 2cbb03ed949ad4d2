//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import "unsafe"

func deviceList(list **C.struct_ibv_device, n int) []*C.struct_ibv_device {
	return unsafe.Slice(list, n)
}

func gidBytes(e *C.struct_ibv_gid_entry) [16]byte { return *(*[16]byte)(unsafe.Pointer(&e.gid)) }

// address is where memory starts. The memory is mapped, never of the Go heap,
// wherever the address is kept.
func address(mem []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(mem)) }

func addressOf(mem []byte) uint64 { return uint64(uintptr(address(mem))) }

// words views mapped memory as words.
// Preconditions: mem is aligned to 8.
func words(mem []byte) []uint64 {
	return unsafe.Slice((*uint64)(address(mem)), len(mem)/8)
}

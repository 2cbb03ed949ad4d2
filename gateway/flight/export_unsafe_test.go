package flight

import "unsafe"

// Misaligned is how far some bytes are behind a place in memory where those of a batch may begin.
func Misaligned(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) % bodyAlignment }

//go:build amd64

package host

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// wide: aligned moves of 16 bytes do not tear either, which processors with AVX
// promise (Intel SDM 3A 9.1.1 for MOVAPS, AMD APM 2 7.3.2), so the 8-byte words in
// them do not. Such copies are made of half as many instructions.
var wide = cpu.X86.HasAVX

// shortBytes is the length up to which Go's own loop is as fast.
const shortBytes = 128

// loadWords copies shared memory to private memory. It issues the loads of all lines before
// it uses the first: many cache misses at once take hardly longer than one.
// Preconditions: wide, shared is aligned to 8, bytes is a multiple of 8 and not 0.
//
//go:noescape
func loadWords(to, shared unsafe.Pointer, bytes uint64)

// storeWords copies private memory to shared memory.
// Preconditions: wide, shared is aligned to 8, bytes is a multiple of 8 and not 0.
//
//go:noescape
func storeWords(shared, from unsafe.Pointer, bytes uint64)

// askFor brings lines nearer without waiting for them. It never faults.
// Preconditions: bytes is not 0.
//
//go:noescape
func askFor(shared unsafe.Pointer, bytes uint64)

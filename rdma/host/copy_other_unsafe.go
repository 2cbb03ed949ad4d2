//go:build !amd64

package host

import "unsafe"

// Elsewhere words are copied one by one, in Go.
const (
	wide       = false
	shortBytes = 128
)

func loadWords(to, shared unsafe.Pointer, bytes uint64)    { panic("unreachable") }
func storeWords(shared, from unsafe.Pointer, bytes uint64) { panic("unreachable") }
func askFor(shared unsafe.Pointer, bytes uint64)           {}

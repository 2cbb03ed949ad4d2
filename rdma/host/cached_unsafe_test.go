package host

import (
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// cachedPages is how many pages of mapped memory are in the page cache; looking at them does not bring them there.
func cachedPages(t *testing.T, mem []byte) (n int) {
	pages := make([]byte, len(mem)/os.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&pages[0])))
	require.Zero(t, errno)
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}

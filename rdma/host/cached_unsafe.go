package host

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// CachedPages is how many pages of mapped memory are in the page cache; looking at them does not bring them there. The kernel counts every
// page for a file that this process may not write.
func CachedPages(mem []byte) (n int, err error) {
	pages := make([]byte, (len(mem)+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return 0, errno
	}
	for _, p := range pages {
		n += int(p & 1)
	}
	return n, nil
}

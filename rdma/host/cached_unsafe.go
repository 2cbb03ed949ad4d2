package host

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inCache says of each page of mapped memory, in bit 0 of its byte, whether it is in the page cache; looking does not bring it there. The kernel
// says so of every page for a file that this process may not write.
func inCache(mem []byte) ([]byte, error) {
	pages := make([]byte, (len(mem)+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return nil, errno
	}
	return pages, nil
}

package storagenode

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FailFlush has a flush of a region's last page fail: that page is not mapped any more.
func (n *Node) FailFlush(region uint32) error {
	n.mu.Lock()
	m := n.memories[region]
	n.mu.Unlock()
	last := uint64(len(m.Bytes()) - os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(&m.Bytes()[last])), uintptr(os.Getpagesize()), 0); errno != 0 {
		return errno
	}
	if m.Persist(last, 8) == nil {
		return errors.New("the flush has not failed")
	}
	return nil
}

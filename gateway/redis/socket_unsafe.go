package redis

import (
	"syscall"
	"unsafe"
)

// System calls without an entry in Go's scheduler. The scheduler takes a registered call of
// more than 20 us for a blocking one, and hands its processor to another thread: on a busy
// machine that costs more than the call. These calls do not block, for the descriptor is in
// non-blocking mode.

// rawBytes bounds one such call, because it delays the scheduler.
const rawBytes = 64 << 10

// rawRead reads without telling the scheduler: only for a descriptor that does not block.
func rawRead(fd uintptr, b []byte) (int, syscall.Errno) {
	b = b[:min(len(b), rawBytes)]
	n, _, e := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

// rawWrite writes in the same way.
func rawWrite(fd uintptr, b []byte) (int, syscall.Errno) {
	b = b[:min(len(b), rawBytes)]
	n, _, e := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

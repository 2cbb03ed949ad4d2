package resp

import (
	"syscall"
	"unsafe"
)

// Calls that Go's scheduler is not told of. It takes one that lasts longer than 20 us
// for one that blocks, gives the processor away and has it taken back: on a busy
// machine more work than the call. These do not block, since the descriptor does not.

// rawBytes bounds one such call, for whom the scheduler has to wait.
const rawBytes = 64 << 10

func rawRead(fd uintptr, b []byte) (int, syscall.Errno) {
	b = b[:min(len(b), rawBytes)]
	n, _, e := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

func rawWrite(fd uintptr, b []byte) (int, syscall.Errno) {
	b = b[:min(len(b), rawBytes)]
	n, _, e := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), e
}

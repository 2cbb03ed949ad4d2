package uffd

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl passes the words of an argument structure; the kernel uses as many as it has, and answers in them.
func ioctl(fd int, request uintptr, arg *[5]uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}

// Address is where mapped memory begins.
func Address(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// MapAt maps a file at an address, and nowhere else: unix.EEXIST where something is mapped already.
func MapAt(fd int, offset int64, addr, n uint64, prot, flags int) ([]byte, error) {
	p, err := unix.MmapPtr(fd, offset, unsafe.Add(nil, uintptr(addr)), uintptr(n), prot, flags|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// MapOver maps a file over memory of MapAt, in its place.
func MapOver(fd int, mem []byte, prot int) error {
	_, err := unix.MmapPtr(fd, 0, unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)), prot, unix.MAP_SHARED|unix.MAP_FIXED)
	return err
}

// Unmap unmaps memory of MapAt.
func Unmap(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)))
}

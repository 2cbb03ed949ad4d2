package uffd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// PageBytes is the unit of faults.
const PageBytes = 4096

// EventBytes is the length of one event as read from the descriptor.
const EventBytes = 32

// Event is a page fault that a thread of the program waits in.
type Event struct {
	Addr  uint64 // of the access
	Write bool   // a store
	// Protected: the page is mapped and write-protected. Otherwise it is not mapped: missing in the
	// memory's file, or only not mapped here.
	Protected bool
}

// Features of the API, by number.
const (
	featWriteProtect = 1 << 0  // events of write-protected pages
	featMissing      = 1 << 5  // events of missing pages of shared memory
	featMinor        = 1 << 10 // events of pages that are there and not mapped
	featSharedWP     = 1 << 12 // write protection of shared memory
	featPoison       = 1 << 14 // UFFDIO_POISON: Linux 6.6, so CONTINUE write-protects too
	features         = featWriteProtect | featMissing | featMinor | featSharedWP | featPoison
)

const (
	eventPagefault = 0x12
	flagWrite      = 1 << 0
	flagProtected  = 1 << 1
)

// ErrKernel: the kernel does not have what is needed.
var ErrKernel = errors.New("the kernel cannot serve page faults of shared memory from another process: Linux 6.6 or later with CONFIG_USERFAULTFD is needed")

// Parse reads one event. ok is false for events other than faults.
func Parse(b []byte) (e Event, ok bool) {
	if len(b) < EventBytes || b[0] != eventPagefault {
		return Event{}, false
	}
	flags := binary.NativeEndian.Uint64(b[8:])
	return Event{Addr: binary.NativeEndian.Uint64(b[16:]), Write: flags&flagWrite != 0, Protected: flags&flagProtected != 0}, true
}

// userOnly is UFFD_USER_MODE_ONLY: no fault of a system call is served.
const userOnly = 1

// Open makes a descriptor for this process, whose reads do not block. userMode: it does not serve faults of system calls, because this process may not
// ask for that: they fail with EFAULT where the page is not mapped.
func Open() (fd int, userMode bool, err error) {
	const flags = unix.O_CLOEXEC | unix.O_NONBLOCK
	fd, err = userfaultfd(flags)
	if errors.Is(err, unix.EPERM) {
		if fd, err = openDevice(flags); err != nil {
			userMode = true
			fd, err = userfaultfd(flags | userOnly)
		}
	}
	switch {
	case errors.Is(err, unix.ENOSYS):
		return -1, false, ErrKernel
	case err != nil:
		return -1, false, fmt.Errorf("userfaultfd: %w (root may use it; others too with vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd)", err)
	}
	if err := handshake(fd); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EINVAL) {
			err = ErrKernel
		}
		return -1, false, err
	}
	return fd, userMode, nil
}

// Is says whether a descriptor is one of userfaultfd.
func Is(fd int) bool {
	name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	return err == nil && name == "anon_inode:[userfaultfd]"
}

// openDevice makes a descriptor by /dev/userfaultfd, which an administrator may open to users.
func openDevice(flags int) (int, error) {
	dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dev)
	return call(unix.SYS_IOCTL, uintptr(dev), ioctlNew, uintptr(flags))
}

func userfaultfd(flags int) (int, error) { return call(unix.SYS_USERFAULTFD, uintptr(flags), 0, 0) }

func call(trap, a, b, c uintptr) (int, error) {
	r, _, errno := unix.Syscall(trap, a, b, c)
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// Numbers of ioctls: direction << 30 | bytes of the argument << 16 | 0xAA << 8 | number.
const (
	ioctlNew          = 0x0000_AA00 // of /dev/userfaultfd
	ioctlAPI          = 0xC018_AA3F
	ioctlRegister     = 0xC020_AA00
	ioctlWake         = 0x8010_AA02
	ioctlCopy         = 0xC028_AA03
	ioctlWriteProtect = 0xC018_AA06
	ioctlContinue     = 0xC020_AA07
	ioctlPoison       = 0xC020_AA08
)

const api = 0xAA

func handshake(fd int) error { return ioctl(fd, ioctlAPI, &[5]uint64{api, features}) }

const (
	registerMissing = 1 << 0
	registerWP      = 1 << 1
	registerMinor   = 1 << 2
)

// Register has the descriptor serve faults of a mapping of this process: on pages that are not mapped and, with protect, on those that are
// write-protected.
func Register(fd int, addr, n uint64, protect bool) error {
	mode := uint64(registerMissing | registerMinor)
	if protect {
		mode |= registerWP
	}
	return ioctl(fd, ioctlRegister, &[5]uint64{addr, n, mode})
}

const continueWP = 1 << 1

// Continue maps pages of the program's mapping that are in the memory's file, write-protected with protect, and wakes threads
// that wait for them. Pages that are mapped stay as they are. EFAULT: a page is not in the file; ENOENT: nothing is mapped there any
// more; ESRCH: the program has ended.
func Continue(fd int, addr, n uint64, protect bool) error {
	mode := uint64(0)
	if protect {
		mode = continueWP
	}
	for n > 0 {
		a := [5]uint64{addr, n, mode}
		err := ioctl(fd, ioctlContinue, &a)
		done := uint64(0)
		switch mapped := int64(a[3]); {
		case err == nil:
			return nil
		case mapped > 0: // then a page that could not be
			done = uint64(mapped)
		case errors.Is(err, unix.EEXIST):
			done = PageBytes
		default:
			return err
		}
		addr, n = addr+done, n-done
	}
	return nil
}

// Copy makes pages of a shared mapping of the program that are not in the memory's file, with these bytes, maps them, write-protected with protect, and wakes
// threads that wait for them. It says how many bytes it has done; an error: why not all. EEXIST: a page is in the file.
func Copy(fd int, addr uint64, b []byte, protect bool) (done uint64, err error) {
	mode := uint64(0)
	if protect {
		mode = 1 << 1
	}
	a := [5]uint64{addr, Address(b), uint64(len(b)), mode}
	err = ioctl(fd, ioctlCopy, &a)
	runtime.KeepAlive(b)
	if copied := int64(a[4]); copied > 0 {
		done = uint64(copied)
	}
	return done, err
}

// WriteProtect protects pages against stores, or allows stores and wakes threads that wait in one.
func WriteProtect(fd int, addr, n uint64, protect bool) error {
	mode := uint64(0)
	if protect {
		mode = 1
	}
	return ioctl(fd, ioctlWriteProtect, &[5]uint64{addr, n, mode})
}

// Unprotect takes write protection off pages that are not mapped, and wakes nobody. The kernel keeps the protection of a page of shared memory when
// the page is taken away, and refuses to poison it then.
func Unprotect(fd int, addr, n uint64) error {
	const dontWake = 1 << 1
	return ioctl(fd, ioctlWriteProtect, &[5]uint64{addr, n, dontWake})
}

// Poison has every access to pages that are not mapped end with SIGBUS, and wakes threads that wait for them. EEXIST: a page is mapped, poisoned or
// protected.
func Poison(fd int, addr, n uint64) error {
	return ioctl(fd, ioctlPoison, &[5]uint64{addr, n, 0})
}

// Wake has threads that wait for pages try their access again.
func Wake(fd int, addr, n uint64) error { return ioctl(fd, ioctlWake, &[5]uint64{addr, n}) }

package host

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNoSpace: the medium has no room for all of a region's memory.
var ErrNoSpace = errors.New("no space")

const (
	// SpareDisk stays free on a file system when a file is made: the node keeps its own
	// state there.
	SpareDisk = 8 << 20
	// SpareMemory is left to the host and to the control group of the process, so that
	// a reservation does not call the kernel's killer.
	SpareMemory = 128 << 20
	// populateStep is made at a time: the amount that is looked for beforehand, and how
	// long other threads wait that change the process's mappings.
	populateStep = 16 << 20
)

// Reserve gives every byte of a file its storage: blocks of a disk, or pages of memory.
// Contents stay. Afterwards no access to a mapping of the file, a read of a hole included,
// can fail because the medium is full; before, such an access ends the process with SIGBUS.
// It returns ErrNoSpace if there is no room; what has been reserved by then stays with the
// file.
//
// Copy on write voids this promise: btrfs, bcachefs, and xfs for a file that shares blocks
// with another (reflink) take new blocks at each overwrite, and an overwrite on a full file
// system fails.
//
// spare is how many bytes must stay free on the file system: SpareDisk for a new file, 0
// for a file that exists. A node must be able to open its regions on a full disk.
//
// Preconditions: the file has this size, and no other process writes it.
func Reserve(f *os.File, bytes, spare uint64) error {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &st), unix.Fstatfs(int(f.Fd()), &fs)); err != nil {
		return err
	}
	has := min(bytes, uint64(st.Blocks)*512)
	memory := fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC || fs.Type == unix.HUGETLBFS_MAGIC
	if memory && has == bytes {
		return nil // here the count is exact; elsewhere it includes blocks of metadata
	}
	// No blocks: a file system without a limit, such as the one of anonymous memory.
	if free := fs.Bavail * uint64(fs.Bsize); fs.Blocks != 0 && fs.Type != unix.HUGETLBFS_MAGIC && free < bytes-has+spare {
		return fmt.Errorf("%w: %s more are needed beside a spare of %s, the file system has %s free", ErrNoSpace, sizeText(bytes-has), sizeText(spare), sizeText(free))
	}
	err := error(nil)
	if memory {
		err = populate(f, bytes, fs.Type != unix.HUGETLBFS_MAGIC)
	} else {
		err = allocate(f, bytes)
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EFAULT) {
		err = fmt.Errorf("%w: %s: %w", ErrNoSpace, sizeText(bytes), err)
	}
	return err
}

// allocate reserves blocks of a disk.
func allocate(f *os.File, bytes uint64) error {
	err := ignoringEINTR(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, int64(bytes)) })
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// Without the call the contents are read and written again, which fills holes with zeros.
	b := make([]byte, 1<<20)
	for off := int64(0); off < int64(bytes); {
		n, err := f.ReadAt(b[:min(int64(len(b)), int64(bytes)-off)], off)
		if err != nil {
			return err
		}
		if _, err := f.WriteAt(b[:n], off); err != nil {
			return err
		}
		off += int64(n)
	}
	return f.Sync() // an error that was put off comes now
}

// populate makes all pages of a file in memory. By way of a mapping, so that huge pages
// are used where mappings ask for them. scarce: the pages come from the host's free memory.
func populate(f *os.File, bytes uint64, scarce bool) error {
	mem, err := unix.Mmap(int(f.Fd()), 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(mem)
	if err := bindMemory(mem); err != nil {
		return err
	}
	Advise(f, mem)
	for off := uint64(0); off < bytes; off += populateStep {
		n := min(populateStep, bytes-off)
		if free := AvailableMemory(); scarce && free < n+SpareMemory {
			return fmt.Errorf("%w: %s of %s more are needed beside a spare of %s, the host or the control group has %s of memory available", ErrNoSpace, sizeText(bytes-off), sizeText(bytes), sizeText(SpareMemory), sizeText(free))
		}
		err := ignoringEINTR(func() error { return unix.Madvise(mem[off:off+n], unix.MADV_POPULATE_WRITE) })
		if errors.Is(err, unix.EINVAL) { // before Linux 5.14
			err = ignoringEINTR(func() error { return unix.Fallocate(int(f.Fd()), 0, int64(off), int64(n)) })
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ignoringEINTR repeats a system call that a signal has interrupted.
func ignoringEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// sizeText is a size for people.
func sizeText(n uint64) string { return fmt.Sprintf("%.4g MiB", float64(n)/(1<<20)) }

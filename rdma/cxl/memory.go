package cxl

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// ErrOccupied means that the place for the litmus holds something.
var ErrOccupied = errors.New("the memory there is not zero, and not of an earlier litmus")

// scratchMagic at scratchMark tells memory that a litmus has used from other memory.
const (
	scratchMagic = 0x53554d54494c5851 // "QXLITMUS"
	scratchMark  = counter + 1024
)

// OpenScratch maps memory for Litmus in a device DAX or a file, from an offset on, which end gives back. It refuses memory that
// holds something, with ErrOccupied, unless overwrite is set, and a device that a node of this host uses.
func OpenScratch(path string, at uint64, overwrite bool) (scratch []byte, end func() error, err error) {
	f, size, align, err := openShared(path)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	bytes := (uint64(ScratchBytes) + align - 1) &^ (align - 1)
	if at%align != 0 || at > size || size-at < bytes {
		return nil, nil, fmt.Errorf("%s has %d bytes: the litmus takes %d from a multiple of %d on, and %d was asked for", path, size, bytes, align, at)
	}
	mem, err := unix.Mmap(int(f.Fd()), int64(at), int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: mapping %d bytes: %w", path, bytes, err)
	}
	if !overwrite && proto.Word(mem, scratchMark) != scratchMagic && !zero(mem[:ScratchBytes]) {
		return nil, nil, errors.Join(fmt.Errorf("%s at %d: %w: name another place, or have it overwritten", path, at, ErrOccupied), unix.Munmap(mem))
	}
	proto.PutWord(mem, scratchMark, scratchMagic)
	return mem[:ScratchBytes], func() error { return errors.Join(unix.Munmap(mem), f.Close()) }, nil
}

// openShared opens a device, with its lock, or a file.
func openShared(path string) (f *os.File, size, align uint64, err error) {
	if pmem.IsDevice(path) {
		d, err := pmem.OpenDevice(path)
		if err != nil {
			return nil, 0, 0, err
		}
		return d.File, d.Bytes, d.Align, nil
	}
	if f, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return nil, 0, 0, fmt.Errorf("shared memory: %w", err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is no device DAX and no file", path)
	}
	if err != nil {
		return nil, 0, 0, errors.Join(err, f.Close())
	}
	return f, uint64(st.Size()), uint64(os.Getpagesize()), nil
}

// zero says whether all bytes are.
func zero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

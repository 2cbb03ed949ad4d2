package uffd

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Discard takes pages out of the memory's file, and so out of every mapping: the next access to one faults.
func Discard(file int, off, n int64) error {
	for {
		err := unix.Fallocate(file, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

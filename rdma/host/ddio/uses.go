package ddio

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// uses is a file of the host for one root port. Processes that rely on its switch hold a shared lock, which the kernel gives up with
// them; one that changes it has it alone. Content: the two bytes from before the first change, or nothing. A restart of the host
// removes it (/run).
type uses struct {
	path string
	file *os.File // nil: no lock is held
}

func (u *uses) any() bool { return u.file != nil }

// open opens the file, and makes it if it is not there. It takes no lock.
func (u *uses) open() error {
	if u.file != nil {
		return nil
	}
	err := os.MkdirAll(filepath.Dir(u.path), 0o755)
	if err == nil {
		u.file, err = os.OpenFile(u.path, os.O_RDWR|os.O_CREATE, 0o600)
	}
	if err != nil {
		u.file = nil
		return fmt.Errorf("the file by which nodes of a host share a DDIO switch: %w", err)
	}
	return nil
}

// lock takes the lock; how is an argument of flock(2). With LOCK_NB, EWOULDBLOCK says that
// another process is in the way.
func (u *uses) lock(how int) error {
	if err := u.open(); err != nil {
		return err
	}
	for {
		err := unix.Flock(int(u.file.Fd()), how)
		if err == nil || errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("locking %s: %w", u.path, err)
		}
	}
}

// share takes the lock in the mode of processes that rely on the switch, which share it. It waits
// for a change that is under way.
func (u *uses) share() error { return u.lock(unix.LOCK_SH) }

// alone tries to take the lock for a change. false: others rely on the switch, and this process holds no lock.
func (u *uses) alone() (bool, error) {
	err := u.lock(unix.LOCK_EX | unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// remember keeps the bytes from before the first change. Preconditions: alone.
func (u *uses) remember(b [2]byte) error {
	if _, changed, err := u.remembered(); err != nil || changed {
		return err
	}
	_, err := u.file.WriteAt(b[:], 0)
	return err
}

// remembered are the bytes from before the first change, if there was one. Preconditions: alone.
func (u *uses) remembered() (b [2]byte, changed bool, err error) {
	n, err := u.file.ReadAt(b[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return b, false, err
	}
	return b, n == len(b), nil
}

// forget is for a switch that is as it was. Preconditions: alone.
func (u *uses) forget() error { return u.file.Truncate(0) }

// close gives up the lock.
func (u *uses) close() error {
	if u.file == nil {
		return nil
	}
	f := u.file
	u.file = nil
	return f.Close()
}

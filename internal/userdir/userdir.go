package userdir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Path of the folder.
func Path() string { return filepath.Join(os.TempDir(), fmt.Sprintf("quarry-%d", os.Getuid())) }

// Make makes the folder, and refuses one in which another user could put files. Other users may
// look into it.
func Make() error {
	dir := Path()
	if err := os.Mkdir(dir, 0o700); err == nil {
		return os.Chmod(dir, 0o755) // the umask may forbid it
	} else if !errors.Is(err, os.ErrExist) {
		return err
	}
	return check(dir)
}

func check(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s: it is not a folder that only user %d may write: remove it", dir, os.Getuid())
	}
	return nil
}

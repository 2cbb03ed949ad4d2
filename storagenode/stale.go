package storagenode

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// socketFolder is where sockets are that have no path of their own. In the folder for temporary
// files itself every user of the host could make a socket with the name of a node that is gone.
func socketFolder() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("quarry-%d", os.Getuid()))
}

// makeSocketFolder makes the folder, where the node's socket is in it, and refuses one in which
// another user could put sockets.
func (c Config) makeSocketFolder() error {
	dir := socketFolder()
	if filepath.Dir(c.Socket) != dir {
		return nil
	}
	if err := os.Mkdir(dir, 0o700); err == nil {
		return os.Chmod(dir, 0o755) // clients of other users connect; the umask may forbid it
	} else if !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("storage node %s: folder of shm sockets: %w", c.Name, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("storage node %s: folder of shm sockets %s: %w", c.Name, dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("storage node %s: folder of shm sockets %s: it is not a folder that only user %d may write: remove it, or choose another path with --socket", c.Name, dir, os.Getuid())
	}
	return nil
}

// removeStale removes sockets that earlier incarnations of the node left in the folder of
// sockets when they were killed: without a data folder each incarnation uses another name.
// A socket that a process listens on stays.
func (c Config) removeStale() {
	if c.Dir != "" {
		return
	}
	paths, _ := filepath.Glob(filepath.Join(socketFolder(), "quarry-*-"+c.Name+".sock"))
	for _, p := range paths {
		if st, err := os.Lstat(p); p == c.Socket || err != nil || st.Mode().Type() != os.ModeSocket {
			continue
		}
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: p, Net: "unixpacket"})
		if err == nil {
			conn.Close()
		} else if errors.Is(err, unix.ECONNREFUSED) {
			os.Remove(p)
		}
	}
}

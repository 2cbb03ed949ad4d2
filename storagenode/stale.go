package storagenode

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/userdir"
)

// makeSocketFolder makes the folder of the node's socket, where it has no path of its own.
func (c Config) makeSocketFolder() error {
	if filepath.Dir(c.Socket) != userdir.Path() {
		return nil
	}
	if err := userdir.Make(); err != nil {
		return fmt.Errorf("storage node %s: folder of shm sockets %w, or choose another path with --socket", c.Name, err)
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
	paths, _ := filepath.Glob(filepath.Join(userdir.Path(), "quarry-*-"+c.Name+".sock"))
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

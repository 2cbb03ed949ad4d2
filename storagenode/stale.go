package storagenode

import (
	"errors"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// removeStale removes sockets that earlier incarnations of the node left in the folder for
// temporary files when they were killed: without a data folder each incarnation uses another name.
// A socket that a process listens on stays.
func (c Config) removeStale() {
	if c.Dir != "" {
		return
	}
	paths, _ := filepath.Glob(filepath.Join(os.TempDir(), "quarry-*-"+c.Name+".sock"))
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

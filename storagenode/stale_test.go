package storagenode

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSocketsOfKilledIncarnationsGo: and nothing else does.
func TestSocketsOfKilledIncarnationsGo(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unixpacket"})
		require.NoError(t, err)
		return l
	}
	dead, alive, other := listen("quarry-1-n1.sock"), listen("quarry-2-n1.sock"), listen("quarry-3-n2.sock")
	for _, l := range []*net.UnixListener{dead, other} {
		l.SetUnlinkOnClose(false) // as when killed
		require.NoError(t, l.Close())
	}
	defer alive.Close()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "quarry-4-n1.sock"), nil, 0o600))
	Config{Name: "n1"}.withDefaults().removeStale()
	require.NoFileExists(t, filepath.Join(dir, "quarry-1-n1.sock"))
	for _, name := range []string{"quarry-2-n1.sock", "quarry-3-n2.sock", "quarry-4-n1.sock"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		require.NoError(t, err, name)
	}
}

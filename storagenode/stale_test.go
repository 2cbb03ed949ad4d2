package storagenode

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/userdir"
)

// TestSocketsOfKilledIncarnationsGo: and nothing else does.
func TestSocketsOfKilledIncarnationsGo(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	c := Config{Name: "n1"}.withDefaults()
	require.NoError(t, c.makeSocketFolder())
	require.NoError(t, c.makeSocketFolder(), "again")
	dir := userdir.Path()
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
	c.removeStale()
	require.NoFileExists(t, filepath.Join(dir, "quarry-1-n1.sock"))
	for _, name := range []string{"quarry-2-n1.sock", "quarry-3-n2.sock", "quarry-4-n1.sock"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		require.NoError(t, err, name)
	}
}

// Another user, or anybody at all, could put sockets there under the names of nodes that are gone.
func TestTheFolderOfSocketsIsTheUsersAlone(t *testing.T) {
	for name, squat := range map[string]func(dir string) error{
		"a folder that all may write": func(dir string) error {
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			return os.Chmod(dir, 0o777)
		},
		"a link": func(dir string) error { return os.Symlink(t.TempDir(), dir) },
		"a file": func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TMPDIR", t.TempDir())
			require.NoError(t, squat(userdir.Path()))
			require.ErrorContains(t, Config{Name: "n1"}.withDefaults().makeSocketFolder(), "remove it, or choose another path with --socket")
		})
	}
	t.Setenv("TMPDIR", t.TempDir())
	require.NoError(t, Config{Name: "n1", Socket: "/elsewhere/s"}.withDefaults().makeSocketFolder())
	require.NoDirExists(t, userdir.Path())
}

package shm

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A client does not talk to a process of another user that has put a socket where a node's was.
func TestASocketOfAnotherUserIsRefused(t *testing.T) {
	for _, c := range []struct {
		peer, self, owner uint32
		ok                bool
	}{{0, 1000, 0, true}, {1000, 1000, 0, true}, {997, 1000, 997, true}, {1001, 1000, 0, false}, {1001, 0, 0, false}} {
		require.Equal(t, c.ok, trusted(c.peer, c.self, c.owner) == nil, c)
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to start a process of another user")
	}
	dir, err := os.MkdirTemp("/tmp", "squat")
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	require.NoError(t, os.Chmod(dir, 0o777))
	path := filepath.Join(dir, "s")
	self, err := os.Executable()
	require.NoError(t, err)
	program := filepath.Join(dir, "squatter") // the folder of go test is root's alone
	b, err := os.ReadFile(self)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, b, 0o755))
	cmd := exec.Command(program)
	cmd.Env = []string{"QUARRYTEST_SQUAT=" + path}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	require.NoError(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	var socket *net.UnixConn
	require.Eventually(t, func() bool {
		socket, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	defer socket.Close()
	require.ErrorContains(t, rightPeer(socket, path), "run by user 65534")
	_, err = NewDialer().link(t.Context(), path, nil, 0)
	require.ErrorContains(t, err, "run by user 65534")
}

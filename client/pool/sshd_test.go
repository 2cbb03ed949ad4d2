package pool_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// sshd starts OpenSSH's server on a port of its own and returns the command that logs in there, but for the file of known hosts, and that file.
func sshd(t *testing.T) (ssh, known string) {
	server, err := exec.LookPath("sshd")
	if err != nil {
		server = "/usr/sbin/sshd"
	}
	for _, tool := range []string{server, "ssh", "ssh-keygen"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(tool + " is not installed: apt-get install openssh-server openssh-client")
		}
	}
	dir := t.TempDir()
	for _, key := range []string{"host", "user"} {
		require.NoError(t, exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, key)).Run())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	conf := fmt.Sprintf("ListenAddress 127.0.0.1:%d\nHostKey %[2]s/host\nAuthorizedKeysFile %[2]s/user.pub\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n", port, dir)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "conf"), []byte(conf), 0o600))
	if os.Getuid() == 0 {
		require.NoError(t, os.MkdirAll("/run/sshd", 0o755)) // it wants the folder
	}
	cmd := exec.Command(server, "-D", "-e", "-f", filepath.Join(dir, "conf"))
	var said strings.Builder
	cmd.Stderr = &said
	require.NoError(t, cmd.Start())
	exited := make(chan struct{})
	go func() { _ = cmd.Wait(); close(exited) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		if <-exited; t.Failed() {
			t.Log(said.String())
		}
	})
	require.Eventually(t, func() bool {
		select {
		case <-exited:
			require.Fail(t, "sshd has ended", said.String())
		default:
		}
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			c.Close()
		}
		return err == nil
	}, patience, 10*time.Millisecond)
	known = filepath.Join(dir, "known")
	key, err := os.ReadFile(filepath.Join(dir, "host.pub"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(known, fmt.Appendf(nil, "[127.0.0.1]:%d %s", port, key), 0o600))
	return fmt.Sprintf("ssh -F none -T -p %d -i %s -o BatchMode=yes -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes", port, filepath.Join(dir, "user")), known
}

// TestSSH: by OpenSSH itself; and a host whose key is not known.
func TestSSH(t *testing.T) {
	ssh, known := sshd(t)
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	h, _ := hostOf(t, c)
	me, err := user.Current()
	require.NoError(t, err)
	h.Name = me.Username + "@127.0.0.1"
	h.SSH = ssh + " -o UserKnownHostsFile=/dev/null"
	_, err = h.Stat(t.Context(), "ledger")
	require.ErrorIs(t, err, pool.ErrAgent)
	require.ErrorContains(t, err, "Host key verification failed")

	h.SSH = ssh + " -o UserKnownHostsFile=" + known
	local := random(size)
	o := options(false)
	o.Replicas = 1
	p, err := h.Create(t.Context(), "ledger", local, o)
	require.NoError(t, err)
	_, err = p.Sync(t.Context(), nil)
	require.NoError(t, err)
	local[7]++
	require.NoError(t, p.Persist(0, size))
	require.NoError(t, p.Close(t.Context()))
	rep, err := pool.Check(t.Context(), c.Connect(client.Config{}), "ledger", local, nil)
	require.NoError(t, err)
	require.True(t, rep.Same())

	bad := h
	bad.Agent = "/none/quarry pool-agent"
	_, err = bad.Stat(t.Context(), "ledger")
	require.ErrorContains(t, err, "install Quarry there")
	bad = h
	bad.Name = "nobody-of-this-name@127.0.0.1"
	_, err = bad.Stat(t.Context(), "ledger")
	require.ErrorContains(t, err, "Permission denied")
}

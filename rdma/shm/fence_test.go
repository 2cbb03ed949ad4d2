package shm_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/stretchr/testify/require"
)

const soon = 30 * time.Millisecond // of KillAfter

// untouched fails if a byte changes after a fence.
func untouched(t *testing.T, m *host.Memory, fence func() error) {
	t.Helper()
	require.NoError(t, fence())
	first := bytes.Clone(m.Bytes())
	for range 20 {
		time.Sleep(time.Millisecond) // gives what must not come a chance to come
		require.True(t, bytes.Equal(first, m.Bytes()), "a byte changed after the fence")
	}
}

// killed says that the node has killed a process: it is dead when the fence ends, so that the other
// signal comes too late.
func (p *process) killed(t *testing.T) {
	t.Helper()
	_ = p.Process.Signal(syscall.SIGTERM)
	_, _ = io.Copy(io.Discard, p.out)
	_ = p.Wait()
	require.Equal(t, syscall.SIGKILL, p.ProcessState.Sys().(syscall.WaitStatus).Signal(), "%v", p.ProcessState)
}

// HAZARDS, security 8: a client that goes on by its own mapping or descriptor, whatever its
// gate page says, writes nothing when the fence has ended.
func TestSecurity08_AFenceDoesNotBelieveTheClient(t *testing.T) {
	for _, role := range []string{"raw-write", "raw-descriptor", "raw-left", "raw-park"} {
		t.Run(role, func(t *testing.T) {
			a, m, addr := node(t, host.Limits{KillAfter: soon})
			p := spawn(t, role, addr)
			require.Equal(t, "started", p.line(t))
			untouched(t, m, func() error { return a.Fence(t.Context(), 1) })
			p.killed(t)
			require.EqualValues(t, 1, a.Counters().Killed)
		})
	}
}

// The same where the region was closed before, and where the list of living sessions ends the session.
func TestSecurity08_AfterCloseRegion(t *testing.T) {
	a, m, addr := node(t, host.Limits{KillAfter: soon})
	p := spawn(t, "raw-write", addr)
	require.Equal(t, "started", p.line(t))
	require.NoError(t, a.CloseRegion(t.Context(), 1, 1))
	untouched(t, m, func() error { return a.EndBelow(t.Context(), 5, nil) })
	p.killed(t)
}

// A session that left long ago is ended by the list too.
func TestSecurity08_EndBelowOfASessionThatHasLeft(t *testing.T) {
	a, m, addr := node(t, host.Limits{KillAfter: soon})
	p := spawn(t, "raw-left", addr)
	require.Equal(t, "started", p.line(t))
	for end := time.Now().Add(time.Minute); len(a.Sessions()) > 0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "the lane of a closed connection stays")
	}
	untouched(t, m, func() error { return a.EndBelow(t.Context(), 5, nil) })
	p.killed(t)
}

// A forked child, and a process that was sent the descriptor, are found and killed; the member, which has
// let the memory go, lives.
func TestSecurity08_MemoryLeftToAnotherProcess(t *testing.T) {
	for _, role := range []string{"raw-fork", "raw-hand"} {
		t.Run(role, func(t *testing.T) {
			a, m, addr := node(t, host.Limits{KillAfter: soon})
			p := spawn(t, role, addr)
			require.Equal(t, "started", p.line(t))
			untouched(t, m, func() error { return a.Fence(t.Context(), 1) })
			require.Equal(t, "child: killed", p.line(t))
			require.NoError(t, p.Wait())
		})
	}
}

// A process may keep the memory as long as one session that has it lives.
func TestSecurity08_TwoSessionsOfAProcess(t *testing.T) {
	a, m, addr := node(t, host.Limits{KillAfter: soon})
	p := spawn(t, "raw-two", addr)
	require.Equal(t, "started", p.line(t))
	require.NoError(t, a.Fence(t.Context(), 1))
	require.Zero(t, a.Counters().Killed)
	untouched(t, m, func() error { return a.Fence(t.Context(), 2) })
	p.killed(t)
}

// A program that keeps the protocol outlives its sessions: the SDK unmaps the memory.
func TestSecurity08_MembersLive(t *testing.T) {
	a, m, addr := node(t, host.Limits{KillAfter: time.Hour})
	p := spawn(t, "member", addr)
	require.Equal(t, "session 1", p.line(t))
	for serial := uint64(1); serial < 4; serial++ {
		require.NoError(t, a.Fence(t.Context(), serial))
		word := bytes.Clone(m.Bytes()[8*serial:][:8])
		require.Equal(t, "session "+string(rune('1'+serial)), p.line(t))
		require.Equal(t, word, m.Bytes()[8*serial:][:8])
	}
	require.Zero(t, a.Counters().Killed)
}

// A fence that cannot end says which process it waits for, and ends when that has ended.
func TestSecurity08_AFenceThatWaitsSaysSo(t *testing.T) {
	a, _, addr := node(t, host.Limits{KillAfter: time.Hour})
	p := spawn(t, "raw-write", addr)
	require.Equal(t, "started", p.line(t))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := a.Fence(ctx, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "still holds the memory of test")
	require.NoError(t, p.Process.Kill())
	require.NoError(t, a.Fence(t.Context(), 1))
}

// A node that is not root looks into processes of its user only. One that closes itself to inspection is
// refused, which names tcp; one that does so later is killed when its session ends.
func TestSecurity08_Unseen(t *testing.T) {
	if os.Getuid() == 0 {
		again(t)
		return
	}
	a, m, addr := node(t, host.Limits{KillAfter: soon})
	p := spawn(t, "unseen", addr)
	require.Contains(t, p.line(t), "use tcp")
	require.Error(t, p.Wait())
	p = spawn(t, "raw-unseen", addr)
	require.Equal(t, "started", p.line(t))
	untouched(t, m, func() error { return a.Fence(t.Context(), 1) })
	p.killed(t)
}

// again runs the test as a user without rights.
func again(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "unseen")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o777))
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	program := filepath.Join(dir, "test")
	require.NoError(t, os.WriteFile(program, self, 0o755))
	cmd := exec.Command(program, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.True(t, strings.Contains(string(out), "--- PASS"), "%s", out)
}

// The SDK keeps the memory from children of the program.
func TestMappingsAreNotInherited(t *testing.T) {
	_, _, addr := node(t, host.Limits{})
	c, err := shm.NewDialer().Dial(t.Context(), addr, cluster.Ticket(1, rdma.ReadWrite), 0)
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Open(t.Context(), 1, 1)
	require.NoError(t, err)
	b, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(b), "memfd:quarry-test")
	require.True(t, found)
	flags := 0
	for line := range strings.Lines(after) {
		if rest, ok := strings.CutPrefix(line, "VmFlags:"); ok && strings.Contains(rest, " dc ") {
			flags++
		}
	}
	require.Equal(t, 1, flags, "of the node's mapping and the lane's, the lane's is not copied")
}

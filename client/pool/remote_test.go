package pool_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/verify/testbinary"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// standIn writes a command that takes ssh's place: it runs the command on this host, in its own process, whose number it writes into a file first.
func standIn(t testing.TB) (command, pid string) {
	dir := t.TempDir()
	command, pid = filepath.Join(dir, "ssh"), filepath.Join(dir, "pid")
	script := fmt.Sprintf("#!/bin/sh\necho $$ >%s\n[ \"$1\" != missing@host ] || { echo 'Host key verification failed.' >&2; exit 255; }\nshift\nexec sh -c \"$*\"\n", pid)
	require.NoError(t, os.WriteFile(command, []byte(script), 0o700))
	return command, pid
}

// hostOf is a host that reaches a cluster.
func hostOf(t testing.TB, c *testcluster.Cluster) (h pool.Host, pid string) {
	bin := testbinary.Build(t, "./cmd/quarry")
	h.Name = "ops@far.example.com"
	h.SSH, pid = standIn(t)
	h.Agent = fmt.Sprintf("exec %s pool-agent -C %s --fabric tcp", filepath.Join(bin, "quarry"), c.Controller.URL())
	return h, pid
}

// TestHost: a pool of a cluster that this program does not reach, with all that can be done with it, and what is refused.
func TestHost(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: true})
	h, _ := hostOf(t, c)
	cl := c.Connect(client.Config{})
	local := random(size)
	p, err := h.Create(ctx, "ledger", local, options(true))
	require.NoError(t, err)
	require.True(t, p.Dirty())
	_, err = h.Open(ctx, "ledger", local, nil)
	require.ErrorIs(t, err, pool.ErrOpen)
	require.ErrorContains(t, err, "far.example.com: ")
	var seen []uint64
	rep, err := p.Sync(ctx, func(done uint64) { seen = append(seen, done) })
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: size, Differ: size}, rep)
	require.IsIncreasing(t, seen)
	require.EqualValues(t, size, seen[len(seen)-1])
	require.False(t, p.Dirty())

	// A range over the border of regions, the last byte, nothing, and more than a request takes.
	copy(local[mib-3:], "over the border")
	local[size-1]++
	require.NoError(t, p.Persist(mib-3, 15))
	require.NoError(t, p.Persist(size-1, 1))
	require.NoError(t, p.Persist(size, 0))
	local[5]++
	require.NoError(t, p.DeepPersist(0, size))
	back := make([]byte, size)
	require.NoError(t, p.Read(back, 0))
	require.Equal(t, local, back)
	for _, r := range [][2]uint64{{size, 1}, {size + 1, 0}, {8, 1<<64 - 4}} {
		require.ErrorIs(t, p.Persist(r[0], r[1]), pool.ErrRange)
		require.ErrorIs(t, p.DeepPersist(r[0], r[1]), pool.ErrRange)
	}
	require.NoError(t, p.SetAttr(attr("OTHER")))
	require.Equal(t, attr("OTHER"), p.Attr())
	rep, err = h.Check(ctx, "ledger", local, nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: size}, rep)
	require.NoError(t, p.Close(ctx))
	require.NoError(t, p.Close(ctx))
	require.ErrorIs(t, p.Persist(0, 1), pool.ErrClosed)
	require.ErrorIs(t, p.Read(back, 0), pool.ErrClosed)
	require.ErrorIs(t, p.SetAttr(attr("")), pool.ErrClosed)
	_, err = p.Sync(ctx, nil)
	require.ErrorIs(t, err, pool.ErrClosed)

	// A client of the cluster finds what the host's agent has made.
	i, err := pool.Stat(ctx, cl, "ledger")
	require.NoError(t, err)
	far, err := h.Stat(ctx, "ledger")
	require.NoError(t, err)
	require.Equal(t, i, far)
	require.Equal(t, []any{uint64(size), attr("OTHER"), false, true}, []any{i.Bytes, i.Attr, i.Dirty, i.Durable})

	empty := make([]byte, size)
	want := attr("OBJ")
	_, err = h.Open(ctx, "ledger", empty, &want)
	require.ErrorIs(t, err, pool.ErrMismatch)
	_, err = h.Open(ctx, "ledger", empty[1:], nil)
	require.ErrorIs(t, err, pool.ErrMismatch)
	_, err = h.Check(ctx, "ledger", empty[1:], nil)
	require.ErrorIs(t, err, pool.ErrMismatch)
	want = attr("OTHER")
	p, err = h.Open(ctx, "ledger", empty, &want)
	require.NoError(t, err)
	require.False(t, p.Dirty(), "it was closed in order")
	require.ErrorIs(t, h.Remove(ctx, "ledger"), pool.ErrOpen)
	rep, err = p.Restore(ctx, nil)
	require.NoError(t, err)
	require.EqualValues(t, size, rep.Differ)
	require.Equal(t, local, empty)
	require.NoError(t, p.Close(ctx))
	_, err = h.Create(ctx, "ledger", local, options(false))
	require.ErrorIs(t, err, client.ErrNameExists)
	require.NoError(t, h.Remove(ctx, "ledger"))
	require.ErrorIs(t, h.Remove(ctx, "ledger"), client.ErrNoName)
	_, err = h.Open(ctx, "ledger", local, nil)
	require.ErrorIs(t, err, client.ErrNoName)
	_, err = h.Create(ctx, "", local, options(false))
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = h.Create(ctx, strings.Repeat("n", pool.MaxNameBytes+1), local, options(false))
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = h.Create(ctx, "empty", nil, options(false))
	require.ErrorIs(t, err, client.ErrArgument)
	p, err = h.Create(ctx, "volatile", local[:mib], options(false))
	require.NoError(t, err)
	require.ErrorIs(t, p.DeepPersist(0, 1), pool.ErrNotDurable)
	require.NoError(t, p.Close(ctx))
}

// TestHostsThatFail: the error names the host, and a remedy; nothing is done.
func TestHostsThatFail(t *testing.T) {
	ssh, _ := standIn(t)
	quarry := filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry")
	for _, x := range []struct {
		h    pool.Host
		want string
	}{
		{pool.Host{Name: "u@h", SSH: filepath.Join(t.TempDir(), "none") + " -T"}, "install OpenSSH's client"},
		{pool.Host{Name: "missing@host", SSH: ssh}, "missing@host: " + ssh + " could not connect, or lost its connection: Host key verification failed."},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: "quarry-that-is-not-there pool-agent"}, "u@h: its shell cannot run quarry-that-is-not-there pool-agent: install Quarry there"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: quarry + " pool-agent --none"}, "unknown flag --none"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: quarry + " pool-agent -C http://127.0.0.1:1"}, "unreachable"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: "echo Welcome to this host, and read the rules"}, `it begins with "Welcome to this "`},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: "cat /dev/urandom"}, "writes to standard output"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: `printf 'QPOOLAGT\002\000\000\000\000\000\000\000'; cat`}, "speaks version 2 of the protocol of pool agents, and this program 1: install the same version"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: `printf 'QPOOLAGT\001\000\000\000\000\000\000\000'; printf '%64s'`}, "not a frame of the protocol"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: "true"}, "the agent has ended: it says nothing"},
		{pool.Host{Name: "u@h", SSH: ssh, Agent: "echo a reason >&2; exit 3"}, "the agent has ended: exit status 3: a reason"},
	} {
		_, err := x.h.Stat(t.Context(), "ledger")
		require.ErrorIs(t, err, pool.ErrAgent)
		require.NotErrorIs(t, err, client.ErrUnknown)
		require.ErrorContains(t, err, x.want)
		_, err = x.h.Open(t.Context(), "ledger", make([]byte, mib), nil)
		require.Error(t, err)
	}
	for _, name := range []string{"", "-oProxyCommand=reboot", "a b", "u@", "@h", "h;reboot", "h\n", strings.Repeat("h", pool.MaxHostBytes+1)} {
		_, err := pool.Host{Name: name, SSH: ssh, Agent: "true"}.Stat(t.Context(), "ledger")
		require.ErrorIs(t, err, client.ErrArgument, "%q", name)
	}
	t.Setenv("QUARRY_SSH", ssh)
	t.Setenv("QUARRY_POOL_AGENT", "echo by a variable >&2; exit 4")
	_, err := pool.Host{Name: "u@h"}.Stat(t.Context(), "ledger")
	require.ErrorContains(t, err, "exit status 4: by a variable")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(time.Millisecond, cancel)
	_, err = pool.Host{Name: "u@h", Agent: "cat >/dev/null"}.Stat(ctx, "ledger")
	require.ErrorIs(t, err, context.Canceled)
}

// TestAgentOfAnotherVersion: an agent refuses a program that speaks another version, and garbage.
func TestAgentOfAnotherVersion(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	h, _ := hostOf(t, c)
	for input, want := range map[string]string{
		"QPOOLAGT\x02\x00\x00\x00\x00\x00\x00\x00":                      "speaks version 2 of the protocol of pool agents, and this quarry 1",
		"GET / HTTP/1.1\r\n\r\n":                                        "not a frame",
		"QPOOLAGT\x01\x00\x00\x00\x00\x00\x00\x00" + "0123456789abcdef": "not a frame",
		"QPOOLAGT\x01\x00\x00\x00\x00\x00\x00\x00" + "\x08\x00":         "unexpected EOF",
		"QPO": "unexpected EOF",
	} {
		words := strings.Fields(h.Agent)[1:]
		cmd := exec.CommandContext(t.Context(), words[0], words[1:]...)
		cmd.Stdin = strings.NewReader(input)
		var text strings.Builder
		cmd.Stderr = &text
		require.Error(t, cmd.Run(), "%q", input)
		require.Contains(t, text.String(), want, "%q", input)
	}
}

// TestAgentIsKilled: Persists that wait for an answer are unknown, later ones are not done, and the pool can be opened again when the agent's session is fenced: each
// range that was answered is there.
func TestAgentIsKilled(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: time.Second})
	h, pid := hostOf(t, c)
	const lanes, each = 8, 4096
	local := make([]byte, lanes*each)
	o := options(false)
	p, err := h.Create(ctx, "ledger", local, o)
	require.NoError(t, err)
	_, err = p.Sync(ctx, nil)
	require.NoError(t, err)
	var wg sync.WaitGroup
	var some sync.WaitGroup
	answered, last := [lanes]byte{}, [lanes]error{}
	some.Add(lanes)
	for lane := range lanes {
		wg.Go(func() {
			for n := byte(1); ; n++ {
				for i := range each {
					local[lane*each+i] = n
				}
				if last[lane] = p.Persist(uint64(lane*each), each); last[lane] != nil {
					return
				}
				answered[lane] = n
				if n == 3 {
					some.Done()
				}
			}
		})
	}
	some.Wait()
	kill(t, pid, syscall.SIGKILL)
	wg.Wait()
	for _, err := range last {
		require.True(t, errors.Is(err, client.ErrUnknown) || errors.Is(err, pool.ErrAgent), "%v", err)
		require.ErrorContains(t, err, "ops@far.example.com")
		require.ErrorContains(t, err, "signal: killed")
	}
	err = p.Persist(0, 1)
	require.ErrorIs(t, err, pool.ErrAgent)
	require.NotErrorIs(t, err, client.ErrUnknown)
	require.ErrorIs(t, p.Read(make([]byte, 1), 0), pool.ErrAgent)
	require.ErrorIs(t, p.Close(ctx), pool.ErrAgent)
	require.True(t, p.Dirty())

	back := make([]byte, len(local))
	var q *pool.Remote
	require.NoError(t, whenFenced(t, func() error { q, err = h.Open(ctx, "ledger", back, nil); return err }))
	require.True(t, q.Dirty())
	_, err = q.Restore(ctx, nil)
	require.NoError(t, err)
	for lane := range lanes {
		for i, b := range back[lane*each:][:each] {
			require.True(t, b == answered[lane] || b == answered[lane]+1, "lane %d, byte %d: %d behind %d", lane, i, b, answered[lane])
		}
	}
	require.NoError(t, q.Close(ctx))
}

// kill sends a signal to the process whose number a file has.
func kill(t testing.TB, pid string, s syscall.Signal) {
	b, err := os.ReadFile(pid)
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(n, s))
}

// TestGivenUp: a call that its caller gives up ends the stream, and the agent closes the pool as Dirty behind it: no byte of it arrives later.
func TestGivenUp(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	h, pid := hostOf(t, c)
	local := make([]byte, 4*mib)
	o := options(false)
	o.Replicas = 1
	p, err := h.Create(t.Context(), "ledger", local, o)
	require.NoError(t, err)
	kill(t, pid, syscall.SIGSTOP) // before the first answer
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(time.Millisecond, cancel)
	_, err = p.Sync(ctx, nil)
	require.ErrorIs(t, err, context.Canceled)
	kill(t, pid, syscall.SIGCONT)
	require.ErrorIs(t, p.Persist(0, 1), pool.ErrAgent)
	back := make([]byte, len(local))
	var q *pool.Remote
	require.NoError(t, whenFenced(t, func() error { q, err = h.Open(t.Context(), "ledger", back, nil); return err }))
	require.True(t, q.Dirty())
	require.NoError(t, q.Close(t.Context()))
}

// TestSetWithHosts: a set without a pool in a cluster that this program reaches; its client is nil.
func TestSetWithHosts(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	h, pid := hostOf(t, c)
	s := newSet(t, "ledger", 1)
	s.Pools, s.SSH, s.Agent = nil, h.SSH, h.Agent
	s.Remotes = []pool.RemotePool{{Host: "a@one", Name: "ledger"}, {Host: "b@two", Name: "second"}}
	o := options(false)
	o.Replicas = 1
	m, err := s.Create(ctx, nil, o, pool.MemoryOptions{})
	require.NoError(t, err)
	copy(m.Bytes()[1000:], "what is persisted")
	require.NoError(t, m.Persist(1000, 17))
	rep, err := s.Check(ctx, nil, nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: 3 * mib}, rep)
	m.Bytes()[0] = 1 // and nothing persists it
	rep, err = m.Sync(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: 3 * mib, Differ: 3 * pool.PartBytes}, rep)
	require.ErrorIs(t, s.Remove(ctx, nil), pool.ErrOpen)
	require.NoError(t, m.Close(ctx))

	// It was closed in order: nothing is compared.
	m, err = s.Open(ctx, nil, never(t))
	require.NoError(t, err)
	// The agent of the last pool ends: the program goes on, and its set is behind.
	kill(t, pid, syscall.SIGTERM)
	require.Eventually(t, func() bool { return errors.Is(m.Persist(0, 8), pool.ErrBehind) }, patience, time.Millisecond)
	require.True(t, m.Dirty())
	m.Bytes()[3*pool.PartBytes] = 9
	require.ErrorIs(t, m.Persist(3*pool.PartBytes, 1), pool.ErrBehind)
	require.Error(t, m.Close(ctx))
	require.NoError(t, whenFenced(t, func() error { m, err = s.Open(ctx, nil, pool.MemoryOptions{}); return err }))
	require.False(t, m.Dirty())
	require.NoError(t, m.Close(ctx))
	rep, err = s.Check(ctx, nil, nil)
	require.NoError(t, err)
	require.True(t, rep.Same())

	// The local part is lost, and made again from each; another owner is noticed.
	want := restored(t, s.Part.Path)
	for _, from := range []string{"", "a@one ledger", "b@two second"} {
		require.NoError(t, os.Remove(s.Part.Path))
		_, err = s.Restore(ctx, nil, from, nil)
		require.NoError(t, err)
		require.Equal(t, want, restored(t, s.Part.Path), from)
	}
	require.NoError(t, os.Remove(s.Part.Path))
	_, err = s.Restore(ctx, nil, "second", nil)
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = s.Restore(ctx, nil, "", nil)
	require.NoError(t, err)
	other := make([]byte, mib)
	p, err := h.Open(ctx, "second", other, nil)
	require.NoError(t, err)
	other[7] = 3
	require.NoError(t, p.Persist(7, 1))
	require.NoError(t, p.Close(ctx))
	_, err = s.Open(ctx, nil, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrMismatch)
	require.NoError(t, h.Remove(ctx, "second"))
	_, err = s.Sync(ctx, nil, o, nil)
	require.NoError(t, err)
	require.NoError(t, s.Remove(ctx, nil))
	_, err = h.Stat(ctx, "ledger")
	require.ErrorIs(t, err, client.ErrNoName)

	// A set that cannot be made leaves nothing: its call is given up, or a host does not answer.
	alone, cancel := *s, context.CancelFunc(nil)
	alone.Mirrors = nil
	for range 4 {
		ctx, cancel = context.WithCancel(t.Context())
		_, err = alone.Create(ctx, nil, o, pool.MemoryOptions{Progress: func(uint64) { cancel() }})
		require.ErrorIs(t, err, context.Canceled)
		require.NoFileExists(t, s.Part.Path)
		_, err = h.Stat(t.Context(), "ledger")
		require.ErrorIs(t, err, client.ErrNoName)
	}
	ctx = t.Context()
	s.Remotes = append(s.Remotes, pool.RemotePool{Host: "missing@host", Name: "third"})
	_, err = s.Create(ctx, nil, o, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrAgent)
	require.NoFileExists(t, s.Part.Path)
	_, err = h.Stat(ctx, "ledger")
	require.ErrorIs(t, err, client.ErrNoName)
}

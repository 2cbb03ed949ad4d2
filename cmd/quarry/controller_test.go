package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// TestReplaceController: of three controllers one loses its disk. It does not start under
// its old identity; after it is replaced it joins, copies the log and votes.
func TestReplaceController(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	dir := t.TempDir()
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Controllers: 3, Nodes: 1, RegionBytes: "16MiB", Dir: dir})
	require.NoError(t, err)
	t.Cleanup(func() { c.Stop() })
	run := func(args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=" + strings.Join(c.URLs, ",")}, "", args...)
	}
	list := func() map[string]memberView {
		var v controllersView
		out := map[string]memberView{}
		if r := run("controller", "list", "--json"); r.code == 0 {
			r.decode(t, &v)
		}
		for _, m := range v.Controllers {
			out[m.Name] = m
		}
		return out
	}
	run("slab", "alloc", "--data", "kept", "--name", "n").ok(t)
	require.Eventually(t, func() bool { // standbys show up when their election begins
		l := list()
		return len(l) == 3 && l["c1"].URL != "" && l["c2"].URL != "" && l["c3"].URL != ""
	}, patience, 100*time.Millisecond)
	lost := list()["c3"]
	require.Contains(t, []string{"voter", "leader"}, lost.Vote)
	require.Contains(t, run("controller", "add", "c3", "--etcd-peer", "http://127.0.0.1:1").err, "quarry controller replace c3")

	c.Process("c3").Kill()
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "c3")))
	require.ErrorContains(t, c.Restart(t.Context(), "c3"), "quarry controller replace c3")
	require.Eventually(t, func() bool { // a leader that was killed is replaced first
		return run("controller", "list").code == 0
	}, patience, 100*time.Millisecond)
	start := run("controller", "replace", "c3").ok(t)
	require.Contains(t, start, "--initial-cluster c1=")
	require.Equal(t, start, run("controller", "replace", "c3", "--etcd-peer", lost.Peers[0]).ok(t), "the same answer again")
	require.NoError(t, c.Restart(t.Context(), "c3"))
	require.Eventually(t, func() bool {
		m := list()["c3"]
		return m.Vote == "voter" && m.URL != "" && m.ID != lost.ID
	}, patience, 200*time.Millisecond, "%v", list())

	// The new member counts: without one of the others there is still a quorum.
	c.Process("c1").Kill()
	require.Eventually(t, func() bool {
		r := run("slab", "read", "@n")
		return r.code == 0 && r.out == "kept"
	}, patience, 100*time.Millisecond)
	require.NoError(t, c.Restart(t.Context(), "c1"))

	// A controller that is removed ends, and its folder is refused from then on.
	// One that leads may end before its answer is out; then it is not found any more.
	require.Eventually(t, func() bool {
		removed := run("controller", "remove", "c2").code == 0
		l := list()
		_, there := l["c2"]
		return removed || len(l) == 2 && !there
	}, patience, 200*time.Millisecond)
	c.Process("c2").Wait()
	log := c.Process("c2").Log()
	require.Contains(t, log, "removed from the cluster")
	require.NotContains(t, log, "panic: ")
	require.Eventually(t, func() bool { return len(list()) == 2 }, patience, 100*time.Millisecond)
}

// TestControllerBeginsAloneAndGrows: one controller with an address gets a second one.
func TestControllerBeginsAloneAndGrows(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	exe, dir := executable(t), t.TempDir()
	one, err := local.Spawn(t.Context(), exe, "controller", "--name", "a", "--listen", "127.0.0.1:0", "--data", filepath.Join(dir, "a"))
	require.NoError(t, err)
	alone := func(args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=" + one.Ready["url"]}, "", args...)
	}
	require.Contains(t, alone("controller", "add", "b", "--etcd-peer", "http://127.0.0.1:7").err, "start it again with --name NAME --etcd-peer URL")
	require.NoError(t, one.Stop())
	ports := freePeerURLs(t, 2)
	one, err = local.Spawn(t.Context(), exe, "controller", "--name", "a", "--listen", "127.0.0.1:0", "--data", filepath.Join(dir, "a"), "--etcd-peer", ports[0])
	require.NoError(t, err)
	t.Cleanup(func() { one.Stop() })
	var start struct {
		All string `json:"initial_cluster"`
	}
	require.Contains(t, alone("controller", "add", "b", "--etcd-peer", "nonsense").err, "want a URL such as")
	alone("controller", "add", "b", "--etcd-peer", ports[1], "--json").decode(t, &start)
	require.Contains(t, start.All, "b="+ports[1])
	two, err := local.Spawn(t.Context(), exe, "controller", "--name", "b", "--listen", "127.0.0.1:0", "--data", filepath.Join(dir, "b"), "--etcd-peer", ports[1], "--initial-cluster", start.All)
	require.NoError(t, err)
	t.Cleanup(func() { two.Stop() })
	require.Eventually(t, func() bool {
		return strings.Count(alone("controller", "list").out, "voter")+strings.Count(alone("controller", "list").out, "leader") >= 3
	}, patience, 200*time.Millisecond, alone("controller", "list").out)
	require.Contains(t, alone("controller", "remove", "nobody").err, "quarry controller list")
}

// TestFirstStartSaysWhatItWaitsFor: the first of several controllers is not ready before the others run, and names them.
func TestFirstStartSaysWhatItWaitsFor(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a process; not with -short")
	}
	ports := freePeerURLs(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, executable(t), "controller", "--name", "a", "--listen", "127.0.0.1:0", "--data", t.TempDir(),
		"--etcd-peer", ports[0], "--initial-cluster", "a="+ports[0]+",b="+ports[1])
	text, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines, said := bufio.NewScanner(text), false
	for !said && lines.Scan() {
		said = strings.HasPrefix(lines.Text(), "quarry: first start: waiting for controller b at "+ports[1])
	}
	require.True(t, said, "the process has ended without it")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	_, _ = io.Copy(io.Discard, text)
	require.Error(t, cmd.Wait(), "it has never been ready")
}

// TestControllerUsage: what would end a member at its next start is refused at the first.
func TestControllerUsage(t *testing.T) {
	r := quarry(t, nil, "", "controller", "--name", "a", "--listen", "127.0.0.1:0", "--etcd-peer", "http://127.0.0.1:7", "--initial-cluster", "a=http://127.0.0.1:7,b=http://127.0.0.1:8")
	require.Equal(t, exitUsage, r.code)
	require.Contains(t, r.err, "without --data")
	help := quarry(t, nil, "", "controller", "--help").ok(t)
	require.Contains(t, help, "quarry controller serve --help")
	require.Contains(t, quarry(t, nil, "", "controller", "serve", "--help").ok(t), "--initial-cluster")
	require.Contains(t, help, "replace")
}

// freePeerURLs are URLs of the loopback that nothing listens on at this moment.
func freePeerURLs(t *testing.T, n int) (urls []string) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		urls = append(urls, "http://"+l.Addr().String())
	}
	return urls
}

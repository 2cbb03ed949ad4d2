package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/cmd/quarry/demo"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/internal/local"
)

func TestDev(t *testing.T) {
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "2", "--replicas", "2", "--region-bytes", "32MiB")
	require.NoError(t, err)
	env := []string{"QUARRY_CONTROLLER=" + p.Ready["url"]}
	ref := strings.TrimSpace(quarry(t, env, "", "slab", "alloc", "-d", "x", "-r", "2").ok(t))
	require.Equal(t, "x", quarry(t, env, "", "slab", "read", ref).ok(t))
	quarry(t, env, "", "fsck").ok(t)
	// Ctrl-C: clean, and quiet.
	require.NoError(t, p.Signal(syscall.SIGINT))
	require.Zero(t, p.Wait().ExitCode(), p.Log())
	require.Empty(t, p.Log())
}

// State and regions in a folder are there again after a restart.
func TestDevKeepsData(t *testing.T) {
	dir := t.TempDir()
	start := func() (*local.Process, []string) {
		p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--data", dir, "--region-bytes", "32MiB", "--lease", "1s")
		require.NoError(t, err)
		return p, []string{"QUARRY_CONTROLLER=" + p.Ready["url"]}
	}
	p, env := start()
	quarry(t, env, "", "slab", "alloc", "-d", "kept", "--name", "kept").ok(t)
	var s statusView
	quarry(t, env, "", "status", "--json").decode(t, &s)
	require.NoError(t, p.Stop())
	p, env = start()
	defer p.Stop()
	require.Contains(t, quarry(t, env, "", "name", "get", "kept").ok(t), "kept")
	var again statusView
	quarry(t, env, "", "status", "--json").decode(t, &again)
	require.Equal(t, s.Cluster, again.Cluster)
	require.Len(t, again.Nodes, 3)
	require.NotEmpty(t, again.Regions)
}

func TestPortsInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	at := l.Addr().String()
	quarry(t, nil, "", "controller", "--listen", at).fails(t, exitFailed, at, "--listen")
	quarry(t, nil, "", "dev", "--listen", at).fails(t, exitFailed, at, "--listen")
	quarry(t, nil, "", "storage", "-C", cluster(t).URL, "--name", "x", "--listen", at, "--agent", "127.0.0.1:0").fails(t, exitFailed, at)
}

func TestTwoNodesWithOneName(t *testing.T) {
	r := quarry(t, nil, "", "storage", "-C", cluster(t).URL, "--name", "n1", "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0", "--timeout", "5s")
	require.NotZero(t, r.code)
	r.fails(t, r.code, "n1")
	on(t, "slab", "free", alloc(t, "the first n1 goes on")).ok(t)
}

func TestDamagedRegionFiles(t *testing.T) {
	for name, content := range map[string][]byte{
		"garbage":   []byte(strings.Repeat("garbage ", 4096)),
		"truncated": []byte("QUARRY\r\n"),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "region-1.quarry")
			require.NoError(t, os.WriteFile(file, content, 0o600))
			r := quarry(t, nil, "", "storage", "-C", cluster(t).URL, "--name", "x", "--data", dir, "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0")
			r.fails(t, exitFailed, file)
			after, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, content, after, "nothing has changed")
		})
	}
}

func TestFullCluster(t *testing.T) {
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 1, RegionBytes: "16MiB"})
	require.NoError(t, err)
	defer c.Stop()
	env := []string{"QUARRY_CONTROLLER=" + c.URL}
	quarry(t, env, "", "slab", "alloc", "-d", "x", "-r", "2").fails(t, exitNoSpace, "2 replicas")
	// One node of 64 GiB takes very many such regions: fill one whose node has no more room.
	require.NoError(t, c.Nodes[0].Stop())
	small, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 1, RegionBytes: "16MiB", Capacity: "16MiB"})
	require.NoError(t, err)
	defer small.Stop()
	env = []string{"QUARRY_CONTROLLER=" + small.URL}
	blob := strings.Repeat("x", 1<<20-100)
	for i := 0; ; i++ {
		require.Less(t, i, 20, "a region of 16 MiB cannot hold so many")
		r := quarry(t, env, blob, "slab", "alloc", "--write-once")
		if r.code != 0 {
			r.fails(t, exitNoSpace, "no space")
			break
		}
	}
	quarry(t, env, "", "fsck").ok(t)
}

func TestDemo(t *testing.T) {
	dir := t.TempDir()
	for i, n := range []int{0, 1, 100, 70_000, 300_000, 2 << 20} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, string("abcefg"[i])), []byte(strings.Repeat(string(rune('A'+i)), n)), 0o600))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "d"), 0o700))
	for name, text := range map[string]string{"x": "hay, hay", "y": "a needle in hay", "z": "nothing"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "d", name), []byte(text), 0o600))
	}
	var rep demoReport
	quarry(t, nil, "", "demo", dir, "--json", "--query", "needle").decode(t, &rep)
	require.True(t, rep.OK)
	parts := map[string]demo.Result{}
	for _, p := range rep.Parts {
		parts[fmt.Sprint(p.What, p.Files)] = p
	}
	require.Contains(t, parts, "load9")
	require.Equal(t, "tcp", parts["read back9"].Provider)
	require.Contains(t, parts, "scan d/3")
	require.Contains(t, parts, "delete a third3")
	require.Contains(t, parts, "read back6")
	if rep.NoRedis == "" {
		require.Contains(t, parts, "redis-cli GET5")
	}
	require.NotNil(t, rep.Killed)
	require.Equal(t, 6, rep.Index.Files)
	require.Len(t, rep.Index.Hits, 1)
	require.Equal(t, "d/y", rep.Index.Hits[0].Name)
}

// A client killed in the middle of its work leaves nothing that is wrong: at most
// map bits it had claimed and not yet stamped, which the scrub of its session clears.
func TestKilledClient(t *testing.T) {
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 2, RegionBytes: "64MiB", Lease: "500ms"})
	require.NoError(t, err)
	defer c.Stop()
	env := []string{"QUARRY_CONTROLLER=" + c.URL}
	for _, transport := range []string{"shm", "tcp"} {
		cmd := exec.Command(executable(t), "bench", "--role", "worker", "-C", c.URL, "--transport", transport)
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		_, err = io.WriteString(in, `{"op":"alloc","bytes":100,"clients":2,"duration_ns":60000000000,"replicas":2,"batch":1,"objects":100}`+"\n")
		require.NoError(t, err)
		line, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "ready\n", line)
		_, err = io.WriteString(in, "go\n")
		require.NoError(t, err)
		// It works now. Everybody else goes on while it is killed, and after.
		quarry(t, env, "", "slab", "free", strings.TrimSpace(quarry(t, env, "", "slab", "alloc", "-d", "x", "-r", "2").ok(t))).ok(t)
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
		quarry(t, env, "", "slab", "free", strings.TrimSpace(quarry(t, env, "", "slab", "alloc", "-d", "x", "-r", "2").ok(t))).ok(t)
		var report fsck.Report
		res := quarry(t, env, "", "fsck", "--json")
		require.NoError(t, json.Unmarshal([]byte(res.out), &report), res.err)
		for _, f := range report.Findings {
			require.Equal(t, fsck.KindLeak, f.Kind, "%+v", f)
		}
		require.Zero(t, report.More)
	}
}

package main

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/pool"
)

// TestPoolsOfAHost: quarry pool --host, and a poolset file with a host, by a command in ssh's place that runs the agent on this host.
func TestPoolsOfAHost(t *testing.T) {
	on(t, "slab", "free", alloc(t, "makes region 1, which other tests look for")).ok(t)
	dir := t.TempDir()
	ssh := filepath.Join(dir, "ssh")
	require.NoError(t, os.WriteFile(ssh, []byte("#!/bin/sh\nshift\nexec sh -c \"$*\"\n"), 0o700))
	far := func(args ...string) result {
		t.Helper()
		args = append([]string{"pool", "--ssh", ssh, "--agent", "exec " + executable(t) + " pool-agent -C " + cluster(t).URL}, args...)
		return quarry(t, []string{"QUARRY_CONTROLLER=http://127.0.0.1:1"}, "", args...) // which this host does not reach
	}
	file, back, set := filepath.Join(dir, "memory"), filepath.Join(dir, "back"), filepath.Join(dir, "far.set")
	memory := make([]byte, 1_500_000)
	_, _ = rand.Read(memory)
	require.NoError(t, os.WriteFile(file, memory, 0o640))
	const host = "--host=ops@far.example.com"
	var made poolView
	far("create", "far", file, host, "--region", "1MiB", "--signature", "FAR", "--json").decode(t, &made)
	require.Equal(t, []any{"FAR", pool.Ready, false, uint64(len(memory))}, []any{made.Signature, made.State, made.Dirty, made.Bytes})
	far("check", "far", file, host).ok(t)
	memory[7]++
	require.NoError(t, os.WriteFile(file, memory, 0o640))
	far("check", "far", file, host).fails(t, exitDamaged, "is not as")
	far("sync", "far", file, host).ok(t)
	far("restore", "far", back, host).ok(t)
	got, err := os.ReadFile(back)
	require.NoError(t, err)
	require.Equal(t, memory, got)
	require.Contains(t, far("info", "far", host).ok(t), `"FAR"`)
	on(t, "pool", "check", "far", file).ok(t)
	far("create", "far", file, host).fails(t, exitConflict, "ops@far.example.com: ")
	far("rm", "far", host).ok(t)
	far("rm", "far", host).fails(t, exitNotFound, "far")
	far("info", "far", "--host=-oProxyCommand=x").fails(t, exitUsage, "want HOST or USER@HOST")
	quarry(t, nil, "", "pool", "--ssh", ssh, "--agent", "exit 1", "info", "far", host).fails(t, exitUnreachable, "no pool agent on ops@far.example.com")
	quarry(t, []string{"QUARRY_SSH=" + ssh, "QUARRY_POOL_AGENT=none"}, "", "pool", "info", "far", host).fails(t, exitUnreachable, "install Quarry there")
	require.Contains(t, on(t, "pool-agent").ok(t), "QPOOLAGT", "standard input ends at once")

	require.NoError(t, os.WriteFile(set, fmt.Appendf(nil, "PMEMPOOLSET\n1028KiB %s\nREPLICA ops@far.example.com farset\n", filepath.Join(dir, "part")), 0o600))
	var view poolSetView
	far("set", "create", set, "--region", "1MiB", "--json").decode(t, &view)
	require.Equal(t, []any{1, "ops@far.example.com farset", pool.Ready}, []any{len(view.Pools), view.Pools[0].Name, view.Pools[0].State})
	far("set", "check", set).ok(t)
	require.Contains(t, quarry(t, nil, "", "pool", "--ssh", ssh, "--agent", "exit 1", "set", "info", set).ok(t), "unreachable: no pool agent on ops@far.example.com")
	require.NoError(t, os.Remove(filepath.Join(dir, "part")))
	far("set", "restore", set, "--from", "ops@far.example.com farset").ok(t)
	far("set", "sync", set).ok(t)
	far("set", "rm", set).ok(t)
	require.NotContains(t, on(t, "pool", "list").ok(t), "farset")
}

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/pool"
)

// TestPoolSetCommands: each command of quarry pool set, and what it refuses.
func TestPoolSetCommands(t *testing.T) {
	on(t, "slab", "free", alloc(t, "makes region 1, which other tests look for")).ok(t)
	dir := t.TempDir()
	file, memory, mirror := filepath.Join(dir, "books.set"), filepath.Join(dir, "memory"), filepath.Join(dir, "mirror")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "PMEMPOOLSET\n1028KiB %s\nREPLICA\n1028KiB %s\nREPLICA quarry: books\n", memory, mirror), 0o600))
	var view poolSetView
	on(t, "pool", "set", "info", file, "--json").decode(t, &view)
	require.Equal(t, []string{pool.Missing, pool.Missing, pool.Missing}, []string{view.Parts[0].State, view.Parts[1].State, view.Pools[0].State})
	on(t, "pool", "set", "create", file, "--region", "1MiB", "--signature", "BOOKS", "--format", "2", "--json").decode(t, &view)
	require.EqualValues(t, 1<<20, view.Pools[0].Bytes)
	require.Equal(t, []string{memory, mirror, "BOOKS"}, []string{view.Parts[0].Path, view.Parts[1].Path, view.Pools[0].Signature})
	require.Contains(t, on(t, "pool", "set", "info", file).ok(t), "quarry: books")

	// A file that was changed while nobody had it open.
	b, err := os.ReadFile(memory)
	require.NoError(t, err)
	b[pool.HeaderBytes+5]++
	require.NoError(t, os.WriteFile(memory, b, 0o600))
	var rep poolReport
	on(t, "pool", "set", "check", file).fails(t, exitDamaged, "is not as")
	on(t, "pool", "set", "sync", file, "--json").decode(t, &rep)
	require.EqualValues(t, 2*pool.PartBytes, rep.Differ)
	on(t, "pool", "set", "check", file, "--json").decode(t, &rep)
	require.True(t, rep.Same)
	on(t, "pool", "set", "restore", file).fails(t, exitUsage, "move it away")
	on(t, "pool", "set", "create", file).fails(t, exitUsage, "not there before")
	require.NoError(t, os.Rename(memory, memory+".away"))
	on(t, "pool", "set", "check", file).fails(t, exitNotFound, "no local part")
	on(t, "pool", "set", "rm", file).fails(t, exitNotFound, "no local part")
	on(t, "pool", "set", "restore", file, "--from", "none").fails(t, exitUsage, "no replica")
	require.Contains(t, on(t, "pool", "set", "restore", file, "--from", "books").ok(t), "is as the replica is now")
	got, err := os.ReadFile(memory)
	require.NoError(t, err)
	require.Equal(t, b[pool.HeaderBytes:], got[pool.HeaderBytes:])
	on(t, "pool", "set", "rm", file).ok(t)
	require.NotContains(t, on(t, "pool", "list").ok(t), "books")
	require.NoFileExists(t, mirror)

	require.NoError(t, os.WriteFile(file, []byte("PMEMPOOLSET\n1MiB here\n"), 0o600))
	for _, command := range []string{"create", "info", "check", "sync", "restore", "rm"} {
		on(t, "pool", "set", command, file).fails(t, exitUsage, "books.set:2: part \"here\": want the path of a file")
		on(t, "pool", "set", command, file+"x").fails(t, exitUsage, "no such file")
	}
}

package main

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/pool"
)

// TestPoolCommands: each command of quarry pool, and what it refuses.
func TestPoolCommands(t *testing.T) {
	on(t, "slab", "free", alloc(t, "makes region 1, which other tests look for")).ok(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "memory")
	memory := make([]byte, 1_500_000)
	_, _ = rand.Read(memory)
	require.NoError(t, os.WriteFile(file, memory, 0o640))

	var made poolView
	on(t, "pool", "create", "ledger", file, "--region", "1MiB", "--signature", "LEDGER", "--format", "3", "--json").decode(t, &made)
	require.EqualValues(t, len(memory), made.Bytes)
	require.Equal(t, []any{"LEDGER", uint32(3), pool.Ready, false}, []any{made.Signature, made.Major, made.State, made.Dirty})
	require.Contains(t, on(t, "pool", "list").ok(t), `"LEDGER"`)
	require.Contains(t, on(t, "pool", "info", "ledger").ok(t), "1.4 MiB")
	require.Contains(t, on(t, "complete-values", "pool info").ok(t), "ledger\n")
	var rep poolReport
	on(t, "pool", "check", "ledger", file, "--json").decode(t, &rep)
	require.True(t, rep.Same)

	memory[700_000]++
	require.NoError(t, os.WriteFile(file, memory, 0o640))
	on(t, "pool", "check", "ledger", file).fails(t, exitDamaged, "is not as")
	on(t, "pool", "sync", "ledger", file, "--json").decode(t, &rep)
	require.EqualValues(t, pool.PartBytes, rep.Differ)
	on(t, "pool", "check", "ledger", file).ok(t)
	back := filepath.Join(dir, "back")
	require.Contains(t, on(t, "pool", "restore", "ledger", back).ok(t), "the file is as the pool is now")
	got, err := os.ReadFile(back)
	require.NoError(t, err)
	require.Equal(t, memory, got)

	// What is refused changes nothing.
	short := filepath.Join(dir, "short")
	require.NoError(t, os.WriteFile(short, memory[1:], 0o600))
	on(t, "pool", "create", "ledger", file).fails(t, exitConflict, "ledger")
	on(t, "pool", "create", "other", dir).fails(t, exitUsage, "want a regular file")
	on(t, "pool", "create", "other", filepath.Join(dir, "none")).fails(t, exitUsage, "none")
	on(t, "pool", "create", "other", file, "--signature", "ninebytes").fails(t, exitUsage, "at most 8 bytes")
	on(t, "pool", "check", "ledger", short).fails(t, exitUsage, "1500000 bytes, the local memory 1499999")
	on(t, "pool", "sync", "ledger", short).fails(t, exitUsage, "1500000 bytes, the local memory 1499999")
	on(t, "pool", "sync", "none", file).fails(t, exitNotFound, "none")
	on(t, "pool", "restore", "none", back).fails(t, exitNotFound, "none")
	on(t, "pool", "restore", "ledger", dir).fails(t, exitUsage, "not a regular file")
	on(t, "pool", "check", "ledger", back).ok(t)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 3, "no temporary file")
	on(t, "pool", "rm", "ledger").ok(t)
	on(t, "pool", "rm", "ledger").fails(t, exitNotFound, "ledger")
	require.NotContains(t, on(t, "space", "list").ok(t), "ledger")
}

package main

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/space"
)

// TestSpaceCommands: each command of quarry space, and what it refuses.
func TestSpaceCommands(t *testing.T) {
	on(t, "slab", "free", alloc(t, "makes region 1, which other tests look for")).ok(t)
	var made space.Info
	on(t, "space", "create", "pages", "2MiB", "--region", "1MiB", "--json").decode(t, &made)
	require.EqualValues(t, 2<<20, made.Bytes)
	require.Contains(t, on(t, "space", "list").ok(t), "pages")
	require.Contains(t, on(t, "region", "list").ok(t), "of space pages")
	on(t, "space", "create", "pages", "1MiB").fails(t, exitConflict, "pages")
	on(t, "space", "create", "other", "1MiB", "--region", "1000").fails(t, exitUsage, "whole MiB")
	on(t, "space", "create", "other", "1MiB", "--base", "0x100000000000", "-r", "1").fails(t, exitNoSpace, `in the way of space "pages"`)
	on(t, "space", "stat", "none").fails(t, exitNotFound, "none")

	on(t, "space", "write", "pages", "+1048570", "--data", "over a border").ok(t)
	require.Equal(t, "over a border", on(t, "space", "read", "pages", "+0xffffa", "13").ok(t))
	on(t, "space", "read", "pages", "+2MiB", "1").fails(t, exitUsage, "want 0xADDRESS")
	on(t, "space", "read", "pages", "+0x1fffff", "2").fails(t, exitUsage, "outside of the space")
	var p space.Place
	on(t, "space", "stat", "pages", "+1048576", "--json").decode(t, &p)
	require.Zero(t, p.Offset)
	require.NotEmpty(t, p.Node)
	require.NotEmpty(t, p.Provider)

	dir := t.TempDir()
	in, back := filepath.Join(dir, "in"), filepath.Join(dir, "back")
	rows := make([]byte, 1_500_000)
	_, _ = rand.Read(rows)
	require.NoError(t, os.WriteFile(in, rows, 0o600))
	on(t, "space", "cp", in, "pages:+77").ok(t)
	on(t, "space", "cp", "pages:+77", back, "--bytes", "1500000").ok(t)
	got, err := os.ReadFile(back)
	require.NoError(t, err)
	require.Equal(t, rows, got)
	// What is refused changes nothing: the space, and the file.
	all := on(t, "space", "read", "pages", "+0", "2MiB").ok(t)
	on(t, "space", "cp", in, "pages:+1000000").fails(t, exitUsage, "outside of the space")
	on(t, "space", "cp", in, "pages:+0", "--bytes", "1600000").fails(t, exitUsage, "1500000 bytes: --bytes 1600000 is more")
	on(t, "space", "cp", in, "pages:+0xffffffffffffffff").fails(t, exitUsage, "outside of the space")
	for _, from := range []string{"pages:+0xffffffff", "pages:+2097152", "pages:0x1000", "pages:+0xffffffffffffffff"} {
		on(t, "space", "cp", from, back).fails(t, exitUsage, "outside of the space")
	}
	on(t, "space", "cp", "pages:+1000000", back, "--bytes", "2MiB").fails(t, exitUsage, "outside of the space")
	on(t, "space", "cp", "pages:+0", dir).fails(t, exitUsage, "not a regular file")
	refused := on(t, "space", "read", "pages", "+1000", "2MiB")
	refused.fails(t, exitUsage, "outside of the space")
	require.Empty(t, refused.out)
	require.Equal(t, all, on(t, "space", "read", "pages", "+0", "2MiB").ok(t))
	got, err = os.ReadFile(back)
	require.NoError(t, err)
	require.Equal(t, rows, got)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 2, "no temporary file")
	on(t, "space", "cp", in, back).fails(t, exitUsage, "want one of them as SPACE:ADDRESS")
	on(t, "space", "cp", filepath.Join(dir, "none"), "pages:+0").fails(t, exitUsage, "none")
	require.Contains(t, on(t, "space", "grow", "pages", "1").ok(t), "3 of 1.0 MiB")
	require.False(t, strings.Contains(on(t, "fsck").ok(t), "pages"), "fsck does not look at plain bytes")
	on(t, "fsck", "-R", fmt.Sprint(p.Region)).fails(t, exitUsage, fmt.Sprintf("region %d holds plain bytes: fsck checks slabs", p.Region))
	require.Contains(t, on(t, "complete-values", "space rm").ok(t), "pages\n")
	on(t, "space", "rm", "pages").ok(t)
	on(t, "space", "rm", "pages").fails(t, exitNotFound, "pages")
}

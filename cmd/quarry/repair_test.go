package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// TestFsckRepair spoils bytes in the files of running storage nodes, where disks
// and memory spoil them.
func TestFsckRepair(t *testing.T) {
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 2, RegionBytes: "64MiB", Keep: true, Dir: t.TempDir()})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Stop()) }()
	run := func(args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=" + c.URL}, "", args...)
	}
	spoil := func(node, text string) {
		paths, err := filepath.Glob(filepath.Join(c.NodeDir(node), "region-*"))
		require.NoError(t, err)
		require.Len(t, paths, 1)
		f, err := os.OpenFile(paths[0], os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		b, err := os.ReadFile(paths[0])
		require.NoError(t, err)
		at := bytes.Index(b, []byte(text))
		require.Positive(t, at)
		_, err = f.WriteAt([]byte{b[at] ^ 1}, int64(at))
		require.NoError(t, err)
	}
	for _, text := range []string{"spoilt on one node", "spoilt on both nodes"} {
		run("slab", "alloc", "--replicas", "2", "--data", text, "--name", strings.ReplaceAll(text, " ", "-")).ok(t)
	}
	run("fsck").ok(t)
	spoil("n1", "spoilt on one node")
	run("fsck").fails(t, exitDamaged, "1 findings", "checksum")
	require.Equal(t, "spoilt on one node", strings.TrimSpace(run("slab", "read", "@spoilt-on-one-node").ok(t)), "a reader may not repair, and is told what is right")
	run("fsck").fails(t, exitDamaged, "1 findings", "checksum")
	var rep fsckView
	run("fsck", "--repair", "--json").decode(t, &rep)
	require.Equal(t, 1, rep.Repaired.Objects)
	require.Empty(t, rep.Findings)
	run("fsck").ok(t)
	require.Equal(t, "spoilt on one node", strings.TrimSpace(run("slab", "read", "@spoilt-on-one-node").ok(t)))

	spoil("n1", "spoilt on both nodes")
	spoil("n2", "spoilt on both nodes")
	got := run("fsck", "--repair")
	got.fails(t, exitDamaged, "1 findings")
	require.Contains(t, got.out, "left as it is:")
	run("slab", "read", "@spoilt-on-both-nodes").fails(t, exitDamaged, "damaged on every replica")
}

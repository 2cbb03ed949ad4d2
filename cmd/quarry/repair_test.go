package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/fsck"
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
		for _, path := range paths {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			if at := bytes.Index(b, []byte(text)); at > 0 {
				_, err = f.WriteAt([]byte{b[at] ^ 1}, int64(at))
				require.NoError(t, err)
				return
			}
		}
		t.Fatalf("%q is in none of %v", text, paths)
	}
	run("tenant", "create", "shop").ok(t)
	for tenant, texts := range map[string][]string{"default": {"spoilt on one node", "spoilt on both nodes"}, "shop": {"spoilt in a shop"}} {
		for _, text := range texts {
			run("slab", "alloc", "--tenant", tenant, "--replicas", "2", "--data", text, "--name", strings.ReplaceAll(text, " ", "-")).ok(t)
		}
		run("kv", "create", "--tenant", tenant, "-t", "of-"+tenant).ok(t)
	}
	run("fsck").ok(t)
	spoil("n1", "spoilt on one node")
	run("fsck").fails(t, exitDamaged, "1 findings", "checksum")
	require.Equal(t, "spoilt on one node", strings.TrimSpace(run("slab", "read", "@spoilt-on-one-node").ok(t)), "a reader may not repair, and is told what is right")
	spoil("n1", "spoilt in a shop")
	run("fsck").fails(t, exitDamaged, "2 findings", "checksum")
	run("fsck", "--tenant", "shop").fails(t, exitDamaged, "1 findings", "checksum")
	var rep fsckView
	run("fsck", "--repair", "--json").decode(t, &rep) // in both tenants
	require.Equal(t, 2, rep.Repaired.Objects)
	require.Empty(t, rep.Findings)
	var trees []string
	for _, tree := range rep.Trees {
		trees = append(trees, tree.Tenant+" "+tree.Name)
	}
	require.Equal(t, []string{"default of-default", "shop of-shop"}, trees)
	require.NotContains(t, run("fsck", "--tenant", "shop").ok(t), "of-default")
	run("fsck", "--tenant", "nowhere").fails(t, exitFailed, "quarry tenant list")
	run("fsck").ok(t)
	require.Equal(t, "spoilt on one node", strings.TrimSpace(run("slab", "read", "@spoilt-on-one-node").ok(t)))

	spoil("n1", "spoilt on both nodes")
	spoil("n2", "spoilt on both nodes")
	got := run("fsck", "--repair")
	got.fails(t, exitDamaged, "1 findings")
	require.Contains(t, got.out, "left as it is:")
	require.Contains(t, got.out, "1 lost objects marked BAD")
	run("slab", "read", "@spoilt-on-both-nodes").fails(t, exitDamaged, "damaged on every replica", "marked BAD")
	run("slab", "write", "@spoilt-on-both-nodes", "--data", "x").fails(t, exitDamaged, "marked BAD")

	// The mark is listed, by the check and among the names. The object is restored.
	lost := func() (marks []string) {
		var rep fsckView
		bad := run("fsck", "--bad", "--json")
		require.NoError(t, json.Unmarshal([]byte(bad.out), &rep), bad.out)
		for _, f := range rep.Findings {
			require.Equal(t, fsck.KindBad, f.Kind)
			require.Contains(t, run("name", "list", "--kind", "bad").ok(t), "bad/"+f.Where)
			marks = append(marks, f.Mark.String())
		}
		return marks
	}
	require.Len(t, lost(), 1)
	run("slab", "restore", lost()[0], "@spoilt-on-one-node", "--data", "x").fails(t, exitUsage, "not in the slab of the mark")
	run("slab", "restore", lost()[0], "@spoilt-on-both-nodes", "--data", "from a copy").ok(t)
	require.Equal(t, "from a copy", strings.TrimSpace(run("slab", "read", "@spoilt-on-both-nodes").ok(t)))
	run("fsck").ok(t)
	require.NotContains(t, run("name", "list").ok(t), "bad/")

	// It is lost again, and given up.
	spoil("n1", "from a copy")
	spoil("n2", "from a copy")
	run("fsck", "--repair").fails(t, exitDamaged, "1 findings")
	marks := lost()
	require.Len(t, marks, 1)
	run("slab", "discard", marks[0]).ok(t)
	run("slab", "discard", marks[0]).fails(t, exitNotFound, "does not have this mark any more")
	run("slab", "read", "@spoilt-on-both-nodes").fails(t, exitNotFound, "freed")
	run("fsck").ok(t)
	require.NotContains(t, run("name", "list").ok(t), "bad/")
}

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// TestKilledLeaders kills controllers one after the other, each time the one whose member
// leads etcd or the one that leads the cluster, which may be another: the cluster changes its
// tables again.
func TestKilledLeaders(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Controllers: 3, Nodes: 1, RegionBytes: "16MiB", LogLevel: "info"})
	require.NoError(t, err)
	t.Cleanup(func() { c.Stop() })
	run := func(args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=" + strings.Join(c.URLs, ",")}, "", args...)
	}
	leaders := func() (etcd, ours string, all bool) {
		var v controllersView
		r := run("controller", "list", "--json")
		if r.code != 0 {
			return "", "", false
		}
		r.decode(t, &v)
		there := 0
		for _, m := range v.Controllers {
			if m.URL != "" {
				there++
			}
			if m.Vote == "leader" {
				etcd = m.Name
			}
			if m.State == "leader" {
				ours = m.Name
			}
		}
		return etcd, ours, there == 3 && etcd != "" && ours != ""
	}
	ref := strings.TrimSpace(run("slab", "alloc", "--data", "kept").ok(t))
	for i, which := range []string{"etcd", "cluster", "etcd", "cluster"} {
		var etcd, ours string
		require.Eventually(t, func() (all bool) { etcd, ours, all = leaders(); return all }, patience, 100*time.Millisecond)
		target := etcd
		if which == "cluster" {
			target = ours
		}
		began := time.Now()
		c.Process(target).Kill()
		name := "n" + string(rune('1'+i))
		require.Eventually(t, func() bool { return run("name", "set", name, ref).code == 0 }, patience, 10*time.Millisecond)
		t.Logf("%s led etcd, %s the cluster; %s was killed: a name was set after %v", etcd, ours, target, time.Since(began).Round(time.Millisecond))
		if testing.Verbose() {
			for _, p := range c.Controllers {
				t.Logf("%s:\n%s", p.Name, p.Log())
			}
		}
		require.NoError(t, c.Restart(t.Context(), target))
	}
	require.Equal(t, "kept", run("slab", "read", "@n1").ok(t))
}

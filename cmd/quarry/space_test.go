package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/local"
)

// medium mounts a small file system of a kind, tmpfs or ext4, and returns its folder.
func medium(t *testing.T, kind string, mib int) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	dir := t.TempDir()
	args := []string{"-t", "tmpfs", "-o", fmt.Sprintf("size=%dm", mib), "none", dir}
	if kind == "ext4" {
		image := filepath.Join(t.TempDir(), "image")
		require.NoError(t, os.WriteFile(image, nil, 0o600))
		require.NoError(t, os.Truncate(image, int64(mib)<<20))
		if out, err := exec.Command("mkfs.ext4", "-q", image).CombinedOutput(); err != nil {
			t.Skipf("no ext4 can be made here: %v %s", err, out)
		}
		args = []string{"-o", "loop", image, dir}
	}
	if out, err := exec.Command("mount", args...).CombinedOutput(); err != nil {
		t.Skipf("no %s can be mounted here: %v %s", kind, err, out)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// TestFullMediumEndsNoProcess: what the regions' memory is taken from runs full, by the
// regions themselves and by other programs. Clients get an error that says so, over
// shared memory and tcp; they and the node go on, and what was written stays readable.
func TestFullMediumEndsNoProcess(t *testing.T) {
	for _, kind := range []string{"tmpfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			dir := medium(t, kind, 224)
			c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 1, NodeArgs: []string{"--data", filepath.Join(dir, "node")}})
			require.NoError(t, err)
			defer c.Stop()
			env := []string{"QUARRY_CONTROLLER=" + c.URL}
			run := func(args ...string) result {
				r := quarry(t, env, "", args...)
				require.False(t, c.Process("n1").Ended(), "the storage node goes on after %v: %s", args, c.Process("n1").Log())
				return r
			}
			big := filepath.Join(t.TempDir(), "big")
			require.NoError(t, os.WriteFile(big, bytes.Repeat([]byte("0123456789abcdef"), 24<<20/16), 0o600))
			run("slab", "alloc", "-d", "kept", "--name", "kept").ok(t)
			for range 3 { // more than the first region holds
				run("slab", "alloc", big).ok(t)
			}
			// Others take all that is left: the second region lies on reserved blocks, most of
			// that no process has touched.
			fill(t, filepath.Join(dir, "others"))
			for _, transport := range []string{"shm", "tcp"} {
				require.Equal(t, "kept", run("slab", "read", "@kept", "--transport", transport).ok(t))
				run("slab", "write", "@kept", "-d", "kept", "--transport", transport).ok(t)
				run("kv", "create", "-t", transport, "--transport", transport).ok(t)
				run("kv", "put", "-t", transport, "key", "-d", "value", "--transport", transport).ok(t)
			}
			for _, transport := range []string{"shm", "tcp"} {
				var r result
				for tries := 0; !strings.Contains(r.err, dir) && tries < 20; tries++ { // a busy controller may say try again first
					r = run("slab", "alloc", big, "--timeout", "50s", "--transport", transport)
				}
				r.fails(t, exitNoSpace, dir)
				require.Equal(t, "kept", run("slab", "read", "@kept", "--transport", transport).ok(t))
			}
			r := run("doctor")
			require.Equal(t, exitDamaged, r.code, r.err)
			require.Contains(t, r.err, dir, "doctor names the disk: %s", r.out)
		})
	}
}

// fill writes a file until the file system has no room for more.
func fill(t *testing.T, path string) {
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	for b := make([]byte, 1<<20); len(b) > 0; {
		if _, err := f.Write(b); err != nil {
			require.ErrorIs(t, err, unix.ENOSPC)
			b = b[:len(b)/2]
		}
	}
	_ = f.Sync()
}

// TestDefaultReplicas: where two failure domains exist, what nobody says anything about has
// two replicas; quarry dev --replicas and quarry region default choose another number for the
// cluster; less is warned of; and a small object takes little of each node.
func TestDefaultReplicas(t *testing.T) {
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 3})
	require.NoError(t, err)
	defer c.Stop()
	env := []string{"QUARRY_CONTROLLER=" + c.URL}
	status := func() (v statusView) {
		quarry(t, env, "", "status", "--json").decode(t, &v)
		return v
	}
	replicas := func() (list []int) {
		for _, r := range status().Regions {
			list = append(list, len(r.Replicas))
		}
		return list
	}
	quarry(t, env, "", "slab", "alloc", "-d", "abc").ok(t)
	require.Equal(t, []int{2}, replicas())
	require.EqualValues(t, 2, status().DefaultReplicas)
	quarry(t, env, "", "kv", "create").ok(t)
	require.Equal(t, []int{2}, replicas())
	quarry(t, env, "", "slab", "alloc", "-d", "abc", "-r", "3").ok(t)
	require.Equal(t, []int{2, 3}, replicas())
	for _, n := range status().Nodes {
		require.LessOrEqual(t, n.Hosted, uint64(128<<20), "%s holds a 3-byte object of each kind", n.Name)
	}
	r := quarry(t, env, "", "slab", "alloc", "-d", "abc", "-r", "1")
	r.ok(t)
	require.Contains(t, r.err, "fewer replicas than the cluster's default")
	require.Contains(t, quarry(t, env, "", "doctor").out, "1 regions have fewer replicas than the cluster's default of 2")
	require.Contains(t, quarry(t, env, "", "region", "create", "-r", "1").err, "fewer replicas than the cluster's default")
	require.Equal(t, "3 replicas, as chosen\n", quarry(t, env, "", "region", "default", "3").ok(t))
	quarry(t, env, "", "region", "create").ok(t)
	require.Equal(t, []int{2, 3, 1, 1, 3}, replicas())
	quarry(t, env, "", "region", "default", "4").fails(t, exitUsage, "1 to 3")
	require.Contains(t, quarry(t, env, "", "region", "default", "auto").ok(t), "2 replicas, by")
	require.EqualValues(t, 2, status().DefaultReplicas)
}

package worker

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOwnCgroup(t *testing.T) {
	const own = "9:name=systemd:/x\n0::/system.slice/quarry-worker.service\n"
	for _, c := range []struct{ cgroup, mounts, want, err string }{
		{own, "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/system.slice/quarry-worker.service", ""},
		{"0::/\n", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup", ""},
		{own, "30 23 0:26 /system.slice /mnt rw - cgroup2 cgroup2 rw\n", "/mnt/quarry-worker.service", ""},
		{own, "30 23 0:26 /system /mnt rw - cgroup2 cgroup2 rw\n", "", "no file system of type cgroup2"},
		{own, "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "", "no file system of type cgroup2"},
		{"4:memory:/x\n", "", "", "no cgroups of version 2"},
	} {
		dir, err := ownCgroup(c.cgroup, c.mounts)
		require.Equal(t, c.want, dir)
		if c.err != "" {
			require.ErrorContains(t, err, c.err)
		}
	}
}

// Where this test's cgroup is delegated, a slot's one has the limits, and all is undone at the end. TestHazard290 runs slots in it.
func TestCgroupsOfSlots(t *testing.T) {
	c, err := newCgroups()
	if err != nil {
		t.Skipf("limits by cgroups cannot be tried here: %v", err)
	}
	dir, err := c.slot(1, 64<<20)
	require.NoError(t, err)
	for file, want := range map[string]string{"memory.max": "67108864\n", "pids.max": "2048\n"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		require.NoError(t, err)
		require.Equal(t, want, string(b))
	}
	require.Zero(t, kills(dir))
	c.end(dir)
	require.NoDirExists(t, dir)
	c.close()
	require.NoDirExists(t, filepath.Join(c.dir, c.name))
}

package worker

import (
	"os"
	"path/filepath"
	"strings"
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

// delegatedEnv says that this test's cgroup is delegated to it, as in the virtual machine of verify/rxevm: there the tests may not skip.
const delegatedEnv = "QUARRY_TEST_DELEGATED"

func delegated(t *testing.T) *cgroups {
	c, err := newCgroups()
	if err != nil && os.Getenv(delegatedEnv) == "" {
		t.Skipf("limits by cgroups cannot be tried here, but are in the stage soft-roce: %v", err)
	}
	require.NoError(t, err)
	return c
}

// A slot's cgroup has the limits, and those of its next process have another, so that they do not count what this one has left; all is undone at the end.
func TestCgroupsOfSlots(t *testing.T) {
	c := delegated(t)
	dir, err := c.slot(64 << 20)
	require.NoError(t, err)
	for file, want := range map[string]string{"memory.max": "67108864\n", "memory.oom.group": "1\n", "pids.max": "2048\n", "cpu.weight": "100\n"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		require.NoError(t, err)
		require.Equal(t, want, string(b))
	}
	require.Zero(t, kills(dir))
	next, err := c.slot(64 << 20)
	require.NoError(t, err)
	require.NotEqual(t, dir, next)
	c.end(dir)
	require.NoDirExists(t, dir)
	c.close()
	require.NoDirExists(t, next)
	require.NoDirExists(t, filepath.Join(c.dir, c.name))
	b, err := os.ReadFile(filepath.Join(c.dir, "cgroup.subtree_control"))
	require.NoError(t, err)
	require.Empty(t, strings.TrimSpace(string(b)))
}

// The kernel ends a slot that takes more memory than its cgroup may have, and no other one; the next process of the slot knows the limit.
func TestHazard290_TheKernelEndsAGreedySlotAlone(t *testing.T) {
	delegated(t).close()
	o := newOwner(t, "greedy", 2)
	o.says(`limited by its cgroup`)
	begun := map[string]string{}
	for range 2 {
		slot := o.says(`slot (\d) begun (\d+) .* before null`)
		begun[slot[1]] = slot[2]
	}
	const why = `the slot's process was ended: it has taken more memory than its limit \(276 MiB, memory.max of its cgroup\)`
	o.says(`slot=w/2 reason="` + why)
	o.says(`slot 2 begun .* before .*` + why)
	b, err := os.ReadFile("/proc/" + begun["1"] + "/cgroup")
	require.NoError(t, err, "the other slot goes on")
	require.Regexp(t, `/quarry-worker\.\d+\.[12]\n`, string(b))
	o.end()
	require.NoError(t, <-o.run)
	c := delegated(t) // for this test all is undone
	defer c.close()
	left, err := filepath.Glob(filepath.Join(c.dir, "quarry-worker.*"))
	require.NoError(t, err)
	require.Len(t, left, 1, "that of this process")
}

// The root cgroup has the host's other processes too: a worker would change their limits.
func TestHazard290_RootCgroupIsLeftAlone(t *testing.T) {
	own, err := os.ReadFile("/proc/self/cgroup")
	require.NoError(t, err)
	if !strings.Contains("\n"+string(own), "\n0::/\n") {
		t.Skip("this process is not in the root cgroup of version 2, but is in the stage soft-roce")
	}
	_, err = newCgroups()
	if os.Getenv(delegatedEnv) == "" && err != nil && !strings.Contains(err.Error(), "root cgroup") {
		t.Skipf("no cgroups of version 2 here, but they are in the stage soft-roce: %v", err)
	}
	require.ErrorContains(t, err, "root cgroup")
}

// A kernel or a filter of system calls that makes no process in a cgroup is found before slots are begun: the worker watches their memory then.
func TestCanBegin(t *testing.T) {
	require.ErrorContains(t, canBegin(t.TempDir()), "clone3 into a cgroup: ")
}

package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
)

// hostOf makes a host of files.
func hostOf(t *testing.T, files map[string]string) Host {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		p := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		require.NoError(t, os.WriteFile(p, []byte(text+"\n"), 0o644))
	}
	return Host{root}
}

func limits(memlock, files string) string {
	return "Limit                     Soft Limit           Hard Limit           Units     \n" +
		"Max open files            " + files + "                 1048576              files     \n" +
		"Max locked memory         " + memlock + "              8388608              bytes     "
}

func the(t *testing.T, list []Finding, check string) Finding {
	t.Helper()
	var worst *Finding
	for _, f := range list {
		if f.Check == check && (worst == nil || Worst([]Finding{f}) != OK && Worst([]Finding{*worst, f}) == f.Level) {
			worst = &f
		}
	}
	require.NotNil(t, worst, "%s: %+v", check, list)
	if worst.Level == Error || worst.Level == Warning {
		require.NotEmpty(t, worst.Remedy, "%+v", worst)
	}
	return *worst
}

func TestLockedMemory(t *testing.T) {
	for _, c := range []struct {
		memlock, caps string
		plan          Plan
		want          Level
	}{
		{"unlimited", "0000000000000000", Plan{RDMA: true}, OK},
		{"8388608", "0000000000000000", Plan{}, Info},
		{"8388608", "0000000000000000", Plan{RDMA: true}, Error},
		{"8388608", "0000000000004000", Plan{RDMA: true}, OK},
		{"17179869184", "0000000000000000", Plan{RDMA: true, CapacityBytes: 8 << 30}, OK},
		{"17179869184", "0000000000000000", Plan{RDMA: true, CapacityBytes: 64 << 30}, Error},
	} {
		h := hostOf(t, map[string]string{"proc/self/limits": limits(c.memlock, "1048576"), "proc/self/status": "CapEff:\t" + c.caps})
		got := the(t, h.Check(c.plan), "locked memory")
		require.Equal(t, c.want, got.Level, "%+v", c)
		if c.want == Error && c.memlock == "8388608" {
			require.Contains(t, got.What, "146 new lanes reach the limit")
		}
	}
}

func TestOpenFiles(t *testing.T) {
	h := hostOf(t, map[string]string{"proc/self/limits": limits("unlimited", "1024")})
	require.Equal(t, Warning, the(t, h.Check(Plan{}), "open files").Level)
}

func TestMemoryAndCapacity(t *testing.T) {
	meminfo := "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nSwapTotal:       1048576 kB"
	h := hostOf(t, map[string]string{"proc/meminfo": meminfo})
	require.Equal(t, OK, the(t, h.Check(Plan{CapacityBytes: 4 << 30}), "capacity").Level)
	require.Equal(t, Warning, the(t, h.Check(Plan{CapacityBytes: 12 << 30}), "capacity").Level)
	require.Equal(t, Error, the(t, h.Check(Plan{CapacityBytes: 64 << 30}), "capacity").Level)
	require.Equal(t, Warning, the(t, h.Check(Plan{}), "swap").Level)
	// A container has less.
	h = hostOf(t, map[string]string{"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": "2147483648", "sys/fs/cgroup/memory.current": "1073741824"})
	require.Equal(t, Error, the(t, h.Check(Plan{CapacityBytes: 4 << 30}), "capacity").Level)
	require.Contains(t, the(t, h.Check(Plan{}), "memory").What, "2 GiB")
	// A folder that is not there yet lies where its parent does.
	f := the(t, h.Check(Plan{CapacityBytes: 1 << 60, DataDir: filepath.Join(t.TempDir(), "a", "b")}), "capacity")
	require.Equal(t, Error, f.Level)
	require.Contains(t, f.What, "no further region")
}

func TestHugePages(t *testing.T) {
	dir := "sys/kernel/mm/hugepages/hugepages-2048kB/"
	h := hostOf(t, map[string]string{dir + "nr_hugepages": "1024", dir + "free_hugepages": "512"})
	plan := Plan{HugepageBytes: 2 << 20, CapacityBytes: 1 << 30}
	require.Equal(t, OK, the(t, h.Check(plan), "huge pages").Level)
	plan.CapacityBytes = 2 << 30
	f := the(t, h.Check(plan), "huge pages")
	require.Equal(t, Error, f.Level)
	require.Contains(t, f.Remedy, "1024")
	require.Equal(t, Info, the(t, hostOf(t, nil).Check(Plan{}), "huge pages").Level)
	shmem := "sys/kernel/mm/transparent_hugepage/shmem_enabled"
	f = the(t, hostOf(t, map[string]string{shmem: "always within_size advise [never] deny force"}).Check(Plan{}), "huge pages")
	require.Equal(t, Info, f.Level)
	require.Contains(t, f.Remedy, shmem)
	f = the(t, hostOf(t, map[string]string{shmem: "always within_size [advise] never deny force"}).Check(Plan{}), "huge pages")
	require.Equal(t, OK, f.Level)
	require.Contains(t, f.What, "advise")
}

func TestNUMA(t *testing.T) {
	h := hostOf(t, map[string]string{"sys/devices/system/node/node0/x": "", "sys/devices/system/node/node1/x": "", "sys/class/infiniband/mlx5_0/device/numa_node": "1"})
	text := ""
	for _, f := range h.Check(Plan{}) {
		text += f.What
	}
	require.Contains(t, text, "adapter mlx5_0 is on NUMA node 1")
}

// What the switch of an adapter's root port says, and why nothing is known of it.
func TestDDIO(t *testing.T) {
	root := t.TempDir()
	port, class := filepath.Join(root, "sys/devices/pci0000:17/0000:17:00.0"), filepath.Join(root, "sys/class/infiniband/mlx5_0")
	require.NoError(t, os.MkdirAll(filepath.Join(port, "0000:18:00.0"), 0o700))
	require.NoError(t, os.MkdirAll(class, 0o700))
	require.Contains(t, Host{root}.ddio("mlx5_0").What, "no PCI device")
	require.NoError(t, os.Symlink(filepath.Join(port, "0000:18:00.0"), filepath.Join(class, "device")))
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(port, name), []byte(text), 0o600))
	}
	write("vendor", "0x8086\n")
	write("device", "0x2030\n")
	write("config", strings.Repeat("\x80", 4096))
	require.Equal(t, ok("ddio", "mlx5_0 is behind root port 0000:17:00.0, whose DDIO is on"), Host{root}.ddio("mlx5_0"))
	write("config", strings.Repeat("\x01", 4096))
	require.Contains(t, Host{root}.ddio("mlx5_0").What, "DDIO is off")
	write("config", strings.Repeat("\x01", 64))
	require.Equal(t, "run this as root", Host{root}.ddio("mlx5_0").Remedy)
}

func TestClocks(t *testing.T) {
	const source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
	require.Equal(t, Warning, the(t, hostOf(t, map[string]string{source: "hpet"}).Check(Plan{}), "clocks").Level)
	require.Equal(t, OK, the(t, hostOf(t, map[string]string{source: "tsc"}).Check(Plan{}), "clocks").Level)
}

func TestKernel(t *testing.T) {
	require.Equal(t, Error, the(t, hostOf(t, map[string]string{"proc/sys/kernel/osrelease": "4.19.0-5"}).Check(Plan{}), "kernel").Level)
	require.Equal(t, OK, the(t, hostOf(t, map[string]string{"proc/sys/kernel/osrelease": "6.1.0"}).Check(Plan{}), "kernel").Level)
}

func adapter(state, layer, gid, kind string) map[string]string {
	dir := "sys/class/infiniband/mlx5_0/ports/1/"
	return map[string]string{
		dir + "state": state, dir + "link_layer": layer, dir + "rate": "100 Gb/sec (4X EDR)", dir + "gids/0": gid, dir + "gid_attrs/types/0": kind,
		dir + "gids/1": "0000:0000:0000:0000:0000:0000:0000:0000", dir + "gid_attrs/types/1": "",
		"sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0", "dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": "",
	}
}

func TestAdapters(t *testing.T) {
	const gid = "0000:0000:0000:0000:0000:ffff:0a00:0001"
	require.Equal(t, Info, the(t, hostOf(t, nil).Check(Plan{}), "rdma").Level)
	require.Equal(t, Error, the(t, hostOf(t, nil).Check(Plan{RDMA: true}), "rdma").Level)
	f := the(t, hostOf(t, adapter("4: ACTIVE", "Ethernet", gid, "RoCE v2")).Check(Plan{}), "rdma")
	require.Equal(t, OK, f.Level)
	require.Contains(t, f.What, "RoCE v2 addresses: 1")
	require.Equal(t, Error, the(t, hostOf(t, adapter("1: DOWN", "Ethernet", gid, "RoCE v2")).Check(Plan{}), "rdma").Level)
	require.Contains(t, the(t, hostOf(t, adapter("4: ACTIVE", "Ethernet", gid, "IB/RoCE v1")).Check(Plan{}), "rdma").What, "no RoCE v2")
	require.Equal(t, OK, the(t, hostOf(t, adapter("4: ACTIVE", "InfiniBand", gid, "IB/RoCE v1")).Check(Plan{}), "rdma").Level)
	files := adapter("4: ACTIVE", "Ethernet", gid, "RoCE v2")
	delete(files, "dev/infiniband/rdma_cm")
	require.Contains(t, the(t, hostOf(t, files).Check(Plan{}), "rdma").What, "/dev/infiniband/rdma_cm")
	files["dev/infiniband/rdma_cm"] = ""
	delete(files, "dev/infiniband/uverbs0")
	require.Contains(t, the(t, hostOf(t, files).Check(Plan{}), "rdma").What, "/dev/infiniband/uverbs0")
	delete(files, "sys/class/infiniband_verbs/uverbs0/ibdev")
	require.Contains(t, the(t, hostOf(t, files).Check(Plan{}), "rdma").Remedy, "ib_uverbs")
}

// A host of which nothing can be read gives findings, not panics.
func TestBareHost(t *testing.T) {
	require.NotEmpty(t, Host{t.TempDir()}.Check(Plan{DataDir: "/nowhere/at/all", CapacityBytes: 1, HugepageBytes: 1 << 30, RDMA: true}))
}

// A data folder on a container's own layer keeps no durable regions, one on tmpfs is said
// to be memory, and an adapter is not let into a file system of a disk.
func TestDataFolder(t *testing.T) {
	tmpfs := "/dev/shm"
	if fs, err := host.FileSystemOf(tmpfs); err == nil && fs.Name == "tmpfs" {
		require.Equal(t, Info, the(t, hostOf(t, nil).Check(Plan{DataDir: filepath.Join(tmpfs, "not", "there")}), "data folder").Level)
		require.Equal(t, Info, the(t, hostOf(t, nil).Check(Plan{DataDir: tmpfs, RDMA: true}), "data folder").Level)
	}
	dir := t.TempDir()
	fs, err := host.FileSystemOf(dir)
	require.NoError(t, err)
	got := the(t, hostOf(t, nil).Check(Plan{DataDir: dir}), "data folder")
	if fs.Volatile == nil {
		require.Equal(t, OK, got.Level)
		require.Contains(t, got.What, fs.Name)
	} else if fs.Unpinnable != nil {
		require.Equal(t, Warning, got.Level)
	}
	if fs.Unpinnable != nil {
		require.Equal(t, Error, the(t, hostOf(t, nil).Check(Plan{DataDir: dir, RDMA: true}), "data folder").Level)
	}
	require.Equal(t, Error, the(t, hostOf(t, nil).Check(Plan{DataDir: "/proc/self/environ/x"}), "data folder").Level)
	device := the(t, hostOf(t, nil).Check(Plan{DataDir: "/dev/null"}), "data folder")
	require.Equal(t, Error, device.Level)
	require.Contains(t, device.What, "is not device DAX")
}

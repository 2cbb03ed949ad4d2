package host

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// boundEnv has the test binary bind itself, since that holds for a whole process.
const boundEnv = "QUARRY_TEST_BOUND"

// Memory that a bound process makes has the node's policy and lies there, also where another process maps it; the threads run there; what others
// could take is not room for regions.
func TestBoundToNUMA(t *testing.T) {
	nodes, _ := filepath.Glob("/sys/devices/system/node/node[0-9]*")
	if len(nodes) == 0 {
		t.Skip("a kernel without NUMA")
	}
	if os.Getenv(boundEnv) == "" {
		t.Logf("NUMA nodes: %d", len(nodes))
		cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), boundEnv+"=1")
		out, err := cmd.CombinedOutput()
		if strings.Contains(string(out), "SYS_NICE") {
			t.Skip("a container that forbids mbind")
		}
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS", "%s", out)
		return
	}
	last := -1
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		if _, list, ok := strings.Cut(string(b), "Mems_allowed_list:"); ok { // of the nodes that have memory
			list, _, _ = strings.Cut(list, "\n")
			eachOfList(list, func(n int) {
				if _, err := numaCPUs("/", n); err == nil {
					last = max(last, n)
				}
			})
		}
	}
	require.GreaterOrEqual(t, last, 0, "no node has memory that this process may use")
	require.NoError(t, BindToNUMA(last))
	node, bound := BoundNUMA()
	require.True(t, bound)
	require.Equal(t, last, node)
	want, err := numaCPUs("/", last)
	require.NoError(t, err)
	tasks, err := names("/proc/self/task")
	require.NoError(t, err)
	for _, id := range tasks {
		var n int
		fmt.Sscan(id, &n)
		var cpus unix.CPUSet
		if unix.SchedGetaffinity(n, &cpus) == nil && want.Count() > 0 {
			for i := range 1024 {
				require.False(t, cpus.IsSet(i) && !want.IsSet(i), "thread %s runs on processor %d", id, i)
			}
		}
	}
	free, known := numaMemory("/", last)
	require.True(t, known)
	require.LessOrEqual(t, AvailableMemory(), free+free/2, "of this node alone; it changes meanwhile")

	const bytes = 1 << 20
	m, err := NewMemory("bound", bytes)
	require.NoError(t, err)
	defer m.Close()
	for i := 0; i < bytes; i += 4096 {
		m.Bytes()[i] = 1 // numa_maps counts pages that are mapped
	}
	line := mapsOf(t, fmt.Sprintf("%p", m.Bytes())[2:])
	require.Contains(t, line, fmt.Sprintf(" bind:%d ", last))
	require.Contains(t, line, fmt.Sprintf(" N%d=", last))
	require.Equal(t, 1, strings.Count(line, " N"), "pages of one node alone: %s", line)
}

// mapsOf is the line of a mapping in numa_maps.
func mapsOf(t *testing.T, at string) string {
	f, err := os.Open("/proc/self/numa_maps")
	require.NoError(t, err)
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), at+" ") {
			return lines.Text()
		}
	}
	t.Fatalf("no mapping at %s", at)
	return ""
}

// The node that is named is looked for first, on a host of two nodes and one of memory alone.
func TestNodesOfAHost(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) {
		p := filepath.Join(root, "sys/devices/system/node", path)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o700))
		require.NoError(t, os.WriteFile(p, []byte(text), 0o600))
	}
	write("online", "0-3\n")
	write("has_memory", "0-1,3\n")
	write("node1/cpulist", "4-6,12\n")
	write("node1/meminfo", "Node 1 MemTotal:  900 kB\nNode 1 MemFree:  100 kB\nNode 1 FilePages:  30 kB\nNode 1 Shmem:  10 kB\n")
	write("node3/cpulist", "\n")
	cpus, err := numaCPUs(root, 1)
	require.NoError(t, err)
	require.Equal(t, 4, cpus.Count())
	require.True(t, cpus.IsSet(5) && cpus.IsSet(12))
	cpus, err = numaCPUs(root, 3)
	require.NoError(t, err)
	require.Zero(t, cpus.Count(), "memory alone")
	_, err = numaCPUs(root, 2)
	require.ErrorContains(t, err, "node 2 has no memory")
	for _, node := range []int{4, -1, 1 << 20} {
		_, err = numaCPUs(root, node)
		require.ErrorContains(t, err, fmt.Sprintf("no NUMA node %d: this host has 0-3", node))
	}
	free, known := numaMemory(root, 1)
	require.True(t, known)
	require.EqualValues(t, 120<<10, free)
	_, known = numaMemory(root, 2)
	require.False(t, known)

	class := filepath.Join(root, "sys/class/infiniband/mlx5_0/device")
	require.NoError(t, os.MkdirAll(class, 0o700))
	_, known = AdapterNUMA(root, "mlx5_0")
	require.False(t, known)
	for text, want := range map[string]int{"1\n": 1, "0\n": 0, "-1\n": -1} {
		require.NoError(t, os.WriteFile(filepath.Join(class, "numa_node"), []byte(text), 0o600))
		node, known := AdapterNUMA(root, "mlx5_0")
		require.Equal(t, want, node)
		require.Equal(t, want >= 0, known)
	}
}

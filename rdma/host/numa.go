package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// boundTo is the NUMA node of this process, plus 1; 0: none.
var boundTo atomic.Int64

// maxNUMA bounds the numbers of NUMA nodes: the kernel's largest configuration.
const maxNUMA = 1024

// BindToNUMA runs all threads of this process, those to come included, on the processors of a NUMA node, and takes memory of new
// regions from it. A node without processors, such as memory behind CXL, binds memory alone. Region files in the page cache
// lie where the thread runs that the kernel reads them for.
func BindToNUMA(node int) error {
	cpus, err := numaCPUs("/", node)
	if err != nil {
		return err
	}
	if cpus.Count() > 0 {
		if err := bindThreads(&cpus); err != nil {
			return fmt.Errorf("NUMA node %d: running on its processors: %w", node, err)
		}
	}
	boundTo.Store(int64(node) + 1)
	return nil
}

// BoundNUMA is the node that was given to BindToNUMA.
func BoundNUMA() (node int, bound bool) {
	n := boundTo.Load()
	return int(n - 1), n > 0
}

// numaCPUs are the processors of a node below a root of the file system. It has to have memory.
func numaCPUs(root string, node int) (cpus unix.CPUSet, err error) {
	at := filepath.Join(root, "sys/devices/system/node")
	has := func(file string) bool {
		b, err := os.ReadFile(filepath.Join(at, file))
		ok := false
		eachOfList(string(b), func(n int) { ok = ok || n == node })
		return err == nil && ok
	}
	switch {
	case !has("online"):
		b, _ := os.ReadFile(filepath.Join(at, "online"))
		return cpus, fmt.Errorf("there is no NUMA node %d: this host has %s", node, strings.TrimSpace(string(b)))
	case !has("has_memory"):
		return cpus, fmt.Errorf("NUMA node %d has no memory", node)
	}
	b, err := os.ReadFile(filepath.Join(at, fmt.Sprintf("node%d/cpulist", node)))
	if err != nil {
		return cpus, fmt.Errorf("NUMA node %d: %w", node, err)
	}
	eachOfList(string(b), cpus.Set)
	return cpus, nil
}

// eachOfList calls f with each number of a list of the kernel's, such as 0-3,8.
func eachOfList(list string, f func(n int)) {
	for _, part := range strings.Split(strings.TrimSpace(list), ",") {
		from, to, several := strings.Cut(part, "-")
		a, err := strconv.Atoi(from)
		b := a
		if several && err == nil {
			b, err = strconv.Atoi(to)
		}
		for ; err == nil && a <= b && a < 1<<16; a++ {
			f(a)
		}
	}
}

// bindThreads binds every thread. One that begins meanwhile has its maker's processors: it is found in the next look.
func bindThreads(cpus *unix.CPUSet) error {
	done := map[int]bool{}
	for again := true; again; {
		again = false
		tasks, err := names("/proc/self/task")
		if err != nil {
			return err
		}
		for _, t := range tasks {
			id, err := strconv.Atoi(t)
			if err != nil || done[id] {
				continue
			}
			done[id], again = true, true
			if err := unix.SchedSetaffinity(id, cpus); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
	return nil
}

// bindMemory has the pages of a mapping taken from the node that the process is bound to. On files in memory this holds for
// every mapping of the file.
func bindMemory(mem []byte) error {
	node, bound := BoundNUMA()
	if !bound {
		return nil
	}
	if err := mbind(mem, node); err != nil {
		return fmt.Errorf("taking memory from NUMA node %d (in a container: the capability SYS_NICE): %w", node, err)
	}
	return nil
}

// numaMemory is how many bytes of a node are free, or hold files of the page cache.
func numaMemory(root string, node int) (uint64, bool) {
	at, before := filepath.Join(root, fmt.Sprintf("sys/devices/system/node/node%d/meminfo", node)), fmt.Sprintf("Node %d ", node)
	free, known := fieldOf(at, before+"MemFree:")
	files, _ := fieldOf(at, before+"FilePages:")
	shared, _ := fieldOf(at, before+"Shmem:")
	return (free + files - min(files, shared)) << 10, known
}

// AdapterNUMA is the node that an RDMA device is attached to, by a root of the file system; false where the kernel does not say.
func AdapterNUMA(root, device string) (int, bool) {
	return numaOf(filepath.Join(root, "sys/class/infiniband", device, "device/numa_node"))
}

// DeviceNUMA is the node that the memory of a character device is at, such as /dev/dax0.0.
func DeviceNUMA(f *os.File) (int, bool) {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return 0, false
	}
	at := fmt.Sprintf("/sys/dev/char/%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	for _, name := range []string{"numa_node", "target_node"} {
		if n, ok := numaOf(filepath.Join(at, name)); ok {
			return n, true
		}
	}
	return 0, false
}

// numaOf reads the NUMA node that a file of sysfs names; false if it names none.
func numaOf(path string) (int, bool) {
	b, err := os.ReadFile(path)
	n, bad := strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil && bad == nil && n >= 0 // -1: one node, or unknown
}

package host

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// AvailableMemory is how much more memory this process can have: what the host has
// available, or its NUMA node if it is bound to one, and what is left of the limits of the process's control groups. MaxUint64
// where nothing tells.
func AvailableMemory() uint64 {
	free := uint64(math.MaxUint64)
	if kib, ok := fieldOf("/proc/meminfo", "MemAvailable:"); ok {
		free = kib << 10
	}
	if node, bound := BoundNUMA(); bound {
		if n, ok := numaMemory("/", node); ok {
			free = min(free, n)
		}
	}
	return min(free, groupMemory("/", "/proc/self/cgroup"))
}

// groupMemory is what is left of the limits of the control groups that a file in the form
// of /proc/self/cgroup names, and of the groups above them. A group's page cache of files
// counts as free: the kernel takes it back first.
func groupMemory(root, groups string) uint64 {
	free := uint64(math.MaxUint64)
	b, err := os.ReadFile(groups)
	if err != nil {
		return free
	}
	for line := range strings.Lines(string(b)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		at, limit, used, caches := "sys/fs/cgroup", "memory.max", "memory.current", []string{"active_file ", "inactive_file "}
		switch part[1] {
		case "": // version 2
		case "memory":
			at, limit, used, caches = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", []string{"total_active_file ", "total_inactive_file "}
		default:
			continue
		}
		for group := filepath.Clean("/" + part[2]); ; group = filepath.Dir(group) {
			dir := filepath.Join(root, at, group)
			most, limited := numberOf(filepath.Join(dir, limit))
			taken, known := numberOf(filepath.Join(dir, used))
			if limited && known {
				for _, c := range caches {
					n, _ := fieldOf(filepath.Join(dir, "memory.stat"), c)
					taken -= min(taken, n)
				}
				free = min(free, most-min(most, taken))
			}
			if group == "/" {
				break
			}
		}
	}
	return free
}

// numberOf is a file's contents; false for a word such as max.
func numberOf(path string) (uint64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}

// fieldOf is the number behind a name at the beginning of a line.
func fieldOf(path, name string) (uint64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		if rest, found := strings.CutPrefix(line, name); found {
			n, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

package doctor

import (
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/verbs"
)

// Plan is what the host is to do.
type Plan struct {
	// DataDir of a storage node; "" keeps regions in memory.
	DataDir string
	// CapacityBytes of a storage node; 0 plans none.
	CapacityBytes uint64
	// HugepageBytes of its pages; 0 means ordinary ones.
	HugepageBytes uint64
	// RDMA is to be used.
	RDMA bool
}

// Check looks at everything on the host.
func (h Host) Check(p Plan) []Finding {
	var out []Finding
	for _, check := range []func(Plan) []Finding{h.memlock, h.files, h.memory, h.durable, h.swap, h.hugepages, h.numa, h.rdma, h.clocks, h.kernel} {
		out = append(out, check(p)...)
	}
	return out
}

const capIPCLock = 14 // CAP_IPC_LOCK

// limit is the soft limit of a line of /proc/self/limits.
func (h Host) limit(name string) (uint64, bool) {
	f := strings.Fields(h.field("proc/self/limits", name))
	if len(f) == 0 {
		return 0, false
	}
	if f[0] == "unlimited" {
		return math.MaxUint64, true
	}
	n, err := strconv.ParseUint(f[0], 10, 64)
	return n, err == nil
}

// adapters are the names of RDMA devices.
func (h Host) adapters() []string {
	var names []string
	for _, d := range h.list("sys/class/infiniband/*") {
		names = append(names, filepath.Base(d))
	}
	return names
}

// memlock is about memory that an adapter reaches, which the kernel locks. Too little is an error
// where an adapter is in use, and otherwise only told.
func (h Host) memlock(p Plan) []Finding {
	const check = "locked memory"
	n, known := h.limit("Max locked memory")
	if !known {
		return []Finding{found(check, Info, "", "the limit cannot be read")}
	}
	caps, _ := strconv.ParseUint(h.field("proc/self/status", "CapEff"), 16, 64)
	if caps>>capIPCLock&1 == 1 {
		return []Finding{ok(check, "CAP_IPC_LOCK: the limit does not matter")}
	}
	if n == math.MaxUint64 {
		return []Finding{ok(check, "unlimited")}
	}
	level, need := Info, p.CapacityBytes
	least, most := verbs.PinnedLane()
	if p.RDMA || len(h.adapters()) > 0 {
		level = Error
	}
	if need > 0 && n >= need || need == 0 && n >= 1<<30 {
		return []Finding{ok(check, "%s", size(n))}
	}
	return []Finding{found(check, level, "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, or in a container that runs as root the capability IPC_LOCK (it does nothing for other users)",
		"limited to %s; memory that an adapter reaches is locked: a storage node locks all regions together, a client %s for each lane, up to %s for one with long chains or buffers of its own: %d new lanes reach the limit",
		size(n), size(least), size(most+verbs.PinnedCopies), n/least)}
}

// wantFiles is what a storage node with thousands of lanes opens.
const wantFiles = 65536

// files is about the limit of open files of this process, which the service inherits.
func (h Host) files(Plan) []Finding {
	const check = "open files"
	n, known := h.limit("Max open files")
	switch {
	case !known:
		return []Finding{found(check, Info, "", "the limit cannot be read")}
	case n < wantFiles:
		return []Finding{found(check, Warning, "LimitNOFILE=1048576 in the unit, or ulimit -n", "limited to %d; each connection of a client's lane is one", n)}
	}
	return []Finding{ok(check, "%s", map[bool]string{true: "unlimited", false: strconv.FormatUint(n, 10)}[n == math.MaxUint64])}
}

// memory compares where regions take memory from with what they may take.
func (h Host) memory(p Plan) []Finding {
	const check = "memory"
	total, free := h.kib("MemTotal"), h.kib("MemAvailable")
	if limit, known := h.number("sys/fs/cgroup/memory.max"); known && limit < total {
		used, _ := h.number("sys/fs/cgroup/memory.current")
		total, free = limit, min(free, limit-min(limit, used))
	}
	out := []Finding{ok(check, "%s, %s of it available", size(total), size(free))}
	if p.CapacityBytes == 0 {
		return out
	}
	if p.DataDir != "" {
		return append(out, h.space(p)...)
	}
	switch {
	case p.HugepageBytes != 0: // set aside beforehand; see hugepages
	case p.CapacityBytes > total:
		out = append(out, found("capacity", Error, "lower --capacity below the memory there is; a container's limit counts", "%s for regions is more than the %s there are: when they are taken no further region can be made", size(p.CapacityBytes), size(total)))
	case p.CapacityBytes > free:
		out = append(out, found("capacity", Warning, "lower --capacity, or free memory", "%s for regions is more than the %s that are available now", size(p.CapacityBytes), size(free)))
	default:
		out = append(out, ok("capacity", "%s for regions fits into memory", size(p.CapacityBytes)))
	}
	return out
}

// space is about regions in files.
func (h Host) space(p Plan) []Finding {
	const check = "capacity"
	var fs unix.Statfs_t
	dir := p.DataDir
	for {
		err := unix.Statfs(dir, &fs)
		if err == nil {
			break
		}
		if up := filepath.Dir(dir); up != dir {
			dir = up // not made yet
			continue
		}
		return []Finding{found(check, Error, "make it, or name another with --data", "%s: %v", p.DataDir, err)}
	}
	bsize := uint64(fs.Bsize)
	all, free := fs.Blocks*bsize, fs.Bavail*bsize
	tmpfs := fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC
	switch {
	case fs.Type == unix.HUGETLBFS_MAGIC:
		return []Finding{found(check, Error, "use --hugepages 2MiB without --data", "%s is a hugetlbfs, in which files cannot be written", p.DataDir)}
	case tmpfs && all < p.CapacityBytes:
		return []Finding{found(check, Error, fmt.Sprintf("mount -o remount,size=%d %s, or lower --capacity", p.CapacityBytes+p.CapacityBytes/16, dir),
			"the tmpfs at %s holds %s, regions may take %s: when it is full no further region can be made", dir, size(all), size(p.CapacityBytes))}
	case all < p.CapacityBytes:
		return []Finding{found(check, Error, "use a larger file system, or lower --capacity", "the file system of %s holds %s, regions may take %s: when it is full no further region can be made", dir, size(all), size(p.CapacityBytes))}
	case free < p.CapacityBytes:
		return []Finding{found(check, Warning, "free some, or lower --capacity", "%s is free at %s, regions may take %s in all", size(free), dir, size(p.CapacityBytes))}
	}
	if name := copiesOnWrite[int64(fs.Type)]; name != "" {
		return []Finding{found(check, Warning, "keep regions on ext4 or XFS", "%s is on %s, which takes new blocks for every change: nothing can be reserved there, and a full one kills the node with SIGBUS", dir, name)}
	}
	kind := "file system"
	if tmpfs {
		kind = "tmpfs"
	}
	return []Finding{ok(check, "%s for regions fits into the %s at %s: %s free", size(p.CapacityBytes), kind, dir, size(free))}
}

// copiesOnWrite are file systems on which reserved blocks are not those that a later change is written to.
var copiesOnWrite = map[int64]string{unix.BTRFS_SUPER_MAGIC: "btrfs", 0x2fc12fc1: "ZFS", 0xca451a4e: "bcachefs"}

// swap is about memory of regions that the kernel may move to disk.
func (h Host) swap(Plan) []Finding {
	if n := h.kib("SwapTotal"); n > 0 {
		return []Finding{found("swap", Warning, "swapoff -a on storage nodes, or MemorySwapMax=0 in the unit", "%s of swap: a region that is swapped out answers in milliseconds", size(n))}
	}
	return []Finding{ok("swap", "none")}
}

// hugepages lists the pools that are set aside, and compares the one that the plan names with its
// capacity.
func (h Host) hugepages(p Plan) (out []Finding) {
	const check = "huge pages"
	pools := 0
	for _, pool := range h.list("sys/kernel/mm/hugepages/hugepages-*kB") {
		kib, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(pool), "hugepages-"), "kB"), 10, 64)
		rel, err := filepath.Rel(h.Root, pool)
		if err != nil {
			continue
		}
		all, _ := h.number(filepath.Join(rel, "nr_hugepages"))
		free, _ := h.number(filepath.Join(rel, "free_hugepages"))
		page := kib << 10
		if all > 0 {
			pools++
			out = append(out, ok(check, "%d of %s, %d free", all, size(page), free))
		}
		if p.HugepageBytes == page && free*page < p.CapacityBytes {
			out = append(out, found(check, Error, fmt.Sprintf("sysctl vm.nr_hugepages=%d for pages of 2 MiB; pages of 1 GiB on the kernel's command line", (p.CapacityBytes+page-1)/page),
				"%d pages of %s are free, capacity needs %d", free, size(page), (p.CapacityBytes+page-1)/page))
		}
	}
	if pools > 0 || p.HugepageBytes != 0 {
		return out
	}
	switch shmem := h.chosen("sys/kernel/mm/transparent_hugepage/shmem_enabled"); shmem {
	case "advise", "within_size", "always":
		out = append(out, ok(check, "none set aside; regions in memory get them as they are touched (shmem_enabled is %s)", shmem))
	default:
		out = append(out, found(check, Info, "for large regions: sysctl vm.nr_hugepages and quarry storage --hugepages 2MiB, or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
			"none set aside: registering 1 GiB for an adapter takes four hundred times as many entries, and a look at cold memory half as long again"))
	}
	return out
}

// chosen is the word in brackets of a file that offers several.
func (h Host) chosen(file string) string {
	_, after, _ := strings.Cut(h.text(file), "[")
	word, _, _ := strings.Cut(after, "]")
	return word
}

// numa says which nodes of the host adapters are on.
func (h Host) numa(Plan) []Finding {
	nodes := len(h.list("sys/devices/system/node/node[0-9]*"))
	if nodes < 2 {
		return []Finding{ok("numa", "one node")}
	}
	out := []Finding{found("numa", Info, "one storage node for each NUMA node: quarry storage --numa N, or auto for that of the adapter", "%d nodes", nodes)}
	for _, d := range h.adapters() {
		if n := h.text("sys/class/infiniband/" + d + "/device/numa_node"); n != "" && n != "-1" {
			out = append(out, found("numa", Info, "quarry storage --numa auto", "adapter %s is on NUMA node %s", d, n))
		}
	}
	return out
}

// clocks is about two things: the price of reading the time, and the rate of the monotonic clock,
// on which leases rest.
func (h Host) clocks(Plan) (out []Finding) {
	const check = "clocks"
	switch source := h.text("sys/devices/system/clocksource/clocksource0/current_clocksource"); source {
	case "tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page":
		out = append(out, ok(check, "source %s, read without a system call", source))
	case "":
		out = append(out, found(check, Info, "", "the clock source cannot be read"))
	default:
		out = append(out, found(check, Warning, "boot with clocksource=tsc if the processor's is stable", "source %s: reading it is a system call, which is as long as a read over shm", source))
	}
	var t unix.Timex
	if _, err := unix.Adjtimex(&t); err == nil && t.Tick != 0 {
		// A tick is 10 ms at the nominal rate; leases are counted short by 1 %.
		if drift := math.Abs(float64(t.Tick)/10000-1) + math.Abs(float64(t.Freq)/65536/1e6); drift > 0.005 {
			out = append(out, found(check, Error, "stop what slews the clock so hard (chronyd, ntpd with large offsets)", "the monotonic clock is being run %.2f %% off its rate; leases allow for 1 %% on both sides together", drift*100))
		} else {
			out = append(out, ok(check, "rate is adjusted by %.4f %%", drift*100))
		}
	}
	return out
}

// kernel is about calls that the fencing of shm clients needs.
func (h Host) kernel(Plan) (out []Finding) {
	release := h.text("proc/sys/kernel/osrelease")
	var major, minor int
	if k, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); k < 2 {
		return []Finding{found("kernel", Info, "", "release %q", release)}
	}
	if major < 5 || major == 5 && minor < 3 {
		return []Finding{found("kernel", Error, "use Linux 5.3 or newer, or quarry storage --socket none", "Linux %s cannot hold on to a client's process (pidfd): shm clients cannot be fenced", release)}
	}
	return []Finding{ok("kernel", "Linux %s", release)}
}

package worker

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"
)

// This file limits the memory of a slot that has no cgroup. A limit of the kernel for one process, RLIMIT_AS or RLIMIT_DATA, would count the
// 2 GiB of addresses that each session of a client reserves, and a worker that acts for submitters has many: it would be no limit.

const (
	// takesMost is how fast a process takes memory, as is assumed: the time to the next look is that in which it could reach its limit.
	takesMost = 4 << 30 // bytes a second
	lookMin   = 10 * time.Millisecond
	lookMax   = time.Second
)

// watch kills a process once it has more memory of its own than limit; true: it has done so. It returns when the process is gone.
func watch(p *os.Process, limit uint64, gone <-chan struct{}) bool {
	for {
		have := ownMemory(p.Pid)
		if have > limit {
			return p.Kill() == nil
		}
		select {
		case <-gone:
			return false
		case <-time.After(nextLook(limit - have)):
		}
	}
}

// nextLook is how long a process takes at least to fill so many bytes.
func nextLook(left uint64) time.Duration {
	return min(lookMax, max(lookMin, time.Duration(float64(left)/takesMost*float64(time.Second))))
}

// ownMemory is what a process has in memory or in swap that it shares with no file and no other process: not the memory of storage nodes; 0 if
// there is no such process.
func ownMemory(pid int) (n uint64) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(b) {
		name, rest, _ := bytes.Cut(line, []byte{':'})
		if s := string(name); s != "RssAnon" && s != "VmSwap" {
			continue
		}
		if f := bytes.Fields(rest); len(f) > 0 {
			kib, _ := strconv.ParseUint(string(f[0]), 10, 64)
			n += kib << 10
		}
	}
	return n
}

package verbs

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Port is the state of an adapter's port as the kernel shows it.
type Port struct {
	Active bool `json:"active"` // the link is up
	// Counters of the port and of its hardware, by the kernel's names. The two that count
	// data count words of 4 bytes.
	Counters map[string]uint64 `json:"counters,omitempty"`
}

// maxCounters bounds the counters of a port: mlx5 has about 60.
const maxCounters = 256

// ReadPort reads a port's state and counters below /sys of a root, usually "/".
func ReadPort(root, device string, port int) Port {
	dir := filepath.Join(root, "sys/class/infiniband", device, "ports", strconv.Itoa(port))
	state, _ := os.ReadFile(filepath.Join(dir, "state"))
	p := Port{Active: strings.Contains(string(state), "ACTIVE"), Counters: map[string]uint64{}}
	for _, kind := range []string{"counters", "hw_counters"} {
		files, _ := os.ReadDir(filepath.Join(dir, kind))
		for _, f := range files {
			if f.Name() == "lifespan" || len(p.Counters) == maxCounters {
				continue // how old the kernel's copy of them may be
			}
			b, err := os.ReadFile(filepath.Join(dir, kind, f.Name()))
			if err != nil {
				continue
			}
			if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil {
				p.Counters[f.Name()] = n
			}
		}
	}
	return p
}

// Megabits is the rate of a port, such as 100000 of "100 Gb/sec (4X EDR)"; 0: unknown.
func Megabits(root, device string, port int) uint32 {
	b, err := os.ReadFile(filepath.Join(root, "sys/class/infiniband", device, "ports", strconv.Itoa(port), "rate"))
	if err != nil {
		return 0
	}
	number, unit, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	gigabits, err := strconv.ParseFloat(number, 64)
	if err != nil || !strings.HasPrefix(unit, "Gb/sec") || gigabits < 0 || gigabits > 1e6 {
		return 0
	}
	return uint32(gigabits * 1000)
}

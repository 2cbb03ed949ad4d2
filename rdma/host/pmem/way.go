package pmem

import (
	"fmt"
	"os"
	"runtime"
	"sync"
)

// Way is how a range is flushed.
type Way uint8

const (
	NoWay      Way = iota // memory that does not survive
	Msync                 // the kernel writes pages to the medium
	CLFLUSH               // each line is written back and evicted, one after the other
	CLFLUSHOPT            // the same, side by side
	CLWB                  // lines are written back and may stay in the cache
	DCCVAP                // arm64: clean by address to the point of persistence
	FenceAlone            // the caches survive: stores need only be out of the store buffer
)

var wayNames = [...]string{"none", "msync", "clflush", "clflushopt", "clwb", "dc-cvap", "fence"}

func (w Way) String() string { return wayNames[w] }

// FlushVariable is the environment variable that chooses how lines are written back, by the name
// of a Way: clwb, clflushopt, clflush or dc-cvap; msync flushes pages even of persistent memory.
// Any of them also has lines written back where caches survive.
const FlushVariable = "QUARRY_PMEM_FLUSH"

// features are the processor's instructions that write lines back.
type features struct {
	clflush, clflushopt, clwb bool // CPUID 1 EDX bit 19, CPUID 7 EBX bits 23 and 24
	dcCVAP                    bool // HWCAP_DCPOP
}

// choose is the best way to write lines back that a processor has: Msync if it has none. override
// names another; a name that this processor does not have is an error.
func choose(arch string, f features, override string) (Way, error) {
	has := []struct {
		way  Way
		has  bool
		arch string
	}{{CLWB, f.clwb, "amd64"}, {CLFLUSHOPT, f.clflushopt, "amd64"}, {CLFLUSH, f.clflush, "amd64"}, {DCCVAP, f.dcCVAP, "arm64"}, {Msync, true, arch}}
	for _, h := range has {
		if h.has && h.arch == arch && (override == "" || override == h.way.String()) {
			return h.way, nil
		}
	}
	names := ""
	for _, h := range has {
		if h.has && h.arch == arch {
			names += " " + h.way.String()
		}
	}
	return NoWay, fmt.Errorf("%s=%s: this processor (%s) has no such way to flush: unset it, or choose one of:%s", FlushVariable, override, arch, names)
}

// processor is how this process writes lines back.
var processor = sync.OnceValues(func() (Way, error) {
	return choose(runtime.GOARCH, cpuFeatures(), os.Getenv(FlushVariable))
})

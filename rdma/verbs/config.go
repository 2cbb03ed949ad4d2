package verbs

import (
	"errors"
	"net/netip"
	"time"
)

// ErrNotBuilt: this program has no RDMA in it.
var ErrNotBuilt = errors.New("built without RDMA: build with CGO_ENABLED=1 and -tags verbs, with the headers of libibverbs installed")

// ErrDevice: no RDMA device can be used; the error says which and why.
var ErrDevice = errors.New("no usable RDMA device")

// Config chooses a device. The zero Config takes the best one there is.
type Config struct {
	Device string        // name, "" any
	Port   int           // 0 any
	GID    netip.Addr    // the port's address, zero: by score
	Spin   time.Duration // how long a wait polls before it sleeps; 100 us
}

const defaultSpin = 100 * time.Microsecond

func (c Config) withDefaults() Config {
	if c.Spin == 0 {
		c.Spin = defaultSpin
	}
	return c
}

// Objects counts the verbs objects of this process that have not been dropped.
type Objects struct {
	Contexts, ProtectionDomains, MemoryRegions, CompletionQueues, Channels, QueuePairs int64
}

// Caps are what a device says it can do.
type Caps struct {
	Device       string
	Port         int
	GID          netip.Addr
	GIDIndex     int
	RoCE         bool
	MTU          int
	Atomics      string // "hca" or "global"
	MaxReads     int    // READs and atomics under way on a queue pair
	Windows2B    bool   // memory windows of type 2B
	Flush        bool   // native FLUSH, by the capability bits; not used yet
	AtomicWrite  bool   // native ATOMIC_WRITE; not used yet
	MaxQueuePair int
}

// Stats counts what a dialer's lanes have done besides chains.
type Stats struct {
	Copied     uint64 // buffers outside of registered memory
	Registered uint64 // bytes
	Mended     uint64 // connections made again after a refusal
}

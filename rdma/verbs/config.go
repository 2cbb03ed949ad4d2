//lint:file-ignore U1000 what chooses windows is used with the tag verbs only

package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// ErrNotBuilt: this program has no RDMA in it.
var ErrNotBuilt = errors.New("built without RDMA: build with CGO_ENABLED=1 and -tags verbs, with the headers of libibverbs and librdmacm installed")

// ErrDevice: no RDMA device can be used; the error says which and why.
var ErrDevice = errors.New("no usable RDMA device")

// ErrNone: this host has no RDMA device at all. It wraps ErrDevice.
var ErrNone = fmt.Errorf("%w: this host has none", ErrDevice)

// Config chooses a device. The zero Config takes the best one there is.
type Config struct {
	Device string        `json:"device"`  // name, "" any
	Port   int           `json:"port"`    // 0 any
	GID    netip.Addr    `json:"address"` // the port's address, zero: by score
	Spin   time.Duration // how long a wait polls before it sleeps; 100 us

	windows windowUse // for tests
}

// windowUse is when a node gives out windows of type 2: where the device is seen to
// enforce them. Tests know already, or want them all the same.
type windowUse uint8

const (
	windowsProbed windowUse = iota
	windowsNever
	windowsAlways
)

// ParseConfig reads the form DEVICE[/PORT][@ADDRESS], such as mlx5_0, mlx5_0/2,
// mlx5_0/1@10.0.0.7 or @fd00::7. Empty is the best device there is.
func ParseConfig(s string) (c Config, err error) {
	rest, address, given := strings.Cut(s, "@")
	if given {
		if c.GID, err = netip.ParseAddr(address); err != nil {
			return c, fmt.Errorf("RDMA device %q: address %q: want an IPv4 or IPv6 address of one of its ports", s, address)
		}
	}
	var port string
	c.Device, port, given = strings.Cut(rest, "/")
	if given {
		if c.Port, err = strconv.Atoi(port); err != nil || c.Port < 1 || c.Port > 255 {
			return c, fmt.Errorf("RDMA device %q: port %q: want a number from 1", s, port)
		}
	}
	if strings.ContainsAny(c.Device, " \t\n") {
		return c, fmt.Errorf("RDMA device %q: want DEVICE[/PORT][@ADDRESS], such as mlx5_0/1@10.0.0.7", s)
	}
	return c, nil
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
	Contexts          int64 `json:"contexts"`
	ProtectionDomains int64 `json:"protection_domains"`
	MemoryRegions     int64 `json:"memory_regions"`
	CompletionQueues  int64 `json:"completion_queues"`
	Channels          int64 `json:"channels"`
	QueuePairs        int64 `json:"queue_pairs"`
	ConnectionIDs     int64 `json:"connection_ids"`
	EventChannels     int64 `json:"event_channels"`
	Windows           int64 `json:"windows"`
}

// Caps are what a device says it can do.
type Caps struct {
	Device       string     `json:"device"`
	Port         int        `json:"port"`
	GID          netip.Addr `json:"address"`
	GIDIndex     int        `json:"gid_index"`
	RoCE         bool       `json:"roce"`
	MTU          int        `json:"mtu_bytes"`
	Atomics      string     `json:"atomics"`             // "hca" or "global"
	MaxReads     int        `json:"max_reads"`           // READs and atomics under way on a queue pair
	Windows2B    bool       `json:"windows_2b"`          // memory windows of type 2B, so it says
	Enforced     string     `json:"windows_enforced"`    // what of them a node has seen enforced: "bounds and queue pair", ...; "" not tried
	Flush        bool       `json:"native_flush"`        // native FLUSH, by the capability bits; used for visible FLUSHes where the library has it too
	AtomicWrite  bool       `json:"native_atomic_write"` // native ATOMIC_WRITE; no protocol needs it
	MaxQueuePair int        `json:"max_queue_pairs"`
}

// Stats counts what a dialer's lanes have done besides chains.
type Stats struct {
	Copied     uint64 // buffers outside of registered memory
	Registered uint64 // bytes
	Mended     uint64 // connections made again after a refusal
	Flushed    uint64 // native FLUSHes
}

//lint:file-ignore U1000 what chooses windows is used with the tag verbs only

package verbs

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
)

// ErrNotBuilt: this program has no RDMA in it.
var ErrNotBuilt = errors.New("built without RDMA: build with CGO_ENABLED=1 and -tags verbs, with the headers of libibverbs and librdmacm installed")

// ErrDevice: no RDMA device can be used; the error says which and why.
var ErrDevice = errors.New("no usable RDMA device")

// ErrNone: this host has no RDMA device at all. It wraps ErrDevice.
var ErrNone = fmt.Errorf("%w: this host has none", ErrDevice)

// Config chooses a device and says how to use it. The zero Config takes the best one there
// is, with defaults that suit most networks.
type Config struct {
	Device string     // name, "" any
	Port   int        // 0 any
	GID    netip.Addr // the port's address, zero: by score
	// PKey is the partition of an InfiniBand network, 0 the default one (0xffff). Of
	// addresses in IP over InfiniBand the interface decides instead.
	PKey uint16
	// Spin is how long a wait polls before it sleeps, 0 means 100 us, less than 0 not at all.
	Spin time.Duration
	// Inline is up to how many bytes a WRITE travels within the work request, 0 means 128,
	// less than 0 none, at most 128.
	Inline  int
	Windows Windows // whether lanes get memory windows of their own
	Atomics Atomics // what executes the atomics of a node's regions
	Link    Link    // what connections ask of the network
	Rail    string  // the network that the device is at, as the operator calls it; "": it has no name
	// Flush is how a node has clients make persistent memory durable. It is not part of the text that ParseConfig reads; see
	// host.ChooseFlush.
	Flush rdma.FlushMethod

	unbindable bool // for tests: regions that no window can be bound to
}

// Link says how queue pairs use the network. Both ends apply their own to what they send.
type Link struct {
	// TrafficClass of RoCE: 4 times the DSCP, and the ECN bits. 0 leaves it to the kernel.
	TrafficClass uint8
	// ServiceLevel of InfiniBand, priority of RoCE, up to 15. 0 leaves it to the path.
	ServiceLevel uint8
	// AckTimeout is how long an adapter waits before it sends again, rounded up to 4.096 us
	// times a power of two, at most 8.6 s; 0 means 268 ms.
	AckTimeout time.Duration
	// Retries before a silent peer is given up, 1 to 7; 0 means 6.
	Retries int
}

// Windows says when a node gives out memory windows of type 2B.
type Windows uint8

const (
	WindowsAuto Windows = iota // where the device is seen to enforce them
	WindowsOn                  // always, also where their bounds are not enforced
	WindowsOff                 // never
)

// Atomics says what executes the atomics on a node's regions.
type Atomics uint8

const (
	AtomicsAuto     Atomics = iota // the adapter, where it has atomics, else the node's processors
	AtomicsRequired                // the adapter; one without atomics is refused, and so is a node whose processors do it
	AtomicsAgent                   // the node's processors, whatever the adapter has
)

func (a Atomics) String() string { return [...]string{"auto", "required", "agent"}[a] }

func (w Windows) String() string { return [...]string{"auto", "on", "off"}[w] }

// mostTimeout is the exponent of the longest AckTimeout: 4.096 us << 21 = 8.6 s.
const mostTimeout = 21

// timeout is the exponent of AckTimeout.
func (l Link) timeout() int {
	n := 1
	for n < mostTimeout && 4096*time.Nanosecond<<n < l.AckTimeout {
		n++
	}
	return n
}

// MaxDevices is how many devices a text names at most.
const MaxDevices = 8

// Split parts a text that names several devices, DEVICE[,OPTION=VALUE...][,DEVICE[,OPTION=VALUE...]...]: what has no = begins
// another one. It has always one part, which may be empty.
func Split(s string) (parts []string) {
	for item := range strings.SplitSeq(s, ",") {
		if len(parts) > 0 && strings.Contains(item, "=") {
			parts[len(parts)-1] += "," + item
		} else {
			parts = append(parts, item)
		}
	}
	return parts
}

// ParseConfigs reads a text as Split takes it. Of several devices each is named, once.
func ParseConfigs(s string) (all []Config, err error) {
	parts := Split(s)
	if len(parts) > MaxDevices {
		return nil, fmt.Errorf("RDMA devices %q: %d of them, want at most %d", s, len(parts), MaxDevices)
	}
	for _, part := range parts {
		c, err := ParseConfig(part)
		if err != nil {
			return nil, err
		}
		same := func(o Config) bool { return o.Device == c.Device && o.Port == c.Port && o.GID == c.GID }
		switch {
		case len(parts) > 1 && c.Device == "" && !c.GID.IsValid():
			return nil, fmt.Errorf("RDMA devices %q: name each of several", s)
		case slices.ContainsFunc(all, same):
			return nil, fmt.Errorf("RDMA devices %q: %q is named twice", s, part)
		}
		all = append(all, c)
	}
	return all, nil
}

// ParseConfig reads the form DEVICE[/PORT][@ADDRESS][,OPTION=VALUE...], such as mlx5_0,
// mlx5_0/2, mlx5_0/1@10.0.0.7, @fd00::7 or mlx5_0,traffic-class=106,retries=7. Empty is the
// best device there is. Options are rail, pkey, spin, inline, windows, atomics, traffic-class,
// service-level, ack-timeout and retries.
func ParseConfig(s string) (c Config, err error) {
	device, options, more := strings.Cut(s, ",")
	rest, address, given := strings.Cut(device, "@")
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
	if strings.ContainsAny(c.Device, " \t\n=") {
		return c, fmt.Errorf("RDMA device %q: want DEVICE[/PORT][@ADDRESS], such as mlx5_0/1@10.0.0.7", s)
	}
	for more {
		var option string
		option, options, more = strings.Cut(options, ",")
		name, value, _ := strings.Cut(option, "=")
		if err := c.set(name, value); err != nil {
			return c, fmt.Errorf("RDMA device %q: %w", s, err)
		}
	}
	return c, nil
}

// set takes an option.
func (c *Config) set(name, value string) (err error) {
	number := func(least, most uint64) (n uint64) {
		if n, err = strconv.ParseUint(value, 0, 16); err != nil || n < least || n > most {
			err = fmt.Errorf("%s %q: want a number from %d to %d", name, value, least, most)
		}
		return n
	}
	duration := func(least, most time.Duration) (d time.Duration) {
		if d, err = time.ParseDuration(value); err != nil || d < least || d > most {
			err = fmt.Errorf("%s %q: want a duration from %v to %v, such as 67ms", name, value, least, most)
		}
		return d
	}
	switch name {
	case "rail":
		if c.Rail = value; !rail.GoodName(value) {
			err = fmt.Errorf("rail %q: want a name of 1 to %d letters, digits, . _ -", value, rail.MaxNameBytes)
		}
	case "pkey":
		c.PKey = uint16(number(1, 0xffff))
	case "spin":
		if c.Spin = duration(0, time.Second); c.Spin == 0 {
			c.Spin = -1
		}
	case "inline":
		if c.Inline = int(number(0, inlineBytes)); c.Inline == 0 {
			c.Inline = -1
		}
	case "windows":
		for _, w := range []Windows{WindowsAuto, WindowsOn, WindowsOff} {
			if value == w.String() {
				c.Windows = w
				return nil
			}
		}
		err = fmt.Errorf("windows %q: want auto, on or off", value)
	case "atomics":
		for _, a := range []Atomics{AtomicsAuto, AtomicsRequired, AtomicsAgent} {
			if value == a.String() {
				c.Atomics = a
				return nil
			}
		}
		err = fmt.Errorf("atomics %q: want auto, required or agent", value)
	case "traffic-class":
		c.Link.TrafficClass = uint8(number(0, 255))
	case "service-level":
		c.Link.ServiceLevel = uint8(number(0, 15))
	case "ack-timeout":
		c.Link.AckTimeout = duration(8192*time.Nanosecond, 4096*time.Nanosecond<<mostTimeout)
	case "retries":
		c.Link.Retries = int(number(1, 7))
	default:
		err = fmt.Errorf("unknown option %q: want rail, pkey, spin, inline, windows, atomics, traffic-class, service-level, ack-timeout or retries", name)
	}
	return err
}

const (
	defaultTimeout = 4096 * time.Nanosecond << 16 // 268 ms
	defaultRetries = 6
	// inlineBytes is up to which length a WRITE travels within the work request.
	inlineBytes = 128
)

const defaultSpin = 100 * time.Microsecond

// withDefaults replaces zero values by the defaults.
func (c Config) withDefaults() Config {
	if c.Spin == 0 {
		c.Spin = defaultSpin
	}
	if c.Inline == 0 {
		c.Inline = inlineBytes
	}
	if c.Link.AckTimeout == 0 {
		c.Link.AckTimeout = defaultTimeout
	}
	if c.Link.Retries == 0 {
		c.Link.Retries = defaultRetries
	}
	c.Spin, c.Inline = max(c.Spin, 0), max(c.Inline, 0)
	return c
}

// Objects counts the verbs objects of this process that have not been dropped.
type Objects struct {
	Contexts          int64 `json:"contexts"`           // open devices
	ProtectionDomains int64 `json:"protection_domains"` // one for each tenant, and each dialer
	MemoryRegions     int64 `json:"memory_regions"`     // pinned memory, of regions, buffers and lanes
	CompletionQueues  int64 `json:"completion_queues"`  // a queue pair of a client has its own; a server's share one
	Channels          int64 `json:"channels"`           // completion channels
	QueuePairs        int64 `json:"queue_pairs"`        // one for each lane at either end
	ConnectionIDs     int64 `json:"connection_ids"`     // of the connection manager
	EventChannels     int64 `json:"event_channels"`     // of the connection manager
	Windows           int64 `json:"windows"`            // memory windows of type 2
}

// Caps are what a device says it can do.
type Caps struct {
	Device       string     `json:"device"`                  // the kernel's name
	Port         int        `json:"port"`                    // counted from 1
	GID          netip.Addr `json:"address"`                 // the port's address in use
	GIDIndex     int        `json:"gid_index"`               // its place in the port's table
	RoCE         bool       `json:"roce"`                    // the port is an Ethernet port
	MTU          int        `json:"mtu_bytes"`               // of the port, now
	Atomics      string     `json:"atomics"`                 // "hca", "global", or "none"
	IWARP        bool       `json:"iwarp"`                   // the transport is iWARP, over TCP
	MaxReads     int        `json:"max_reads"`               // READs and atomics under way on a queue pair
	Windows2B    bool       `json:"windows_2b"`              // memory windows of type 2B, so it says
	Enforced     string     `json:"windows_enforced"`        // what of them a node has seen enforced: "bounds and queue pair", ...; "" not tried
	Flush        bool       `json:"native_flush"`            // native FLUSH, by the capability bits; used for visible FLUSHes where the library has it too
	Persistent   bool       `json:"native_persistent_flush"` // native FLUSH that is persistent, by the capability bits
	AtomicWrite  bool       `json:"native_atomic_write"`     // native ATOMIC_WRITE; no protocol needs it
	MaxQueuePair int        `json:"max_queue_pairs"`         // limit of the device
}

// noAtomics is Caps.Atomics of a device without any.
const noAtomics = "none"

// Acts says whether a node on the device has its processors execute the atomics of its regions.
func (c *Caps) Acts(want Atomics) bool { return c.Atomics == noAtomics || want == AtomicsAgent }

// Agrees says whether a client on the device may use a node whose processors execute the atomics of its regions (acts), or one whose
// adapter does.
func (c *Caps) Agrees(want Atomics, acts bool) error {
	switch {
	case acts && want == AtomicsRequired:
		return errors.New("the node's processors execute the atomics of its regions, and this side requires an adapter that does (--rdma-atomics required)")
	case !acts && c.Atomics == noAtomics:
		return fmt.Errorf("%s has no atomics, and the node's adapter executes those of its regions: use another adapter, or the tcp provider", c.Device)
	}
	return nil
}

// Stats counts what a dialer's lanes have done besides chains.
type Stats struct {
	Copied     uint64 // buffers outside of registered memory
	Registered uint64 // bytes
	Redialled  uint64 // connections made again after a refusal
	Flushed    uint64 // native FLUSHes, visible or persistent
	Pushed     uint64 // READs that made what was written before them durable
	Asked      uint64 // ranges that nodes were asked to flush
	Acted      uint64 // messages by which nodes executed chains with an atomic
	Parts      uint64 // parts of chains that were posted: a chain has more than one where verbs are ordered behind a flush that the node is asked for
	Deepened   uint64 // connections made again with a longer send queue
}

// leastDepth is how many work requests the queue pair of a new lane holds: four chains of
// ordinary operations. A lane that posts longer chains connects again with a longer queue,
// up to mostDepth.
const (
	leastDepth = 64
	mostDepth  = 4 * rdma.MaxChainVerbs
)

// PinnedLane is the memory that one lane of a client pins, in bytes: least is that of a new
// one, most that of a lane whose chains are as long as they can be. PinnedCopies come on top.
func PinnedLane() (least, most uint64) { return pinned(leastDepth), pinned(mostDepth) }

// PinnedCopies is the most that a lane pins besides, in bytes, to copy buffers through that
// lie outside of registered memory.
const PinnedCopies = stageBytes

const (
	// stageBytes holds the largest chain, each buffer aligned to a cache line. Few
	// lanes need as much: it is pinned memory.
	stageBytes = rdma.MaxChainBytes + 64*rdma.MaxChainVerbs
	stageLeast = 256 << 10
)

// pinned follows the provider of mlx5: 384 bytes for a work request with 128 bytes of
// inline data, 64 for a completion, each queue a power of two, a page for the receive queue
// and one for doorbells.
func pinned(depth int) uint64 {
	pages := func(bytes int) uint64 { return uint64(max(4096, 1<<bits.Len(uint(bytes-1)))) }
	const answers = 4 * rdma.MaxChainVerbs * 8
	return pages(depth*384) + pages((depth+2)*64) + 2*4096 + answers
}

package storagenode

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/internal/wire"
	"github.com/quarrystore/quarry/rdma/host/ddio"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// Config of a node. Controllers is needed.
type Config struct {
	// Controllers are base URLs, one or more.
	Controllers []string
	// Name in the cluster, unique; default the host's name.
	Name string
	// FailureDomain is /dc/rack/host; default /default/default/NAME. Replicas of a
	// region lie in different ones.
	FailureDomain string
	// Dir keeps regions as files, and the node's state across restarts. A device DAX, such as /dev/dax0.0, keeps them
	// in persistent memory without a file system; clients on its host use tcp or verbs then, not shm.
	// "" keeps regions in anonymous memory: a restarted node has nothing.
	Dir string
	// Format makes a directory on a device Dir that has none, and gives up what it held. A device that has one is used
	// as it is.
	Format bool
	// Shared says that other hosts map a device Dir as well, and that their processors see one coherent memory: their clients then execute verbs
	// on it themselves, as those of this host do over shm. Each of those hosts runs a cxl.Agent. Only processes of the node's user, or root's,
	// are sent the device.
	Shared bool
	// Host is the name of this host among those of a Shared device; default what the kernel says.
	Host string
	// HostsGone are hosts of a Shared device of which the operator says that they are off: the node does not wait for their agents.
	HostsGone []string
	// Medium of a device Dir: MediumVolatile has its regions count as volatile, and flushes nothing. MediumPersistent says that it survives a loss
	// of power also where the kernel lists no NVDIMM behind it. Default MediumAuto: what the kernel says.
	Medium string
	// Flush is how clients that come through an adapter make regions durable: auto, native, appliance or agent; see
	// host.ChooseFlush. Default auto.
	Flush string
	// DDIO switches the adapter's WRITEs into the processors' caches or past them while the node runs: ddio.On, ddio.Off, or ddio.Keep,
	// the default. Only at root ports that package ddio knows, and as root.
	DDIO string
	// NUMA is the NUMA node whose processors and memory this process uses: a number, or NUMAAuto for the one of the adapter;
	// default none. It holds for the whole process.
	NUMA string
	// HugepageBytes of the pages that anonymous regions lie on; 0 means ordinary ones.
	// They are set aside when a region is made. Not with Dir.
	HugepageBytes uint64
	// CapacityBytes of all regions together; default 64 GiB. A region takes all of its
	// memory when it is made, and is refused where the medium has no room for it.
	CapacityBytes uint64
	// MaxSessions and MaxConnections bound the clients of the fabric: sessions that have
	// connections, and connections of all of them. 0 means 4096 and 16384. Programs of storage nodes
	// are admitted beyond.
	MaxSessions, MaxConnections int
	// Listen are the addresses of the tcp fabric, comma separated, each [RAIL=]HOST:PORT; default 127.0.0.1:0. RAIL names the
	// network of the address. Clients that name no rails begin with the first. Several have each a HOST of its own, which the table shows.
	Listen string
	// StrictRails has the node's programs refuse to reach a node that is on none of the rails in Listen; else they warn.
	StrictRails bool
	// AgentListen is the address that controllers call; default 127.0.0.1:0.
	AgentListen string
	// Advertise is the host name or address that others reach both ports at; default
	// that of Listen and of AgentListen. Needed where they listen on all addresses. It does not hold for several addresses of Listen.
	Advertise string
	// GossipListen is where the cluster's pulse is heard, host:port of UDP;
	// default a free port of the host in Listen or, if that has several addresses, in AgentListen. NoGossip takes no part in it.
	GossipListen string
	// Socket is the path of the shm fabric's socket; default in Dir or, without one,
	// in the system's folder for temporary files. "none" serves no shm.
	Socket string
	// RDMA says whether and how the verbs fabric is served.
	RDMA RDMA
	// Token is the cluster's token, where it asks for one.
	Token string
	// TLS serves the agent port; ControllerTLS is for https controllers.
	TLS, ControllerTLS *tls.Config
	// FabricTLS encrypts the tcp fabric, as a node and as a client of other nodes; nil: plain.
	FabricTLS *tcp.TLS
	// ID is the identity in the certificate of TLS: then only controllers of its cluster, by their
	// certificates, may call the agent. None: any caller that has the cluster's bearer.
	ID identity.ID
	// Logger; nil means slog.Default.
	Logger *slog.Logger
	// Wire is the network of a simulation; nil means the host's. GossipListen is NoGossip then.
	Wire *wire.Wire

	device *pmem.Device // in place of the device at Dir; for tests
}

const (
	defaultCapacity = 64 << 30
	noSocket        = "none"
	// Media of a device.
	MediumAuto       = "auto"
	MediumPersistent = "persistent"
	MediumVolatile   = "volatile"
	// NUMAAuto is the NUMA node that the adapter is attached to, if the kernel says which.
	NUMAAuto       = "auto"
	maxNameBytes   = 64
	maxSocketBytes = 107 // of a path: the kernel's limit
)

var domain = regexp.MustCompile(`^(/[A-Za-z0-9._-]{1,64}){1,8}$`)

// withDefaults replaces zero values by the defaults.
func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name, _ = os.Hostname()
	}
	if c.FailureDomain == "" {
		c.FailureDomain = "/default/default/" + c.Name
	}
	if c.CapacityBytes == 0 {
		c.CapacityBytes = defaultCapacity
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.AgentListen == "" {
		c.AgentListen = "127.0.0.1:0"
	}
	if c.Host == "" {
		c.Host, _ = os.Hostname()
	}
	if c.onDevice() && !c.Shared {
		c.Socket = noSocket // a descriptor of the device would give a client every region
	}
	if c.Socket == "" {
		c.Socket = c.ownSocket()
	}
	if c.Socket != noSocket {
		// Absolute, because clients have other working directories.
		if p, err := filepath.Abs(c.Socket); err == nil {
			c.Socket = p
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// onDevice says whether Dir is a device.
func (c Config) onDevice() bool { return c.device != nil || c.Dir != "" && pmem.IsDevice(c.Dir) }

// ownSocket is a path that no other node uses. A socket in the node's folder is replaced by the
// next incarnation of a node that was killed; one named by the process id stays behind.
func (c Config) ownSocket() string {
	if c.Dir != "" && !c.onDevice() {
		if p, err := filepath.Abs(filepath.Join(c.Dir, "shm.sock")); err == nil && len(p) <= maxSocketBytes {
			return p
		}
	}
	return filepath.Join(userdir.Path(), fmt.Sprintf("quarry-%d-%s.sock", os.Getpid(), c.Name))
}

// validate refuses values that cannot be, or not together.
func (c Config) validate() error {
	switch {
	case c.HugepageBytes != 0 && c.Dir != "":
		return errors.New("storage node: huge pages are for regions in memory: give --hugepages or --data, not both")
	case (c.Shared || c.Medium == MediumVolatile || len(c.HostsGone) > 0) && !c.onDevice():
		return fmt.Errorf("storage node: --shared, --host-gone and --medium volatile are for a device given by --data, such as /dev/dax0.0, and %q is none", c.Dir)
	case len(c.HostsGone) > 0 && !c.Shared:
		return errors.New("storage node: --host-gone is for a device that several hosts map (--shared)")
	case c.Shared && c.RDMA.Fabric != FabricTCP:
		return errors.New("storage node: the processors of several hosts are one domain of atomics, and an adapter is another: --shared needs --fabric tcp")
	case !slices.Contains([]string{"", MediumAuto, MediumPersistent, MediumVolatile}, c.Medium):
		return fmt.Errorf("storage node: --medium %s: want auto, persistent or volatile", c.Medium)
	case c.Format && c.device == nil && !pmem.IsDevice(c.Dir):
		return fmt.Errorf("storage node: --format is for a device given by --data, such as /dev/dax0.0, and %q is none", c.Dir)
	case c.DDIO != "" && c.DDIO != ddio.On && c.DDIO != ddio.Off && c.DDIO != ddio.Keep:
		return fmt.Errorf("storage node: --ddio %s: want on, off or keep", c.DDIO)
	case c.MaxSessions < 0 || c.MaxConnections < 0:
		return fmt.Errorf("storage node: at most %d sessions and %d connections: want at least 1, or 0 for the defaults", c.MaxSessions, c.MaxConnections)
	case len(c.Controllers) == 0:
		return errors.New("storage node: no controller given: set --controllers, such as http://127.0.0.1:7420")
	case c.Name == "" || len(c.Name) > maxNameBytes || strings.ContainsAny(c.Name, "/\n\r\x00 "):
		return fmt.Errorf("storage node: name %q: want 1 to %d bytes without slashes or spaces", c.Name, maxNameBytes)
	case !domain.MatchString(c.FailureDomain):
		return fmt.Errorf("storage node: failure domain %q: want /dc/rack/host, up to 8 parts of letters, digits, . _ -", c.FailureDomain)
	case strings.ContainsAny(c.Advertise, ":/ []") && net.ParseIP(c.Advertise) == nil:
		return fmt.Errorf("storage node: advertised host %q: want a name or an address, without port", c.Advertise)
	}
	if _, err := rail.ParseListen(c.Listen); err != nil && c.Wire == nil {
		return fmt.Errorf("storage node: --listen %w", err)
	}
	for _, u := range c.Controllers {
		if p, err := url.Parse(u); err != nil || p.Host == "" || p.Scheme != "http" && p.Scheme != "https" {
			return fmt.Errorf("storage node: controller %q: want a URL such as http://127.0.0.1:7420", u)
		}
	}
	return nil
}

// advertised is the address of a listener as the table shows it.
func (c Config) advertised(what string, l net.Addr) (string, error) {
	name, port, err := net.SplitHostPort(l.String())
	if err != nil {
		return "", fmt.Errorf("storage node %s: %s port: %w", c.Name, what, err)
	}
	if c.Advertise != "" {
		return net.JoinHostPort(c.Advertise, port), nil
	}
	if ip := net.ParseIP(name); ip != nil && ip.IsUnspecified() {
		return "", fmt.Errorf("storage node %s: the %s port listens on all addresses: say with --advertise which one others use", c.Name, what)
	}
	return l.String(), nil
}

const (
	fetchTimeout = 3 * time.Second        // of one call of a controller
	beatTimeout  = time.Second            // of one heartbeat
	retryEvery   = 200 * time.Millisecond // between registrations
	stopTimeout  = 5 * time.Second        // until Close gives up waiting for verbs
	// actTimeout of one command. The controller has given up by then, and calls again.
	actTimeout = 30 * time.Second
	// maxAnswerBytes of a controller: two lists of state.MaxSerials serials, and room.
	maxAnswerBytes = 8 << 20
	// Longest calls of a controller: a Fence of as many, a scrub for maxDead sessions, others.
	maxFenceBytes   = 4 << 20
	maxWorkBytes    = 64 << 10
	maxCommandBytes = 4 << 10
)

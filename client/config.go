package client

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/wire"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// DefaultTimeout bounds a call whose context has no deadline; see Config.Timeout.
const DefaultTimeout = 10 * time.Second

// Values of Config.Transport.
const (
	TransportAuto  = "auto"  // shm on the same host where the node serves it, else verbs if both sides have an adapter, else tcp
	TransportVerbs = "verbs" // RDMA adapters
	TransportSHM   = "shm"   // the node's memory mapped into this process; same host only
	TransportTCP   = "tcp"
)

// Values of Config.ReadFrom.
const (
	ReadNear    = "near"    // the replica on this host, reached through shared memory; else the primary
	ReadPrimary = "primary" // the primary
	ReadSpread  = "spread"  // each lane reads at one replica, the lanes of a client at all of them alike
)

// Values of FabricTLSFromFiles.
const (
	FabricTLSOff      = tcp.TLSOff      // all connections are plain
	FabricTLSOn       = tcp.TLSOn       // TLS where the node offers it, else plain
	FabricTLSRequired = tcp.TLSRequired // TLS, or no connection
)

// FabricTLS says whether connections to storage nodes are encrypted: TLS 1.3, in which a node
// shows the certificate of its name in the table, and the client its own. An attacker who can
// change traffic can make a client with FabricTLSOn connect without TLS; with FabricTLSRequired
// the client's calls fail instead.
type FabricTLS = tcp.TLS

// Config configures a Client. Only Controllers is required.
type Config struct {
	// Controllers are the base URLs of one or more controllers, http or https.
	Controllers []string
	// Name identifies the session in listings. Default: program@host:pid. One line of at
	// most 255 bytes.
	Name string
	// Transport is one of the Transport constants; "" means TransportAuto. The provider
	// that auto chooses is logged once for each node and is part of Stats.
	Transport string
	// RequireRDMA rejects nodes that an RDMA adapter cannot reach.
	RequireRDMA bool
	// Rails are the networks that this program is on, each NAME or NAME=ADDRESS, with the local address that connections come from. A node with
	// several tcp addresses is reached by one at these rails; docs/OPERATIONS.md tells more. None: by the first address that answers.
	Rails []string
	// RailPolicy says what happens where a node is on none of Rails: RailsWarn or RailsStrict; "" means RailsWarn.
	RailPolicy string
	// RDMADevice selects the adapter, or several, comma separated: DEVICE[/PORT][@ADDRESS][,OPTION=VALUE...], such as
	// mlx5_0/1 or mlx5_0,traffic-class=106. "" selects the best adapter. See verbs.ParseConfig.
	RDMADevice string
	// Token is the cluster's token; "" if the cluster requires none.
	Token string
	// Tenant is the tenant that the session is opened in, and whose memory and names it can reach; "" means the
	// one that this program's identity has grants in, else "default", which every cluster has.
	Tenant string
	// TLS configures https controllers; nil means the system's defaults.
	TLS *tls.Config
	// FabricTLS encrypts connections to storage nodes over TransportTCP; nil: they are plain. Nodes
	// that require encryption refuse plain ones. See FabricTLSFromFiles.
	FabricTLS *FabricTLS
	// Keys encrypts payloads in this process, before they leave it, with keys of the tenant; nil: they
	// are clear. Each payload takes 48 bytes more. See docs/SECURITY.md for what stays visible.
	Keys Keys
	// AllowClear has a Client with Keys read objects that are not encrypted, which anyone who can write the
	// memory can forge: for the time in which a store is encrypted. What it writes is encrypted.
	AllowClear bool
	// Lanes is the number of calls that can run at the same time, 1 to 256. Further calls
	// wait. 0 means four for each CPU.
	Lanes int
	// ReadOnly opens a session that cannot change memory.
	ReadOnly bool
	// Durability of objects whose AllocOptions name none; 0 means Volatile.
	Durability Durability
	// Replicas of objects whose AllocOptions name none, 1 to 3. 0 means the cluster's
	// default: the number that its operator set, else 2 if the storage nodes lie in at
	// least two failure domains, else 1.
	Replicas int
	// Slab of mutable objects whose AllocOptions name none, and of the nodes of new trees: PairSlab or
	// StagedSlab, which needs one replica, and nodes of up to 16 KiB. 0 means PairSlab.
	Slab SlabKind
	// HelpFromNodes has the node of an object's primary execute a Write, CompareAndWrite or Update, by a message, when the Client has found
	// the object held by others several times in a row: the node executes what it is asked for one object one after the other. The
	// Client goes on by itself where the node does not, as for payloads of more than 4016 bytes and with Keys. Stats counts both.
	HelpFromNodes bool
	// ReadFrom says at which replica objects are read in regions with open words, where each replica in sync has what
	// was acknowledged: ReadNear, ReadPrimary or ReadSpread; "" means ReadNear. Elsewhere reads go to
	// the primary.
	ReadFrom string
	// Timeout bounds a call whose context has no deadline; 0 means DefaultTimeout.
	Timeout time.Duration
	// Logger receives the log; nil means slog.Default, warnings and errors only. The data
	// path logs nothing.
	Logger *slog.Logger
	// Wire replaces the network in simulations; nil means the host's network.
	Wire *wire.Wire

	job  uint64 // not 0: calls are made for this job of Tenant; see Jobs.Connect
	user string // not "": calls are made for this user of Tenant; see Client.ConnectUser
}

// maxLanes bounds Config.Lanes: the number of a lane takes 8 bits of each reservation.
const maxLanes = 256

// withDefaults replaces zero values by the defaults.
func (c Config) withDefaults() Config {
	if c.Name == "" {
		host, _ := os.Hostname()
		c.Name = fmt.Sprintf("%s@%s:%d", filepath.Base(os.Args[0]), host, os.Getpid())
	}
	if c.Transport == "" {
		c.Transport = TransportAuto
	}
	if c.Lanes == 0 {
		c.Lanes = min(maxLanes, 4*runtime.GOMAXPROCS(0))
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.Durability == 0 {
		c.Durability = Volatile
	}
	if c.Slab == 0 {
		c.Slab = PairSlab
	}
	if c.ReadFrom == "" {
		c.ReadFrom = ReadNear
	}
	if c.Logger == nil {
		c.Logger = slog.New(warningHandler{slog.Default().Handler()})
	}
	return c
}

// A configError is an ErrArgument that says what is wrong with a Config.
type configError string

func (e configError) Error() string        { return "client: " + string(e) }
func (e configError) Is(target error) bool { return target == ErrArgument }

func badConfig(format string, args ...any) error { return configError(fmt.Sprintf(format, args...)) }

// validController refuses what cannot be dialled as a controller.
func validController(u string) error {
	p, err := url.Parse(u)
	if err != nil || p.Host == "" || p.Scheme != "http" && p.Scheme != "https" {
		return badConfig("controller %q: want a URL such as http://127.0.0.1:7420", u)
	}
	return nil
}

// validate refuses a configuration that no session can have. The defaults have been filled in.
func (c Config) validate() error {
	if len(c.Controllers) == 0 {
		return badConfig("no controller given: set Config.Controllers, such as http://127.0.0.1:7420")
	}
	for _, u := range c.Controllers {
		if err := validController(u); err != nil {
			return err
		}
	}
	switch {
	case c.Transport != TransportAuto && c.Transport != TransportVerbs && c.Transport != TransportSHM && c.Transport != TransportTCP:
		return badConfig("transport %q: want auto, verbs, shm or tcp", c.Transport)
	case c.RequireRDMA && c.Transport != TransportAuto && c.Transport != TransportVerbs:
		return badConfig("transport %s is not RDMA, which is required: use auto", c.Transport)
	case c.Lanes < 1 || c.Lanes > maxLanes:
		return badConfig("%d lanes: want 1 to %d", c.Lanes, maxLanes)
	case c.Replicas < 0 || c.Replicas > MaxReplicas:
		return badConfig("%d replicas: want 1 to %d, or 0 for the cluster's default", c.Replicas, MaxReplicas)
	case c.Timeout < 0:
		return badConfig("timeout %v: want more than 0", c.Timeout)
	case c.Durability > Durable:
		return badConfig("durability %d: want Volatile or Durable", c.Durability)
	case c.Slab > StagedSlab:
		return badConfig("slab kind %v: want PairSlab or StagedSlab", c.Slab)
	case c.Slab == StagedSlab && c.Replicas > 1:
		return badConfig("%v, not %d: ask for 1 replica, or for PairSlab", alloc.ErrStagedReplicas, c.Replicas)
	case c.ReadFrom != ReadNear && c.ReadFrom != ReadPrimary && c.ReadFrom != ReadSpread:
		return badConfig("reads from %q: want near, primary or spread", c.ReadFrom)
	case c.AllowClear && c.Keys == nil:
		return badConfig("AllowClear without Keys: a client without keys reads nothing else")
	}
	if _, err := rail.ParseOwn(c.Rails); err != nil {
		return badConfig("%v", err)
	}
	if _, err := rail.ParsePolicy(c.RailPolicy); err != nil {
		return badConfig("%v", err)
	}
	return c.validNames()
}

// validNames refuses a name or tenant that a controller would refuse.
func (c Config) validNames() error {
	switch {
	case strings.ContainsAny(c.Name, "\n\r") || len(c.Name) > 255:
		return badConfig("name %q: want one line of at most 255 bytes", c.Name)
	case strings.Trim(c.Tenant, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || len(c.Tenant) > 63:
		return badConfig("tenant %q: want at most 63 of a-z, 0-9, - and _", c.Tenant)
	}
	return nil
}

// warningHandler drops log records below the level Warn: by default a library must not
// write to its program's standard error unless something is wrong.
type warningHandler struct{ slog.Handler }

func (w warningHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && w.Handler.Enabled(ctx, l)
}
func (w warningHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return warningHandler{w.Handler.WithAttrs(a)}
}
func (w warningHandler) WithGroup(g string) slog.Handler {
	return warningHandler{w.Handler.WithGroup(g)}
}

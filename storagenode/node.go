package storagenode

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/internal/rpcstats"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/ddio"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/storagenode/state"
)

// Node is a running storage node. Fields up to mu are set before the node serves and never
// change, are safe for concurrent use, or belong to one goroutine as they say. mu guards those
// behind it.
type Node struct {
	cfg         Config            // with defaults
	keeper      keeper            // nil: regions are in memory
	incarnation uint64            // of this process: random, not 0
	own         *rdma.Credentials // of this incarnation: no ticket yet, the key is told to controllers
	secret      [32]byte          // of this incarnation's registration
	keys        keyring.Ring      // of the controllers
	hostID      string            // boot id of the host; clients compare it with theirs
	domain      proto.Domain      // of all regions
	home        *cxl.Home         // of the other hosts that map the node's device; nil: none do
	persistence pmem.Persistence  // of all regions
	missing     []uint32          // regions that the keeper had and has not any more
	adapters    []*adapter        // by number; none: the node serves no RDMA
	adapter     string            // the first one, such as mlx5_0; empty: none
	ddio        host.DDIO         // of the adapter's root port
	port        *ddio.Port        // whose switch the node relies on; nil: none
	notNative   error             // why the adapter does not make regions durable by a FLUSH of its own

	ports       []port             // of the fabric over tcp; the first is the one that clients without rails take
	tcpAddress  string             // of the first, as the table shows it
	rails       []rail.Own         // that the node's programs are on, by the ports' names
	downs       rail.Downs         // addresses of other nodes that did not answer lately
	crossed     sync.Map           // incarnation and rail of other nodes: crossings that were warned of
	shmListener *net.UnixListener  // of the fabric over shm; nil: none
	agent       *httpserver.Server // of the controllers' calls
	unserve     func()             // with Config.Wire
	agentURL    string             // as the table shows it
	controllers *controllers       // whichever leads is called
	pulse       vital              // its part in the cluster's pulse
	ctx         context.Context    // ends when Close begins
	cancel      context.CancelFunc // of ctx
	wg          sync.WaitGroup     // of its goroutines
	failed      chan error         // read by Err
	renew       chan struct{}      // of capacity 1: register again
	// lost, used and usedNext belong to the goroutine of heartbeats. lost: no controller answers. used is
	// how many bytes the blocks in use have; they are counted again at usedNext.
	lost        bool
	used        uint64
	usedNext    int64
	calls       rpcstats.Calls        // of controllers
	counts      counts                // for metrics
	executors   executors             // of procedures
	functions   functions             // that workers call for clients
	settled     settled               // what programs have done, for metrics
	medium      medium                // what regions are taken from
	others      others                // whether tcp clients are here
	left        left                  // sessions whose connections have ended
	ending      ending                // the state of Leave
	saving      chan struct{}         // taken by the save that runs; see keep.go
	savedSeq    uint64                // of keptSeq, by the save that runs
	unsaved     atomic.Int64          // since when the newest state is not saved; 0: it is
	saveErr     atomic.Pointer[error] // why the last save failed; nil: it did not
	savingAgain atomic.Bool           // saveAgain runs
	noted       bool                  // noteFailure has begun; of the goroutine of heartbeats
	closing     sync.Once             // Close has begun
	closed      error                 // its answer

	mu       sync.Mutex              // guards the machine, one step at a time, and the fields below
	state    *state.State            // decides which commands are obeyed
	works    map[workKey]*work       // programs over regions, running or ended
	keptSeq  uint64                  // counts steps that changed state.Kept
	memories map[uint32]*host.Memory // of every region of state that is made; nil once the node stops
	access   *access                 // nil until a controller has answered
	served   bool                    // the node is registered: all commands are refused before
	pulseKey []byte                  // of this incarnation, as the controllers have said
	beatMs   uint32                  // ms; the node sends two heartbeats in it
	tcp      *tcp.Server             // nil before the node serves
	shm      *shm.Server             // nil before the node serves, or without a socket
	acting   sync.WaitGroup          // steps whose actions are under way; added to only while memories is not nil
}

// Start hosts what a node has, registers it and returns when a controller knows it.
func Start(ctx context.Context, cfg Config) (_ *Node, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, own: rdma.NewCredentials(), memories: map[uint32]*host.Memory{}, works: map[workKey]*work{}, failed: make(chan error, 4+rail.MaxEnds+2*verbs.MaxDevices), renew: make(chan struct{}, 1), saving: make(chan struct{}, 1), left: left{some: make(chan struct{}, 1)}, ending: ending{answered: make(chan struct{}, 1)}, pulse: vital{hurry: make(chan struct{}, 1)}}
	n.others.count = func() uint64 { return n.access.Chains("tcp", programLane) }
	n.ctx, n.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	var b [8]byte
	rand.Read(b[:])
	n.incarnation = binary.LittleEndian.Uint64(b[:]) | 1
	rand.Read(n.secret[:])
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("storage node %s: the id of this host: %w", cfg.Name, err)
	}
	n.hostID = strings.TrimSpace(string(id))
	n.medium.init(&n.cfg)
	if err := n.openDevice(ctx); err != nil {
		return nil, fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
	}
	if err := n.chooseDomain(); err != nil {
		return nil, err
	}
	if err := errors.Join(n.bindNUMA(), n.switchDDIO("/")); err != nil {
		return nil, fmt.Errorf("storage node %s: %w", cfg.Name, err)
	}
	if err := n.recall(ctx); err != nil {
		return nil, err
	}
	if err := n.listen(ctx); err != nil {
		return nil, err
	}
	if err := n.listenPulse(ctx); err != nil {
		return nil, fmt.Errorf("storage node %s: %w", cfg.Name, err)
	}
	n.controllers = newControllers(cfg)
	if err := n.register(ctx); err != nil {
		return nil, err
	}
	if err := n.joinPulse(); err != nil {
		return nil, fmt.Errorf("storage node %s: %w", cfg.Name, err)
	}
	n.wg.Go(n.beat)
	return n, nil
}

// errNoFolder is why regions of a node without a folder are volatile.
var errNoFolder = errors.New("its regions are in memory (no --data)")

// openKeeper opens the folder or the device that keeps the node's regions.
func (n *Node) openKeeper() (keeper, error) {
	if n.cfg.device == nil {
		d, err := openFolder(n.cfg.Dir)
		if err != nil {
			return nil, err
		}
		d.domain, d.boot, d.log = n.domain, n.hostID, n.cfg.Logger
		return d, nil
	}
	d, err := openDevice(n.cfg.device, n.domain, n.cfg.Format, n.cfg.Shared)
	if err != nil {
		return nil, err
	}
	if n.cfg.Shared {
		if err := n.shareDevice(); err != nil {
			d.close(false)
			return nil, err
		}
	}
	return d, nil
}

// recall reads the state and the regions of the node's keeper.
func (n *Node) recall(ctx context.Context) error {
	limits := state.Limits{CapacityBytes: n.cfg.CapacityBytes, Volatile: errNoFolder, Adapters: len(n.adapters)}
	n.persistence = pmem.Persistence{Kind: pmem.KindVolatile, Flush: pmem.NoWay.String()}
	var kept state.Kept
	var regions []state.Region
	if n.cfg.Dir != "" {
		k, err := n.openKeeper()
		if err != nil {
			return err
		}
		n.keeper, n.medium.keep = k, k
		if kept, err = k.load(); err != nil {
			return err
		}
		list, missing, err := k.scan(ctx, kept)
		if err != nil {
			return err
		}
		for _, f := range list {
			n.memories[f.region.Number] = f.memory
			regions = append(regions, f.region)
			kept.Cluster = f.region.Cluster
		}
		if n.missing = missing; len(missing) > 0 {
			n.cfg.Logger.Error("storage node: regions that were here are missing: the controllers take other replicas; to have these back, stop this node, restore their files and start it", "node", n.cfg.Name, "data", n.cfg.Dir, "missing", missing, "found", len(list))
		}
		if n.persistence, limits.Volatile, err = k.persistence(); err != nil {
			return fmt.Errorf("storage node %s: %s: %w", n.cfg.Name, n.cfg.Dir, err)
		}
		limits.Persistent = limits.Volatile == nil
		if dir := pmem.SharedLedgers(); dir != "" {
			n.cfg.Logger.Warn("storage node: flushes go to the ledgers of a test: nothing here is durable; unset "+pmem.LedgersVariable, "node", n.cfg.Name, "ledgers", dir)
		}
		if !limits.Persistent {
			n.cfg.Logger.Warn("storage node: regions here do not survive a loss of power: durable ones are refused", "node", n.cfg.Name, "data", n.cfg.Dir, "reason", limits.Volatile)
		}
	}
	n.state = state.New(limits, kept, regions)
	return n.chooseFlush()
}

// listen opens all ports. The fabric's connections wait in the backlog until the
// node is registered and can tell good tickets from bad.
func (n *Node) listen(ctx context.Context) (err error) {
	if n.cfg.Wire != nil {
		n.tcpAddress, n.agentURL = n.cfg.Name+":1", "http://"+n.cfg.Name+":2"
		n.unserve = n.cfg.Wire.Serve(n.agentURL, n.agentHandler())
		return nil
	}
	var lc net.ListenConfig
	if err := n.listenTCP(ctx); err != nil {
		return err
	}
	if err := n.listenVerbs(ctx); err != nil {
		return err
	}
	if n.cfg.Socket != noSocket && n.domain == proto.DomainCPU {
		if err := n.cfg.makeSocketFolder(); err != nil {
			return err
		}
		n.cfg.removeStale()
		if n.shmListener, err = shm.Listen(n.cfg.Socket); err != nil {
			return fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
		}
	}
	l, err := lc.Listen(ctx, "tcp", n.cfg.AgentListen)
	if err != nil {
		return fmt.Errorf("storage node %s: agent: %w", n.cfg.Name, err)
	}
	address, err := n.cfg.advertised("agent", l.Addr())
	if err != nil {
		l.Close()
		return err
	}
	n.agentURL = "http://" + address
	if n.cfg.TLS != nil {
		n.agentURL = "https://" + address
	} else if a, ok := l.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		n.cfg.Logger.Warn("storage node: the agent port has no TLS: a reader of its traffic can command the node", "agent", n.agentURL)
	}
	n.agent = httpserver.New("agent", n.agentHandler())
	n.agent.TLS = n.cfg.TLS
	n.agent.Hosts = []string{address}
	n.wg.Go(func() {
		if err := n.agent.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.failed <- fmt.Errorf("storage node %s: agent: %w", n.cfg.Name, err)
		}
	})
	return nil
}

// agentHandler serves the agent port: calls of controllers, /healthz and /readyz.
func (n *Node) agentHandler() http.Handler {
	mux := http.NewServeMux()
	path, calls := quarrypbconnect.NewAgentHandler(&agent{n}, connect.WithInterceptors(&n.calls, n.thisIncarnation()))
	mux.Handle(path, rights.Identify(n.caller, httpserver.Gate{Allow: n.allow(), MaxBytes: maxBytes, Body: agentauth.Body}.Before(calls)))
	mux.HandleFunc("GET /healthz", health)
	mux.HandleFunc("GET /readyz", n.ready)
	return mux
}

// maxBytes of a controller's call.
func maxBytes(path string) int64 {
	switch path {
	case quarrypbconnect.AgentFenceProcedure:
		return maxFenceBytes
	case quarrypbconnect.AgentWorkProcedure:
		return maxWorkBytes
	}
	return maxCommandBytes
}

// caller is a controller by its certificate, where nodes have identities.
func (n *Node) caller(r *http.Request) (rights.Caller, error) {
	if n.cfg.ID == (identity.ID{}) {
		return rights.Caller{Name: "anyone", Roles: identity.Roles}, nil
	}
	id, err := identity.OfPeer(r.TLS, n.cfg.ID)
	if err == nil && id == (identity.ID{}) {
		err = errors.New("show a certificate of this cluster (--tls-cert, --tls-key, --tls-ca)")
	}
	return rights.Caller{Name: id.String(), Roles: []identity.Role{id.Role}, ID: id}, err
}

// allow refuses callers that are no controllers, or whose call the cluster's controllers have not signed.
func (n *Node) allow() func(*http.Request) error {
	signed := agentauth.Allow(&n.keys, n.identity)
	return func(r *http.Request) error {
		if err := rights.Allow(r); err != nil {
			return err
		}
		return signed(r)
	}
}

// identity is what calls to the agent have to name; false until the node is registered.
func (n *Node) identity() (agentauth.Node, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return agentauth.Node{Cluster: n.state.Cluster, Number: n.state.Node}, n.served
}

// serve starts the fabric, once the machine knows which sessions have ended. From then on the node
// accepts the commands of controllers.
func (n *Node) serve() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.served || n.memories == nil {
		return
	}
	n.served = true
	if n.cfg.Wire != nil {
		n.cfg.Wire.Lend(n.tcpAddress, n.access.Access)
		return
	}
	n.serveVerbs()
	n.serveTCP()
	if n.shmListener != nil {
		n.shm = shm.NewServer(n.access.Access, n.cfg.Logger)
		n.wg.Go(func() {
			if err := n.shm.Serve(n.shmListener); err != nil && n.ctx.Err() == nil {
				n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
			}
		})
	}
}

// Err yields the error that has stopped a port.
func (n *Node) Err() <-chan error { return n.failed }

var fabricTLS = map[string]quarrypb.FabricTLS{
	tcp.TLSOff: quarrypb.FabricTLS_FABRIC_TLS_OFF, tcp.TLSOn: quarrypb.FabricTLS_FABRIC_TLS_ON, tcp.TLSRequired: quarrypb.FabricTLS_FABRIC_TLS_REQUIRED,
}

// self is the node as the table shows it.
func (n *Node) self() *quarrypb.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := &quarrypb.Node{
		Name: n.cfg.Name, FailureDomain: n.cfg.FailureDomain, Incarnation: n.incarnation, AgentUrl: n.agentURL,
		CapacityBytes: n.cfg.CapacityBytes, Persistent: n.state.Limits.Persistent, Domain: uint32(n.domain), Id: n.state.Node, Fabric: proto.FabricVersion,
		Endpoints: n.endpoints(),
		Key:       n.own.Holder[:], PageBytes: n.cfg.HugepageBytes, Medium: n.medium.name, HostedBytes: n.state.HostedSize, AvailableBytes: n.medium.left(),
		Persistence: &quarrypb.Persistence{Kind: n.persistence.Kind, Domain: n.persistence.Domain, Flush: n.persistence.Flush, Method: n.persistence.Method},
		Numa:        n.numa(), MissingRegions: n.missing,
	}
	if n.adapter != "" {
		p.Persistence.Ddio = n.ddio.String()
	}
	for _, a := range n.adapters {
		if a.listener != nil {
			p.Endpoints = append(p.Endpoints, a.endpoint(len(n.adapters) > 1))
		}
	}
	p.LostAdapters = n.state.LostAdapters()
	if n.shmListener != nil {
		p.Endpoints = append(p.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: n.cfg.Socket, HostId: n.hostID})
	}
	if n.home != nil {
		for _, e := range n.home.Endpoints() {
			p.Endpoints = append(p.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: e.Socket, HostId: e.BootID})
		}
	}
	return p
}

// hosted is every replica whose memory is here.
func (n *Node) hosted() (out []*quarrypb.HostedRegion) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.state.Regions {
		if r := &n.state.Regions[i]; r.Phase != state.Making {
			out = append(out, &quarrypb.HostedRegion{Region: r.Number, Uuid: r.UUID[:], Cluster: r.Cluster[:], SizeBytes: r.Bytes, Epoch: r.Epoch})
		}
	}
	return out
}

// Close stops serving and returns when no verb runs any more. It waits at most
// stopTimeout for commands and verbs under way. Another call does nothing.
func (n *Node) Close() error {
	n.closing.Do(func() { n.closed = n.close() })
	return n.closed
}

// close is Close, once. The order matters: no new commands, then no new actions, then the end of
// all access, then the memory.
func (n *Node) close() error {
	n.cancel()
	n.leavePulse() // first: it makes the controllers probe the node at once
	var errs []error
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if n.unserve != nil {
		n.unserve()
	}
	if n.agent != nil {
		if err := n.agent.Shutdown(ctx); err != nil {
			errs = append(errs, err, n.agent.Close())
		}
	}
	n.mu.Lock()
	memories := n.memories
	n.memories = nil // no step begins an action after this
	n.mu.Unlock()
	n.acting.Wait() // the end of n.ctx ends their waits
	if n.access != nil {
		// First: it ends the lanes that the servers wait for.
		errs = append(errs, n.access.Close(ctx))
	}
	if n.home != nil {
		errs = append(errs, n.home.Close(ctx))
	}
	for _, a := range n.adapters {
		if a.listener != nil {
			a.listener.Close()
		}
	}
	if n.tcp != nil {
		n.tcp.Close()
	} else {
		for _, p := range n.ports {
			p.listener.Close()
		}
	}
	if n.shm != nil {
		errs = append(errs, n.shm.Close())
	} else if n.shmListener != nil {
		n.shmListener.Close()
	}
	n.wg.Wait()
	if n.port != nil {
		errs = append(errs, n.port.Restore())
	}
	clean := errors.Join(errs...) == nil
	for _, m := range memories {
		failed := m.Failed()
		err := m.Close()
		clean = clean && failed == nil && err == nil
		errs = append(errs, err)
	}
	if n.keeper != nil {
		n.keeper.close(clean)
	}
	if n.cfg.device != nil {
		n.cfg.device.File.Close()
	}
	if n.controllers != nil {
		n.controllers.close()
	}
	return errors.Join(errs...)
}

package storagenode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// Ways in which a node serves its memory.
const (
	FabricAuto  = "auto"  // verbs if there is a device that can, else tcp and shm
	FabricVerbs = "verbs" // verbs, or the node does not start; tcp goes through the adapter
	FabricTCP   = "tcp"   // tcp and shm
)

// RDMA says how a node serves the verbs fabric. The zero RDMA is FabricAuto.
type RDMA struct {
	Fabric string
	// Listen is the address that verbs clients exchange queue pairs at; default any
	// port of the host part of Config.Listen.
	Listen string
	// Device is as verbs.ParseConfig takes it, "" the best there is.
	Device string
}

// access opens and closes regions, and ends sessions, on all providers of the node together.
type access struct {
	*host.Access               // tcp and shm; on a node with an adapter, tcp through it
	verbs        *verbs.Server // nil without an adapter
	loop         *verbs.Loop   // nil unless the adapter executes the atomics
	home         *cxl.Home     // of other hosts that map the node's device; nil: none do
}

// chooseDomain chooses the atomicity domain of the node, before it hosts a region: its adapter if it
// serves verbs and that has atomics, else its processors.
func (n *Node) chooseDomain() error {
	n.domain = proto.DomainCPU
	switch n.cfg.RDMA.Fabric {
	case "", FabricAuto, FabricVerbs:
	case FabricTCP:
		return nil
	default:
		return fmt.Errorf("storage node %s: fabric %q: want auto, verbs or tcp", n.cfg.Name, n.cfg.RDMA.Fabric)
	}
	c, err := verbs.ParseConfig(n.cfg.RDMA.Device)
	if err != nil {
		return fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
	}
	caps, err := n.probe(c)
	switch {
	case err == nil:
		n.device, n.adapter = c, caps.Device
		if !caps.Acts(c.Atomics) {
			n.domain = proto.DomainAdapter
		}
		n.cfg.Logger.Info("storage node: serving RDMA", "node", n.cfg.Name, "device", caps.Device, "port", caps.Port, "address", caps.GID, "mtu", caps.MTU, "atomics", caps.Atomics, "domain", n.domain.String())
		n.warnMemlock()
		return nil
	case n.cfg.RDMA.Fabric == FabricVerbs:
		return fmt.Errorf("storage node %s: RDMA is required: %w", n.cfg.Name, err)
	}
	// An adapter that cannot be used is worth a warning; no adapter is not.
	level := slog.LevelWarn
	if errors.Is(err, verbs.ErrNotBuilt) || errors.Is(err, verbs.ErrNone) {
		level = slog.LevelDebug
	}
	n.cfg.Logger.Log(context.Background(), level, "storage node: serving tcp and shm, not RDMA", "node", n.cfg.Name, "reason", err)
	return nil
}

// probe asks the device whether it can serve memory of the kind that regions have.
func (n *Node) probe(c verbs.Config) (verbs.Caps, error) {
	if !verbs.Built {
		return verbs.Caps{}, verbs.ErrNotBuilt
	}
	var m *host.Memory
	var err error
	if dev := n.cfg.device; dev != nil {
		all := func([]byte) (uint64, error) { return probeBytes, nil }
		m, err = host.OpenDeviceMemory(dev, "probe", 0, (probeBytes+dev.Align-1)&^(dev.Align-1), all)
	} else if n.cfg.Dir == "" {
		m, err = host.NewMemory("probe", probeBytes)
	} else {
		if err := os.MkdirAll(n.cfg.Dir, 0o700); err != nil {
			return verbs.Caps{}, err
		}
		path := filepath.Join(n.cfg.Dir, fmt.Sprintf("probe-%d", os.Getpid()))
		m, err = host.OpenMemory(path, probeBytes, true)
		defer os.Remove(path)
	}
	if err != nil {
		return verbs.Caps{}, err
	}
	defer m.Close()
	if err := m.Pin(); err != nil {
		return verbs.Caps{}, fmt.Errorf("regions in %s: %w", n.cfg.Dir, err)
	}
	defer m.Unpin()
	caps, err := verbs.Probe(c, m.Bytes())
	if err == nil && m.Persistent() {
		n.notNative = verbs.NotNative(c, m.Bytes())
	}
	return caps, err
}

// chooseFlush chooses how clients make the node's regions durable. It runs when it is known what
// the regions lie on.
func (n *Node) chooseFlush() error {
	facts := host.FlushFacts{Persistent: n.state.Limits.Persistent, Adapter: n.adapter != "", Processors: n.domain == proto.DomainCPU, NotNative: n.notNative,
		Caches: n.persistence.Flush == pmem.FenceAlone.String(), DDIO: n.ddio, Pages: n.persistence.Flush == pmem.Msync.String()}
	m, err := host.ChooseFlush(n.cfg.Flush, facts)
	if err != nil {
		return fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
	}
	n.persistence.Method, n.device.Flush = m.String(), m
	switch {
	case !facts.Adapter || m == rdma.NoFlush:
	case m == rdma.ReadAfterWrite && !facts.Caches && facts.DDIO != host.DDIOOff:
		n.cfg.Logger.Warn("storage node: regions are made durable by READs behind WRITEs, as --flush says: that loses acknowledged changes where the adapter writes into the processors' caches (DDIO on, Soft-RoCE)",
			"node", n.cfg.Name, "method", m.String())
	default:
		n.cfg.Logger.Info("storage node: how clients make regions durable", "node", n.cfg.Name, "method", m.String(), "not native", n.notNative)
	}
	return nil
}

// probeBytes is enough to meet a limit of locked memory that is too low for anything.
const probeBytes = proto.MinRegionBytes

// warnMemlock logs how much of the capacity the limit of locked memory makes unusable.
func (n *Node) warnMemlock() {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil || l.Cur >= n.cfg.CapacityBytes || os.Geteuid() == 0 {
		return
	}
	n.cfg.Logger.Warn("storage node: locked memory is limited to less than the capacity: regions beyond it will not open (ulimit -l, LimitMEMLOCK=infinity, or CAP_IPC_LOCK)",
		"node", n.cfg.Name, "limit", l.Cur, "capacity", n.cfg.CapacityBytes)
}

// listenVerbs opens the port at which queue pairs are exchanged.
func (n *Node) listenVerbs(ctx context.Context) (err error) {
	if n.adapter == "" {
		return nil
	}
	at := n.cfg.RDMA.Listen
	if at == "" {
		name, err := n.cfg.fabricHost()
		if err != nil {
			return fmt.Errorf("storage node %s: fabric: %w", n.cfg.Name, err)
		}
		at = net.JoinHostPort(name, "0")
	}
	var lc net.ListenConfig
	if n.verbsListener, err = lc.Listen(ctx, "tcp", at); err != nil {
		return fmt.Errorf("storage node %s: verbs: %w", n.cfg.Name, err)
	}
	n.verbsAddress, err = n.cfg.advertised("verbs", n.verbsListener.Addr())
	return err
}

// admit makes the access control of the node as a controller has named it.
func (n *Node) admit(cluster [16]byte, id uint32) (_ *access, err error) {
	limits := host.Limits{Sessions: n.cfg.MaxSessions, Lanes: n.cfg.MaxConnections}
	a := &access{Access: host.New(cluster, &n.keys, id, n.incarnation, limits), home: n.home}
	if n.home != nil {
		ctx, cancel := context.WithTimeout(n.ctx, fetchTimeout)
		defer cancel()
		if err := n.home.Begin(ctx, cluster, id); err != nil {
			return nil, fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
		}
	}
	a.OnLeft(n.sessionLeft)
	a.OnKill(func(pid int, why string) {
		n.cfg.Logger.Warn("storage node: shm client killed", "node", n.cfg.Name, "pid", pid, "reason", "the process "+why)
	})
	defer func() {
		if err == nil {
			a.Handle(msg.Object, n.object)
			a.Handle(msg.Worker, n.worker)
		}
	}()
	if n.adapter == "" {
		return a, nil
	}
	if a.verbs, err = verbs.NewServer(cluster, &n.keys, id, n.incarnation, limits, n.device, n.cfg.Logger); err != nil {
		return nil, fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
	}
	a.verbs.OnLeft(n.sessionLeft)
	if n.domain != proto.DomainAdapter {
		return a, nil // the processors execute the atomics of clients over verbs, too
	}
	if a.loop, err = a.verbs.NewLoop(); err != nil {
		return nil, errors.Join(fmt.Errorf("storage node %s: own way through the adapter: %w", n.cfg.Name, err), a.verbs.Close(n.ctx))
	}
	a.Through(a.loop)
	return a, nil
}

// serveVerbs accepts verbs clients.
func (n *Node) serveVerbs() {
	if n.verbsListener == nil {
		return
	}
	server := n.access.verbs
	n.wg.Go(func() {
		if err := server.Serve(n.verbsListener); err != nil && n.ctx.Err() == nil {
			n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
		}
	})
	n.wg.Go(func() {
		select {
		case err := <-server.Err():
			n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
		case <-n.ctx.Done():
		}
	})
}

// OpenRegion serves memory under an epoch on every provider.
func (a *access) OpenRegion(ctx context.Context, region uint32, epoch uint64, m *host.Memory) error {
	if a.verbs != nil {
		// First: the others go through it.
		if err := a.verbs.OpenRegion(ctx, region, epoch, m); err != nil {
			return err
		}
	}
	if err := a.Access.OpenRegion(ctx, region, epoch, m); err != nil {
		return err
	}
	return a.openShared(ctx, region, epoch, m)
}

// CloseRegion ends access up to an epoch on every provider.
func (a *access) CloseRegion(ctx context.Context, region uint32, epoch uint64) error {
	err := a.Access.CloseRegion(ctx, region, epoch)
	if a.home != nil {
		err = errors.Join(err, a.home.CloseRegion(ctx, region, epoch))
	}
	if a.verbs != nil {
		err = errors.Join(err, a.verbs.CloseRegion(ctx, region, epoch))
	}
	return err
}

// Handle makes a procedure known that clients call by messages, on every provider.
// Preconditions: nothing is served yet.
func (a *access) Handle(number uint16, p host.Procedure) {
	a.Access.Handle(number, p)
	if a.verbs != nil {
		a.verbs.Handle(number, p)
	}
}

// Fence ends sessions on every provider.
func (a *access) Fence(ctx context.Context, serials ...uint64) error {
	err := a.Access.Fence(ctx, serials...)
	if a.home != nil {
		err = errors.Join(err, a.home.Fence(ctx, serials...))
	}
	if a.verbs != nil {
		err = errors.Join(err, a.verbs.Fence(ctx, serials...))
	}
	return err
}

// EndBelow ends the sessions that are not named on every provider.
func (a *access) EndBelow(ctx context.Context, next uint64, live []uint64) error {
	err := a.Access.EndBelow(ctx, next, live)
	if a.home != nil {
		err = errors.Join(err, a.home.EndBelow(ctx, next, live))
	}
	if a.verbs != nil {
		err = errors.Join(err, a.verbs.EndBelow(ctx, next, live))
	}
	return err
}

// Close ends all access. Lanes that go through the adapter end first.
func (a *access) Close(ctx context.Context) error {
	err := a.Access.Close(ctx)
	if a.verbs != nil {
		if a.loop != nil {
			err = errors.Join(err, a.loop.Close())
		}
		err = errors.Join(err, a.verbs.Close(ctx))
	}
	return err
}

// Counters are those of every provider. Of clients over verbs they have the chains that the node's processors execute, and what
// the adapter executes they cannot have.
func (a *access) Counters() host.Counters {
	c := a.Access.Counters()
	if a.verbs == nil {
		return c
	}
	acted := a.verbs.Acted()
	c.Usage.Add(acted.Usage)
	for cause, n := range acted.Refused {
		c.Refused[cause] += n
	}
	return c
}

// Sessions lists the sessions that have lanes here, with their providers, by serial.
func (a *access) Sessions() []host.SessionStatus {
	all := a.Access.Sessions()
	if a.verbs == nil {
		return all
	}
	for _, v := range a.verbs.Sessions() {
		i, known := slices.BinarySearchFunc(all, v.Serial, func(s host.SessionStatus, serial uint64) int { return cmp.Compare(s.Serial, serial) })
		if known {
			all[i].Providers["verbs"] += v.Providers["verbs"]
			all[i].Usage.Add(v.Usage)
		} else {
			all = slices.Insert(all, i, v)
		}
	}
	return all
}

// lanes counts the lanes by provider.
func (a *access) lanes() map[string]int {
	sum := map[string]int{}
	for _, s := range a.Sessions() {
		for p, k := range s.Providers {
			sum[p] += k
		}
	}
	return sum
}

// Adapter describes the adapter of a node that serves verbs.
type Adapter struct {
	Device          string            `json:"device"`
	Number          int               `json:"port_number"`
	Port            verbs.Port        `json:"port"`
	Events          map[string]uint64 `json:"events"`        // asynchronous ones, by the library's names
	Registrations   uint64            `json:"registrations"` // of regions; for each epoch without windows
	RegisterSeconds float64           `json:"register_seconds"`
	AccessErrors    uint64            `json:"access_errors"`  // queue pairs that ended because of a client's wrong request
	Expelled        uint64            `json:"expelled"`       // sessions ended for that
	VerifiedBytes   uint64            `json:"verified_bytes"` // hashed by the node's processors for verbs clients
}

// adapter describes the adapter; nil: there is none.
func (a *access) adapter() *Adapter {
	if a.verbs == nil {
		return nil
	}
	times, took := a.verbs.Registration()
	caps := a.verbs.Caps()
	return &Adapter{Device: caps.Device, Number: caps.Port, Port: verbs.ReadPort("/", caps.Device, caps.Port), Events: a.verbs.Events(),
		Registrations: times, RegisterSeconds: took.Seconds(), AccessErrors: a.verbs.AccessErrors(), Expelled: a.verbs.Expelled(), VerifiedBytes: a.verbs.VerifiedBytes()}
}

// connected is the number of lanes by provider, for registrations and heartbeats.
func (n *Node) connected() (out []*quarrypb.Connected) {
	n.mu.Lock()
	a := n.access
	n.mu.Unlock()
	if a == nil {
		return nil
	}
	lanes := a.lanes()
	for _, p := range []quarrypb.Provider{quarrypb.Provider_PROVIDER_VERBS, quarrypb.Provider_PROVIDER_SHM, quarrypb.Provider_PROVIDER_TCP} {
		if k := lanes[strings.ToLower(strings.TrimPrefix(p.String(), "PROVIDER_"))]; k > 0 {
			out = append(out, &quarrypb.Connected{Provider: p, Lanes: uint32(k)})
		}
	}
	return out
}

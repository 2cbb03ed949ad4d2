package storagenode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	// port of the host part of Config.Listen. Of several devices each has the next port; default any port of the device's own address.
	Listen string
	// Device is as verbs.ParseConfigs takes it, "" the best there is. Of several devices those are used that work when the node
	// starts.
	Device string
}

// access opens and closes regions, and ends sessions, on all providers of the node together.
type access struct {
	*host.Access             // tcp and shm; on a node with an adapter, tcp through it
	adapters     []*adapter  // by number; none: the node serves no RDMA
	ways         *crossroads // of tcp lanes through several adapters; else nil
	home         *cxl.Home   // of other hosts that map the node's device; nil: none do
}

// live are the adapters that are not lost.
func (a *access) live() (all []*adapter) {
	for _, ad := range a.adapters {
		if !ad.retired.Load() {
			all = append(all, ad)
		}
	}
	return all
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
	devices, err := verbs.ParseConfigs(n.cfg.RDMA.Device)
	if err != nil {
		return fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
	}
	var refused []error
	for _, c := range devices {
		caps, err := n.probe(c)
		if err != nil {
			refused = append(refused, err)
			continue
		}
		domain := proto.DomainAdapter
		if caps.Acts(c.Atomics) {
			domain = proto.DomainCPU
		}
		if slices.ContainsFunc(n.adapters, func(a *adapter) bool { return a.caps.Device == caps.Device }) {
			return fmt.Errorf("storage node %s: RDMA devices %q: %s is named twice: one device has one domain of atomics, whatever its ports", n.cfg.Name, n.cfg.RDMA.Device, caps.Device)
		}
		if len(n.adapters) > 0 && domain != n.domain {
			return fmt.Errorf("storage node %s: the atomics of its regions would be executed by %s and by its processors, as for %s: use adapters of one kind, or --rdma-atomics agent",
				n.cfg.Name, caps.Device, n.adapters[0].caps.Device)
		}
		n.domain = domain
		n.adapters = append(n.adapters, &adapter{number: uint32(len(n.adapters)), device: c, caps: caps})
		n.cfg.Logger.Info("storage node: serving RDMA", "node", n.cfg.Name, "device", caps.Device, "port", caps.Port, "address", caps.GID, "mtu", caps.MTU, "atomics", caps.Atomics, "domain", n.domain.String())
	}
	err = errors.Join(refused...)
	switch {
	case len(n.adapters) > 0 && err != nil:
		n.cfg.Logger.Warn("storage node: serving RDMA without some of its adapters", "node", n.cfg.Name, "reason", err)
		fallthrough
	case len(n.adapters) > 0:
		n.adapter = n.adapters[0].caps.Device
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
		n.notNative = errors.Join(n.notNative, verbs.NotNative(c, m.Bytes()))
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
	n.persistence.Method = m.String()
	for _, a := range n.adapters {
		a.device.Flush = m
	}
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

// listenVerbs opens the ports at which queue pairs are exchanged.
func (n *Node) listenVerbs(ctx context.Context) error {
	for _, a := range n.adapters {
		if err := a.listen(ctx, &n.cfg, len(n.adapters) > 1); err != nil {
			return err
		}
	}
	return nil
}

// verbsAddress is where queue pairs are exchanged; "": nowhere.
func (n *Node) verbsAddress() string {
	var all []string
	for _, a := range n.adapters {
		all = append(all, a.address)
	}
	return strings.Join(all, ",")
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
	a.adapters = n.adapters
	for _, ad := range n.adapters {
		if err := n.admitBy(ad, cluster, id, limits); err != nil {
			return nil, errors.Join(err, a.close(n.ctx))
		}
	}
	switch {
	case n.domain != proto.DomainAdapter: // the processors execute the atomics of clients over verbs, too
	case len(a.adapters) == 1:
		a.Through(a.adapters[0].loop)
	default:
		a.ways = &crossroads{adapters: a.adapters, at: make(map[uint32]uint32)}
		a.Through(a.ways)
	}
	return a, nil
}

// admitBy makes the access control of an adapter.
func (n *Node) admitBy(ad *adapter, cluster [16]byte, id uint32, limits host.Limits) (err error) {
	if ad.server, err = verbs.NewServer(cluster, &n.keys, id, n.incarnation, limits, ad.device, n.cfg.Logger); err != nil {
		return fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
	}
	ad.shut = ad.server.Close
	ad.server.OnLeft(n.sessionLeft)
	if n.domain != proto.DomainAdapter {
		return nil
	}
	if ad.loop, err = ad.server.NewLoop(); err != nil {
		return fmt.Errorf("storage node %s: own way through the adapter: %w", n.cfg.Name, err)
	}
	return nil
}

// serveVerbs accepts verbs clients.
func (n *Node) serveVerbs() {
	for _, a := range n.adapters {
		server, listener := a.server, a.listener
		n.wg.Go(func() {
			if err := server.Serve(listener); err != nil && n.ctx.Err() == nil && !a.retired.Load() {
				n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
			}
		})
		n.wg.Go(func() {
			select {
			case err := <-server.Err():
				n.lose(a, err)
			case <-n.ctx.Done():
			}
		})
	}
}

// OpenRegion serves memory under an epoch on every provider, and over verbs through one adapter.
// Preconditions: CloseRegion of the epochs before has succeeded, so that no other adapter serves the region.
func (a *access) OpenRegion(ctx context.Context, region uint32, epoch uint64, adapter uint32, m *host.Memory) error {
	if len(a.adapters) > 0 {
		if int(adapter) >= len(a.adapters) || a.adapters[adapter].retired.Load() {
			return fmt.Errorf("region %d: adapter %d does not serve", region, adapter)
		}
		// First: the others go through it.
		if err := a.adapters[adapter].server.OpenRegion(ctx, region, epoch, m); err != nil {
			return err
		}
	}
	if a.ways != nil {
		a.ways.point(region, adapter)
	}
	if err := a.Access.OpenRegion(ctx, region, epoch, m); err != nil {
		return err
	}
	return a.openShared(ctx, region, epoch, m)
}

// CloseRegion ends access up to an epoch on every provider and adapter.
func (a *access) CloseRegion(ctx context.Context, region uint32, epoch uint64) error {
	err := a.Access.CloseRegion(ctx, region, epoch)
	if a.home != nil {
		err = errors.Join(err, a.home.CloseRegion(ctx, region, epoch))
	}
	for _, ad := range a.live() {
		err = errors.Join(err, ad.server.CloseRegion(ctx, region, epoch))
	}
	return err
}

// Handle makes a procedure known that clients call by messages, on every provider.
// Preconditions: nothing is served yet.
func (a *access) Handle(number uint16, p host.Procedure) {
	a.Access.Handle(number, p)
	for _, ad := range a.adapters {
		ad.server.Handle(number, p)
	}
}

// Fence ends sessions on every provider.
func (a *access) Fence(ctx context.Context, serials ...uint64) error {
	err := a.Access.Fence(ctx, serials...)
	if a.home != nil {
		err = errors.Join(err, a.home.Fence(ctx, serials...))
	}
	for _, ad := range a.live() {
		err = errors.Join(err, ad.server.Fence(ctx, serials...))
	}
	return err
}

// EndBelow ends the sessions that are not named on every provider.
func (a *access) EndBelow(ctx context.Context, next uint64, live []uint64) error {
	err := a.Access.EndBelow(ctx, next, live)
	if a.home != nil {
		err = errors.Join(err, a.home.EndBelow(ctx, next, live))
	}
	for _, ad := range a.live() {
		err = errors.Join(err, ad.server.EndBelow(ctx, next, live))
	}
	return err
}

// Close ends all access. Lanes that go through adapters end first.
func (a *access) Close(ctx context.Context) error {
	return errors.Join(a.Access.Close(ctx), a.close(ctx))
}

// close gives the adapters back.
func (a *access) close(ctx context.Context) (err error) {
	for _, ad := range a.adapters {
		if ad.server != nil {
			err = errors.Join(err, ad.close(ctx))
		}
	}
	return err
}

// Counters are those of every provider. Of clients over verbs they have the chains that the node's processors execute, and what
// the adapters execute they cannot have.
func (a *access) Counters() host.Counters {
	c := a.Access.Counters()
	for _, ad := range a.adapters {
		acted := ad.server.Acted()
		c.Usage.Add(acted.Usage)
		for cause, n := range acted.Refused {
			c.Refused[cause] += n
		}
	}
	return c
}

// Sessions lists the sessions that have lanes here, with their providers, by serial.
func (a *access) Sessions() []host.SessionStatus {
	all := a.Access.Sessions()
	for _, ad := range a.adapters {
		all = sessionsOf(ad, all)
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

// Adapter describes an adapter of a node that serves verbs.
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
	Lost            bool              `json:"lost"`           // it serves no more; the node's other adapters do
}

// status describes the adapters.
func (a *access) status() (all []Adapter) {
	for _, ad := range a.adapters {
		all = append(all, ad.status())
	}
	return all
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

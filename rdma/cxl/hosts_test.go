package cxl_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
)

const (
	align = 2 << 20
	// deviceBytes are room for 16 regions of the contract and the board.
	deviceBytes = 80 << 20
	// patience bounds waits for what must come.
	patience = 3 * time.Minute
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(clientEnv); spec != "" {
		if err := client(spec); err != nil {
			fmt.Fprintln(os.Stderr, "client:", err)
			os.Exit(1)
		}
		return
	}
	cxl.QuickLitmus() // the litmus has tests of its own
	os.Exit(m.Run())
}

var incarnations atomic.Uint64

// device is a file in place of a device, that two hosts have.
type device struct {
	boot string // of the other host; "": b
	path string
	home *pmem.Device
}

func newDevice(t testing.TB) *device {
	d := &device{path: filepath.Join(t.TempDir(), "dax0.0")}
	f, err := os.OpenFile(d.path, os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(deviceBytes))
	d.home = &pmem.Device{File: f, Path: d.path, Bytes: deviceBytes, Align: align}
	t.Cleanup(func() { f.Close() })
	return d
}

// other is the device as the other host has it: an open file of its own, with the lock that an agent has.
func (d *device) other(t testing.TB) *pmem.Device {
	f, err := os.OpenFile(d.path, os.O_RDWR, 0)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil }, patience, time.Millisecond)
	return &pmem.Device{File: f, Path: d.path, Bytes: deviceBytes, Align: align}
}

// node is a node whose clients come by the agent of another host.
type node struct {
	t        testing.TB
	cluster  rdmatest.Cluster
	dev      *device
	access   *host.Access // of the home's own host
	home     *cxl.Home
	agent    *running
	mu       sync.Mutex
	memories map[uint32]*host.Memory
	handlers map[uint16]host.Procedure
	stopped  sync.Once
}

// running is an agent that serves.
type running struct {
	socket string
	stop   context.CancelFunc
	ended  chan error
	agent  *cxl.Agent
	hold   sync.Mutex  // the agent stands still while another has it
	stands atomic.Bool // it waits for hold
	dead   atomic.Bool // it has ended, or ends without a word
	during atomic.Pointer[func()]
}

func newHome(t testing.TB, dev *device, c rdmatest.Cluster, incarnation uint64, change func(*cxl.HomeConfig)) (*cxl.Home, error) {
	cfg := cxl.HomeConfig{Host: "host-a", Format: true, Incarnation: incarnation, Keys: c.Ring(), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	h, err := cxl.NewHome(ctx, dev.home, cfg)
	if err != nil {
		return nil, err
	}
	require.NoError(t, h.Begin(ctx, c.UUID, 1))
	return h, nil
}

// startAgent joins host-b and serves.
func startAgent(t testing.TB, dev *device, limits host.Limits, prepare func(*host.Access)) *running {
	r := &running{socket: filepath.Join(t.TempDir(), "s"), ended: make(chan error, 1)}
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	joining, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	a, err := cxl.NewAgent(joining, dev.other(t), cxl.AgentConfig{Host: "host-b", BootID: cmp.Or(dev.boot, "b"), MachineID: "machine-b", Socket: r.socket, Limits: limits, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Prepare: prepare})
	require.NoError(t, err)
	r.agent = a
	a.Before(func() bool {
		if !r.hold.TryLock() {
			r.stands.Store(true)
			r.hold.Lock()
			r.stands.Store(false)
		}
		defer r.hold.Unlock()
		return ctx.Err() != nil || !r.dead.Load()
	})
	a.During(func() {
		if f := r.during.Load(); f != nil {
			(*f)()
		}
	})
	go func() { r.ended <- a.Serve(ctx) }()
	t.Cleanup(stop)
	return r
}

func (r *running) end(t testing.TB) {
	if r.dead.Load() {
		return
	}
	r.stop()
	require.NoError(t, <-r.ended)
	r.dead.Store(true)
}

// hangs calls f while the agent stands still.
func (r *running) hangs(f func()) {
	r.hold.Lock()
	defer r.hold.Unlock()
	for !r.stands.Load() && !r.dead.Load() { // a look at the board that had begun goes on to its end
		runtime.Gosched()
	}
	f()
}

// stall has the agent's next command take until leave is closed; began is closed when it has begun.
func (r *running) stall() (began, leave chan struct{}) {
	began, leave = make(chan struct{}), make(chan struct{})
	f := func() { r.during.Store(nil); close(began); <-leave }
	r.during.Store(&f)
	return began, leave
}

// kill has the agent die, and its clients with it.
func (r *running) kill(t testing.TB) {
	r.dead.Store(true)
	require.NoError(t, <-r.ended)
	require.NoError(t, r.agent.Die())
}

// start makes a node, an agent, and waits until the agent serves.
func start(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
	return startNode(t, c, host.Limits{Offences: c.Offences, LanesPerSession: 32})
}

func startNode(t testing.TB, c rdmatest.Cluster, limits host.Limits) *node {
	n := &node{t: t, cluster: c, dev: newDevice(t), memories: map[uint32]*host.Memory{}, handlers: map[uint16]host.Procedure{}}
	incarnation := incarnations.Add(1)
	n.access = host.New(c.UUID, c.Ring(), 1, incarnation, host.Limits{})
	var err error
	n.home, err = newHome(t, n.dev, c, incarnation, nil)
	require.NoError(t, err)
	n.agent = startAgent(t, n.dev, limits, func(a *host.Access) {
		for _, number := range []uint16{100, 101} {
			a.Handle(number, func(from *rdma.Ticket, request, answer []byte) (int, error) {
				n.mu.Lock()
				p := n.handlers[number]
				n.mu.Unlock()
				return p(from, request, answer)
			})
		}
	})
	require.Eventually(t, func() bool { return len(n.home.Endpoints()) == 1 }, patience, time.Millisecond)
	require.Equal(t, []cxl.Endpoint{{Host: "host-b", BootID: "b", Socket: n.agent.socket}}, n.home.Endpoints())
	t.Cleanup(n.Stop)
	return n
}

func (n *node) Addr() string { return n.agent.socket }

func (n *node) OpenRegion(ctx context.Context, tenant, region uint32, epoch uint64) error {
	n.mu.Lock()
	m := n.memories[region]
	if m == nil {
		var err error
		off := uint64(len(n.memories)) * rdmatest.RegionBytes
		if m, err = host.OpenDeviceMemory(n.dev.home, "test", off, rdmatest.RegionBytes, func([]byte) (uint64, error) { return rdmatest.RegionBytes, nil }); err != nil {
			n.mu.Unlock()
			return err
		}
		m.PartOf(m, off)
		n.memories[region] = m
	}
	n.mu.Unlock()
	m.Own(tenant)
	if err := n.access.OpenRegion(ctx, region, epoch, m); err != nil {
		return err
	}
	return n.home.OpenRegion(ctx, region, epoch, m.Offset(), rdmatest.RegionBytes, tenant)
}

func (n *node) CloseRegion(ctx context.Context, region uint32, epoch uint64) error {
	if err := n.access.CloseRegion(ctx, region, epoch); err != nil {
		return err
	}
	return n.home.CloseRegion(ctx, region, epoch)
}

func (n *node) Fence(ctx context.Context, serials ...uint64) error {
	if err := n.access.Fence(ctx, serials...); err != nil {
		return err
	}
	return n.home.Fence(ctx, serials...)
}

func (n *node) Handle(number uint16, p host.Procedure) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.handlers[number] = p
}

func (n *node) Bytes(region uint32) []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.memories[region].Bytes()
}

func (n *node) Stop() {
	n.stopped.Do(func() {
		n.agent.end(n.t)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(n.t, n.home.Close(ctx))
		require.NoError(n.t, n.access.Close(ctx))
		for _, m := range n.memories {
			require.NoError(n.t, m.Close())
		}
	})
}

// The contract of a provider holds for clients of another host: regions that the node opens and closes, and sessions that it fences.
func TestContract(t *testing.T) {
	rdmatest.Run(t, rdmatest.Provider{Name: "shm", Dialer: shm.NewDialer(), Start: start, Persistent: true}) // the file counts as a device
}

//go:build cgo && verbs

package verbs

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// needDevice skips where there is no adapter: the tests run in the virtual machine of
// verify/rxevm, see test-rdma.sh there.
func needDevice(t testing.TB) {
	if os.Getenv("RXE_DEVICE") == "" {
		t.Skip("no RDMA device: run verify/rxevm/test-rdma.sh")
	}
}

var incarnations atomic.Uint64

// node is a server and its regions.
type node struct {
	*Server
	t        testing.TB
	addr     string
	served   chan error
	mu       sync.Mutex
	memories map[uint32]*host.Memory
	stopped  bool
}

func startNode(t testing.TB, c rdmatest.Cluster) *node { return startNodeWith(t, c, WindowsOff) }

func startNodeWith(t testing.TB, c rdmatest.Cluster, w Windows) *node {
	return startNodeOf(t, c, Config{Windows: w})
}

func startNodeOf(t testing.TB, c rdmatest.Cluster, config Config) *node {
	return startLimitedNode(t, c, config, host.Limits{LanesPerSession: 32})
}

func startLimitedNode(t testing.TB, c rdmatest.Cluster, config Config, limits host.Limits) *node {
	needDevice(t)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	s, err := NewServer(c.UUID, c.Ring(), 1, incarnations.Add(1), limits, config, log)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n := &node{Server: s, t: t, addr: l.Addr().String(), served: make(chan error, 1), memories: make(map[uint32]*host.Memory)}
	go func() { n.served <- s.Serve(l) }()
	t.Cleanup(n.Stop)
	return n
}

func (n *node) Addr() string { return n.addr }

// OpenRegion serves a region to tenant 0.
func (n *node) OpenRegion(ctx context.Context, region uint32, epoch uint64) error {
	return n.openOf(ctx, 0, region, epoch)
}

// contractNode is a node as the contract names its methods.
type contractNode struct{ *node }

func (n contractNode) OpenRegion(ctx context.Context, tenant, region uint32, epoch uint64) error {
	return n.openOf(ctx, tenant, region, epoch)
}

func (n *node) openOf(ctx context.Context, tenant, region uint32, epoch uint64) error {
	n.mu.Lock()
	m := n.memories[region]
	if m == nil {
		var err error
		if m, err = host.NewMemory("test", rdmatest.RegionBytes); err != nil {
			n.mu.Unlock()
			return err
		}
		n.memories[region] = m
	}
	n.mu.Unlock()
	m.Own(tenant)
	return n.Server.OpenRegion(ctx, region, epoch, m)
}

// openMemory serves memory, which the test closes, to tenant 0.
func (n *node) openMemory(region uint32, epoch uint64, m *host.Memory) error {
	return n.Server.OpenRegion(n.t.Context(), region, epoch, m)
}

func (n *node) Bytes(region uint32) []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.memories[region].Bytes()
}

func (n *node) Stop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped {
		return
	}
	n.stopped = true
	require.NoError(n.t, n.Server.Close(context.Background()))
	require.NoError(n.t, <-n.served)
	for m := range maps.Values(n.memories) {
		require.NoError(n.t, m.Close())
	}
}

func newDialer(t testing.TB) *Dialer {
	needDevice(t)
	d, err := NewDialer(Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func TestContract(t *testing.T) {
	d := newDialer(t)
	rdmatest.Run(t, rdmatest.Provider{
		Name: "verbs", Dialer: d,
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node { return contractNode{startNode(t, c)} },
	})
	require.Equal(t, int64(0), Live().QueuePairs, "queue pairs are left")
}

// The same, where a device enforces windows. Soft-RoCE does not enforce their bounds, but
// a window onto a whole region has those of its memory region.
func TestContractWithWindows(t *testing.T) {
	d := newDialer(t)
	rdmatest.Run(t, rdmatest.Provider{
		Name: "verbs", Dialer: d,
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
			return contractNode{startNodeWith(t, c, WindowsOn)}
		},
	})
	require.Zero(t, Live().QueuePairs, "queue pairs are left")
	require.Zero(t, Live().Windows, "windows are left")
}

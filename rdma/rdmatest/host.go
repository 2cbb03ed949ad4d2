package rdmatest

import (
	"context"
	"maps"
	"sync"
	"testing"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/stretchr/testify/require"
)

// Host is a Node whose verbs are executed by package host.
type Host struct {
	Access *host.Access
	addr   string
	stop   func()
	t      testing.TB
	make   func(region uint32) (*host.Memory, error)

	mu       sync.Mutex
	memories map[uint32]*host.Memory
	stopped  bool
}

// StartHost starts a node. serve makes the access reachable and returns the
// address and what ends it; makeMemory may be nil for anonymous memory.
func StartHost(t testing.TB, c Cluster, incarnation uint64, serve func(*host.Access) (addr string, stop func()), makeMemory func(region uint32) (*host.Memory, error)) *Host {
	h := &Host{
		Access: host.New(c.UUID, c.Ring(), 1, incarnation, host.Limits{Offences: c.Offences, LanesPerSession: 32}),
		t:      t, make: makeMemory, memories: make(map[uint32]*host.Memory),
	}
	if h.make == nil {
		h.make = func(uint32) (*host.Memory, error) { return host.NewMemory("test", RegionBytes) }
	}
	h.addr, h.stop = serve(h.Access)
	t.Cleanup(h.Stop)
	return h
}

func (h *Host) Addr() string { return h.addr }

func (h *Host) OpenRegion(ctx context.Context, tenant, region uint32, epoch uint64) error {
	h.mu.Lock()
	m := h.memories[region]
	if m == nil {
		var err error
		if m, err = h.make(region); err != nil {
			h.mu.Unlock()
			return err
		}
		h.memories[region] = m
	}
	h.mu.Unlock()
	m.Own(tenant)
	return h.Access.OpenRegion(ctx, region, epoch, m)
}

// Handle makes a procedure known.
func (h *Host) Handle(number uint16, p host.Procedure) { h.Access.Handle(number, p) }

func (h *Host) CloseRegion(ctx context.Context, region uint32, epoch uint64) error {
	return h.Access.CloseRegion(ctx, region, epoch)
}

func (h *Host) Fence(ctx context.Context, serials ...uint64) error {
	return h.Access.Fence(ctx, serials...)
}

func (h *Host) Bytes(region uint32) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.memories[region].Bytes()
}

func (h *Host) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return
	}
	h.stopped = true
	h.stop()
	require.NoError(h.t, h.Access.Close(context.Background()))
	for m := range maps.Values(h.memories) {
		require.NoError(h.t, m.Close())
	}
}

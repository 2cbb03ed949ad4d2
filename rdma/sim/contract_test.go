package sim_test

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/sim"
)

// testNode is one fabric with one node.
type testNode struct {
	*sim.Service
	addr    string
	profile sim.Profile
}

func (n *testNode) Addr() string { return n.addr }

func (n *testNode) OpenRegion(_ context.Context, tenant, region uint32, epoch uint64) error {
	return n.Service.OpenRegion(tenant, region, epoch, rdmatest.RegionBytes, n.profile)
}

func (n *testNode) CloseRegion(_ context.Context, region uint32, epoch uint64) error {
	n.Service.CloseRegion(region, epoch)
	return nil
}

func (n *testNode) Fence(_ context.Context, serials ...uint64) error {
	return n.Service.Fence(serials...)
}

// Bytes: the fabric has words, not bytes; tests look by READs.
func (n *testNode) Bytes(uint32) []byte { return nil }

// TestContract: the hostile fabric keeps the whole contract. Three of its cases
// (WholeChainLimit, RefusalStopsChain, TestSecurity10_AlignmentAndFlush) lean on the
// order of atomics and WRITEs that follow each other without the fence flag: the
// other providers set it, so the fabric is told to do the same for the suite, and
// TestFenceFlagOrders shows what happens otherwise. Two things that the suite does not ask are not to be had: it does not end a
// session after many offences, and Wait has no deadline, because there is no
// clock: it returns when nothing moves any more.
func TestContract(t *testing.T) {
	for _, p := range []sim.Profile{sim.DRAM, sim.ADRDDIOOn} {
		t.Run(p.String(), func(t *testing.T) {
			d := &sim.Dialer{}
			incarnation := uint64(0)
			rdmatest.Run(t, rdmatest.Provider{Name: "sim", Dialer: d, Persistent: p != sim.DRAM, Start: func(_ testing.TB, c rdmatest.Cluster) rdmatest.Node {
				incarnation++
				rng := rand.New(rand.NewPCG(incarnation, 1))
				fabric := sim.New(rng.IntN)
				fabric.InOrder = true
				node := fabric.AddNode()
				node.Incarnation = incarnation
				s := sim.NewService(node)
				s.Cluster, s.Keys = c.UUID, c.Ring()
				return &testNode{s, d.Serve(s), p}
			}})
		})
	}
}

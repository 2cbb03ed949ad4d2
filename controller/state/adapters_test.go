package state

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// adapterNode is a node with that many adapters, those of which that are named have been lost.
func adapterNode(name string, incarnation uint64, count int, lost ...uint32) *quarrypb.Node {
	n := testNode(name, "/dc/"+name+"/h", incarnation)
	for a := range count {
		n.Endpoints = append(n.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_VERBS_ADAPTER, Address: fmt.Sprintf("%s:%d", name, 3+a), Adapter: uint32(a)})
	}
	n.LostAdapters = lost
	return n
}

// served are the adapters that serve the regions at a node, in the order of the regions.
func served(r *rig, node uint32) (all []uint32) {
	for _, g := range r.table().Regions {
		for _, p := range g.Replicas {
			if p.Node == node && p.State != out {
				all = append(all, p.Adapter)
			}
		}
	}
	return all
}

// twoAdapters is a cluster of two nodes with two adapters each, and four regions on both.
func twoAdapters(t *testing.T) *rig {
	r := newRig(t)
	r.settle()
	r.up(adapterNode("a", 1, 2))
	r.up(adapterNode("b", 1, 2))
	r.ask(&quarrypb.CreateRegionRequest{Replicas: 2, Count: 4, SizeBytes: 16 << 20})
	r.run()
	require.Equal(t, []uint32{0, 1, 0, 1}, served(r, 1))
	require.Equal(t, []uint32{0, 1, 0, 1}, served(r, 2))
	return r
}

// order lists the calls that concern a region, while everything is answered.
func order(r *rig, region uint32) (all []string) {
	for r.commit != nil || len(r.calls) > 0 || r.probed() {
		r.settle()
		if len(r.calls) > 0 {
			c := r.calls[0]
			switch m := c.Msg.(type) {
			case *quarrypb.CloseRegionRequest:
				if m.Region == region {
					all = append(all, fmt.Sprintf("n%d close %d", c.Node, m.Epoch))
				}
			case *quarrypb.OpenRegionRequest:
				if m.Region == region {
					all = append(all, fmt.Sprintf("n%d open %d at %d", c.Node, m.Epoch, m.Adapter))
				}
			case *quarrypb.HostRegionRequest:
				if m.Region == region && (m.Zero || !m.MustExist) {
					all = append(all, fmt.Sprintf("n%d make", c.Node))
				}
			case *quarrypb.WorkRequest:
				if m.Region == region {
					all = append(all, fmt.Sprintf("n%d %s", c.Node, m.Kind))
				}
			}
			r.reply(c.ID, "", false)
		}
		r.answerProbe()
	}
	return all
}

// TestHazard268_AdapterIsLost: the regions of a lost adapter go on by another one of the node, in an epoch that both nodes open only
// when both have closed the one before, and without a copy. The others keep their epochs.
func TestHazard268_AdapterIsLost(t *testing.T) {
	r := twoAdapters(t)
	before := r.table()
	w := r.join(adapterNode("a", 1, 2, 0))
	calls := order(r, 1)
	r.joined(w, adapterNode("a", 1, 2, 0))
	require.Equal(t, []string{"n1 close 1", "n2 close 1", "n1 open 2 at 1", "n2 open 2 at 0", "n1 WORK_KIND_RECONCILE", "n1 open 3 at 1", "n2 open 3 at 0"}, calls)
	require.Equal(t, []uint32{1, 1, 1, 1}, served(r, 1))
	require.Equal(t, []uint32{0, 1, 0, 1}, served(r, 2))
	after := r.table()
	for i, g := range after.Regions {
		require.Equal(t, open, g.State)
		for _, p := range g.Replicas {
			require.Equal(t, inSync, p.State)
			require.Equal(t, uint64(1), p.Incarnation)
		}
		if i%2 == 1 {
			require.Equal(t, before.Regions[i].Epoch, g.Epoch, "region %d was not served by the adapter", g.Id)
		}
	}
	require.Equal(t, []uint32{0}, after.Nodes[0].LostAdapters)

	// A registration that was sent before the loss arrives behind it: the adapter stays lost.
	w = r.join(adapterNode("a", 1, 2))
	r.run()
	r.joined(w, adapterNode("a", 1, 2))
	require.Equal(t, []uint32{0}, r.table().Nodes[0].LostAdapters)
	require.Equal(t, []uint32{1, 1, 1, 1}, served(r, 1))
	r.ask(&quarrypb.CreateRegionRequest{Replicas: 2, SizeBytes: 16 << 20})
	r.run()
	require.Equal(t, uint32(1), served(r, 1)[4])

	// The last one is lost with the node: nothing changes until its probes fail.
	w = r.join(adapterNode("a", 1, 2, 0, 1))
	require.Empty(t, order(r, 1))
	r.joined(w, adapterNode("a", 1, 2, 0, 1))
}

// TestHazard268_AdapterIsLostInAChange: an adapter is lost while a region changes already, or while its leader is followed by another one.
func TestHazard268_AdapterIsLostInAChange(t *testing.T) {
	opens := func(c Call) bool { _, ok := c.Msg.(*quarrypb.OpenRegionRequest); return ok && c.Node == 1 }
	t.Run("both", func(t *testing.T) { // the calls that open the epoch at the second adapter find no such adapter
		r := newRig(t)
		r.settle()
		r.up(adapterNode("a", 1, 3))
		r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, SizeBytes: 16 << 20})
		r.run()
		for _, lost := range [][]uint32{{0}, {0, 1}} {
			w := r.join(adapterNode("a", 1, 3, lost...))
			r.answerAll(opens)
			r.joined(w, adapterNode("a", 1, 3, lost...))
		}
		for _, c := range slices.Clone(r.calls) {
			if m, ok := c.Msg.(*quarrypb.OpenRegionRequest); ok && m.Adapter == 1 {
				r.reply(c.ID, "the node has lost that adapter", true)
			}
		}
		r.run()
		require.Equal(t, []uint32{2}, served(r, 1))
		require.Equal(t, open, r.table().Regions[0].State)
	})
	t.Run("leader", func(t *testing.T) {
		for name, committed := range map[string]bool{"before the node's record": false, "behind it": true} {
			t.Run(name, func(t *testing.T) {
				r := twoAdapters(t)
				r.join(adapterNode("a", 1, 2, 0))
				if committed {
					r.commitOne()
				}
				r.start()
				r.settle()
				r.up(adapterNode("b", 1, 2))
				r.up(adapterNode("a", 1, 2, 0))
				r.advance(time.Second)
				r.run()
				require.Equal(t, []uint32{1, 1, 1, 1}, served(r, 1))
				for _, g := range r.table().Regions {
					require.Equal(t, open, g.State)
				}
			})
		}
	})
	t.Run("creation", func(t *testing.T) {
		r := newRig(t)
		r.settle()
		r.up(adapterNode("a", 1, 2))
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, SizeBytes: 16 << 20})
		r.answerAll(opens)
		n := r.join(adapterNode("a", 1, 2, 0))
		r.run()
		r.joined(n, adapterNode("a", 1, 2, 0))
		require.Equal(t, Busy, r.refusal(w).Code)
		w = r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, SizeBytes: 16 << 20})
		r.run()
		require.Equal(t, uint32(1), answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].Replicas[0].Adapter)
	})
}

// TestHazard270_AdaptersOfTheNextIncarnation: a node starts again with fewer adapters, and with memory: its regions lie at one that it has.
func TestHazard270_AdaptersOfTheNextIncarnation(t *testing.T) {
	r := newRig(t)
	r.settle()
	r.up(adapterNode("a", 1, 3))
	r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, Count: 3, SizeBytes: 16 << 20})
	r.run()
	require.Equal(t, []uint32{0, 1, 2}, served(r, 1))
	for incarnation, count := range []int{2, 1, 0, 2} {
		var found []*quarrypb.HostedRegion
		for _, g := range r.table().Regions {
			found = append(found, &quarrypb.HostedRegion{Region: g.Id, Uuid: g.Uuid, SizeBytes: g.SizeBytes, Epoch: g.Epoch})
		}
		n := adapterNode("a", uint64(incarnation+2), count)
		r.dead[1] = true
		w := r.join(n, found...)
		r.reply(r.calls[len(r.calls)-1].ID, "connection refused", false)
		delete(r.dead, 1)
		r.settle()
		r.joined(w, n)
		r.run()
		for _, g := range r.table().Regions {
			require.Equal(t, open, g.State)
			require.Less(t, int(g.Replicas[0].Adapter), max(count, 1))
		}
	}
	require.Contains(t, served(r, 1), uint32(0))
	require.Contains(t, served(r, 1), uint32(1))
}

// TestAdapterBesideTheMemory: regions go to adapters at the NUMA node of a node's memory, as long as one of these works.
func TestAdapterBesideTheMemory(t *testing.T) {
	n := &node{rec: adapterNode("a", 1, 3)}
	n.rec.Numa = &quarrypb.Numa{Memory: proto.Uint32(1)}
	for i, e := range n.rec.Endpoints[1:] {
		e.Numa = proto.Uint32([]uint32{0, 1, 1}[i])
	}
	n.byAdapter = [MaxAdapters]int{0, 5, 4}
	require.Equal(t, uint32(2), n.bestAdapter())
	n.byAdapter[2] = 5
	require.Equal(t, uint32(1), n.bestAdapter())
	n.rec.LostAdapters = []uint32{1, 2}
	require.Equal(t, uint32(0), n.bestAdapter())
	n.rec.LostAdapters, n.rec.Numa = nil, nil
	require.Equal(t, uint32(0), n.bestAdapter(), "the memory may be anywhere")
}

func TestAdaptersAreChecked(t *testing.T) {
	require.Nil(t, checkEndpoints(adapterNode("a", 1, MaxAdapters, 0, 7)))
	twice := adapterNode("a", 1, 2)
	twice.Endpoints[1].Adapter = 1
	gap := adapterNode("a", 1, 2)
	gap.Endpoints[2].Adapter = 2
	for name, n := range map[string]*quarrypb.Node{
		"too many": adapterNode("a", 1, MaxAdapters+1), "twice": twice, "gap": gap, "lost, not there": adapterNode("a", 1, 2, 2),
		"lost twice": adapterNode("a", 1, 2, 1, 1), "lost, and has none": adapterNode("a", 1, 0, 1),
	} {
		err := checkEndpoints(n)
		require.NotNil(t, err, name)
		require.Equal(t, Invalid, err.Code, name)
	}
}

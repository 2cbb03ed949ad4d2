package fsck_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// Objects in STAGED slabs are right while a change is under way, by a record or by a shadow, and are
// counted with what V names. A home that is not that of V in a slab that is not reserved is a fault.
func TestStagedSlabs(t *testing.T) {
	w := &world{World: slabtest.New(t, 1)}
	header := proto.RegionHeader{Domain: proto.DomainCPU, UUID: uuid, RegionBytes: proto.MinRegionBytes, Region: 1, Incarnation: 1, Epoch: 1}
	w.write(t, 0, 0, header.Encode())
	w.port = w.Lane(5)
	for i, capacity := range []int{1200, 128} { // with room for a record, and without
		payload := make([]byte, 1000>>(3*i))
		ref, err := w.port.Alloc.Alloc(payload, alloc.Want{Kind: proto.Staged, Replicas: 1, Capacity: capacity})
		require.NoError(t, err)
		w.refs = append(w.refs, ref)
	}
	seen := map[proto.Ref]fsck.Object{}
	check := func() *fsck.Report {
		clear(seen)
		rep, err := fsck.Regions(t.Context(), []fsck.Region{{ID: 1, UUID: uuid, Epoch: 1, Bytes: proto.MinRegionBytes, Replicas: []*rdma.Target{w.target(t, 0)}, Nodes: []string{"n1"}}},
			fsck.Options{Object: func(o fsck.Object) { seen[o.Ref] = o }})
		require.NoError(t, err)
		return rep
	}
	require.Empty(t, check().Findings)
	for _, lead := range []proto.Locator{proto.MakeGone(7) | 1<<60, proto.MakeGone(proto.MaxVersion)} {
		proto.PutWord(w.Nodes[0].Memory.Bytes(), int(w.refs[0].Addr.Off())+16, uint64(lead))
		rep := check()
		require.Len(t, rep.Findings, 1)
		require.Contains(t, rep.Findings[0].What, "no session writes that")
		require.NoError(t, w.port.Lane.RepairAll(w.refs[0]))
		require.Empty(t, check().Findings)
	}
	for i, ref := range w.refs {
		dead := w.Lane(uint32(10 + i))
		// Not in the magazine of the lane that dies: a shadow that it has claimed itself.
		own, err := dead.Alloc.Alloc(nil, alloc.Want{Kind: proto.Staged, Replicas: 1, Capacity: 128})
		require.NoError(t, err)
		require.NotEqual(t, ref, own)
		dead.BeforeDo = func(_ int, r *rdma.Round) {
			if c := r.At(0); c.Verbs[0].Op == rdma.Write { // record or shadow, L, CAS V, and no more
				c.Verbs = c.Verbs[:3]
				rdma.Do(r)
				panic(slabtest.ErrDied)
			}
		}
		require.PanicsWithValue(t, slabtest.ErrDied, func() {
			_, _ = dead.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
				if i == 1 {
					return bytes.Repeat([]byte{7}, len(old)), nil
				}
				return append(bytes.Clone(old[1:]), 7), nil
			})
		})
		require.Empty(t, check().Findings)
		require.Equal(t, ref.Incarnation.Born()+2-uint64(i), seen[ref].Version) // the repair of the first has used up a version
	}
	mem := w.Nodes[0].Memory.Bytes()
	for _, ref := range w.refs {
		proto.PutWord(mem, int(ref.Addr.Off()), 0) // R
	}
	rep := check()
	require.Len(t, rep.Findings, 2)
	require.Contains(t, rep.Findings[0].What, "not in home")
}

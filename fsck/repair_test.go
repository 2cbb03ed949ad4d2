package fsck_test

import (
	"fmt"
	"net/http"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// vandal is a session that keeps to no protocol.
type vandal struct {
	t        *testing.T
	ctl      quarrypbconnect.ControllerClient
	serial   uint64
	proof    []byte
	replicas []*rdma.Target // of region 1
	g        proto.Geometry
}

func newVandal(t *testing.T, cluster *testcluster.Cluster) *vandal {
	v := &vandal{t: t, ctl: quarrypbconnect.NewControllerClient(http.DefaultClient, cluster.Controller.URL())}
	ticket := rdma.NewCredentials()
	res, err := v.ctl.OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "vandal", Key: ticket.Holder[:]}))
	require.NoError(t, err)
	require.NoError(t, ticket.Accept(res.Msg.Ticket))
	v.serial, v.proof = ticket.Serial, res.Msg.Proof
	reg := res.Msg.Table.Regions[0]
	v.g, err = proto.NewGeometry(reg.SizeBytes)
	require.NoError(t, err)
	for _, rep := range reg.Replicas {
		for _, n := range res.Msg.Table.Nodes {
			if n.Id != rep.Node {
				continue
			}
			c, err := tcp.Dialer{}.Dial(t.Context(), n.Endpoints[0].Address, ticket, 0)
			require.NoError(t, err)
			t.Cleanup(func() { c.Close() })
			w, err := c.Open(t.Context(), reg.Id, reg.Epoch)
			require.NoError(t, err)
			v.replicas = append(v.replicas, &rdma.Target{Conn: c, Window: w})
		}
	}
	return v
}

func (v *vandal) do(replica int, f func(*rdma.Chain)) *rdma.Chain {
	var r rdma.Round
	f(r.Chain(v.replicas[replica]))
	rdma.Do(&r)
	require.NoError(v.t, r.Err())
	return r.At(0)
}

func (v *vandal) read(replica int, off uint64, n int) []byte {
	b := make([]byte, n)
	v.do(replica, func(c *rdma.Chain) { c.Read(off, b) })
	return b
}

// slab of an object, its block and its place in it.
func (v *vandal) slab(ref client.Ref) (s proto.Slab, block uint32, index int, gen uint32) {
	off := uint64(ref.Addr.Off())
	block, ok := v.g.BlockOf(off)
	require.True(v.t, ok)
	h := proto.Header(proto.Word(v.read(0, v.g.HeaderOff(block), 8), 0))
	index, ok = v.g.SlabIndex(off, h.Class())
	require.True(v.t, ok)
	return v.g.Slab(block, index, h), block, index, h.Generation()
}

// spoil flips a bit of the payload of the active image.
func (v *vandal) spoil(replica int, ref client.Ref) {
	s, _, _, _ := v.slab(ref)
	_, word := s.Words(v.read(0, s.Off, s.Class.Bytes()))
	at := s.ImageOff(word.Version()) + proto.ImageHeaderBytes
	b := v.read(replica, at, 1)
	b[0] ^= 4
	v.do(replica, func(c *rdma.Chain) { c.Write(at, b) })
}

// swap changes a word, whatever it is.
func (v *vandal) swap(replica int, off uint64, to func(uint64) uint64) {
	was := proto.Word(v.read(replica, off, 8), 0)
	c := v.do(replica, func(c *rdma.Chain) { c.CAS(off, was, to(was)) })
	require.True(v.t, c.Verbs[0].Swapped())
}

func (v *vandal) flipMapBit(ref client.Ref) {
	_, block, i, _ := v.slab(ref)
	v.swap(0, v.g.MapOff(block)+uint64(i/64*8), func(w uint64) uint64 { return w ^ 1<<(i%64) })
}

// TestRepair damages a region in every way that fsck finds, and mends it. What no
// replica has is not made up.
func TestRepair(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	connectClient := func() *client.Client {
		return cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	}
	check := func() *fsck.Report {
		rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp"})
		require.NoError(t, err)
		return rep
	}
	c := connectClient()
	alloc := func(i int, once bool) client.Ref {
		ref, err := c.Alloc(ctx, fmt.Appendf(nil, "object %d", i), client.AllocOptions{WriteOnce: once})
		require.NoError(t, err)
		return ref
	}
	var refs []client.Ref
	for i := range 9 {
		refs = append(refs, alloc(i, i >= 4 && i < 7))
	}
	freed := []client.Ref{alloc(100, false), alloc(101, false)}
	for _, ref := range freed {
		require.NoError(t, c.Free(ctx, ref))
	}
	require.NoError(t, c.Close())
	require.True(t, check().OK())

	v := newVandal(t, cluster)
	v.spoil(0, refs[0]) // a primary
	v.spoil(1, refs[1]) // a backup
	word := func(ref client.Ref) uint64 { s, _, _, _ := v.slab(ref); return s.VOff() }
	v.swap(1, word(refs[2]), func(uint64) uint64 { return uint64(proto.MakeV(proto.StateLive, 77)) })
	v.flipMapBit(refs[3])
	v.spoil(0, refs[4])
	v.spoil(1, refs[5])
	v.swap(1, word(refs[6]), func(uint64) uint64 { return 0 })
	s, _, _, _ := v.slab(refs[7])
	v.swap(0, s.ROff(), func(uint64) uint64 { return uint64(proto.MakeR(proto.MaxSession-7, 5)) })
	v.spoil(0, refs[8]) // all of them
	v.spoil(1, refs[8])
	v.swap(1, word(freed[0]), func(w uint64) uint64 { return uint64(proto.MakeV(proto.StateFree, proto.V(w).Version()+3)) })
	v.flipMapBit(freed[1])
	_, err := v.ctl.CloseSession(ctx, connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: v.serial, Proof: v.proof}))
	require.NoError(t, err)

	before := check()
	// The cluster's own scrub may have been faster with the leak.
	require.Contains(t, []int{10, 11}, len(before.Findings), "%v", before.Findings)
	c = connectClient()
	done, err := fsck.Repair(ctx, c, before.Findings)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.Equal(t, 6, done.Objects)
	require.Equal(t, 1, done.Slabs)
	require.Contains(t, []int{2, 3}, done.Words)
	require.Len(t, done.Left, 1)
	require.Equal(t, 1, done.Marked)

	after := check()
	require.Len(t, after.Findings, 1, "%v", after.Findings)
	require.Equal(t, fsck.KindBad, after.Findings[0].Kind)
	c = connectClient()
	for i, ref := range refs[:8] {
		b, err := c.Read(ctx, ref, nil)
		require.NoError(t, err, i)
		require.Equal(t, fmt.Sprintf("object %d", i), string(b))
	}
	_, err = c.Read(ctx, refs[8], nil)
	require.ErrorIs(t, err, client.ErrCorrupt)
	require.NoError(t, c.Write(ctx, refs[7], []byte("nobody holds it any more")))
}

// A claim of a session without a record: of a PAIR slab, and of a STAGED one, which may be a shadow and is freed in a
// second pass.
func TestRepairFreesClaimsOfNoSession(t *testing.T) {
	for _, kind := range []client.SlabKind{client.PairSlab, client.StagedSlab} {
		t.Run(kind.String(), func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{})
			cfg := client.Config{Transport: client.TransportTCP, Replicas: 1}
			c := cluster.Connect(cfg)
			kept, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{Slab: kind})
			require.NoError(t, err)
			gone, err := c.Alloc(t.Context(), []byte("y"), client.AllocOptions{Slab: kind})
			require.NoError(t, err)
			require.NoError(t, c.Free(t.Context(), gone))
			require.NoError(t, c.Close())
			v := newVandal(t, cluster)
			s, _, _, _ := v.slab(gone)
			v.swap(0, s.ROff(), func(uint64) uint64 { return uint64(proto.MakeR(proto.MaxSession-7, 5)) })
			_, err = v.ctl.CloseSession(t.Context(), connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: v.serial, Proof: v.proof}))
			require.NoError(t, err)
			check := func() *fsck.Report {
				rep, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp"})
				require.NoError(t, err)
				return rep
			}
			rep := check()
			require.NotEmpty(t, rep.Findings)
			c = cluster.Connect(cfg)
			_, err = fsck.Repair(t.Context(), c, rep.Findings)
			require.NoError(t, err)
			b, err := c.Read(t.Context(), kept, nil)
			require.NoError(t, err)
			require.Equal(t, "x", string(b))
			require.NoError(t, c.Close())
			require.Empty(t, check().Findings)
		})
	}
}

package fsck_test

import (
	"context"
	"net"
	"testing"

	"log/slog"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

var uuid = [16]byte{1}

// world is a region on two nodes with some objects in it.
type world struct {
	*slabtest.World
	port *slabtest.Port
	refs []proto.Ref
}

func newWorld(t *testing.T) *world {
	w := &world{World: slabtest.New(t, 2)}
	header := proto.RegionHeader{Domain: proto.DomainCPU, UUID: uuid, RegionBytes: proto.MinRegionBytes, Region: 1, Incarnation: 1, Epoch: 1}
	w.port = w.Lane(5)
	for i := range w.Nodes {
		w.write(t, i, 0, header.Encode())
	}
	for i := range 100 {
		ref, err := w.port.Alloc.Alloc(make([]byte, 120*(i%8)), alloc.Want{Kind: proto.Kind(i % 2), Replicas: 2})
		require.NoError(t, err)
		w.refs = append(w.refs, ref)
	}
	return w
}

// target is a window on a node's memory of a session of its own.
func (w *world) target(t *testing.T, node int) *rdma.Target {
	key := keyring.NewSigner([32]byte{4})
	a := host.New([16]byte{3}, keyring.NewRing(key.Public()), 1, 1, host.Limits{})
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, w.Nodes[node].Memory))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := tcp.NewServer(a, slog.New(slog.DiscardHandler))
	go s.Serve(l)
	t.Cleanup(s.Close)
	ticket := rdma.Issue(key, rdma.Ticket{Cluster: [16]byte{3}, Session: 9, Serial: 1, Rights: rdma.ReadWrite})
	c, err := tcp.Dialer{}.Dial(context.Background(), l.Addr().String(), ticket, 0)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	win, err := c.Open(context.Background(), 1, 1)
	require.NoError(t, err)
	return &rdma.Target{Conn: c, Window: win}
}

func (w *world) write(t *testing.T, node int, off uint64, b []byte) {
	var r rdma.Round
	r.Chain(w.target(t, node)).Write(off, b)
	rdma.Do(&r)
	require.NoError(t, r.Err())
}

func (w *world) read(t *testing.T, node int, off uint64, n int) []byte {
	var r rdma.Round
	b := make([]byte, n)
	r.Chain(w.target(t, node)).Read(off, b)
	rdma.Do(&r)
	require.NoError(t, r.Err())
	return b
}

func (w *world) check(t *testing.T, o fsck.Options) *fsck.Report {
	t.Helper()
	rep, err := fsck.Regions(t.Context(), []fsck.Region{{ID: 1, UUID: uuid, Epoch: 1, Bytes: proto.MinRegionBytes,
		Replicas: []*rdma.Target{w.target(t, 0), w.target(t, 1)}, Nodes: []string{"n1", "n2"}}}, o)
	require.NoError(t, err)
	return rep
}

// slab finds the slab of a ref from its block header.
func (w *world) slab(t *testing.T, ref proto.Ref) (proto.Slab, uint32, proto.Header) {
	b, ok := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	require.True(t, ok)
	h := proto.Header(proto.Word(w.read(t, 0, w.Geometry.HeaderOff(b), 8), 0))
	return proto.Slab{Off: uint64(ref.Addr.Off()), Class: h.Class(), Kind: h.Kind()}, b, h
}

func TestHealthyRegion(t *testing.T) {
	w := newWorld(t)
	for _, ref := range w.refs[:30] {
		_, _, err := w.port.Alloc.Free(ref)
		require.NoError(t, err)
	}
	rep := w.check(t, fsck.Options{})
	require.Empty(t, rep.Findings)
	require.Equal(t, 70, rep.Regions[0].Objects)
	require.Positive(t, rep.Regions[0].Claimed, "magazines of the client")
	require.NoError(t, w.port.Alloc.Close())
	rep = w.check(t, fsck.Options{Session: func(uint32) fsck.SessionState { return slab.SessionGone }})
	require.Empty(t, rep.Findings, "nothing is left of a client that has closed")
	require.Zero(t, rep.Regions[0].Claimed)
}

// Replicas behind a network are compared by hashes: their bytes are READ only where they differ, and what differs is found.
func TestReplicasAreComparedByHashes(t *testing.T) {
	w := newWorld(t)
	rep := w.check(t, fsck.Options{Session: func(uint32) fsck.SessionState { return slab.SessionLive }})
	require.Empty(t, rep.Findings)
	used := rep.Regions[0].BlocksInUse
	require.Positive(t, used)
	all := int64(used) * proto.BlockBytes
	require.Greater(t, rep.Regions[0].AlikeBytes, all/2, "claims of the client's magazine are at the primary alone")
	require.Less(t, rep.Regions[0].AlikeBytes, all)
	before := rep.Regions[0].AlikeBytes

	s, _, _ := w.slab(t, w.refs[3])
	_, v := s.Words(w.read(t, 1, s.Off, s.Class.Bytes()))
	off := s.ImageOff(v.Version()) + proto.ImageHeaderBytes
	b := w.read(t, 1, off, 1)
	w.write(t, 1, off, []byte{^b[0]})
	rep = w.check(t, fsck.Options{})
	require.Len(t, rep.Findings, 1)
	require.Equal(t, "n2", rep.Findings[0].Node)
	require.LessOrEqual(t, rep.Regions[0].AlikeBytes, before)
}

// Every kind of damage is found, named, and nothing else is.
func TestDamageIsFound(t *testing.T) {
	word := func(x uint64) []byte { b := make([]byte, 8); proto.PutWord(b, 0, x); return b }
	cases := []struct {
		name   string
		damage func(*testing.T, *world)
		kind   fsck.Kind
		what   string
	}{
		{"a flipped bit in an image", func(t *testing.T, w *world) {
			s, _, _ := w.slab(t, w.refs[50])
			_, v := s.Words(w.read(t, 0, s.Off, s.Class.Bytes()))
			b := w.read(t, 0, s.ImageOff(v.Version())+40, 8)
			b[3] ^= 4
			w.write(t, 0, s.ImageOff(v.Version())+40, b)
		}, fsck.KindImage, "checksum"},
		{"the same on a backup", func(t *testing.T, w *world) {
			s, _, _ := w.slab(t, w.refs[50])
			_, v := s.Words(w.read(t, 0, s.Off, s.Class.Bytes()))
			w.write(t, 1, s.ImageOff(v.Version())+40, word(7))
		}, fsck.KindImage, "checksum"},
		{"a backup left behind", func(t *testing.T, w *world) {
			s, _, _ := w.slab(t, w.refs[50])
			w.write(t, 1, s.VOff(), word(0))
		}, fsck.KindReplica, "primary"},
		{"spare bits", func(t *testing.T, w *world) {
			s, _, _ := w.slab(t, w.refs[51])
			w.write(t, 0, s.VOff(), word(1<<63))
		}, fsck.KindWord, "V 0x8000"},
		{"a cleared map bit", func(t *testing.T, w *world) {
			s, b, h := w.slab(t, w.refs[51])
			i, _ := w.Geometry.SlabIndex(s.Off, h.Class())
			at := w.Geometry.MapOff(b) + uint64(i/64*8)
			w.write(t, 0, at, word(proto.Word(w.read(t, 0, at, 8), 0)&^(1<<(i%64))))
		}, fsck.KindMap, "free in the map"},
		{"a leak", func(t *testing.T, w *world) {
			_, b, h := w.slab(t, w.refs[52])
			for i := range h.Class().Slabs() {
				at := w.Geometry.MapOff(b) + uint64(i/64*8)
				if m := proto.Word(w.read(t, 0, at, 8), 0); m>>(i%64)&1 == 0 {
					w.write(t, 0, at, word(m|1<<(i%64)))
					return
				}
			}
			t.Fatal("no slab of the block is free")
		}, fsck.KindLeak, "taken"},
		{"headers that differ", func(t *testing.T, w *world) {
			_, b, h := w.slab(t, w.refs[53])
			w.write(t, 1, w.Geometry.HeaderOff(b), word(uint64(proto.MakeHeader(proto.BlockActive, h.Kind(), h.Class()+1, 0, 0))))
		}, fsck.KindHeader, "the primary has"},
		{"a region header of something else", func(t *testing.T, w *world) {
			w.write(t, 1, 0, word(1))
		}, fsck.KindHeader, "magic"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			require.NoError(t, w.port.Alloc.Close())
			require.Empty(t, w.check(t, fsck.Options{}).Findings)
			c.damage(t, w)
			rep := w.check(t, fsck.Options{})
			require.Len(t, rep.Findings, 1)
			require.Equal(t, c.kind, rep.Findings[0].Kind)
			require.Contains(t, rep.Findings[0].String(), c.what)
		})
	}
}

// A block whose formatter has died is what a scrub frees: it is found when the scrub for that session is over and has not.
func TestHazard179_HalfFormatted(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.port.Alloc.Close())
	_, b, h := w.slab(t, w.refs[53])
	word := make([]byte, 8)
	proto.PutWord(word, 0, uint64(proto.MakeHeader(proto.BlockFormatting, h.Kind(), h.Class(), h.Generation(), 10)))
	w.write(t, 0, w.Geometry.HeaderOff(b), word)
	state := slab.SessionGone
	known := fsck.Options{Session: func(uint32) fsck.SessionState { return state }}
	for state = range slab.SessionFenced + 1 {
		rep := w.check(t, known)
		if state != slab.SessionGone {
			require.Empty(t, rep.Findings, state)
			continue
		}
		require.NotEmpty(t, rep.Findings)
		require.Equal(t, fsck.KindHeader, rep.Findings[0].Kind)
		require.Contains(t, rep.Findings[0].What, "being formatted by session 10, which does not exist")
	}
}

func TestReservationOfNobody(t *testing.T) {
	w := newWorld(t)
	rep := w.check(t, fsck.Options{Session: func(uint32) fsck.SessionState { return slab.SessionGone }})
	require.NotEmpty(t, rep.Findings)
	require.Equal(t, fsck.KindReservation, rep.Findings[0].Kind)
	require.Contains(t, rep.Findings[0].What, "session 5")
}

// TestHalfReclaimed: the headers of a reclaim that is under way, or was left, are not
// damage; a block that is being taken back and differs in another way is.
func TestHalfReclaimed(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.port.Alloc.Close())
	_, b, h := w.slab(t, w.refs[53])
	gone := proto.MakeHeader(proto.BlockReclaim, h.Kind(), h.Class(), h.Generation()+1, 0)
	free := proto.MakeHeader(proto.BlockFree, 0, 0, h.Generation()+1, 0)
	other := proto.MakeHeader(proto.BlockReclaim, h.Kind(), h.Class()+1, h.Generation()+1, 0)
	for _, c := range []struct {
		primary, backup proto.Header
		findings        int
	}{
		{h.With(proto.BlockDraining), h, 0},
		{h.With(proto.BlockDraining), gone, 0},
		{gone, gone, 0},
		{gone, free, 0},
		{h, gone, 1},
		{h.With(proto.BlockDraining), other, 1},
		{free, gone, 1},
	} {
		for i, h := range []proto.Header{c.primary, c.backup} {
			word := make([]byte, 8)
			proto.PutWord(word, 0, uint64(h))
			w.write(t, i, w.Geometry.HeaderOff(b), word)
		}
		var found []fsck.Finding
		for _, f := range w.check(t, fsck.Options{}).Findings {
			if f.Kind == fsck.KindHeader {
				found = append(found, f)
			}
		}
		require.Len(t, found, c.findings, "primary %v, backup %v: %v", c.primary, c.backup, found)
	}
}

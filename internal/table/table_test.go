package table

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

var uuid = []byte("0123456789abcdef")

// history is a controller's: the table at every revision, by number.
type history struct{ at []*quarrypb.Table }

func newHistory(rnd *rand.Rand, revisions int) *history {
	h := &history{at: []*quarrypb.Table{{Cluster: uuid, Whole: true}}}
	cur := h.at[0]
	for rev := 1; rev <= revisions; rev++ {
		cur = proto.CloneOf(cur)
		cur.Revision = uint64(rev)
		switch rnd.IntN(4) {
		case 0:
			cur.Nodes = append(cur.Nodes, &quarrypb.Node{Id: uint32(len(cur.Nodes) + 1), Incarnation: 1})
		case 1:
			cur.Regions = append(cur.Regions, &quarrypb.Region{Id: uint32(rev), Epoch: 1})
		case 2:
			if n := len(cur.Regions); n > 0 {
				cur.Regions[rnd.IntN(n)].Epoch++
			}
		case 3:
			cur.ReclaimEpoch++
		}
		h.at = append(h.at, cur)
	}
	return h
}

// change is what a controller at revision to sends to a client that has from.
func (h *history) change(from, to int) *quarrypb.Table {
	now := h.at[to]
	if from == 0 {
		return proto.CloneOf(now)
	}
	out := &quarrypb.Table{Cluster: uuid, Revision: now.Revision, SinceRevision: uint64(from), ReclaimEpoch: now.ReclaimEpoch}
	old, err := (*Table)(nil).Merge(h.at[from])
	if err != nil {
		panic(err)
	}
	for _, n := range now.Nodes {
		if !proto.Equal(old.Node(n.Id), n) {
			out.Nodes = append(out.Nodes, n)
		}
	}
	for _, r := range now.Regions {
		if !proto.Equal(old.Region(r.Id), r) {
			out.Regions = append(out.Regions, r)
		}
	}
	return out
}

// Hazard 16: a watch that is late, doubled or goes back never takes a client back.
func TestHazard16_LyingWatch(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 16))
		const revisions = 40
		h := newHistory(rnd, revisions)
		var cur *Table
		for range 200 {
			to := 1 + rnd.IntN(revisions)
			from := rnd.IntN(to)
			before := cur.Revision()
			next, err := cur.Merge(h.change(from, to))
			switch {
			case uint64(to) <= before:
				require.NoError(t, err)
				require.Same(t, cur, next, "old news change nothing")
			case uint64(from) > before:
				require.ErrorIs(t, err, ErrGap)
				require.Same(t, cur, next)
			default:
				require.NoError(t, err)
				require.Equal(t, uint64(to), next.Revision())
			}
			cur = next
			// Whatever was sent, what the client has is what the controller had at that revision.
			if cur == nil {
				continue
			}
			want := h.at[cur.Revision()]
			require.Equal(t, want.ReclaimEpoch, cur.ReclaimEpoch())
			require.Len(t, cur.Nodes(), len(want.Nodes))
			require.Len(t, cur.Regions(), len(want.Regions))
			for i, r := range want.Regions {
				require.True(t, proto.Equal(r, cur.Regions()[i]), "seed %d revision %d region %d", seed, cur.Revision(), r.Id)
			}
		}
	}
}

func TestMergeRefusesNonsense(t *testing.T) {
	good, err := (*Table)(nil).Merge(&quarrypb.Table{Cluster: uuid, Revision: 5, Whole: true, Regions: []*quarrypb.Region{{Id: 1, Epoch: 4}}})
	require.NoError(t, err)
	for name, c := range map[string]struct {
		in   *quarrypb.Table
		want error
	}{
		"no cluster":      {&quarrypb.Table{Revision: 6, Whole: true}, ErrBadTable},
		"another cluster": {&quarrypb.Table{Cluster: []byte("fedcba9876543210"), Revision: 6, Whole: true}, ErrForeign},
		"region 0":        {&quarrypb.Table{Cluster: uuid, Revision: 6, Regions: []*quarrypb.Region{{}}}, ErrBadTable},
		"region twice":    {&quarrypb.Table{Cluster: uuid, Revision: 6, Regions: []*quarrypb.Region{{Id: 2}, {Id: 2}}}, ErrBadTable},
		"epoch back":      {&quarrypb.Table{Cluster: uuid, Revision: 6, Regions: []*quarrypb.Region{{Id: 1, Epoch: 3}}}, ErrBadTable},
		"gap":             {&quarrypb.Table{Cluster: uuid, Revision: 9, SinceRevision: 6}, ErrGap},
	} {
		got, err := good.Merge(c.in)
		require.ErrorIs(t, err, c.want, name)
		require.Same(t, good, got, name)
	}
	gone, err := good.Merge(&quarrypb.Table{Cluster: uuid, Revision: 6, SinceRevision: 5, DroppedRegions: []uint32{1}})
	require.NoError(t, err)
	require.Nil(t, gone.Region(1))
	require.NotNil(t, good.Region(1), "tables are immutable")
}

func FuzzMerge(f *testing.F) {
	seed, _ := proto.Marshal(&quarrypb.Table{Cluster: uuid, Revision: 6, Regions: []*quarrypb.Region{{Id: 1, Epoch: 3}}, DroppedRegions: []uint32{4}})
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		in := &quarrypb.Table{}
		if proto.Unmarshal(b, in) != nil {
			return
		}
		cur, err := (*Table)(nil).Merge(&quarrypb.Table{Cluster: uuid, Revision: 5, Whole: true, Regions: []*quarrypb.Region{{Id: 1, Epoch: 2}}})
		require.NoError(t, err)
		next, err := cur.Merge(in)
		if err != nil {
			require.Same(t, cur, next)
		}
		require.GreaterOrEqual(t, next.Revision(), cur.Revision())
		for i, r := range next.Regions() {
			require.True(t, r.Id != 0 && (i == 0 || next.Regions()[i-1].Id < r.Id))
		}
	})
}

func BenchmarkMergeOneOf10000(b *testing.B) {
	whole := &quarrypb.Table{Cluster: uuid, Revision: 1, Whole: true}
	for i := range uint32(10000) {
		whole.Regions = append(whole.Regions, &quarrypb.Region{Id: i + 1, Epoch: 1})
	}
	cur, err := (*Table)(nil).Merge(whole)
	require.NoError(b, err)
	in := &quarrypb.Table{Cluster: uuid, Revision: 2, SinceRevision: 1, Regions: []*quarrypb.Region{{Id: 77, Epoch: 2}}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := cur.Merge(in); err != nil {
			b.Fatal(err)
		}
	}
}

package raw_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// afterPowerLoss is the word at off of replica k if the power failed now, and nothing survived but what was flushed.
func afterPowerLoss(w *slabtest.World, k int, off uint64) uint64 {
	return proto.Word(w.Nodes[k].Ledger.Cut(pmem.None)[off:], 0)
}

// durableLane is a lane over a durable region.
func durableLane(t testing.TB, w *slabtest.World, session uint32) (*slabtest.Port, *raw.Lane) {
	p, l := lane(t, w, session)
	p.Durable()
	return p, l
}

// diesBehindFirst has a session die in a round, of whose chains the first verb alone was executed.
func diesBehindFirst(p *slabtest.Port, round int, f func()) (died bool) {
	first := p.Rounds()
	p.BeforeDo = func(n int, r *rdma.Round) {
		for i := 0; n-first == round && i < r.Len(); i++ {
			r.At(i).Verbs = r.At(i).Verbs[:1]
		}
	}
	p.AfterDo = func(n int, _ *rdma.Round) {
		if n-first == round {
			panic(slabtest.ErrDied)
		}
	}
	defer func() { died = recover() == slabtest.ErrDied }()
	f()
	return false
}

// TestLoadedWordsSurviveALossOfPower: what a Load has returned is on stable storage at the primary, also if the session that wrote it has
// not flushed it, and what a failed CompareAndSwap has returned.
func TestLoadedWordsSurviveALossOfPower(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		for round := 1; ; round++ {
			w := slabtest.NewLedgers(t, replicas)
			a, writer := durableLane(t, w, 1)
			_, reader := durableLane(t, w, 2)
			require.NoError(t, writer.Store(1, word, 5))
			died := diesBehindFirst(a, round, func() { _, _ = writer.Add(1, word, 10) })
			v, err := reader.Load(1, word)
			require.NoError(t, err)
			require.Equal(t, v, afterPowerLoss(w, 0, word), "%d replicas, died in round %d", replicas, round)
			if !died {
				require.EqualValues(t, 15, v)
				break
			}
			w.Fence(1)
			old, err := reader.CompareAndSwap(1, word, 1, 2)
			require.NoError(t, err)
			for k := range replicas {
				require.Equal(t, old, afterPowerLoss(w, k, word), "replica %d of %d, died in round %d", k, replicas, round)
			}
		}
	}
}

// TestTakerFlushesThePrimary: the taker of a dead session's reservation has the word durable at the primary before it releases it. From then
// on readers go by that.
func TestTakerFlushesThePrimary(t *testing.T) {
	w := slabtest.NewLedgers(t, 2)
	a, dead := durableLane(t, w, 1)
	_, next := durableLane(t, w, 2)
	require.True(t, diesBehindFirst(a, 3, func() { _, _ = dead.Add(1, word, 10) }))
	require.EqualValues(t, 10, has(w, 0, word))
	require.Zero(t, afterPowerLoss(w, 0, word))
	w.Fence(1)
	_, err := next.Add(1, word+8*proto.RawWords, 1) // another word of the reservation
	require.NoError(t, err)
	require.EqualValues(t, 10, afterPowerLoss(w, 0, word))
}

// TestEveryChangeIsFlushed: behind each WRITE and each atomic on data of a durable region is a FLUSH of it.
func TestEveryChangeIsFlushed(t *testing.T) {
	for _, rebuilding := range []bool{false, true} {
		for _, replicas := range []int{1, 3} {
			w := slabtest.New(t, replicas)
			p, l := lane(t, w, 1)
			p.Durable()
			if rebuilding && replicas > 1 {
				p.Rebuilding(2)
			}
			visible, changes := p.BeforeDo, 0
			p.BeforeDo = func(n int, r *rdma.Round) {
				for i := range r.Len() {
					verbs := r.At(i).Verbs
					for j := range verbs {
						v := &verbs[j]
						if v.Op != rdma.Write && v.Op != rdma.CompareSwap && v.Op != rdma.FetchAdd || v.Off < data {
							continue
						}
						changes++
						require.Less(t, j+1, len(verbs))
						f := verbs[j+1]
						require.True(t, f.Op == rdma.Flush && f.Kind == rdma.Persistent && f.Off == v.Off && f.Bytes == v.Len(), "%v is followed by %v", v, f)
						require.True(t, v.Op == rdma.Write || f.Fence, "the FLUSH may pass the atomic")
					}
				}
				visible(n, r)
			}
			require.NoError(t, l.Write([]raw.Piece{{1, data + 13, make([]byte, 300)}, {1, data + 1<<20, make([]byte, 7)}}))
			require.Equal(t, 2*replicas, changes)
			require.NoError(t, l.Store(1, word, 3))
			_, err := l.Add(1, word, 1)
			require.NoError(t, err)
			require.Equal(t, 4*replicas, changes)
		}
	}
}

package slab_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// madeObjects are n objects of a lane with this payload.
func madeObjects(t *testing.T, p *slabtest.Port, n int, payload []byte, want alloc.Want) []proto.Ref {
	refs := make([]proto.Ref, n)
	for i := range refs {
		var err error
		refs[i], err = p.Alloc.Alloc(payload, want)
		require.NoError(t, err)
	}
	return refs
}

// TestCostOfUpdateMany: a batch takes the rounds of one Update, the verbs of as many, and allocates nothing. Of large slabs
// it READs the half that is expected to hold the image.
func TestCostOfUpdateMany(t *testing.T) {
	for _, c := range []struct {
		name          string
		replicas      int
		bytes         int
		kind          proto.Kind
		rounds, verbs uint64 // verbs of an object
	}{
		{"small", 1, 100, proto.Pair, 2, 5},
		{"two replicas", 2, 100, proto.Pair, 3, 7},
		{"half", 1, 1500, proto.Pair, 2, 5},
		{"staged", 1, 100, proto.Staged, 2, 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			const n = 32
			p := slabtest.NewSHM(t, c.replicas).Lane(1)
			want := alloc.Want{Replicas: c.replicas, Capacity: c.bytes + 300}
			if c.kind == proto.Staged {
				want.Kind = c.kind
			}
			refs := madeObjects(t, p, n, make([]byte, c.bytes), want)
			errs, next := make([]error, n), make([]byte, c.bytes)
			f := func(i int, old []byte, _ *slab.Info) ([]byte, error) {
				copy(next, old)
				next[3]++
				return next, nil
			}
			run := func() {
				p.Lane.UpdateMany(refs, f, errs)
				for _, err := range errs {
					if err != nil {
						t.Error(err)
					}
				}
			}
			for range 4 { // the lane learns which halves are in use
				run()
			}
			was := *p.Lane.Tally()
			run()
			now := p.Lane.Tally()
			require.Equal(t, c.rounds, now.Rounds-was.Rounds, "rounds")
			verbs := now.AllVerbs() - was.AllVerbs()
			if c.name == "half" { // of odd versions the image and the header of the other one lie apart
				require.LessOrEqual(t, verbs, (c.verbs+1)*n)
				require.Less(t, now.Bytes-was.Bytes, uint64(n*2*(c.bytes+400)), "bytes READ and written")
			} else {
				require.Equal(t, c.verbs*n, verbs, "verbs")
			}
			require.Zero(t, testing.AllocsPerRun(20, run))
			got, _, err := p.Lane.Read(refs[n-1], nil)
			require.NoError(t, err)
			require.EqualValues(t, 4+1+21, got[3])
		})
	}
}

// TestUpdateManyOneByOne: each object has its answer by itself. One that the callback refuses is released unchanged, one that is named
// twice is changed twice, and one that another lane holds is changed when that is done.
func TestUpdateManyOneByOne(t *testing.T) {
	w := slabtest.New(t, 1)
	p, other := w.Lane(1), w.Lane(2)
	refs := madeObjects(t, p, 4, []byte{0}, alloc.Want{Replicas: 1})
	gone := refs[3]
	_, _, err := p.Alloc.Free(gone)
	require.NoError(t, err)
	once, err := p.Alloc.Alloc([]byte{0}, alloc.Want{Replicas: 1, Kind: proto.Single})
	require.NoError(t, err)

	all := []proto.Ref{refs[0], refs[1], refs[2], refs[0], gone, once}
	errs := make([]error, len(all))
	refused := errors.New("refused")
	add := func(i int, old []byte, info *slab.Info) ([]byte, error) {
		if all[i] == refs[1] {
			return nil, refused
		}
		info.Tag = 7
		return []byte{old[0] + 1}, nil
	}
	// While the other lane holds refs[2] this one begins: the batch leaves that object for the end.
	began := make(chan struct{})
	var many sync.WaitGroup
	_, err = other.Lane.Update(refs[2], func(old []byte, _ *slab.Info) ([]byte, error) {
		many.Go(func() {
			p.Lane.UpdateMany(all, func(i int, old []byte, info *slab.Info) ([]byte, error) {
				if i == 0 {
					close(began)
				}
				return add(i, old, info)
			}, errs)
		})
		<-began
		return []byte{old[0] + 10}, nil
	})
	require.NoError(t, err)
	many.Wait()
	require.NoError(t, errors.Join(errs[0], errs[2], errs[3]))
	require.Equal(t, refused, errs[1])
	require.ErrorIs(t, errs[4], slab.ErrFreed)
	require.ErrorIs(t, errs[5], slab.ErrImmutable)
	for i, want := range []byte{2, 0, 11} {
		got, info, err := p.Lane.Read(refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, []byte{want}, got)
		require.Equal(t, want > 0, info.Tag == 7)
		require.NoError(t, update(other.Lane, refs[i], []byte("not held")))
	}
}

// TestBatchesOfUpdatesCountOnce: lanes whose connections lose chains and answers increment the same objects in batches. Every
// increment that was acknowledged is there, none twice, and what is unknown accounts for the rest.
func TestBatchesOfUpdatesCountOnce(t *testing.T) {
	for _, c := range []struct {
		replicas int
		kind     proto.Kind
	}{{1, proto.Pair}, {2, proto.Pair}, {1, proto.Staged}} {
		t.Run(fmt.Sprint(c.replicas, c.kind), func(t *testing.T) {
			w := slabtest.New(t, c.replicas)
			sound := w.Lane(1)
			want := alloc.Want{Replicas: c.replicas}
			if c.kind == proto.Staged {
				want.Kind = c.kind
			}
			refs := madeObjects(t, sound, 12, make([]byte, 8), want)
			var wg sync.WaitGroup
			var mu sync.Mutex
			acked, unknown := make([]int, len(refs)), make([]int, len(refs))
			for lane := range 3 {
				p := w.Lane(uint32(lane + 10))
				p.Flaky(uint64(lane+1), 12)
				wg.Go(func() {
					errs, next := make([]error, len(refs)), make([]byte, 8)
					for range 60 {
						p.Lane.UpdateMany(refs, func(_ int, old []byte, _ *slab.Info) ([]byte, error) {
							proto.PutWord(next, 0, proto.Word(old, 0)+1)
							return next, nil
						}, errs)
						mu.Lock()
						for i, err := range errs {
							switch {
							case err == nil:
								acked[i]++
							case errors.Is(err, slab.ErrUnknown):
								unknown[i]++
							default:
								t.Error(err)
							}
						}
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			for i, ref := range refs {
				b, _, err := sound.Lane.Read(ref, nil)
				require.NoError(t, err)
				n := int(proto.Word(b, 0))
				require.GreaterOrEqual(t, n, acked[i])
				require.LessOrEqual(t, n, acked[i]+unknown[i])
				require.Greater(t, acked[i], 150)
			}
		})
	}
}

// TestUpdateManyWithoutALease: the lease is over when the batch has been READ: nothing is changed, and nothing stays held.
func TestUpdateManyWithoutALease(t *testing.T) {
	w := slabtest.New(t, 1)
	p, other := w.Lane(1), w.Lane(2)
	refs := madeObjects(t, p, 3, []byte("old"), alloc.Want{Replicas: 1})
	errs := make([]error, len(refs))
	p.Lease.Store(false)
	p.Lane.UpdateMany(refs, func(int, []byte, *slab.Info) ([]byte, error) { return []byte("new"), nil }, errs)
	for i, ref := range refs {
		require.ErrorIs(t, errs[i], slab.ErrLease)
		got, _, err := other.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Equal(t, "old", string(got))
		require.NoError(t, update(other.Lane, ref, []byte("not held")))
	}
}

// TestHazard324_DeadlinePassesInABatch: the deadline of a call passes in the round that reserves a batch, which has no answer, or while another
// lane holds an object of it. What the batch has not changed is left alone: a round behind the deadline has no time to be settled, and
// would end the session.
func TestHazard324_DeadlinePassesInABatch(t *testing.T) {
	late := errors.New("deadline")
	for _, c := range []struct {
		name string
		many func(l *slab.Lane, refs []proto.Ref, errs []error)
	}{
		{"UpdateMany", func(l *slab.Lane, refs []proto.Ref, errs []error) {
			l.UpdateMany(refs, func(int, []byte, *slab.Info) ([]byte, error) { return []byte("new"), nil }, errs)
		}},
		{"WriteMany", func(l *slab.Lane, refs []proto.Ref, errs []error) {
			l.WriteMany(refs, [][]byte{[]byte("new"), []byte("new"), []byte("new")}, errs)
		}},
	} {
		for _, lost := range []bool{true, false} {
			t.Run(fmt.Sprint(c.name, ",lost=", lost), func(t *testing.T) {
				w := slabtest.New(t, 1)
				p, other := w.Lane(1), w.Lane(2)
				refs := madeObjects(t, other, 3, []byte("old"), alloc.Want{Replicas: 1})
				require.NoError(t, update(p.Lane, refs[0], []byte("old"))) // headers are cached
				if !lost {
					require.NoError(t, other.Lane.Hold(refs[1:2]))
				}
				first := p.Rounds() + 1
				p.AfterDo = func(round int, r *rdma.Round) {
					if round != first {
						return
					}
					p.OnPause = func(int) error { return late }
					if lost {
						r.At(0).Err = rdma.ErrBroken
					}
				}
				errs := make([]error, len(refs))
				c.many(p.Lane, refs, errs)
				for i, ref := range refs {
					got, _, err := other.Lane.Read(ref, nil)
					require.NoError(t, err)
					if lost || i == 1 {
						require.ErrorIs(t, errs[i], late)
						require.Equal(t, "old", string(got))
					} else {
						require.NoError(t, errs[i])
						require.Equal(t, "new", string(got))
					}
				}
				require.NoError(t, p.Ended)
				if !lost {
					require.NoError(t, other.Lane.Drop())
				}
				for _, ref := range refs {
					require.Zero(t, heldBy(w, ref))
				}
			})
		}
	}
}

// TestUpdateManyCountsOnceWhateverIsLost: of a batch that names an object twice one round has no answer, whether it was executed or not. Each object is
// incremented as often as it is named, and nothing stays held.
func TestUpdateManyCountsOnceWhateverIsLost(t *testing.T) {
	for _, c := range []struct {
		name     string
		replicas int
		kind     proto.Kind
		set      func(p *slabtest.Port)
	}{
		{"one replica", 1, proto.Pair, func(*slabtest.Port) {}},
		{"two replicas", 2, proto.Pair, func(*slabtest.Port) {}},
		{"staged", 1, proto.Staged, func(*slabtest.Port) {}},
		{"halves", 2, proto.Pair, func(p *slabtest.Port) { p.Lane.ReadHalvesFrom(0) }},
		{"durable", 2, proto.Pair, (*slabtest.Port).Durable},
		{"open words", 2, proto.Pair, func(p *slabtest.Port) { p.OpenWords(0) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := slabtest.New(t, c.replicas)
			p := w.Lane(1)
			c.set(p)
			before := p.BeforeDo
			for lose := range 10 {
				for _, executed := range []bool{false, true} {
					want := alloc.Want{Replicas: c.replicas}
					if c.kind == proto.Staged {
						want.Kind = c.kind
					}
					refs := madeObjects(t, p, 3, []byte{0}, want)
					require.NoError(t, update(p.Lane, refs[2], []byte{0})) // the guess of its half is another one
					p.Lane.Rest()
					var verbs [][]rdma.Verb
					at := p.Rounds() + 1 + lose
					p.BeforeDo = func(round int, r *rdma.Round) {
						if before != nil {
							before(round, r)
						}
						if round == at && !executed {
							for i := range r.Len() { // chains without verbs are executed in their place
								verbs = append(verbs, r.At(i).Verbs)
								r.At(i).Verbs = nil
							}
						}
					}
					p.AfterDo = func(round int, r *rdma.Round) {
						if round == at {
							for i := range r.Len() {
								r.At(i).Err = rdma.ErrBroken
								if !executed {
									r.At(i).Verbs = verbs[i]
								}
							}
						}
					}
					errs := make([]error, 5)
					p.Lane.UpdateMany([]proto.Ref{refs[0], refs[1], refs[0], refs[2], refs[0]}, func(_ int, old []byte, _ *slab.Info) ([]byte, error) {
						return []byte{old[0] + 1}, nil
					}, errs)
					require.NoError(t, errors.Join(errs...), "round %d", lose)
					p.Lane.Rest()
					p.BeforeDo, p.AfterDo = before, nil
					require.NoError(t, p.Ended)
					for i, ref := range refs {
						got, _, err := p.Lane.Read(ref, nil)
						require.NoError(t, err)
						require.Equal(t, []byte{[]byte{3, 1, 1}[i]}, got, "object %d, round %d", i, lose)
						require.Zero(t, heldBy(w, ref))
					}
				}
			}
		})
	}
}

package slab_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// slabBytes is a copy of the slab of a STAGED object at the primary.
func slabBytes(w *slabtest.World, ref proto.Ref) []byte {
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	mem := w.Nodes[0].Memory.Bytes()
	h := proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(block))))
	return bytes.Clone(mem[ref.Addr.Off():][:h.Class().Bytes()])
}

// spread changes every 20th byte of a payload: its record is longer than that of one byte.
func spread(old []byte, i byte) []byte {
	next := bytes.Clone(old)
	for k := 0; k < len(next); k += 20 {
		next[k] = i
	}
	return next
}

// A writer dies behind its record and ahead of L, which leads elsewhere. The next change has a record of the same
// length. A READ that finds home and record of before, and V and L of afterwards, shows no image: the dead writer's was
// never committed.
func TestDeadWritersVersionIsTaken(t *testing.T) {
	way := stagedWays[0]
	w := slabtest.New(t, 1)
	dead, taker, reader := w.Lane(1), w.Lane(2), w.Lane(3)
	was := make([]byte, way.bytes)
	ref, err := dead.Alloc.Alloc(was, stagedWant(way.capacity))
	require.NoError(t, err)
	was = way.next(was, 1)
	require.NoError(t, update(dead.Lane, ref, was))
	_, v, lead := wordsOf(w, ref)
	dieAfter(t, dead, 1, func() { _ = update(dead.Lane, ref, spread(was, 2)) }) // the record alone
	_, now, still := wordsOf(w, ref)
	require.Equal(t, v, now)
	require.Equal(t, lead, still)
	before := slabBytes(w, ref)
	w.Fence(1)
	next := spread(was, 3)
	require.NoError(t, update(taker.Lane, ref, next))
	after := slabBytes(w, ref)
	require.NotEqual(t, lead, proto.Locator(proto.Word(after, 16)), "the records have two lengths")
	torn := true
	reader.AfterDo = func(_ int, r *rdma.Round) {
		if v := r.At(0).Verbs[0]; torn && v.Op == rdma.Read && v.Off == uint64(ref.Addr.Off()) {
			torn = false
			copy(v.Buf, before)
			copy(v.Buf[8:proto.StagedLead], after[8:])
		}
	}
	got, _, err := reader.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.False(t, torn)
	require.Equal(t, next, got)
}

// A taker dies behind each verb of its rounds, and another one takes over. Readers see the committed value at any moment,
// and each takeover uses up a version.
func TestTakerDiesAtEachVerb(t *testing.T) {
	step := slabtest.Stride(t, 7, 36)
	for _, way := range stagedWays {
		for _, replicas := range []int{1, 2} {
			verbs := 0
			for died := true; died; verbs += step {
				died = false
				// A test of its own gives its memory back at once.
				t.Run(fmt.Sprintf("%s,R=%d,%d verbs", way.name, replicas, verbs), func(t *testing.T) {
					died = takerDiesBehind(t, way, replicas, verbs)
				})
			}
			require.Greater(t, verbs, 8)
		}
	}
}

func takerDiesBehind(t *testing.T, way stagedWay, replicas, verbs int) (died bool) {
	w := slabtest.New(t, replicas)
	dead, taker, o := w.Lane(1), w.Lane(2), w.Lane(3)
	dead.Wants(1)
	taker.Wants(1)
	o.Wants(1)
	ref, err := dead.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
	require.NoError(t, err)
	next := way.next(make([]byte, way.bytes), 2)
	dieBehindV(t, dead, ref, next)
	w.Fence(1)
	died = dieBehind(taker, verbs, func() { require.NoError(t, update(taker.Lane, ref, way.next(next, 3))) })
	sees, _, err := o.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.True(t, bytes.Equal(sees, next) || bytes.Equal(sees, way.next(next, 3)))
	w.Fence(2)
	require.NoError(t, update(o.Lane, ref, way.next(next, 4)))
	_, info, err := o.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.GreaterOrEqual(t, info.Version, ref.Incarnation.Born()+3)
	return died
}

// dieBehindV has a lane update a STAGED object and die when the primary has the new V, and no home.
func dieBehindV(t *testing.T, p *slabtest.Port, ref proto.Ref, payload []byte) {
	reg, err := p.Region(1)
	require.NoError(t, err)
	p.BeforeDo = func(_ int, r *rdma.Round) {
		for i := range r.Len() {
			c := r.At(i)
			for k, v := range c.Verbs {
				if c.To == reg.P() && v.Op == rdma.CompareSwap && v.Off == uint64(ref.Addr.Off())+8 {
					c.Verbs = c.Verbs[:k+1]
					rdma.Do(r)
					panic(slabtest.ErrDied)
				}
			}
		}
	}
	require.PanicsWithValue(t, slabtest.ErrDied, func() { require.NoError(t, update(p.Lane, ref, payload)) })
}

// dieBehind runs f on a lane that dies when so many verbs have been executed. false: f has ended before.
func dieBehind(p *slabtest.Port, verbs int, f func()) (died bool) {
	p.BeforeDo = func(_ int, r *rdma.Round) {
		n := 0
		for i := range r.Len() {
			n += len(r.At(i).Verbs)
		}
		if n <= verbs {
			verbs -= n
			return
		}
		for i := range r.Len() { // one chain after the other
			var one rdma.Round
			c := r.At(i)
			if n := min(verbs, len(c.Verbs)); n > 0 {
				one.Chain(c.To).Verbs = c.Verbs[:n]
				rdma.Do(&one)
				verbs -= n
			}
		}
		panic(slabtest.ErrDied)
	}
	defer func() {
		if r := recover(); r != nil {
			if r != slabtest.ErrDied {
				panic(r)
			}
			died = true
		}
	}()
	f()
	return false
}

// A damaged L is not followed, is written anew by changes and repairs, and does not keep an object from being changed.
func TestDamagedLead(t *testing.T) {
	for name, bad := range map[string]proto.Locator{
		"invalid":   proto.MakeGone(proto.MaxVersion) | 1<<60,
		"far ahead": proto.MakeGone(proto.MaxVersion),
		"moved":     proto.MakeLocator(proto.RecordMoved, 64, 64),
	} {
		for _, end := range []string{"update", "free", "repair"} {
			t.Run(name+","+end, func(t *testing.T) {
				w := slabtest.New(t, 1)
				p := w.Lane(1)
				ref, err := p.Alloc.Alloc(make([]byte, 1000), stagedWant(1200))
				require.NoError(t, err)
				proto.PutWord(w.Nodes[0].Memory.Bytes(), int(ref.Addr.Off())+16, uint64(bad))
				switch end {
				case "update":
					require.NoError(t, update(p.Lane, ref, bytes.Repeat([]byte{1}, 40)))
				case "free":
					_, _, err := p.Alloc.Free(ref)
					require.NoError(t, err)
					return
				case "repair":
					require.NoError(t, p.Lane.RepairAll(ref))
				}
				_, v, lead := wordsOf(w, ref)
				require.False(t, slab.BadLead(lead, v), "%v", lead)
			})
		}
	}
}

// A client holds a slab whose old L names the claim of a dead session: its home is whole, so the scrub frees that claim while
// the client's callback runs.
func TestScrubDoesNotWaitForCallbacks(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		way := stagedWays[1]
		w := slabtest.New(t, replicas)
		dead, client, scrub := w.Lane(1), w.Lane(2), w.Lane(3)
		dead.Wants(1)
		client.Wants(1)
		ref, err := dead.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
		require.NoError(t, err)
		require.NoError(t, update(dead.Lane, ref, way.next(nil, 2)))
		_, _, lead := wordsOf(w, ref)
		require.Equal(t, proto.RecordShadow, lead.Kind())
		w.Fence(1)
		reg, err := scrub.Region(1)
		require.NoError(t, err)
		scrub.OnPause = func(int) error { return context.DeadlineExceeded }
		_, err = client.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
			_, err := scrub.Lane.Scrub(reg, func(id uint32) bool { return id == 1 })
			require.NoError(t, err)
			r, _, _ := wordsOf(w, proto.Ref{Addr: proto.MakeAddr(1, lead.Off())})
			require.NotEqualValues(t, 1, r.Session(), "the claim") // the callback may run again when the client has claimed it
			return way.next(old, 3), nil
		})
		require.NoError(t, err)
	}
}

// A writer dies when home is written at the primary and not at the backup. The taker writes it there as well, before the
// record may be overwritten.
func TestTakerWritesHomesOfBackups(t *testing.T) {
	for _, way := range stagedWays {
		w := slabtest.New(t, 2)
		dead, taker := w.Lane(1), w.Lane(2)
		dead.Wants(1)
		taker.Wants(1)
		ref, err := dead.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
		require.NoError(t, err)
		reg, err := dead.Region(1)
		require.NoError(t, err)
		home := uint64(ref.Addr.Off()) + proto.StagedLead
		dead.BeforeDo = func(_ int, r *rdma.Round) {
			if c := r.At(0); c.To == reg.P() && c.Verbs[0].Op == rdma.Write && c.Verbs[0].Off == home {
				var one rdma.Round
				one.Chain(c.To).Verbs = c.Verbs
				rdma.Do(&one)
				panic(slabtest.ErrDied)
			}
		}
		next := way.next(make([]byte, way.bytes), 2)
		require.PanicsWithValue(t, slabtest.ErrDied, func() { _ = update(dead.Lane, ref, next) })
		w.Fence(1)
		_, err = taker.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) {
			size := proto.ImageHeaderBytes + way.bytes
			at := func(node int) []byte { return w.Nodes[node].Memory.Bytes()[home:][:size] }
			require.Equal(t, at(0), at(1))
			return nil, slab.ErrConflict
		})
		require.ErrorIs(t, err, slab.ErrConflict)
	}
}

// Another session dies when it has taken over the slab whose shadow a scrub is about to free. The scrub takes it over itself.
func TestScrubTakesOverFromDeadTakers(t *testing.T) {
	w, dead, ref, way := shadowed(t)
	taker, scrub := w.Lane(2), w.Lane(3)
	next := way.next(nil, 2)
	dieBehindV(t, dead, ref, next)
	w.Fence(1)
	require.True(t, dieBehind(taker, 4, func() { _ = update(taker.Lane, ref, way.next(nil, 3)) })) // twice CAS R and READ
	holder, _, lead := wordsOf(w, ref)
	require.EqualValues(t, 2, holder.Session())
	require.Equal(t, proto.RecordShadow, lead.Kind())
	w.Fence(2)
	reg, err := scrub.Region(1)
	require.NoError(t, err)
	scrub.OnPause = func(int) error { return context.DeadlineExceeded }
	_, err = scrub.Lane.Scrub(reg, func(id uint32) bool { return id == 1 })
	require.NoError(t, err)
	holder, _, _ = wordsOf(w, ref)
	require.Zero(t, holder)
	shadow, _, _ := wordsOf(w, proto.Ref{Addr: proto.MakeAddr(1, lead.Off())})
	require.Zero(t, shadow)
	got, _, err := scrub.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, next, got)
}

// A writer dies behind L. Reconcile takes what nothing has committed out of L. In the next epoch another change may have the version of a
// shadow, but not that of a record.
func TestReconcileTakesLeftoversOutOfL(t *testing.T) {
	for _, way := range stagedWays {
		w := slabtest.New(t, 1)
		dead, next := w.Lane(1), w.Lane(2)
		ref, err := dead.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
		require.NoError(t, err)
		dieAfter(t, dead, 2, func() { _ = update(dead.Lane, ref, way.next(make([]byte, way.bytes), 2)) }) // record or shadow, and L
		_, v, lead := wordsOf(w, ref)
		require.NotEqual(t, proto.RecordGone, lead.Kind())
		next.NextEpoch()
		reg, err := next.Region(1)
		require.NoError(t, err)
		_, err = next.Lane.Reconcile(reg)
		require.NoError(t, err)
		_, now, lead := wordsOf(w, ref)
		require.Equal(t, v, now)
		taken := v.Version()
		if way.name == "record" {
			taken++
		}
		require.Equal(t, proto.MakeGone(taken), lead, way.name)
	}
}

// A writer dies behind its record, ahead of L or behind it, and the epoch ends. A READ of the next epoch that finds the record of before, and V
// and L of the next change, which has a record in the same place, does not show what the dead writer has not committed.
func TestReconcileLeavesTheVersionsOfRecords(t *testing.T) {
	for verbs := 1; verbs <= 2; verbs++ {
		way := stagedWays[0]
		w := slabtest.New(t, 1)
		dead, next := w.Lane(1), w.Lane(2)
		was := make([]byte, way.bytes)
		ref, err := dead.Alloc.Alloc(was, stagedWant(way.capacity))
		require.NoError(t, err)
		was = way.next(was, 1)
		require.NoError(t, update(dead.Lane, ref, was))
		dieAfter(t, dead, verbs, func() { _ = update(dead.Lane, ref, spread(was, 2)) })
		next.NextEpoch()
		reg, err := next.Region(1)
		require.NoError(t, err)
		_, err = next.Lane.Reconcile(reg)
		require.NoError(t, err)
		before := slabBytes(w, ref)
		want := spread(was, 3)
		require.NoError(t, update(next.Lane, ref, want))
		after := slabBytes(w, ref)
		torn := true
		next.AfterDo = func(_ int, r *rdma.Round) {
			if v := r.At(0).Verbs[0]; torn && v.Op == rdma.Read && v.Off == uint64(ref.Addr.Off()) {
				torn = false
				copy(v.Buf, before)
				copy(v.Buf[8:proto.StagedLead], after[8:])
			}
		}
		got, _, err := next.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.False(t, torn)
		require.True(t, bytes.Equal(want, got), "behind %d verbs", verbs)
	}
}

// A taker has no memory for the shadow that it has to READ. It keeps the slab, whose image is whole in the shadow alone, and ends its session.
func TestTakerWithoutMemoryKeepsTheSlab(t *testing.T) {
	w, dead, ref, way := shadowed(t)
	taker, o := w.Lane(2), w.Lane(3)
	next := way.next(nil, 2)
	dieAfter(t, dead, 3, func() { _ = update(dead.Lane, ref, next) }) // committed, home is not written
	w.Fence(1)
	full := errors.New("no memory")
	taker.BeforeDo = func(_ int, r *rdma.Round) {
		if v := r.At(0).Verbs[0]; v.Op == rdma.CompareSwap && v.Expect != 0 {
			taker.OnBuffer = func(int) error { return full }
		}
	}
	require.ErrorIs(t, update(taker.Lane, ref, way.next(nil, 3)), full)
	require.ErrorIs(t, taker.Ended, full)
	r, _, _ := wordsOf(w, ref)
	require.EqualValues(t, 2, r.Session())
	got, _, err := o.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, next, got)
	w.Fence(2)
	require.NoError(t, update(o.Lane, ref, way.next(nil, 4)))
}

// V changes under a reservation: memory is damaged. The CAS of V fails, and the WRITE of home behind it in the chain overwrites
// what no READ could show any more. The session ends, and readers get an error.
func TestDamagedVUnderAReservation(t *testing.T) {
	for _, way := range stagedWays {
		for name, bad := range map[string]func(proto.V) proto.V{
			"invalid": func(v proto.V) proto.V { return v | 1<<60 },
			"ahead":   func(v proto.V) proto.V { return v + 100 },
			"behind":  func(v proto.V) proto.V { return v - 1 },
		} {
			w := slabtest.New(t, 1)
			p, o := w.Lane(1), w.Lane(2)
			ref, err := p.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
			require.NoError(t, err)
			require.NoError(t, update(p.Lane, ref, way.next(make([]byte, way.bytes), 1)))
			_, err = p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
				_, v, _ := wordsOf(w, ref)
				proto.PutWord(w.Nodes[0].Memory.Bytes(), int(ref.Addr.Off())+8, uint64(bad(v)))
				return way.next(old, 2), nil
			})
			require.ErrorIs(t, err, slab.ErrUnknown, name)
			require.ErrorContains(t, p.Ended, "invariant broken", name)
			for range 3 {
				_, _, err = o.Lane.Read(ref, nil)
				require.ErrorIs(t, err, slab.ErrCorrupt, name)
			}
			require.NoError(t, o.Ended)
		}
	}
}

// The commit of an update in a full region had its homes written at the primary only when its session ended. The staging slab, to which
// L of the backup leads, stays taken, and the lane posts nothing more.
func TestStagingSlabStaysWhereHomeIsNotWhole(t *testing.T) {
	w := slabtest.New(t, 2)
	p := w.Lane(1)
	p.Wants(1)
	refs := fullRegion(t, p, false)
	require.NoError(t, update(p.Lane, refs[0], filled(1)))
	reg, err := p.Region(1)
	require.NoError(t, err)
	over := errors.New("the deadline has passed")
	home := uint64(refs[0].Addr.Off()) + proto.StagedLead
	p.BeforeDo = func(_ int, r *rdma.Round) {
		if v := r.At(0).Verbs[0]; v.Op != rdma.Write || v.Off != home {
			return
		}
		p.BeforeDo = func(int, *rdma.Round) { t.Error("a round behind the end of the session") }
		require.Equal(t, reg.To[1], r.At(1).To)
		r.At(1).Verbs = r.At(1).Verbs[:0]
		p.AfterDo = func(_ int, r *rdma.Round) {
			r.At(1).Err = rdma.ErrBroken
			p.Ended = over
		}
	}
	require.NoError(t, update(p.Lane, refs[0], filled(2))) // committed
	require.ErrorIs(t, p.Ended, over)
	rs, _ := stagingWords(w)
	held := 0
	for _, r := range rs {
		if r != 0 {
			held++
		}
	}
	require.Equal(t, 1, held)
}

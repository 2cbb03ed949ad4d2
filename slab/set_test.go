package slab_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// objects makes n objects of 8 bytes, with 0 in them, in the order of their addresses.
func objects(t *testing.T, p *slabtest.Port, n int) (refs []proto.Ref) {
	for range n {
		ref, err := p.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: len(p.World.Nodes)})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	slices.SortFunc(refs, func(a, b proto.Ref) int { return cmp.Compare(a.Addr, b.Addr) })
	return refs
}

// number is the payload of a counter.
func number(n uint64) []byte {
	b := make([]byte, 8)
	proto.PutWord(b, 0, n)
	return b
}

// heldBy is R of an object at the primary.
func heldBy(w *slabtest.World, ref proto.Ref) proto.R {
	off := uint64(ref.Addr.Off())
	block, _ := w.Geometry.BlockOf(off)
	mem := w.Nodes[0].Memory.Bytes()
	h := proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(block))))
	s := w.Geometry.Slab(block, h.Class().SlabOf(int(off-w.Geometry.BlockOff(block))), h)
	return proto.R(proto.Word(mem, int(s.ROff())))
}

// Eight objects are held in one round, changed in one round or two, and given back in one: no more than one object.
func TestCostOfSets(t *testing.T) {
	for _, c := range []struct {
		replicas              int
		durable, open         bool
		writes, verbs, fences int
	}{
		{replicas: 1, writes: 1, verbs: 8 * 2},
		{replicas: 3, writes: 2, verbs: 8 * (3 + 3)},
		{replicas: 1, durable: true, writes: 1, verbs: 8 * 4, fences: 2},
		{replicas: 2, durable: true, writes: 2, verbs: 8 * (2 + 4 + 2), fences: 3},
		{replicas: 2, open: true, writes: 1, verbs: 8 * (4 + 2)}, // with the settles, which nobody waits for
	} {
		t.Run(fmt.Sprintf("R=%d,durable=%v,open=%v", c.replicas, c.durable, c.open), func(t *testing.T) {
			p := slabtest.New(t, c.replicas).Lane(1)
			if c.durable {
				p.Durable()
			}
			if c.open {
				p.OpenWords(0)
			}
			refs := objects(t, p, 8)
			p.Lane.Rest()
			cost := func(rounds, verbs, fences int, f func()) {
				t.Helper()
				was, before := p.Rounds(), *p.Lane.Tally()
				f()
				sent, after := 0, p.Lane.Tally()
				for k := range after.Verbs {
					sent += int(after.Verbs[k] - before.Verbs[k])
				}
				require.Equal(t, []int{rounds, verbs, fences}, []int{p.Rounds() - was, sent, int(after.Fences - before.Fences)})
			}
			at, errs := []int{0, 1, 2, 3, 4, 5, 6, 7}, make([]error, 8)
			for k := range 2 {
				cost(1, 8*2, 0, func() { require.NoError(t, p.Lane.Hold(refs)) })
				payloads := make([][]byte, 8)
				for i := range payloads {
					b, info, err := p.Lane.Held(i)
					require.NoError(t, err)
					require.EqualValues(t, refs[i].Incarnation.Born()+uint64(2*k), info.Version)
					payloads[i] = number(proto.Word(b, 0) + 1)
				}
				for range 2 { // the set is kept, and shows what was written
					cost(c.writes, c.verbs, c.fences, func() { p.Lane.WriteHeld(at, payloads, errs) })
					for i := range payloads {
						require.NoError(t, errs[i])
						b, _, err := p.Lane.Held(i)
						require.NoError(t, err)
						require.Equal(t, payloads[i], b)
					}
				}
				cost(1, 8, 0, func() { require.NoError(t, p.Lane.Drop()) })
				for _, ref := range refs {
					b, _, err := p.Lane.Read(ref, nil)
					require.NoError(t, err)
					require.Equal(t, number(uint64(k+1)), b)
					require.Zero(t, heldBy(p.World, ref))
				}
			}
		})
	}
}

func TestSetsDoNotAllocate(t *testing.T) {
	p := slabtest.NewSHM(t, 1).Lane(1)
	refs := objects(t, p, 4)
	at, payloads, errs := []int{3, 1}, [][]byte{number(1), number(2)}, make([]error, 2)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		require.NoError(t, p.Lane.Hold(refs))
		p.Lane.WriteHeld(at, payloads, errs)
		require.NoError(t, errs[0])
		require.NoError(t, p.Lane.Drop())
	}))
}

// regions is the port of a lane that uses two regions: number 2 is that of another world.
type regions struct {
	*slabtest.Port
	second   *slabtest.Port
	lane     *slab.Lane
	onSecond func()       // region 2 is asked for, and may be waited for
	of, view *slab.Region // of region 2: in the other world, and here
}

func (p *regions) Region(id uint32) (*slab.Region, error) {
	if id != 2 {
		return p.Port.Region(id)
	}
	if p.onSecond != nil {
		p.onSecond()
	}
	r, err := p.second.Region(1)
	if err != nil {
		return nil, err
	}
	if r != p.of {
		view := *r
		view.ID = 2
		p.of, p.view = r, &view
	}
	return p.view, nil
}

// laneOf opens a lane of a session in both worlds.
func laneOf(t *testing.T, worlds [2]*slabtest.World, session uint32) *regions {
	p := &regions{Port: worlds[0].Lane(session), second: worlds[1].Lane(session)}
	var err error
	p.lane, err = slab.NewLane(p)
	require.NoError(t, err)
	return p
}

// twoRegions are two worlds with n objects each; those of the second have references into region 2.
func twoRegions(t *testing.T, n int) (worlds [2]*slabtest.World, refs []proto.Ref) {
	for i := range worlds {
		worlds[i] = slabtest.New(t, 1)
		for _, ref := range objects(t, worlds[i].Lane(100), n) {
			ref.Addr = proto.MakeAddr(uint32(i+1), ref.Addr.Off())
			refs = append(refs, ref)
		}
	}
	return worlds, refs
}

// Hazard 184: holders of overlapping sets in two regions name their objects in orders of their own, move amounts between them, and never wait
// for each other in a circle. Their connections lose chains and answers.
func TestHazard184_OverlappingSets(t *testing.T) {
	worlds, refs := twoRegions(t, 3)
	var wg sync.WaitGroup
	for g := range 4 {
		p := laneOf(t, worlds, uint32(g+1))
		if g > 1 {
			p.Flaky(uint64(g), 20)
			p.second.Flaky(uint64(g), 20)
		}
		wg.Go(func() {
			errs := make([]error, 2)
			for i := range 100 {
				mine := []proto.Ref{refs[(g+i)%6], refs[(g+5*i+1)%6], refs[(3*g+i+3)%6]}
				if mine[0] == mine[1] {
					continue
				}
				if err := p.lane.Hold(mine); err != nil {
					t.Error(err)
					return
				}
				a, _, _ := p.lane.Held(0)
				b, _, _ := p.lane.Held(1)
				p.lane.WriteHeld([]int{0, 1}, [][]byte{number(proto.Word(a, 0) + 7), number(proto.Word(b, 0) - 7)}, errs)
				if err := errors.Join(errs[0], errs[1], p.lane.Drop()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	sum, p := uint64(0), laneOf(t, worlds, 9)
	for _, ref := range refs {
		b, _, err := p.lane.Read(ref, nil)
		require.NoError(t, err)
		sum += proto.Word(b, 0)
		require.Zero(t, heldBy(worlds[ref.Addr.Region()-1], ref))
	}
	require.Zero(t, sum)
}

// Hazard 184: while a lane waits for one slab of a set, it holds those of lower addresses and no other.
func TestHazard184_NothingHeldBehindAConflict(t *testing.T) {
	w := slabtest.New(t, 1)
	p, other := w.Lane(1), w.Lane(2)
	refs := objects(t, other, 4)
	require.NoError(t, other.Lane.Hold(refs[2:3]))
	waits := 0
	p.OnPause = func(int) error {
		if waits++; waits == 3 {
			for i, ref := range refs {
				require.Equal(t, []uint32{1, 1, 2, 0}[i], heldBy(w, ref).Session(), i)
			}
			return other.Lane.Drop()
		}
		return nil
	}
	require.NoError(t, p.Lane.Hold([]proto.Ref{refs[3], refs[2], refs[1], refs[0], refs[1]}))
	require.Equal(t, 3, waits)
	require.NoError(t, p.Lane.Drop())
	p.OnPause = func(int) error { return errors.New("no time is left") }
	require.NoError(t, other.Lane.Hold(refs[2:3]))
	require.ErrorIs(t, p.Lane.Hold(refs), slab.ErrBusy)
	for i, ref := range refs {
		require.Equal(t, i == 2, heldBy(w, ref) != 0, i)
	}
	// Its holder dies: the set is taken over, and given back.
	w.Fence(2)
	require.NoError(t, p.Lane.Hold(refs))
	require.NoError(t, p.Lane.Drop())
	require.Zero(t, heldBy(w, refs[2]))
}

// Hazard 185: where one object cannot be held, the error names it, and nothing is held.
func TestHazard185_NothingIsKept(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	refs := objects(t, p, 5)
	once, err := p.Alloc.Alloc(make([]byte, 8), alloc.Want{Kind: proto.Single, Replicas: 1})
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(refs[2])
	require.NoError(t, err)
	index, err := p.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: 1, Tag: proto.TagIndex})
	require.NoError(t, err)
	stale := refs[1]
	stale.Incarnation = proto.MakeIncarnation(stale.Incarnation.Generation(), stale.Incarnation.Born()+1)
	large, err := p.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: 1, Capacity: proto.MaxPayloadBytes(proto.Pair)})
	require.NoError(t, err)
	huge := []proto.Ref{large}
	for range 2 {
		more, err := p.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: 1, Capacity: proto.MaxPayloadBytes(proto.Pair)})
		require.NoError(t, err)
		huge = append(huge, more)
	}
	far := proto.Ref{Addr: proto.MakeAddr(7, refs[0].Addr.Off()), Incarnation: refs[0].Incarnation}
	for _, c := range []struct {
		refs []proto.Ref
		err  error
		name proto.Ref
	}{
		{[]proto.Ref{refs[0], refs[2], refs[3]}, slab.ErrFreed, refs[2]},
		{[]proto.Ref{refs[0], stale, refs[3]}, slab.ErrFreed, stale},
		{[]proto.Ref{refs[0], once, refs[3]}, slab.ErrImmutable, once},
		{[]proto.Ref{refs[0], index, refs[3]}, slab.ErrIndex, index},
		{[]proto.Ref{refs[0], far}, slab.ErrNoRegion, far},
		{[]proto.Ref{refs[1], stale}, slab.ErrBadRef, stale},
		{huge, slab.ErrSetFull, proto.Ref{}},
		{make([]proto.Ref, slab.MaxSet+1), slab.ErrSetFull, proto.Ref{}},
	} {
		err := p.Lane.Hold(c.refs)
		require.ErrorIs(t, err, c.err)
		if c.name != (proto.Ref{}) {
			require.True(t, strings.Contains(err.Error(), c.name.String()), "%v does not name %v", err, c.name)
		}
		for _, ref := range refs {
			require.False(t, heldBy(w, ref) != 0 && ref != refs[2], "%v holds %v", c.err, ref)
		}
		require.NoError(t, p.Lane.Drop(), "of nothing")
	}
	// What does not fit is not done, and the set is kept.
	require.NoError(t, p.Lane.Hold(refs[:2]))
	errs := make([]error, 2)
	p.Lane.WriteHeld([]int{0, 1}, [][]byte{make([]byte, 1<<20), number(5)}, errs)
	require.ErrorIs(t, errs[0], slab.ErrTooLarge)
	require.NoError(t, errs[1])
	p.Lane.WriteHeld([]int{0}, [][]byte{number(6)}, errs)
	require.NoError(t, errs[0])
	require.NoError(t, p.Lane.Drop())
}

// Hazard 185: one of two nodes does not answer a try to hold a set. What the other one has given is given back before the next try.
func TestHazard185_UnansweredTry(t *testing.T) {
	worlds, refs := twoRegions(t, 2)
	p := laneOf(t, worlds, 1)
	lost := false
	p.AfterDo = func(_ int, r *rdma.Round) {
		if !lost && r.Len() == 2 {
			lost, r.At(0).Err = true, rdma.ErrBroken
		}
	}
	p.OnPause = func(int) error {
		for _, ref := range refs {
			if heldBy(worlds[ref.Addr.Region()-1], ref) != 0 {
				return fmt.Errorf("%v is held between two tries", ref)
			}
		}
		return nil
	}
	require.NoError(t, p.lane.Hold(refs))
	require.True(t, lost)
	require.NoError(t, p.lane.Drop())
}

// reopen has the epoch of a world end. Nobody has reserved anything in the next one.
func reopen(p *slabtest.Port, refs ...proto.Ref) {
	for _, ref := range refs {
		off, mem := uint64(ref.Addr.Off()), p.World.Nodes[0].Memory.Bytes()
		block, _ := p.World.Geometry.BlockOf(off)
		h := proto.Header(proto.Word(mem, int(p.World.Geometry.HeaderOff(block))))
		s := p.World.Geometry.Slab(block, h.Class().SlabOf(int(off-p.World.Geometry.BlockOff(block))), h)
		proto.PutWord(mem, int(s.ROff()), 0)
	}
	p.NextEpoch()
}

// Hazard 186: while a lane waits for a slab of a set, the epoch of another one's region ends, and others change that object. The
// set shows what is there when all are held.
func TestHazard186_EpochEndsInHold(t *testing.T) {
	worlds, refs := twoRegions(t, 1)
	p, other := laneOf(t, worlds, 1), worlds[1].Lane(2)
	far := proto.Ref{Addr: proto.MakeAddr(1, refs[1].Addr.Off()), Incarnation: refs[1].Incarnation} // as other names it
	require.NoError(t, other.Lane.Hold([]proto.Ref{far}))
	paused := false
	p.OnPause = func(int) error {
		if paused {
			return nil
		}
		paused = true
		reopen(p.Port, refs[0])
		if err := update(worlds[0].Lane(3).Lane, refs[0], number(9)); err != nil {
			return err
		}
		return other.Lane.Drop()
	}
	require.NoError(t, p.lane.Hold(refs))
	require.True(t, paused)
	b, _, err := p.lane.Held(0)
	require.NoError(t, err)
	require.Equal(t, number(9), b)
	require.NoError(t, p.lane.Drop())
}

// Hazard 187: the epoch of one region of a set ends while it is held. Nothing more is changed, in no region, and Drop says that the set was not whole.
func TestHazard187_NothingIsWrittenBehindALostHold(t *testing.T) {
	worlds, refs := twoRegions(t, 1)
	p := laneOf(t, worlds, 1)
	require.NoError(t, p.lane.Hold(refs))
	reopen(p.Port, refs[0])
	require.NoError(t, update(worlds[0].Lane(3).Lane, refs[0], number(9)))
	rounds, errs := p.Rounds(), make([]error, 2)
	p.lane.WriteHeld([]int{0, 1}, [][]byte{number(1), number(1)}, errs)
	require.Equal(t, rounds, p.Rounds())
	for i := range errs {
		require.ErrorIs(t, errs[i], slab.ErrHoldLost)
		require.NotErrorIs(t, errs[i], slab.ErrUnknown)
	}
	_, _, err := p.lane.Held(0)
	require.ErrorIs(t, err, slab.ErrHoldLost)
	require.ErrorIs(t, p.lane.Drop(), slab.ErrHoldLost)
	for i, want := range []uint64{9, 0} {
		b, _, err := p.lane.Read(refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, number(want), b)
		require.Zero(t, heldBy(worlds[i], refs[i]))
	}
}

// Hazard 209: a write of a set waits for one region, as behind a connection that has ended, and meanwhile the epoch of another one ends, and others change the object
// there. Nothing is changed.
func TestHazard209_EpochEndsWhileAWriteWaits(t *testing.T) {
	worlds, refs := twoRegions(t, 1)
	p := laneOf(t, worlds, 1)
	require.NoError(t, p.lane.Hold(refs))
	p.onSecond = func() {
		p.onSecond = nil
		reopen(p.Port, refs[0])
		require.NoError(t, update(worlds[0].Lane(3).Lane, refs[0], number(9)))
		p.second.Raise() // it has been opened again, in the same epoch
	}
	rounds, errs := p.Rounds(), make([]error, 1)
	p.lane.WriteHeld([]int{1}, [][]byte{number(1)}, errs)
	require.ErrorIs(t, errs[0], slab.ErrHoldLost)
	require.Equal(t, rounds, p.Rounds())
	require.ErrorIs(t, p.lane.Drop(), slab.ErrHoldLost)
	b, _, err := p.lane.Read(refs[1], nil)
	require.NoError(t, err)
	require.Equal(t, number(0), b)
}

// loseWhileWaiting has the epoch of region 1 end, and its object change, when a lane asks for region 2 the n-th time from now.
func loseWhileWaiting(t *testing.T, p *regions, worlds [2]*slabtest.World, first proto.Ref, n int) {
	p.onSecond = func() {
		if n--; n == 0 {
			p.onSecond = nil
			reopen(p.Port, first)
			require.NoError(t, update(worlds[0].Lane(3).Lane, first, number(9)))
		}
	}
}

// requireNotWritten has a lane that holds two objects write the second one, of region 2, and requires that nothing is changed because the
// set has been lost meanwhile.
func requireNotWritten(t *testing.T, p *regions, refs []proto.Ref, payload []byte) {
	was, _, err := p.lane.Held(1)
	require.NoError(t, err)
	was = bytes.Clone(was)
	errs := make([]error, 1)
	p.lane.WriteHeld([]int{1}, [][]byte{payload}, errs)
	require.Nil(t, p.onSecond, "nothing has been lost")
	require.ErrorIs(t, errs[0], slab.ErrHoldLost)
	require.NotErrorIs(t, errs[0], slab.ErrUnknown)
	require.ErrorIs(t, p.lane.Drop(), slab.ErrHoldLost)
	b, _, err := p.lane.Read(refs[1], nil)
	require.NoError(t, err)
	require.Equal(t, was, b)
}

// Hazard 209: a STAGED object of a set needs a shadow, and the lane claims slabs first. The epoch of another region of the set ends meanwhile: nothing
// is changed.
func TestHazard209_EpochEndsWhileAShadowIsClaimed(t *testing.T) {
	worlds, refs := twoRegions(t, 1)
	staged, err := worlds[1].Lane(100).Alloc.Alloc(make([]byte, 128), stagedWant(128))
	require.NoError(t, err)
	refs[1] = proto.Ref{Addr: proto.MakeAddr(2, staged.Addr.Off()), Incarnation: staged.Incarnation}
	p := laneOf(t, worlds, 1)
	_, err = alloc.New(p.lane, p) // lends its claims to the lane
	require.NoError(t, err)
	require.NoError(t, p.lane.Hold(refs))
	loseWhileWaiting(t, p, worlds, refs[0], 2) // the first time is the look at the set
	requireNotWritten(t, p, refs, bytes.Repeat([]byte{1}, 128))
	require.Zero(t, heldBy(worlds[1], staged))
}

// Hazard 209: the region of the STAGED object is full, and the answer to the reservation of a staging slab is lost. The epoch of another region of the
// set ends before the connection is there again: nothing is changed, and the staging slab is given back.
func TestHazard209_EpochEndsWhileAStagingSlabIsBorrowed(t *testing.T) {
	worlds, refs := twoRegions(t, 1)
	staged := fullRegion(t, worlds[1].Lane(100), false)[0]
	refs[1] = proto.Ref{Addr: proto.MakeAddr(2, staged.Addr.Off()), Incarnation: staged.Incarnation}
	p := laneOf(t, worlds, 1)
	_, err := alloc.New(p.lane, p)
	require.NoError(t, err)
	require.NoError(t, update(p.lane, refs[1], filled(1))) // formats the staging block, and learns that the region is full
	require.NoError(t, p.lane.Hold(refs))
	p.AfterDo = func(_ int, r *rdma.Round) {
		p.AfterDo = nil
		r.At(0).Err = rdma.ErrBroken
		loseWhileWaiting(t, p, worlds, refs[0], 1)
	}
	requireNotWritten(t, p, refs, filled(2))
	rs, _ := stagingWords(worlds[1])
	require.Equal(t, make([]proto.R, len(rs)), rs)
	require.Zero(t, heldBy(worlds[1], staged))
}

// Hazard 209: the lease ends while a shadow is claimed. The write is refused, the set is held as before, and written when there is a lease again.
func TestHazard209_LeaseEndsWhileAShadowIsClaimed(t *testing.T) {
	w := slabtest.New(t, 1)
	ref, err := w.Lane(100).Alloc.Alloc(make([]byte, 128), stagedWant(128))
	require.NoError(t, err)
	p := w.Lane(1)
	require.NoError(t, p.Lane.Hold([]proto.Ref{ref}))
	p.Lane.LendShadows(leaseless{p.Alloc, p})
	errs := make([]error, 1)
	write := func() { p.Lane.WriteHeld([]int{0}, [][]byte{bytes.Repeat([]byte{1}, 128)}, errs) }
	write()
	require.ErrorIs(t, errs[0], slab.ErrLease)
	b, _, err := p.Lane.Held(0)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 128), b)
	p.Lease.Store(true)
	write()
	require.NoError(t, errs[0])
	require.NoError(t, p.Lane.Drop())
}

// leaseless claims, and the lease ends meanwhile.
type leaseless struct {
	*alloc.Allocator
	p *slabtest.Port
}

func (s leaseless) ClaimShadows(reg *slab.Region, class proto.Class) error {
	defer s.p.Lease.Store(false)
	return s.Allocator.ClaimShadows(reg, class)
}

// Hazard 210: a STAGED object of a set is to be written in a full region, and others have all staging slabs. The write is refused, the set stays
// held, and Drop gives that object back too.
func TestHazard210_NoStagingSlabForASet(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	refs := fullRegion(t, p, false)[:2]
	require.NoError(t, update(p.Lane, refs[0], filled(1))) // formats the staging block
	mem, g := w.Nodes[0].Memory.Bytes(), w.Geometry
	h := proto.Header(proto.Word(mem, int(g.HeaderOff(g.StagingBlock()))))
	lend := func(session uint32) {
		for i := range proto.MaxStagedClass.Slabs() {
			r := proto.R(0)
			if session != 0 {
				r = proto.MakeR(session, uint64(i+1))
			}
			proto.PutWord(mem, int(g.Slab(g.StagingBlock(), i, h).ROff()), uint64(r))
		}
	}
	lend(9)
	require.NoError(t, p.Lane.Hold(refs))
	errs := make([]error, 2)
	p.Lane.WriteHeld([]int{0, 1}, [][]byte{filled(2), filled(2)}, errs)
	for i := range errs {
		require.ErrorIs(t, errs[i], slab.ErrBusy)
		require.NotZero(t, heldBy(w, refs[i]))
	}
	lend(0)
	p.Lane.WriteHeld([]int{0}, [][]byte{filled(3)}, errs)
	require.NoError(t, errs[0])
	lend(9)
	p.Lane.WriteHeld([]int{1}, [][]byte{filled(3)}, errs[1:])
	require.ErrorIs(t, errs[1], slab.ErrBusy)
	require.NoError(t, p.Lane.Drop())
	for i, want := range []int{3, 0} {
		require.Zero(t, heldBy(w, refs[i]))
		b, _, err := p.Lane.Read(refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, filled(want), b)
	}
}

// Hazard 187: without a lease it is unknown whether the set was whole to the end, and all is given back.
func TestHazard187_LeaseEndsUnderASet(t *testing.T) {
	p := slabtest.New(t, 1).Lane(1)
	refs := objects(t, p, 2)
	require.NoError(t, p.Lane.Hold(refs))
	p.Lease.Store(false)
	rounds, errs := p.Rounds(), make([]error, 1)
	p.Lane.WriteHeld([]int{0}, [][]byte{number(1)}, errs)
	require.ErrorIs(t, errs[0], slab.ErrLease)
	require.Equal(t, rounds, p.Rounds())
	err := p.Lane.Drop()
	require.ErrorIs(t, err, slab.ErrHoldLost)
	require.ErrorIs(t, err, slab.ErrLease)
	require.Zero(t, heldBy(p.World, refs[0]))
	require.ErrorIs(t, p.Lane.Hold(refs), slab.ErrLease)
	require.Zero(t, heldBy(p.World, refs[1]))
}

// The answers of Drop are lost: the slabs are released all the same, and the set was whole.
func TestDropWithoutAnAnswer(t *testing.T) {
	worlds, refs := twoRegions(t, 1)
	p := laneOf(t, worlds, 1)
	require.NoError(t, p.lane.Hold(refs))
	once := false
	p.AfterDo = func(_ int, r *rdma.Round) {
		if !once {
			once, r.At(1).Err = true, rdma.ErrBroken
		}
	}
	require.NoError(t, p.lane.Drop())
	for i, ref := range refs {
		require.Zero(t, heldBy(worlds[i], ref))
	}
}

// A session that dies while it writes a set leaves each object wholly old or wholly new.
func TestHolderDiesAtEachRound(t *testing.T) {
	for _, dies := range []int{1, 2, 3, 4} {
		w := slabtest.New(t, 2)
		p, refs := w.Lane(1), []proto.Ref(nil)
		refs = objects(t, p, 3)
		first := p.Rounds()
		p.BeforeDo = func(round int, r *rdma.Round) {
			if round-first == dies {
				for i := range r.Len() { // the first half of what it posts is executed
					r.At(i).Verbs = r.At(i).Verbs[:len(r.At(i).Verbs)/2]
				}
			}
		}
		p.AfterDo = func(round int, _ *rdma.Round) {
			if round-first == dies {
				panic(slabtest.ErrDied)
			}
		}
		require.PanicsWithValue(t, slabtest.ErrDied, func() {
			_ = p.Lane.Hold(refs)
			p.Lane.WriteHeld([]int{0, 1, 2}, [][]byte{number(1), number(1), number(1)}, make([]error, 3))
			_ = p.Lane.Drop()
		})
		w.Fence(1)
		taker := w.Lane(2)
		require.NoError(t, taker.Lane.Hold(refs))
		for i := range refs {
			b, _, err := taker.Lane.Held(i)
			require.NoError(t, err)
			old := dies < 3 || dies == 3 && proto.Word(b, 0) == 0
			require.Equal(t, map[bool]uint64{true: 0, false: 1}[old], proto.Word(b, 0))
		}
		require.NoError(t, taker.Lane.Drop())
	}
}

// Sets of encrypted objects, and of objects in STAGED slabs.
func TestSetsOfOtherSlabs(t *testing.T) {
	for _, kind := range []proto.Kind{proto.Pair, proto.Staged} {
		for _, encrypted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v,encrypted=%v", kind, encrypted), func(t *testing.T) {
				p := slabtest.New(t, 1).Lane(1)
				if encrypted {
					p.Lane.Encrypt(payloadkey.NewRing("shop", false, nil, keyA))
				}
				var refs []proto.Ref
				for range 3 {
					ref, err := p.Alloc.Alloc(make([]byte, 1000), alloc.Want{Kind: kind, Replicas: 1, Capacity: 1200})
					require.NoError(t, err)
					refs = append(refs, ref)
				}
				errs := make([]error, 3)
				for k := range byte(3) {
					require.NoError(t, p.Lane.Hold(refs))
					for range 2 {
						var payloads [][]byte
						for i := range refs {
							b, _, err := p.Lane.Held(i)
							require.NoError(t, err)
							next := append([]byte(nil), b...)
							next[40+i]++
							payloads = append(payloads, next)
						}
						p.Lane.WriteHeld([]int{2, 0, 1}, [][]byte{payloads[2], payloads[0], payloads[1]}, errs)
						require.NoError(t, errors.Join(errs...))
					}
					require.NoError(t, p.Lane.Drop())
					for i, ref := range refs {
						b, _, err := p.Lane.Read(ref, nil)
						require.NoError(t, err)
						require.Equal(t, 2*(k+1), b[40+i])
					}
				}
			})
		}
	}
}

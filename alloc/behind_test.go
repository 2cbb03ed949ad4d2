package alloc_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// leaked counts the slabs of a block that are taken in the map, free and unreserved, and clears their bits.
func leaked(t *testing.T, p *slabtest.Port, block uint32) int {
	var st slab.Scrubbed
	require.NoError(t, p.Lane.ScrubBlock(mustRegion(t, p), block, func(uint32) bool { return false }, &st))
	return st.Bits
}

// onMap says whether a round is one CAS of a map word, and whether it sets bits.
func onMap(w *slabtest.World, r *rdma.Round, block uint32) (is, sets bool) {
	if r.Len() != 1 || len(r.At(0).Verbs) != 1 {
		return false, false
	}
	v := &r.At(0).Verbs[0]
	from := w.Geometry.MapOff(block)
	is = v.Op == rdma.CompareSwap && v.Off >= from && v.Off < from+proto.MapBytes
	return is, is && v.New&^v.Expect != 0
}

// claimsBehind is a hook of a lane that gives slabs back: other claims them and allocates ref before the lane looks behind its cleared bits, and gives its
// claims back before the lane sets a bit again: then back is set.
func claimsBehind(t *testing.T, w *slabtest.World, other *slabtest.Port, block uint32, ref *proto.Ref, back *bool) func(int, *rdma.Round) {
	claimed := false
	return func(_ int, r *rdma.Round) {
		is, sets := onMap(w, r, block)
		switch {
		case !claimed && r.Len() == 1 && len(r.At(0).Verbs) > 1 && r.At(0).Verbs[0].Op == rdma.Read: // looks behind
			claimed = true
			var err error
			*ref, err = other.Alloc.Alloc(make([]byte, 20_000), want(2))
			require.NoError(t, err)
		case claimed && !*back && is && sets:
			*back = true
			require.NoError(t, other.Alloc.Close())
		}
	}
}

// TestBitsAreNotSetForWhatWasGivenBack: hazard 166. A client, or a scrub, has cleared map bits, finds the slabs claimed by another client, and sets the
// bits for it; that client has given the claims back just before. No bit stays set.
func TestBitsAreNotSetForWhatWasGivenBack(t *testing.T) {
	small := make([]byte, 20_000)
	t.Run("client", func(t *testing.T) {
		w := slabtest.New(t, 2)
		owner, other := w.Lane(1), w.Lane(2)
		first, err := owner.Alloc.Alloc(small, want(2))
		require.NoError(t, err)
		block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
		var ref proto.Ref
		back := false
		owner.BeforeDo = claimsBehind(t, w, other, block, &ref, &back)
		require.NoError(t, owner.Alloc.Close())
		owner.BeforeDo = nil
		require.True(t, back)
		b, ok := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		require.True(t, ok)
		require.Equal(t, block, b)
		require.Zero(t, leaked(t, owner, block))
		_, _, err = owner.Lane.Read(ref, nil)
		require.NoError(t, err)
		mended, err := owner.Lane.RepairMap(mustRegion(t, owner), block)
		require.NoError(t, err)
		require.Zero(t, mended)
	})
	t.Run("scrub", func(t *testing.T) {
		w := slabtest.New(t, 2)
		before, claimer, scrub := w.Lane(1), w.Lane(2), w.Lane(3)
		first, err := before.Alloc.Alloc(small, want(2))
		require.NoError(t, err)
		block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
		require.NoError(t, before.Alloc.Close())
		atStamp, stamp, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		once := sync.OnceFunc(func() { close(atStamp); <-stamp })
		claimer.BeforeDo = func(_ int, r *rdma.Round) {
			if r.Len() == 1 && len(r.At(0).Verbs) > 2 && r.At(0).Verbs[0].Op == rdma.CompareSwap { // R of many slabs
				once()
			}
		}
		go func() {
			_, err := claimer.Alloc.Alloc(small, want(2))
			done <- err
		}()
		<-atStamp
		stamped, back := false, false
		scrub.BeforeDo = func(_ int, r *rdma.Round) {
			switch is, sets := onMap(w, r, block); {
			case is && !sets && !stamped:
				stamped = true
				close(stamp)
				require.NoError(t, <-done)
				claimer.BeforeDo = nil
			case is && sets && !back:
				back = true
				require.NoError(t, claimer.Alloc.Close())
			}
		}
		leaked(t, scrub, block)
		scrub.BeforeDo = nil
		require.True(t, back)
		require.Zero(t, leaked(t, scrub, block))
		mended, err := scrub.Lane.RepairMap(mustRegion(t, scrub), block)
		require.NoError(t, err)
		require.Zero(t, mended)
	})
}

// TestBitsOfAClaimWithoutAnAnswer: hazard 171. The CAS that claims bits is executed and has no answer, and another client's clearing, repeated without an
// answer, takes one of the bits away. The claimer takes the others, and loses none of them.
func TestBitsOfAClaimWithoutAnAnswer(t *testing.T) {
	w := slabtest.New(t, 2)
	before, claimer := w.Lane(1), w.Lane(2)
	first, err := before.Alloc.Alloc(make([]byte, 20_000), want(2))
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
	require.NoError(t, before.Alloc.Close())
	lost := false
	claimer.AfterDo = func(_ int, r *rdma.Round) {
		ch := r.At(0)
		if lost || r.Len() != 1 || len(ch.Verbs) != 2 || ch.Verbs[0].Op != rdma.CompareSwap || ch.Verbs[0].Off != w.Geometry.MapOff(block) {
			return
		}
		lost = true
		mem := w.Nodes[0].Memory.Bytes()
		set := ch.Verbs[0].New &^ ch.Verbs[0].Expect
		require.NotZero(t, set&(set-1), "several bits")
		proto.PutWord(mem, int(ch.Verbs[0].Off), ch.Verbs[0].New&^(set&-set))
		ch.Err, ch.Done = rdma.ErrBroken, 0
	}
	ref, err := claimer.Alloc.Alloc(make([]byte, 20_000), want(2))
	require.NoError(t, err)
	require.True(t, lost)
	require.NoError(t, claimer.Alloc.Close())
	claimer.AfterDo = nil
	require.Zero(t, leaked(t, claimer, block))
	_, _, err = claimer.Lane.Read(ref, nil)
	require.NoError(t, err)
}

// TestBitsOfOthersAreNotSetAgain: hazard 166. A claimer that has had no answer goes on with bits that may be another client's, finds those slabs reserved, and one bit
// cleared. Before it sets that one the other client gives all of its claims back: their bits stay clear.
func TestBitsOfOthersAreNotSetAgain(t *testing.T) {
	w := slabtest.New(t, 2)
	before, claimer, other := w.Lane(1), w.Lane(2), w.Lane(3)
	small := make([]byte, 20_000)
	first, err := before.Alloc.Alloc(small, want(2))
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
	require.NoError(t, before.Alloc.Close())
	mem, at := w.Nodes[0].Memory.Bytes(), int(w.Geometry.MapOff(block))
	stage := 0
	claimer.BeforeDo = func(_ int, r *rdma.Round) {
		ch := r.At(0)
		is, sets := onMap(w, r, block)
		switch {
		case stage == 0 && ch.Verbs[0].Op == rdma.CompareSwap && int(ch.Verbs[0].Off) == at: // claims bits
			stage = 1
			_, err := other.Alloc.Alloc(small, want(2))
			require.NoError(t, err)
			require.Greater(t, other.Alloc.Held(), 20)
		case stage == 2 && len(ch.Verbs) > 20: // reserves the slabs
			stage = 3
			all := proto.Word(mem, at)
			proto.PutWord(mem, at, all&(all-1)) // by a clearing that was repeated without an answer
		case stage == 3 && is && sets:
			stage = 4
			require.NoError(t, other.Alloc.Close())
		}
	}
	claimer.AfterDo = func(_ int, r *rdma.Round) {
		if stage == 1 {
			stage = 2
			r.At(0).Err, r.At(0).Done = rdma.ErrBroken, 0
		}
	}
	_, err = claimer.Alloc.Alloc(small, want(2))
	require.NoError(t, err)
	require.Equal(t, 4, stage)
	claimer.BeforeDo, claimer.AfterDo = nil, nil
	require.NoError(t, claimer.Alloc.Close())
	require.Zero(t, leaked(t, claimer, block))
}

// TestBitsAreLookedAtAnotherTime: hazard 166. The call ends when a bit has been set for a client that has given its slab back: the next one looks again.
func TestBitsAreLookedAtAnotherTime(t *testing.T) {
	w := slabtest.New(t, 2)
	owner, other := w.Lane(1), w.Lane(2)
	small := make([]byte, 20_000)
	first, err := owner.Alloc.Alloc(small, want(2))
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
	var ref proto.Ref
	back := false
	owner.BeforeDo = claimsBehind(t, w, other, block, &ref, &back)
	owner.AfterDo = func(int, *rdma.Round) {
		if back {
			owner.OnRegion = func() error { return context.DeadlineExceeded }
		}
	}
	require.ErrorIs(t, owner.Alloc.Trim(), context.DeadlineExceeded)
	require.NoError(t, owner.Ended)
	require.True(t, back)
	owner.BeforeDo, owner.AfterDo, owner.OnRegion = nil, nil, nil
	require.False(t, owner.Alloc.Idle(), "a session that is closed now leaves bits to a scrub")
	require.NoError(t, owner.Alloc.Close())
	require.True(t, owner.Alloc.Idle())
	require.Zero(t, leaked(t, owner, block))
}

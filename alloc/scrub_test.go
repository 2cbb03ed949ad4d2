package alloc_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestScrubAndClaimerLeaveNoSlabFreeInTheMap: hazard 21. A scrub begins before any
// round of a refill and pauses before any of its own until the refill is over: it
// takes bits that are set and not yet stamped for leaks. Whatever the order, a slab
// that somebody has is taken in the map afterwards.
func TestScrubAndClaimerLeaveNoSlabFreeInTheMap(t *testing.T) {
	if testing.Short() {
		t.Skip("runs one of two programs at a time, in a thousand orders; not with -short")
	}
	refills := 4 // claim, stamp and the two of the birth, more or less
	cleared := 0
	for at := 1; at <= refills; at++ {
		for pause := 1; ; pause++ {
			w := slabtest.New(t, 2)
			p, q := w.Lane(1), w.Lane(2)
			first, err := p.Alloc.Alloc([]byte("formats the block"), want(2))
			require.NoError(t, err)
			block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
			require.NoError(t, p.Alloc.Close()) // no claims: the next Alloc refills
			paused, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			rounds := 0
			q.BeforeDo = func(int, *rdma.Round) {
				if rounds++; rounds == pause {
					close(paused)
					<-resume
				}
			}
			own, began := 0, false
			p.BeforeDo = func(int, *rdma.Round) {
				if own++; own != at {
					return
				}
				began = true
				go func() {
					var st slab.Scrubbed
					done <- q.Lane.ScrubBlock(mustRegion(t, q), block, func(uint32) bool { return false }, &st)
				}()
				select {
				case <-paused:
				case err := <-done:
					done <- err
				}
			}
			ref, err := p.Alloc.Alloc([]byte("refills"), want(2))
			require.NoError(t, err)
			require.True(t, began, "round %d of the refill", at)
			close(resume)
			require.NoError(t, <-done)
			q.BeforeDo, p.BeforeDo = nil, nil
			mended, err := q.Lane.RepairMap(mustRegion(t, q), block)
			require.NoError(t, err)
			require.Zero(t, mended, "words wrong after a scrub that began before round %d of the refill and paused before its round %d", at, pause)
			b, _, err := p.Lane.Read(ref, nil)
			require.NoError(t, err)
			require.Equal(t, "refills", string(b))
			if rounds > 40 {
				cleared++ // one CAS for each of the bits that it took for leaks
			}
			if rounds < pause || pause > 80 {
				break
			}
		}
	}
	require.Positive(t, cleared, "no scrub met a claim without a stamp")
}

// TestScrubBeforeTheOwnerClears: the scrub takes a bit whose clearing its owner has
// put off, another client claims the slab, and only then its owner clears the bit.
func TestScrubBeforeTheOwnerClears(t *testing.T) {
	w := slabtest.New(t, 2)
	owner, scrub, other := w.Lane(1), w.Lane(2), w.Lane(3)
	ref, err := owner.Alloc.Alloc(make([]byte, 300_000), want(2))
	require.NoError(t, err)
	keep, err := owner.Alloc.Alloc(make([]byte, 300_000), want(2)) // fills the magazine when freed
	require.NoError(t, err)
	for _, r := range []proto.Ref{keep, ref} {
		_, _, err = owner.Alloc.Free(r)
		require.NoError(t, err)
	}
	for block := range w.Geometry.Blocks {
		var st slab.Scrubbed
		require.NoError(t, scrub.Lane.ScrubBlock(mustRegion(t, scrub), block, func(uint32) bool { return false }, &st))
	}
	var refs []proto.Ref
	for range 8 { // takes what there is of the class
		r, err := other.Alloc.Alloc(make([]byte, 300_000), want(2))
		require.NoError(t, err)
		refs = append(refs, r)
	}
	require.NoError(t, owner.Alloc.Close())
	for block := range w.Geometry.Blocks {
		mended, err := scrub.Lane.RepairMap(mustRegion(t, scrub), block)
		require.NoError(t, err)
		require.Zero(t, mended, "block %d", block)
	}
	again := false
	for _, r := range refs {
		again = again || r.Addr == ref.Addr
	}
	require.True(t, again, "the other client got the slab that was freed")
}

// TestScrubsOfOneBlockBesideEachOther: a client died while it formatted a block. A scrub that
// was replaced stops before any of its rounds; another one frees the block, a client formats it
// again, and then the first one goes on. The block's headers stay alike.
func TestScrubsOfOneBlockBesideEachOther(t *testing.T) {
	const dead = 9
	isDead := func(session uint32) bool { return session == dead }
	again, left := 0, 0
	for pause := 1; ; pause++ {
		w := slabtest.New(t, 3)
		victim, late, next, user := w.Lane(dead), w.Lane(2), w.Lane(3), w.Lane(4)
		headers := func(block uint32) (h [3]proto.Header) {
			for i := range h {
				b := make([]byte, 8)
				r := user.Lane.Round()
				r.Reset()
				r.Chain(mustRegion(t, user).To[i]).Read(w.Geometry.HeaderOff(block), b)
				user.Lane.Do()
				require.NoError(t, r.Err())
				h[i] = proto.Header(proto.Word(b, 0))
			}
			return h
		}
		const block = 3
		half := proto.MakeHeader(proto.BlockFormatting, proto.Pair, 1, 0, dead)
		for i, h := range []proto.Header{half, proto.MakeHeader(proto.BlockActive, proto.Pair, 1, 0, 0), 0} {
			r := victim.Lane.Round()
			r.Reset()
			r.Chain(mustRegion(t, victim).To[i]).CAS(w.Geometry.HeaderOff(block), 0, uint64(h))
			victim.Lane.Do()
			require.NoError(t, r.Err())
		}
		require.Equal(t, half, headers(block)[0])

		paused, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		rounds := 0
		late.BeforeDo = func(int, *rdma.Round) {
			if rounds++; rounds == pause {
				close(paused)
				<-resume
			}
		}
		go func() {
			var st slab.Scrubbed
			done <- late.Lane.ScrubBlock(mustRegion(t, late), block, isDead, &st)
		}()
		ended := false
		select {
		case <-paused:
		case err := <-done:
			require.NoError(t, err)
			ended = true
		}
		var st slab.Scrubbed
		require.NoError(t, next.Lane.ScrubBlock(mustRegion(t, next), block, isDead, &st))
		var refs []proto.Ref
		for size := 24; size <= 200_000 && headers(block)[0].State() == proto.BlockFree; size = size*5/4 + 1 {
			ref, err := user.Alloc.Alloc(make([]byte, size), want(3))
			require.NoError(t, err)
			refs = append(refs, ref)
		}
		if headers(block)[0].State() == proto.BlockActive {
			again++
		} else {
			left++
		}
		if !ended {
			close(resume)
			require.NoError(t, <-done)
		}
		h := headers(block)
		require.Equal(t, h[0], h[1], "a scrub that stopped before round %d", pause)
		require.Equal(t, h[0], h[2], "a scrub that stopped before round %d", pause)
		require.NotEqual(t, proto.BlockFormatting, h[0].State())
		for _, ref := range refs {
			_, _, err := user.Lane.Read(ref, nil)
			require.NoError(t, err)
		}
		if ended {
			break
		}
	}
	require.Positive(t, again, "the block was formatted again while a scrub had stopped")
	require.Positive(t, left, "a scrub that had begun kept others away")
}

// TestScrubThatCannotFreeABlockEndsItsSession: a scrub has claimed a block whose formatter is
// dead, and then its call has to end while a replica does not answer. Its session ends too, so
// that the next scrub finds a formatter that is dead, and frees the block.
func TestScrubThatCannotFreeABlockEndsItsSession(t *testing.T) {
	const dead, failing, block = 9, 2, 3
	half := proto.MakeHeader(proto.BlockFormatting, proto.Pair, 1, 0, dead)
	for at := 2; ; at++ { // round 1 READs the header
		w := slabtest.New(t, 3)
		victim, late, next := w.Lane(dead), w.Lane(failing), w.Lane(3)
		r := victim.Lane.Round()
		r.Reset()
		r.Chain(mustRegion(t, victim).P()).CAS(w.Geometry.HeaderOff(block), 0, uint64(half))
		victim.Lane.Do()
		require.NoError(t, r.Err())

		rounds, failed := 0, false
		late.BeforeDo = func(int, *rdma.Round) {
			if rounds++; rounds == at {
				failed = true
				late.Flaky(uint64(at), 1) // no chain is answered any more
				late.Ended = context.DeadlineExceeded
			}
		}
		var st slab.Scrubbed
		err := late.Lane.ScrubBlock(mustRegion(t, late), block, func(s uint32) bool { return s == dead }, &st)
		if !failed {
			require.NoError(t, err)
			require.Greater(t, at, 5, "rounds of a scrub that frees a block with three replicas")
			return
		}
		require.ErrorIs(t, err, context.DeadlineExceeded, "round %d", at)
		require.ErrorContains(t, late.Ended, "could not be freed", "round %d", at)
		w.Fence(failing)
		isDead := func(s uint32) bool { return s == dead || s == failing }
		require.NoError(t, next.Lane.ScrubBlock(mustRegion(t, next), block, isDead, &st))
		for i, n := range w.Nodes {
			h := proto.Header(proto.Word(n.Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
			require.Equal(t, proto.BlockFree, h.State(), "replica %d, round %d", i, at)
		}
	}
}

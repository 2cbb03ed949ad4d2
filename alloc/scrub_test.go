package alloc_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/internal/slabtest"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// TestScrubAndClaimerLeaveNoSlabFreeInTheMap: hazard 21. A scrub begins before any
// round of a refill and pauses before any of its own until the refill is over: it
// takes bits that are set and not yet stamped for leaks. Whatever the order, a slab
// that somebody has is taken in the map afterwards.
func TestScrubAndClaimerLeaveNoSlabFreeInTheMap(t *testing.T) {
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
			mended, err := q.Lane.MendMap(mustRegion(t, q), block)
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
		mended, err := scrub.Lane.MendMap(mustRegion(t, scrub), block)
		require.NoError(t, err)
		require.Zero(t, mended, "block %d", block)
	}
	again := false
	for _, r := range refs {
		again = again || r.Addr == ref.Addr
	}
	require.True(t, again, "the other client got the slab that was freed")
}

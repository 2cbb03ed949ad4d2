package slab_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// joinerLane is a lane with open words that takes the last of three replicas for one that is rebuilt.
func joinerLane(w *slabtest.World, session uint32) *slabtest.Port {
	p := openLane(w, session, 0)
	p.Rebuilding(2)
	return p
}

// A session dies behind each verb of a birth while a replica is rebuilt. The copier has passed the slab before, or has
// READ it before and changes V of the joiner after the takeover. When it has passed every slab, the joiner has what the others have.
func TestJoinerHasWhatTakersSettle(t *testing.T) {
	step := slabtest.Stride(t, 1, 9)
	for _, used := range []bool{false, true} {
		for _, beside := range []bool{false, true} {
			t.Run(fmt.Sprintf("used=%v,beside=%v", used, beside), func(t *testing.T) {
				verbs := 0
				for joinerMeetsDeadBirth(t, used, beside, verbs) {
					verbs += step
				}
				require.Greater(t, verbs, 6)
			})
		}
	}
}

func joinerMeetsDeadBirth(t *testing.T, used, beside bool, verbs int) (died bool) {
	w := slabtest.New(t, 3)
	first := openLane(w, 1, 0)
	want := alloc.Want{Replicas: 3, Capacity: 50_000} // a block has few such slabs
	ref, err := first.Alloc.Alloc([]byte("first"), want)
	require.NoError(t, err)
	if used { // V of a slab that was in use before is not 0
		refs := []proto.Ref{ref}
		for range pairSlab(w, ref).Class.Slabs() - 1 {
			ref, err := first.Alloc.Alloc([]byte("more"), want)
			require.NoError(t, err)
			refs = append(refs, ref)
		}
		for _, ref := range refs {
			_, _, err = first.Alloc.Free(ref)
			require.NoError(t, err)
		}
	}
	first.Lane.Rest()
	require.NoError(t, first.Alloc.Close())
	copier := joinerLane(w, 4)
	copier.Rebuild(2)
	copier.Lane.CopyBy(proto.BlockBytes) // in one piece
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	dead := joinerLane(w, 2)
	// The claim is there before: only the birth is cut short.
	kept, err := dead.Alloc.Alloc([]byte("kept"), want)
	require.NoError(t, err)
	dead.Lane.Rest()
	die := func() {
		died = diesBehind(dead, verbs, false, func() {
			_, err := dead.Alloc.Alloc([]byte("dead"), want)
			require.NoError(t, err)
			dead.Lane.Rest()
		})
		w.Fence(2)
		scrub := joinerLane(w, 3)
		_, err := scrub.Lane.Scrub(scrub.View(), func(s uint32) bool { return s == 2 })
		require.NoError(t, err)
	}
	if met := false; beside {
		copier.AfterDo = func(_ int, r *rdma.Round) {
			if v := r.At(0).Verbs[0]; !met && v.Op == rdma.Read && v.Off == w.Geometry.BlockOff(block) {
				met = true
				die()
			}
		}
	}
	var st slab.Copied
	require.NoError(t, copier.Lane.CopyBlock(copier.View(), block, &st))
	if !beside {
		die()
	}
	h := proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
	for i := range h.Class().Slabs() {
		s := w.Geometry.Slab(block, i, h)
		_, v := s.Words(w.Nodes[0].Memory.Bytes()[s.Off:])
		_, joined := s.Words(w.Nodes[2].Memory.Bytes()[s.Off:])
		require.Equal(t, v, joined.Settled(), "V of slab %d at the replica that was rebuilt, %d verbs", i, verbs)
		if v.State() == proto.StateLive {
			seed := proto.Seed(first.View().Seed, s.Off, h.Generation())
			img, _, ok := proto.DecodeImage(s.Image(w.Nodes[2].Memory.Bytes()[s.Off:][:s.Class.Bytes()], v.Version()), seed)
			require.True(t, ok, "image of slab %d", i)
			require.Equal(t, v.Version(), img.Version)
		}
	}
	got, _, err := openLane(w, 5, 2).Lane.Read(kept, nil)
	require.NoError(t, err)
	require.Equal(t, "kept", string(got))
	return died
}

// V of a replica that is damaged does not count. Readers at the others go by what these have: an image whose V is open and that one of
// them lacks is not returned, also by a session that may only read and finds it there.
func TestOpenWordBesideADamagedOne(t *testing.T) {
	const n, damaged = 3, 2
	for _, readOnly := range []bool{false, true} {
		for _, c := range []struct {
			name string
			v    [n]int // as in TestReadsOfOpenWords
			sees int
		}{
			{"open at one", [n]int{-1, 0}, 0},
			{"open at all", [n]int{-1, -1}, 1},
			{"settle late at one", [n]int{-1, 1}, 1},
		} {
			t.Run(fmt.Sprintf("%s,readOnly=%v", c.name, readOnly), func(t *testing.T) {
				w := slabtest.New(t, n)
				p := openLane(w, 1, 0)
				ref, err := p.Alloc.Alloc([]byte("value 0"), alloc.Want{Replicas: n})
				require.NoError(t, err)
				p.Lane.Rest()
				s := pairSlab(w, ref)
				base := vAt(w, ref, 0).Version()
				for i := range n { // every replica has the image: its V comes behind it
					putImage(p, ref, s, i, base, 1)
					putV(w, s, i, base, c.v[i])
				}
				proto.PutWord(w.Nodes[damaged].Memory.Bytes(), int(s.VOff()), 1<<63)
				p.View().ReadOnly = readOnly
				got, _, err := p.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, fmt.Sprintf("value %d", c.sees), string(got))
			})
		}
	}
}

// RepairFree goes by the primary where words are open too. A version that fell would be given again, and a reference to the
// object that had it would name another one.
func TestRepairFreeOfOpenWords(t *testing.T) {
	for _, off := range []int{-2, +2} {
		w := slabtest.New(t, 2)
		p := openLane(w, 1, 0)
		ref, err := p.Alloc.Alloc([]byte("freed"), alloc.Want{Replicas: 2})
		require.NoError(t, err)
		s := pairSlab(w, ref)
		_, _, _, err = p.Lane.Free(ref, false)
		require.NoError(t, err)
		p.Lane.Rest()
		want := vAt(w, ref, 0)
		require.Equal(t, proto.StateFree, want.State())
		proto.PutWord(w.Nodes[1].Memory.Bytes(), int(s.VOff()), uint64(int(want)+off))
		require.NoError(t, p.Lane.RepairFree(ref.Addr))
		for i := range 2 {
			require.Equal(t, want, vAt(w, ref, i))
		}
	}
}

// What one replica has settled was committed: a taker does not put it back because V of another one is damaged.
func TestTakerKeepsWhatIsSettled(t *testing.T) {
	for _, v := range [][3]int{{1, 1, 0}, {-1, 1, 0}, {-1, 0, 1}} { // as in TestReadsOfOpenWords
		t.Run(fmt.Sprint(v), func(t *testing.T) {
			w := slabtest.New(t, 3)
			dead := openLane(w, 1, 0)
			ref, err := dead.Alloc.Alloc([]byte("value 0"), alloc.Want{Replicas: 3})
			require.NoError(t, err)
			dead.Lane.Rest()
			s, base := pairSlab(w, ref), vAt(w, ref, 0).Version()
			for i := range 3 {
				putImage(dead, ref, s, i, base, 1)
				putV(w, s, i, base, v[i])
			}
			proto.PutWord(w.Nodes[0].Memory.Bytes(), int(s.ROff()), uint64(dead.Reservation()))
			w.Fence(1)
			taker := openLane(w, 2, 0)
			require.NoError(t, update(taker.Lane, ref, []byte("next")))
			taker.Lane.Rest()
			for i := range 3 {
				require.Equal(t, base+2, vAt(w, ref, i).Version())
				got, _, err := openLane(w, uint32(10+i), i).Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, "next", string(got))
			}
		})
	}
}

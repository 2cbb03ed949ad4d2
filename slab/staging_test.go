package slab_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

const wholeSlab = 60 << 10 // of MaxStagedClass, so that a region has few of them

// fullRegion is fill, of a region whose shadow block a program of an earlier version has used for an object:
// updates need the staging block.
func fullRegion(t *testing.T, p *slabtest.Port, durable bool) (refs []proto.Ref) {
	g, mem := &p.World.Geometry, p.World.Nodes[0].Memory.Bytes()
	b := g.ShadowBlock()
	h := proto.MakeHeader(proto.BlockActive, proto.Single, proto.Classes-1, 0, 0)
	proto.PutWord(mem, int(g.HeaderOff(b)), uint64(h))
	proto.PutWord(mem, int(g.MapOff(b)), 1)
	return fill(t, p, durable)
}

// fill fills the region of a lane with objects in STAGED slabs that have no room for a record of a
// change of all bytes.
func fill(t *testing.T, p *slabtest.Port, durable bool) (refs []proto.Ref) {
	want := stagedWant(wholeSlab)
	want.Durable = durable
	for {
		ref, err := p.Alloc.Alloc(make([]byte, wholeSlab), want)
		if err != nil {
			require.ErrorIs(t, err, alloc.ErrNoSpace)
			return refs
		}
		refs = append(refs, ref)
	}
}

func filled(i int) []byte { return bytes.Repeat([]byte{byte(i)}, wholeSlab) }

// stagingWords are R and V of the slabs of the staging block as they are in memory.
func stagingWords(w *slabtest.World) (rs []proto.R, vs []proto.V) {
	mem, b := w.Nodes[0].Memory.Bytes(), w.Geometry.StagingBlock()
	h := proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(b))))
	for i := range proto.MaxStagedClass.Slabs() {
		r, v := w.Geometry.Slab(b, i, h).Words(mem[w.Geometry.Slab(b, i, h).Off:][:h.Class().Bytes()])
		rs, vs = append(rs, r), append(vs, v)
	}
	return rs, vs
}

// Updates of whole images go on in a region that is full, also where the shadow block is of no use: by a slab of
// the last block, which holds no objects. A third round claims it, and it is given back with the slab.
func TestUpdatesInAFullRegion(t *testing.T) {
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%v", durable), func(t *testing.T) {
			w := slabtest.New(t, 1)
			p := w.Lane(1)
			verbs, fences := 2+16+6, 1
			if durable {
				p.Durable()
				verbs, fences = 2+16+10, 4
			}
			refs := fullRegion(t, p, durable)
			require.Len(t, refs, int(w.Geometry.Blocks-2)*proto.MaxStagedClass.Slabs())
			require.NoError(t, update(p.Lane, refs[0], filled(1)))
			for i, ref := range refs[1:20] {
				rounds, before := p.Rounds(), *p.Lane.Tally()
				require.NoError(t, update(p.Lane, ref, filled(i+2)))
				require.Equal(t, 3, p.Rounds()-rounds)
				after, sent := p.Lane.Tally(), 0
				for k := range after.Verbs {
					sent += int(after.Verbs[k] - before.Verbs[k])
				}
				require.Equal(t, verbs, sent)
				require.EqualValues(t, fences, after.Fences-before.Fences)
			}
			payloads, errs := make([][]byte, len(refs)), make([]error, len(refs))
			for i := range refs {
				payloads[i] = filled(i + 3)
			}
			p.Lane.WriteMany(refs[:30], payloads[:30], errs[:30])
			for i := range 30 {
				require.NoError(t, errs[i])
				got, _, err := p.Lane.Read(refs[i], nil)
				require.NoError(t, err)
				require.Equal(t, payloads[i], got)
			}
			rs, vs := stagingWords(w)
			for i := range rs {
				require.Zero(t, rs[i])
				require.Zero(t, vs[i])
			}
		})
	}
}

// The slabs that another session has claimed and not used are not free: an update does not wait for them.
func TestUpdatesBesideClaimsOfOthers(t *testing.T) {
	w := slabtest.New(t, 1)
	idle, p := w.Lane(1), w.Lane(2)
	refs := fullRegion(t, p, false)
	_, _, err := idle.Lane.Read(refs[0], nil)
	require.NoError(t, err)
	for _, ref := range refs[:15] { // of one block
		_, _, err := idle.Alloc.Free(ref) // stays in its magazine
		require.NoError(t, err)
	}
	require.Equal(t, 15, idle.Alloc.Held())
	require.NoError(t, update(p.Lane, refs[20], filled(1)))
	_, _, err = p.Alloc.Free(refs[21])
	require.NoError(t, err)
	require.NoError(t, update(p.Lane, refs[20], filled(2))) // by the claim that is left of it
	require.Equal(t, 1, p.Alloc.Held())
}

func TestUpdatesInAFullRegionDoNotAllocate(t *testing.T) {
	p := slabtest.NewSHM(t, 1).Lane(1)
	refs := fullRegion(t, p, false)
	f := func(old []byte, _ *slab.Info) ([]byte, error) {
		for i := range old {
			old[i]++
		}
		return old, nil
	}
	_, err := p.Lane.Update(refs[0], f)
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(10, func() {
		_, err := p.Lane.Update(refs[0], f)
		require.NoError(t, err)
	}))
}

// Sessions that died hold all staging slabs: an update waits, and goes on when a scrub has freed one. One
// whose deadline passes before is not done.
func TestUpdateWaitsForAStagingSlab(t *testing.T) {
	w := slabtest.New(t, 1)
	p, scrub := w.Lane(2), w.Lane(3)
	refs := fullRegion(t, p, false)
	require.NoError(t, update(p.Lane, refs[0], filled(1)))
	for i := range proto.MaxStagedClass.Slabs() {
		dead := w.Lane(uint32(10 + i))
		require.NoError(t, update(dead.Lane, refs[i], filled(2)))
		dieAfter(t, dead, 3, func() { _ = update(dead.Lane, refs[i], filled(3)) })
	}
	rs, _ := stagingWords(w)
	require.NotContains(t, rs, proto.R(0))
	given := errors.New("the deadline has passed")
	p.OnPause = func(attempt int) error {
		if attempt == 20 {
			return given
		}
		return nil
	}
	err := update(p.Lane, refs[30], filled(4))
	require.ErrorIs(t, err, slab.ErrBusy)
	require.ErrorIs(t, err, given)
	require.ErrorContains(t, err, "all 15 staging slabs of region 1")
	reg, err := scrub.Region(1)
	require.NoError(t, err)
	p.OnPause = func(attempt int) error {
		if attempt == 20 {
			for i := range proto.MaxStagedClass.Slabs() {
				w.Fence(uint32(10 + i))
			}
			_, err := scrub.Lane.Scrub(reg, func(id uint32) bool { return id >= 10 })
			return err
		}
		return nil
	}
	require.NoError(t, update(p.Lane, refs[30], filled(4)))
	for i := range proto.MaxStagedClass.Slabs() {
		got, _, err := p.Lane.Read(refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, filled(3), got)
	}
}

// A writer dies behind each verb of its commit in a full region: what V names is whole, also when the staging slab
// is used again, and a scrub frees it.
func TestWriterDiesWithAStagingSlab(t *testing.T) {
	step := slabtest.Stride(t, 1, 4)
	for verbs, all := 0, 1; verbs < all; verbs += step {
		w := slabtest.New(t, 1)
		p, o := w.Lane(1), w.Lane(2)
		refs := fullRegion(t, p, false)
		require.NoError(t, update(p.Lane, refs[0], filled(1)))
		all = dieAfter(t, p, verbs, func() { _ = update(p.Lane, refs[0], filled(2)) })
		require.Equal(t, 6, all)
		want := filled(1)
		if verbs >= 3 {
			want = filled(2)
		}
		sees := func() {
			got, _, err := o.Lane.Read(refs[0], nil)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got), "behind %d verbs", verbs)
		}
		sees()
		for i := range 40 { // from other slabs of the block
			require.NoError(t, update(o.Lane, refs[1+i%3], filled(i)))
		}
		sees()
		w.Fence(1)
		reg, err := o.Region(1)
		require.NoError(t, err)
		_, err = o.Lane.Scrub(reg, func(id uint32) bool { return id == 1 })
		require.NoError(t, err)
		sees()
		rs, _ := stagingWords(w)
		for i := range rs {
			require.Zero(t, rs[i], "behind %d verbs", verbs)
		}
	}
}

// Answers of commits and of claims of staging slabs are lost, and chains run late: no staging slab stays taken.
func TestLostAnswersInAFullRegion(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	refs := fullRegion(t, p, false)
	require.NoError(t, update(p.Lane, refs[0], filled(1)))
	p.Flaky(1, 4)
	for i := range 100 {
		err := update(p.Lane, refs[i%5], filled(i))
		require.NoError(t, err)
		rs, _ := stagingWords(w)
		for _, r := range rs {
			require.Zero(t, r, "update %d", i)
		}
	}
	require.NoError(t, p.Ended)
}

// A commit breaks off behind each of its verbs, and its session goes on: the staging slab is given back.
func TestTornCommitInAFullRegion(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	refs := fullRegion(t, p, false)
	require.NoError(t, update(p.Lane, refs[0], filled(1)))
	for verbs := 1; verbs < 7; verbs++ {
		p.BeforeDo = func(_ int, r *rdma.Round) {
			c := r.At(0)
			if c.Verbs[0].Op != rdma.Write {
				return
			}
			p.BeforeDo = nil
			require.Len(t, c.Verbs, 6)
			c.Verbs = c.Verbs[:min(verbs, 6)]
			p.AfterDo = func(_ int, r *rdma.Round) {
				p.AfterDo = nil
				r.At(0).Err = rdma.ErrBroken
			}
		}
		require.NoError(t, update(p.Lane, refs[0], filled(verbs+1)))
		got, _, err := p.Lane.Read(refs[0], nil)
		require.NoError(t, err)
		require.Equal(t, filled(verbs+1), got)
		rs, _ := stagingWords(w)
		for i := range rs {
			require.Zero(t, rs[i], "behind %d verbs", verbs)
		}
	}
}

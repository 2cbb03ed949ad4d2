package slab_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// headerOf is a block's header in memory.
func headerOf(w *slabtest.World, block uint32) proto.Header {
	return proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
}

// Births leave the shadow block to updates: in a full region each lane claims a few of its slabs, keeps them, and
// updates in two rounds, as elsewhere. A lane that finds none left borrows staging slabs.
func TestUpdatesByTheShadowBlock(t *testing.T) {
	w := slabtest.New(t, 1)
	refs := fill(t, w.Lane(1), false)
	require.Len(t, refs, int(w.Geometry.ShadowBlock())*proto.MaxStagedClass.Slabs())
	require.Equal(t, proto.BlockFree, headerOf(w, w.Geometry.ShadowBlock()).State())
	var lanes []*slabtest.Port
	for i := range 5 { // 4, 4, 4, 3 and no claims of 15 slabs
		p := w.Lane(uint32(2 + i))
		require.NoError(t, update(p.Lane, refs[i], filled(99)))
		want := 2
		if i == 4 {
			want = 3
		}
		for k := range 10 {
			rounds := p.Rounds()
			require.NoError(t, update(p.Lane, refs[10*i+k], filled(k+1)))
			require.Equal(t, want, p.Rounds()-rounds, "lane %d", i)
			_, err := p.Alloc.Alloc(make([]byte, wholeSlab), stagedWant(wholeSlab))
			require.ErrorIs(t, err, alloc.ErrNoSpace, "lane %d puts no object into its claims", i)
		}
		require.Equal(t, []int{4, 4, 4, 3, 0}[i], p.Alloc.Held())
		require.Equal(t, i == 4, headerOf(w, w.Geometry.StagingBlock()).Staging(), "lane %d", i)
		lanes = append(lanes, p)
	}
	for _, p := range lanes {
		require.NoError(t, p.Alloc.Close())
	}
	b := w.Geometry.ShadowBlock()
	mem := w.Nodes[0].Memory.Bytes()
	require.Zero(t, proto.Word(mem, int(w.Geometry.MapOff(b))))
	for i := range proto.MaxStagedClass.Slabs() {
		require.Zero(t, proto.Word(mem, int(w.Geometry.Slab(b, i, headerOf(w, b)).ROff())))
	}
}

// Objects of several classes have their shadows in one shadow block, and those of a batch in different slabs of it.
func TestBatchesInAFullRegion(t *testing.T) {
	w := slabtest.New(t, 1)
	maker, p := w.Lane(1), w.Lane(2)
	var refs []proto.Ref
	var payloads [][]byte
	for i, size := range []int{1980, 1500, 1980, 1500} {
		ref, err := maker.Alloc.Alloc(make([]byte, size), stagedWant(size))
		require.NoError(t, err)
		refs, payloads = append(refs, ref), append(payloads, bytes.Repeat([]byte{byte(i + 1)}, size))
	}
	fill(t, maker, false)
	for _, size := range []int{1980, 1500} { // the rest of the two blocks; an object takes a larger slab than it needs
		for err := error(nil); err == nil; {
			_, err = maker.Alloc.Alloc(make([]byte, size), stagedWant(size))
		}
	}
	require.NoError(t, update(p.Lane, refs[1], bytes.Repeat([]byte{9}, 1500)))
	require.Equal(t, 2112, headerOf(w, w.Geometry.ShadowBlock()).Class().Bytes(), "that of default nodes, for the smaller object too")
	errs, rounds, shadows := make([]error, len(refs)), p.Rounds(), map[uint64]bool{}
	p.BeforeDo = func(_ int, r *rdma.Round) {
		for _, v := range r.At(0).Verbs {
			if b, _ := w.Geometry.BlockOf(v.Off); v.Op == rdma.Write && b == w.Geometry.ShadowBlock() {
				shadows[v.Off] = true
			}
		}
	}
	p.Lane.WriteMany(refs, payloads, errs)
	require.Equal(t, 2, p.Rounds()-rounds)
	require.Len(t, shadows, len(refs), "each has a shadow of its own: a writer may die before homes are whole")
	for i := range refs {
		require.NoError(t, errs[i])
		got, _, err := p.Lane.Read(refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, payloads[i], got, "%d", i)
	}
	require.False(t, headerOf(w, w.Geometry.StagingBlock()).Staging())
}

// Objects that are larger than the slabs of the shadow block borrow staging slabs.
func TestShadowsOfLargerObjects(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	small, err := p.Alloc.Alloc(make([]byte, 1980), stagedWant(1980))
	require.NoError(t, err)
	large := fill(t, p, false)[0]
	for err == nil {
		_, err = p.Alloc.Alloc(make([]byte, 1980), stagedWant(1980))
	}
	for i := range 3 {
		require.NoError(t, update(p.Lane, small, bytes.Repeat([]byte{byte(i + 1)}, 1980)))
		require.NoError(t, update(p.Lane, large, filled(i+1)))
		got, _, err := p.Lane.Read(large, nil)
		require.NoError(t, err)
		require.Equal(t, filled(i+1), got)
	}
	require.True(t, headerOf(w, w.Geometry.StagingBlock()).Staging())
	require.EqualValues(t, 2112, headerOf(w, w.Geometry.ShadowBlock()).Class().Bytes())
}

// An object that a program of an earlier version has put into the shadow block is read and freed there, and its slab
// is not kept for a birth.
func TestObjectInTheShadowBlock(t *testing.T) {
	w := slabtest.New(t, 1)
	p, old := w.Lane(1), w.Lane(2)
	old.Wants(2) // takes all blocks for blocks of objects
	var last proto.Ref
	for b := uint32(0); b != w.Geometry.ShadowBlock(); b, _ = w.Geometry.BlockOf(uint64(last.Addr.Off())) {
		var err error
		last, err = old.Alloc.Alloc(make([]byte, 500_000), alloc.Want{Kind: proto.Pair, Replicas: 2})
		require.NoError(t, err)
	}
	require.NoError(t, update(p.Lane, last, []byte("new")))
	_, _, err := p.Alloc.Free(last)
	require.NoError(t, err)
	require.Zero(t, p.Alloc.Held())
}

// An update of an object that exists never fails because others have taken the memory: lanes fill a region, free and
// update, and keep what they have claimed, in any order.
func TestUpdatesNeverLackMemory(t *testing.T) {
	step := slabtest.Stride(t, 1, 4)
	for seed := uint64(0); seed < 4; seed += uint64(step) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := slabtest.New(t, 1)
			r := rand.New(rand.NewPCG(seed, 17))
			var lanes []*slabtest.Port
			for i := range 7 {
				lanes = append(lanes, w.Lane(uint32(1+i)))
			}
			refs := fill(t, lanes[0], false)
			for i := range 400 / step {
				p, at := lanes[r.IntN(len(lanes))], r.IntN(len(refs))
				switch r.IntN(8) {
				case 0:
					_, _, err := p.Alloc.Free(refs[at])
					require.NoError(t, err)
					refs[at] = refs[len(refs)-1]
					refs = refs[:len(refs)-1]
				case 1, 2:
					ref, err := p.Alloc.Alloc(filled(i), stagedWant(wholeSlab-r.IntN(2)<<13))
					if errors.Is(err, alloc.ErrNoSpace) {
						continue
					}
					require.NoError(t, err)
					refs = append(refs, ref)
				default:
					require.NoError(t, update(p.Lane, refs[at], filled(i)[:48<<10]), "update %d", i)
				}
			}
		})
	}
}

package alloc_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestHazard20_ReclaimChangesClass: a block goes to another class only when
// nothing in it lives or is held, and old refs into it stay dead.
func TestHazard20_ReclaimChangesClass(t *testing.T) {
	w := slabtest.New(t, 2)
	p, agent := w.Lane(1), w.Lane(2)
	old, err := p.Alloc.Alloc([]byte("small"), want(2))
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(old.Addr.Off()))
	passes := 0
	pass := func() error { passes++; return nil }

	freed, err := agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, pass)
	require.NoError(t, err)
	require.Zero(t, freed, "an object lives there")
	_, _, err = p.Lane.Read(old, nil)
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(old)
	require.NoError(t, err)
	freed, err = agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, pass)
	require.NoError(t, err)
	require.Zero(t, freed, "a magazine holds it")
	require.NoError(t, p.Alloc.Close())
	freed, err = agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, pass)
	require.NoError(t, err)
	require.Equal(t, 1, freed)
	require.Equal(t, 4, passes)

	fresh := w.Lane(3) // its session starts after the pass: no header of before
	_, _, err = fresh.Lane.Read(old, nil)
	require.ErrorIs(t, err, slab.ErrFreed)
	for range int(w.Geometry.Blocks) {
		ref, err := fresh.Alloc.Alloc(make([]byte, 300_000), want(2))
		require.NoError(t, err, "every block, the reclaimed one too, takes the large class")
		if b, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off())); b == block {
			require.EqualValues(t, 1, ref.Incarnation.Generation())
			requireSameReplicas(t, w, ref)
		}
	}
	_, _, err = fresh.Lane.Read(old, nil)
	require.ErrorIs(t, err, slab.ErrFreed)
}

// TestHazard20_BirthUnderTheReadOfABlock: a client has a claim in the block and births it while
// the agent's READ of the block is under way. The READ returns V from before and R from
// behind it: the slab seems to be free.
func TestHazard20_BirthUnderTheReadOfABlock(t *testing.T) {
	w := slabtest.New(t, 2)
	p, agent := w.Lane(1), w.Lane(2)
	first, err := p.Alloc.Alloc(make([]byte, 300_000), want(2)) // the only slab of its block
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(first) // it stays claimed
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
	off := w.Geometry.BlockOff(block)
	var born proto.Ref
	before := make([]byte, proto.BlockBytes)
	reads := func(r *rdma.Round) bool {
		v := &r.At(0).Verbs[0]
		return v.Op == rdma.Read && v.Len() == proto.BlockBytes
	}
	agent.BeforeDo = func(_ int, r *rdma.Round) {
		if born == (proto.Ref{}) && reads(r) {
			copy(before, w.Nodes[0].Memory.Bytes()[off:])
			born, err = p.Alloc.Alloc(bytes.Repeat([]byte("b"), 300_000), want(2))
			require.NoError(t, err)
		}
	}
	tampered := false
	agent.AfterDo = func(_ int, r *rdma.Round) {
		if tampered || !reads(r) {
			return
		}
		tampered = true
		s := proto.Slab{Class: mustHeader(t, w, block).Class(), Kind: proto.Pair}
		got := r.At(0).Verbs[0].Buf
		for in := 0; in < len(got); in += s.Class.Bytes() {
			reserved, _ := s.Words(got[in:])
			_, v := s.Words(before[in:])
			if reserved == 0 {
				binary.LittleEndian.PutUint64(got[in+int(s.VOff()):], uint64(v))
			}
		}
	}
	_, err = agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, func() error { return nil })
	require.NoError(t, err)
	require.True(t, tampered)
	require.Equal(t, first.Addr, born.Addr)
	got, _, err := p.Lane.Read(born, nil)
	require.NoError(t, err, "the block was reclaimed under an object")
	require.Equal(t, bytes.Repeat([]byte("b"), 300_000), got)
}

func mustHeader(t *testing.T, w *slabtest.World, block uint32) proto.Header {
	h := proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
	require.True(t, h.Valid())
	return h
}

// TestReclaimDiesAnywhere: whatever round a reclaim dies before, the next one frees the block.
func TestReclaimDiesAnywhere(t *testing.T) {
	w := slabtest.New(t, 3)
	generation := map[uint32]uint32{} // of blocks
	step := slabtest.Stride(t, 1, 4)
	for at := 1; ; at += step {
		session := uint32(3 * at)
		p, dies, next := w.Lane(session), w.Lane(session+1), w.Lane(session+2)
		ref, err := p.Alloc.Alloc([]byte("x"), want(3))
		require.NoError(t, err)
		block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		_, _, err = p.Alloc.Free(ref)
		require.NoError(t, err)
		require.NoError(t, p.Alloc.Close())
		pass := func() error { return nil }
		dies.BeforeDo = func(n int, _ *rdma.Round) {
			if n == at {
				panic(slabtest.ErrDied)
			}
		}
		died := func() (died bool) {
			defer func() { died = recover() != nil }()
			freed, err := dies.Alloc.Reclaim(mustRegion(t, dies), []uint32{block}, pass)
			require.NoError(t, err)
			require.Equal(t, 1, freed)
			return false
		}()
		w.Fence(session + 1)
		if died {
			freed, err := next.Alloc.Reclaim(mustRegion(t, next), []uint32{block}, pass)
			require.NoError(t, err, "died before round %d", at)
			require.Equal(t, 1, freed, "died before round %d", at)
		}
		generation[block]++
		for i, n := range w.Nodes {
			h := proto.Header(proto.Word(n.Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
			require.Equal(t, proto.MakeHeader(proto.BlockFree, 0, 0, generation[block], 0), h, "replica %d, died before round %d", i, at)
		}
		if !died {
			require.Greater(t, at, 10, "rounds of a reclaim with three replicas")
			return
		}
	}
}

// TestPendingBitsOfAReclaimedBlock: bits that a lane still has to clear are not cleared
// in a block that has another class by now.
func TestPendingBitsOfAReclaimedBlock(t *testing.T) {
	w := slabtest.New(t, 1)
	p, agent, other := w.Lane(1), w.Lane(2), w.Lane(3)
	var refs []proto.Ref
	for range 40 { // more than a magazine keeps of this class
		ref, err := p.Alloc.Alloc(make([]byte, 30_000), want(1))
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	blocks := map[uint32]bool{}
	for _, ref := range refs {
		_, _, err := p.Alloc.Free(ref)
		require.NoError(t, err)
		b, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		blocks[b] = true
	}
	freed := 0
	for b := range blocks {
		n, err := agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{b}, func() error { p.Raise(); return nil })
		require.NoError(t, err)
		freed += n
	}
	require.NotZero(t, freed, "a block without a claim of the magazine's, its bits pending")
	for {
		_, err := other.Alloc.Alloc(make([]byte, 3000), want(1))
		if errors.Is(err, alloc.ErrNoSpace) {
			break
		}
		require.NoError(t, err)
	}
	was := map[uint32][]byte{}
	mem := w.Nodes[0].Memory.Bytes()
	for b := range blocks {
		off := w.Geometry.MapOff(b)
		if h := proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(b)))); h.Generation() == 1 && h.State() == proto.BlockActive {
			was[b] = append([]byte{}, mem[off:off+proto.MapBytes]...)
		}
	}
	require.Len(t, was, freed)
	require.NoError(t, p.Alloc.Close())
	for b, bits := range was {
		off := w.Geometry.MapOff(b)
		require.True(t, bytes.Equal(bits, mem[off:off+proto.MapBytes]), "map of block %d has changed", b)
	}
}

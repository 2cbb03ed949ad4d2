package slab_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// V of the primary is damaged so that it is not valid. No operation copies it to the backup, whose V and image a failover goes by, and
// no session ends because of it.
func TestInvalidVIsNotCopied(t *testing.T) {
	for name, op := range map[string]func(w *slabtest.World, o *slabtest.Port, ref proto.Ref) error{
		"read": func(_ *slabtest.World, o *slabtest.Port, ref proto.Ref) error {
			_, _, err := o.Lane.Read(ref, nil)
			return err
		},
		"update": func(_ *slabtest.World, o *slabtest.Port, ref proto.Ref) error {
			return update(o.Lane, ref, []byte("new"))
		},
		"free slab": func(_ *slabtest.World, o *slabtest.Port, ref proto.Ref) error { return o.Lane.RepairFree(ref.Addr) },
		"repair":    func(_ *slabtest.World, o *slabtest.Port, ref proto.Ref) error { return o.Lane.RepairAll(ref) },
		"takeover": func(w *slabtest.World, o *slabtest.Port, ref proto.Ref) error {
			w.Fence(1)
			return update(o.Lane, ref, []byte("new"))
		},
		"scrub": func(w *slabtest.World, o *slabtest.Port, ref proto.Ref) error {
			w.Fence(1)
			reg, err := o.Region(1)
			require.NoError(w.T, err)
			if _, err := o.Lane.Scrub(reg, func(id uint32) bool { return id == 1 }); err != nil {
				return err
			}
			return slab.ErrCorrupt
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := slabtest.New(t, 2)
			dead, o := w.Lane(1), w.Lane(2)
			ref, err := dead.Alloc.Alloc([]byte("old"), alloc.Want{Replicas: 2})
			require.NoError(t, err)
			block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
			h := proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
			i, _ := w.Geometry.SlabIndex(uint64(ref.Addr.Off()), h.Class())
			at := int(w.Geometry.Slab(block, i, h).VOff())
			good := proto.Word(w.Nodes[1].Memory.Bytes(), at)
			bad := good | 1<<61
			if name == "takeover" || name == "scrub" { // the writer dies when it holds the slab
				require.True(t, dieBehind(dead, 2, func() { _ = update(dead.Lane, ref, []byte("new")) }))
			}
			proto.PutWord(w.Nodes[0].Memory.Bytes(), at, bad)
			require.ErrorIs(t, op(w, o, ref), slab.ErrCorrupt)
			require.NoError(t, o.Ended)
			require.Equal(t, good, proto.Word(w.Nodes[1].Memory.Bytes(), at))
			require.Equal(t, bad, proto.Word(w.Nodes[0].Memory.Bytes(), at))
			o.NextEpoch()
			reg, err := o.Region(1)
			require.NoError(t, err)
			_, err = o.Lane.Reconcile(reg)
			require.NoError(t, err)
			got, _, err := o.Lane.Read(ref, nil)
			require.NoError(t, err)
			require.Equal(t, "old", string(got))
		})
	}
}

// A lane that has ended its session posts nothing more, whatever is asked of it, until its port has another one.
func TestNothingIsPostedBehindTheEndOfTheSession(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	ref, err := p.Alloc.Alloc([]byte("old"), alloc.Want{Replicas: 1})
	require.NoError(t, err)
	p.Lane.EndSession(slab.ErrLease)
	p.BeforeDo = func(int, *rdma.Round) { t.Error("posted") }
	_, _, err = p.Lane.Read(ref, nil)
	require.ErrorIs(t, err, slab.ErrLease)
	require.ErrorIs(t, update(p.Lane, ref, []byte("new")), slab.ErrLease)
	_, err = p.Alloc.Alloc([]byte("other"), alloc.Want{Replicas: 1})
	require.ErrorIs(t, err, slab.ErrLease)
	require.Error(t, p.Alloc.Trim())
	p.BeforeDo, p.Ended = nil, nil
	p.Lane.NewSession()
	got, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "old", string(got))
}

// The answer of each round of a repair of a write-once object is lost. As soon as the slab is released another session frees the object and
// gives birth to another one there: the repair, which goes on, does not write into it.
func TestRepairWritesNothingBehindItsRelease(t *testing.T) {
	released := 0
	for lost, rounds := 1, 1; lost <= rounds; lost++ {
		w := slabtest.New(t, 2)
		p, o := w.Lane(1), w.Lane(2)
		ref, err := p.Alloc.Alloc([]byte("old"), alloc.Want{Replicas: 2, Kind: proto.Single})
		require.NoError(t, err)
		s := pairSlab(w, ref)
		memory := w.Nodes[0].Memory.Bytes()
		memory[s.ImageOff(1)+proto.ImageHeaderBytes] ^= 4
		var other proto.Ref
		first := o.Rounds()
		o.AfterDo = func(round int, r *rdma.Round) {
			if round-first != lost || r.At(0).Err != nil {
				return
			}
			r.At(0).Err = rdma.ErrBroken
			if held, _ := s.Words(memory[s.Off:]); held == 0 && round-first > 2 {
				released++
				c, _, _, err := p.Lane.Free(ref, true)
				require.NoError(t, err)
				other, err = p.Lane.Birth(c, []byte("new"), 0)
				require.NoError(t, err)
			}
		}
		require.NoError(t, o.Lane.Repair(ref))
		rounds = max(rounds, o.Rounds()-first)
		want := "old"
		if other != (proto.Ref{}) {
			ref, want = other, "new"
		}
		h, payload, whole := proto.DecodeImage(s.Image(memory[s.Off:][:s.Class.Bytes()], 0), proto.Seed(p.View().Seed, s.Off, ref.Incarnation.Generation()))
		require.True(t, whole)
		require.Equal(t, want, string(payload))
		require.Equal(t, ref.Incarnation.Born(), h.Born)
	}
	require.NotZero(t, released)
}

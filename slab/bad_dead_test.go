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

// A damaged header at the primary makes every image of its block look damaged, because the generation is in the seed of the checksum. No object is
// given up for that: the headers of all replicas have to be alike.
func TestNoMarkUnderADamagedHeader(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 2)}
	p := w.lane(1)
	ref := w.object(t, p)
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	m := w.Nodes[0].Memory.Bytes()
	off := int(w.Geometry.HeaderOff(block))
	h := proto.Header(proto.Word(m, off))
	proto.PutWord(m, off, uint64(proto.MakeHeader(h.State(), h.Kind(), h.Class(), h.Generation()^2, 0)))
	_, err := w.lane(2).Lane.MarkBad(ref.Addr)
	require.ErrorIs(t, err, slab.ErrCorrupt)
	proto.PutWord(m, off, uint64(h))
	_, _, err = w.lane(3).Lane.Read(ref, nil)
	require.NoError(t, err)
}

// The image of a dead writer stays where a birth behind a mark and its discard would have written: under the same version a reader of the freed
// object, whose READ has brought that image before the birth and V behind it, would return it. So the version of a mark is above that image.
func TestBirthBehindAMarkAndADeadImage(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 2)}
	p := w.lane(1)
	// V odd, so that the other place is A, before V.
	ref, err := p.Alloc.Alloc([]byte("payload"), alloc.Want{Replicas: 2, Capacity: 600})
	require.NoError(t, err)
	require.NoError(t, p.Alloc.Trim())
	if _, v := w.words(0, ref.Addr); v.Version()&1 == 0 {
		require.NoError(t, update(p.Lane, ref, []byte("payload")))
	}
	for i := uint32(2); i <= 3; i++ {
		d := w.lane(i)
		// CAS R, READ; image at P.
		require.True(t, diesBehind(d, 4, false, func() { _ = update(d.Lane, ref, []byte("dead")) }))
		w.Fence(i)
		// another writer wants it, and gives up: takeover
		o := w.lane(10 + i)
		_, err := o.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return nil, slab.ErrConflict })
		require.ErrorIs(t, err, slab.ErrConflict)
	}
	s := pairSlab(w.World, ref)
	_, v := w.words(0, ref.Addr)
	mem := w.Nodes[0].Memory.Bytes()
	before := append([]byte(nil), mem[s.Off:][:s.Class.Bytes()]...)
	left, _, whole := proto.DecodeImage(s.Image(before, v.Version()+1), proto.Seed(p.View().Seed, s.Off, ref.Incarnation.Generation()))
	require.True(t, whole, "the dead writer's image")
	w.lose(ref.Addr)
	o := w.lane(20)
	mark, err := o.Lane.MarkBad(ref.Addr)
	require.NoError(t, err)
	c, err := o.Lane.FreeBad(mark)
	require.NoError(t, err)
	require.Greater(t, mark.Incarnation.Born(), left.Version)
	// another session claims this very slab: by a Birth under a reservation of ours
	q := w.lane(21)
	r := q.Reservation()
	proto.PutWord(mem, int(s.ROff()), uint64(r))
	c.Reg, c.R, c.Held = q.View(), r, true
	// A reader with the old reference: its READ has brought A before, and V after.
	rd := w.lane(22)
	var torn bool
	born := proto.Ref{}
	rd.AfterDo = readHook(t, s, before, mem, func() {
		var err error
		born, err = q.Lane.Birth(c, []byte("committed"), 0)
		require.NoError(t, err)
	}, &torn)
	_, _, err = rd.Lane.Read(ref, nil)
	require.True(t, torn)
	require.False(t, born.IsZero())
	require.ErrorIs(t, err, slab.ErrFreed)
}

// readHook makes the first READ of the slab a slow one: bytes below R are as before, the rest as behind f.
func readHook(t *testing.T, s proto.Slab, before, mem []byte, f func(), torn *bool) func(int, *rdma.Round) {
	return func(_ int, r *rdma.Round) {
		for i := range r.Len() {
			for _, v := range r.At(i).Verbs {
				if v.Op == rdma.Read && v.Off >= s.Off && v.Off < s.Off+uint64(s.Class.Bytes()) && len(v.Buf) > 16 && !*torn {
					*torn = true
					f()
					for k := range v.Buf {
						at := v.Off + uint64(k)
						if at < s.ROff() {
							v.Buf[k] = before[at-s.Off]
						} else {
							v.Buf[k] = mem[at]
						}
					}
				}
			}
		}
	}
}

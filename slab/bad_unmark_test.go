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

// lostAndMarked is an object that is lost, and the reference of its mark.
func (w *badWorld) lostAndMarked(t *testing.T, p *slabtest.Port) (ref, mark proto.Ref) {
	t.Helper()
	ref = w.object(t, p)
	w.lose(ref.Addr)
	mark, err := p.Lane.MarkBad(ref.Addr)
	require.NoError(t, err)
	p.Lane.Rest()
	return ref, mark
}

// V of one replica is damaged when the slab is marked. Nothing takes the mark away, nothing is changed, and the error is not that the mark is gone; once V of the replicas is
// alike again it is taken away.
func TestMarkWithADamagedV(t *testing.T) {
	badKinds(t, func(t *testing.T, w *badWorld) {
		for replica := range w.Nodes {
			p := w.lane(w.next())
			ref, mark := w.lostAndMarked(t, p)
			k := mark.Incarnation.Born()
			vs := []proto.V{proto.MakeV(proto.StateBad, k) | 1<<60}
			if replica > 0 {
				vs = append(vs, proto.MakeV(proto.StateFree, k), proto.MakeV(proto.StateBad, k+2), proto.MakeV(proto.StateLive, k-1))
			}
			at := int(pairSlab(w.World, ref).VOff())
			for _, v := range vs {
				mem := w.Nodes[replica].Memory.Bytes()
				was := proto.Word(mem, at)
				proto.PutWord(mem, at, uint64(v))
				has, err := p.Lane.HasMark(mark)
				if replica == 0 {
					require.ErrorIs(t, err, slab.ErrCorrupt)
				} else {
					require.NoError(t, err)
					require.True(t, has)
				}
				_, err = p.Lane.FreeBad(mark)
				require.ErrorIs(t, err, slab.ErrCorrupt)
				require.NotErrorIs(t, err, slab.ErrUnknown)
				_, err = p.Lane.Restore(ref, k, []byte("x"), 0)
				require.ErrorIs(t, err, slab.ErrCorrupt)
				for i := range w.Nodes {
					_, now := w.words(i, ref.Addr)
					if i == replica {
						require.Equal(t, v, now)
					} else {
						require.Equal(t, proto.MakeV(proto.StateBad, k), now.Settled())
					}
				}
				if replica == 0 {
					proto.PutWord(mem, at, was)
				} else {
					require.NoError(t, p.Lane.RepairFree(ref.Addr))
				}
				require.Equal(t, proto.MakeV(proto.StateBad, k), w.same(t, ref.Addr))
			}
			_, err := p.Lane.Restore(ref, k, []byte("x"), 0)
			require.NoError(t, err)
			has, err := p.Lane.HasMark(mark)
			require.NoError(t, err)
			require.False(t, has)
		}
	})
}

// No object is ever born at the version of a mark, also of one that a reconcile has made. So what is left of a mark when its object has been restored names nothing.
func TestMarkOfAReconcileIsNoReference(t *testing.T) {
	badKinds(t, func(t *testing.T, w *badWorld) {
		p := w.lane(1)
		ref, err := p.Alloc.Alloc([]byte("never updated"), w.want())
		require.NoError(t, err)
		require.NoError(t, p.Alloc.Trim())
		p.Lane.Rest()
		w.lose(ref.Addr)
		p.NextEpoch()
		for range 2 { // the second one changes nothing
			reg, err := p.Region(1)
			require.NoError(t, err)
			st, err := p.Lane.Reconcile(reg)
			require.NoError(t, err)
			require.LessOrEqual(t, st.Bad, 1)
		}
		v := w.same(t, ref.Addr)
		require.Equal(t, proto.StateBad, v.State())
		require.Greater(t, v.Version(), ref.Incarnation.Born())
		mark, err := p.Lane.MarkBad(ref.Addr)
		require.NoError(t, err)
		require.Equal(t, v.Version(), mark.Incarnation.Born())
		_, err = p.Lane.Restore(ref, v.Version(), []byte("restored"), 0)
		require.NoError(t, err)
		_, _, _, err = p.Lane.Free(mark, false)
		require.ErrorIs(t, err, slab.ErrFreed)
		_, err = p.Lane.FreeBad(mark)
		require.ErrorIs(t, err, slab.ErrFreed)
		got, _, err := p.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Equal(t, "restored", string(got))
	})
}

// A dead writer has left an image, above V, at the backup. The mark of a reconcile is above it, and so is all that is born behind it.
func TestMarkOfAReconcileIsAboveAllImages(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 2)}
	dead, o := w.lane(1), w.lane(2)
	ref := w.object(t, dead)
	_, v := w.words(0, ref.Addr)
	// CAS R and two READs at P; the image at the backup, and not V.
	require.True(t, diesBehind(dead, 3+1, true, func() { _ = update(dead.Lane, ref, []byte("dead")) }))
	w.lose(ref.Addr)
	left := proto.ParseImageHeader(w.Nodes[1].Memory.Bytes()[pairSlab(w.World, ref).ImageOff(v.Version()+1):]).Version
	require.Greater(t, left, v.Version())
	o.NextEpoch()
	reg, err := o.Region(1)
	require.NoError(t, err)
	_, err = o.Lane.Reconcile(reg)
	require.NoError(t, err)
	require.Greater(t, w.same(t, ref.Addr).Version(), left)
}

// A FreeBad dies when V is FREE@m at one replica, where words are open. A reader may have seen that, and asks others for m by its number alone: a Restore has another. The same goes for
// a Free and a mark.
func TestDeadFreeSharesNoVersion(t *testing.T) {
	for _, kind := range []proto.Kind{proto.Pair, proto.Single} {
		for _, marked := range []bool{false, true} {
			w := &badWorld{World: slabtest.New(t, 2), kind: kind, open: true}
			p, dead := w.lane(1), w.lane(2)
			var ref, mark proto.Ref
			if marked {
				ref, mark = w.lostAndMarked(t, p)
				// READ of the header, CAS R and READ at P, READ of both, CAS V at the backup.
				require.True(t, diesBehind(dead, 1+2+2+1, true, func() { _, _ = dead.Lane.FreeBad(mark) }))
			} else { // what a Free leaves when the object is damaged behind its look
				ref = w.object(t, p)
				w.lose(ref.Addr)
				s := pairSlab(w.World, ref)
				_, v := w.words(0, ref.Addr)
				proto.PutWord(w.Nodes[0].Memory.Bytes(), int(s.ROff()), uint64(dead.Reservation()))
				proto.PutWord(w.Nodes[1].Memory.Bytes(), int(s.VOff()), uint64(proto.MakeV(proto.StateFree, v.Version()+1).Open()))
			}
			_, seen := w.words(1, ref.Addr)
			require.True(t, seen.IsOpen())
			require.Equal(t, proto.StateFree, seen.Settled().State())
			w.Fence(2)
			var got uint64
			if marked {
				info, err := p.Lane.Restore(ref, mark.Incarnation.Born(), []byte("x"), 0)
				require.NoError(t, err)
				got = info.Version
			} else {
				mark, err := p.Lane.MarkBad(ref.Addr)
				require.NoError(t, err)
				got = mark.Incarnation.Born()
			}
			require.NotEqual(t, seen.Version(), got, "%v, marked=%v", kind, marked)
		}
	}
}

// The payload of a chunk is a part of that of a large object. It is not restored by itself.
func TestChunkIsNotRestored(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 2), kind: proto.Single}
	p := w.lane(1)
	want := w.want()
	want.Tag = proto.TagChunk
	ref, err := p.Alloc.Alloc([]byte("chunk"), want)
	require.NoError(t, err)
	w.lose(ref.Addr)
	mark, err := p.Lane.MarkBad(ref.Addr)
	require.NoError(t, err)
	_, err = p.Lane.Restore(ref, mark.Incarnation.Born(), []byte("x"), 0)
	require.ErrorIs(t, err, slab.ErrImmutable)
	require.Equal(t, proto.StateBad, w.same(t, ref.Addr).State())
	_, err = p.Lane.FreeBad(mark)
	require.NoError(t, err)
}

// L of a slab whose object is restored leads to nothing, whatever has damaged it.
func TestRestoreMendsL(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 1), kind: proto.Staged}
	p := w.lane(1)
	ref := w.object(t, p)
	w.lose(ref.Addr)
	s := pairSlab(w.World, ref)
	proto.PutWord(w.Nodes[0].Memory.Bytes(), int(s.LOff()), 1<<63|5)
	mark, err := p.Lane.MarkBad(ref.Addr)
	require.NoError(t, err)
	info, err := p.Lane.Restore(ref, mark.Incarnation.Born(), []byte("x"), 0)
	require.NoError(t, err)
	_, _, lead := wordsOf(w.World, ref)
	require.Equal(t, proto.MakeGone(info.Version), lead)
}

// spoilShadow calls f with what each READ of the shadow of an object has brought, and its number from 0.
func spoilShadow(p *slabtest.Port, lead proto.Locator, f func(n int, img []byte)) {
	n := 0
	p.AfterDo = func(_ int, r *rdma.Round) {
		for i := range r.Len() {
			for _, v := range r.At(i).Verbs {
				if v.Op == rdma.Read && v.Off == uint64(lead.Off())+proto.StagedLead {
					f(n, v.Buf)
					n++
				}
			}
		}
	}
}

// Home is damaged, and the shadow is whole. A READ of the shadow that brings other bytes neither gives the object up nor makes L lead elsewhere.
func TestShadowIsReadAgain(t *testing.T) {
	for _, c := range []struct {
		reads int // spoilt: one by who takes R, two by isLost
		want  error
	}{{0, slab.ErrWhole}, {2, slab.ErrWhole}, {3, slab.ErrBusy}} {
		w, p, ref, way := shadowed(t)
		require.NoError(t, update(p.Lane, ref, way.next(nil, 2)))
		_, v, lead := wordsOf(w, ref)
		require.Equal(t, proto.RecordShadow, lead.Kind())
		home := w.Nodes[0].Memory.Bytes()[ref.Addr.Off()+proto.StagedLead:]
		home[proto.ImageHeaderBytes] ^= 1
		o := w.Lane(2)
		spoilShadow(o, lead, func(n int, img []byte) {
			if n < c.reads {
				img[proto.ImageHeaderBytes+n] ^= 1
			}
		})
		_, err := o.Lane.MarkBad(ref.Addr)
		require.ErrorIs(t, err, c.want, "%d", c.reads)
		got, info, err := w.Lane(3).Lane.Read(ref, nil)
		require.NoError(t, err, "%d", c.reads)
		require.Equal(t, way.next(nil, 2), got)
		require.Equal(t, v.Version(), info.Version)
	}
}

// Home is damaged where the record patches it: what a session sees of the slab is whole. It writes home before it makes L lead elsewhere.
func TestHomeIsWrittenFromTheRecord(t *testing.T) {
	w := slabtest.New(t, 1)
	p, o := w.Lane(1), w.Lane(2)
	way := stagedWays[0]
	ref, err := p.Alloc.Alloc(make([]byte, way.bytes), alloc.Want{Kind: proto.Staged, Replicas: 1, Capacity: way.capacity})
	require.NoError(t, err)
	next := way.next(make([]byte, way.bytes), 2)
	require.NoError(t, update(p.Lane, ref, next))
	_, v, lead := wordsOf(w, ref)
	require.Equal(t, proto.RecordInline, lead.Kind())
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	s := pairSlab(w, ref)
	mem := w.Nodes[0].Memory.Bytes()
	home := mem[ref.Addr.Off()+proto.StagedLead:]
	damaged := false
	for i := range way.bytes { // the record has what the update changed
		home[proto.ImageHeaderBytes+i] ^= 1
		seen := append([]byte(nil), mem[s.Off:][:s.Class.Bytes()]...)
		seed := proto.Seed(p.View().Seed, s.Off, proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(block)))).Generation())
		if _, _, from := s.Compose(seen, v.Version(), seed); from == proto.FromRecord {
			damaged = true
			break
		}
		home[proto.ImageHeaderBytes+i] ^= 1
	}
	require.True(t, damaged)
	_, err = o.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
		require.Equal(t, next, old)
		require.Equal(t, next, home[proto.ImageHeaderBytes:][:len(next)])
		return nil, slab.ErrConflict
	})
	require.ErrorIs(t, err, slab.ErrConflict)
}

// A primary that has been replaced does not know the blocks that were formatted since. A session whose lease is over says nothing of what it READs there.
func TestNoReferenceIsBadWithoutALease(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 1)}
	ref := w.object(t, w.lane(1))
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	proto.PutWord(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block)), 0) // FREE
	o := w.lane(2)
	_, _, err := o.Lane.Read(ref, nil)
	require.ErrorIs(t, err, slab.ErrBadRef)
	o.Lease.Store(false)
	_, _, err = o.Lane.Read(ref, nil)
	require.ErrorIs(t, err, slab.ErrLease)
	require.NotErrorIs(t, err, slab.ErrBadRef)
}

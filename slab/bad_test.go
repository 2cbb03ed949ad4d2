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

// badWorld is a region in which objects are lost.
type badWorld struct {
	*slabtest.World
	kind     proto.Kind
	open     bool   // words may be open
	sessions uint32 // so far
}

// next is the number of another session.
func (w *badWorld) next() uint32 {
	w.sessions++
	return w.sessions
}

// lane is a lane that reads at the last replica where words are open.
func (w *badWorld) lane(session uint32) *slabtest.Port {
	p := w.Lane(session)
	if w.open {
		p.OpenWords(len(w.Nodes) - 1)
	}
	return p
}

// words are R and V at a replica.
func (w *badWorld) words(replica int, at proto.Addr) (proto.R, proto.V) {
	return pairSlab(w.World, proto.Ref{Addr: at}).Words(w.Nodes[replica].Memory.Bytes()[at.Off():])
}

// damage flips a bit of the payload that V names, at a replica. The record of a STAGED slab goes too.
func (w *badWorld) damage(replica int, at proto.Addr) {
	s := pairSlab(w.World, proto.Ref{Addr: at})
	_, v := w.words(replica, at)
	w.Nodes[replica].Memory.Bytes()[s.ImageOff(v.Version())+proto.ImageHeaderBytes] ^= 4
	if s.Kind == proto.Staged {
		proto.PutWord(w.Nodes[replica].Memory.Bytes(), int(s.LOff()), 0)
	}
}

// lose damages the object at all replicas.
func (w *badWorld) lose(at proto.Addr) {
	for i := range w.Nodes {
		w.damage(i, at)
	}
}

// same is V, settled, of all replicas. R is free.
func (w *badWorld) same(t *testing.T, at proto.Addr) proto.V {
	t.Helper()
	r, v := w.words(0, at)
	require.Zero(t, r)
	for i := range w.Nodes {
		_, o := w.words(i, at)
		require.Equal(t, v.Settled(), o.Settled(), "replica %d", i)
	}
	return v.Settled()
}

// badKinds calls f with regions of all kinds.
func badKinds(t *testing.T, f func(t *testing.T, w *badWorld)) {
	for _, c := range []struct {
		replicas int
		kind     proto.Kind
		open     bool
	}{{1, proto.Pair, false}, {2, proto.Pair, false}, {3, proto.Pair, false}, {2, proto.Pair, true}, {3, proto.Pair, true}, {2, proto.Single, false},
		{2, proto.Single, true}, {1, proto.Staged, false}} {
		t.Run(fmt.Sprintf("R=%d,%v,open=%v", c.replicas, c.kind, c.open), func(t *testing.T) {
			f(t, &badWorld{World: slabtest.New(t, c.replicas), kind: c.kind, open: c.open})
		})
	}
}

// want is for large slabs, of which a region has few.
func (w *badWorld) want() alloc.Want {
	return alloc.Want{Replicas: len(w.Nodes), Kind: w.kind, Capacity: 6000}
}

// object makes an object, on its third version if it can be written.
func (w *badWorld) object(t *testing.T, p *slabtest.Port) proto.Ref {
	ref, err := p.Alloc.Alloc([]byte("payload"), w.want())
	require.NoError(t, err)
	for range 2 {
		if w.kind != proto.Single {
			require.NoError(t, update(p.Lane, ref, []byte("payload")))
		}
	}
	require.NoError(t, p.Alloc.Trim()) // lanes come and go
	p.Lane.Rest()
	return ref
}

// An object of which no replica has a whole image is marked. Nothing but FreeBad, with the reference of the mark, changes the slab then; another
// object can be born in it.
func TestLostObjectIsMarkedAndGivenUp(t *testing.T) {
	badKinds(t, func(t *testing.T, w *badWorld) {
		p, o := w.lane(1), w.lane(2)
		ref := w.object(t, p)
		w.lose(ref.Addr)
		was := w.same(t, ref.Addr)
		mark, err := o.Lane.MarkBad(ref.Addr)
		require.NoError(t, err)
		o.Lane.Rest()
		v := w.same(t, ref.Addr)
		require.Equal(t, proto.StateBad, v.State())
		require.Greater(t, v.Version(), was.Version())
		require.Equal(t, proto.Ref{Addr: ref.Addr, Incarnation: proto.MakeIncarnation(ref.Incarnation.Generation(), v.Version())}, mark)
		again, err := p.Lane.MarkBad(ref.Addr)
		require.NoError(t, err)
		require.Equal(t, mark, again)
		for name, f := range map[string]func(proto.Ref) error{
			"read":   func(r proto.Ref) error { _, _, err := p.Lane.Read(r, nil); return err },
			"repair": p.Lane.Repair,
			"all":    p.Lane.RepairAll,
			"free":   func(r proto.Ref) error { _, _, _, err := p.Lane.Free(r, false); return err },
			"update": func(r proto.Ref) error {
				if w.kind == proto.Single {
					return slab.ErrBad
				}
				return update(p.Lane, r, []byte("new"))
			},
			"batch": func(r proto.Ref) error {
				if w.kind == proto.Single {
					return slab.ErrBad
				}
				errs := make([]error, 1)
				p.Lane.WriteMany([]proto.Ref{r}, [][]byte{[]byte("new")}, errs)
				return errs[0]
			},
		} {
			for _, r := range []proto.Ref{ref, mark} {
				err := f(r)
				require.ErrorIs(t, err, slab.ErrBad, name)
				require.ErrorIs(t, err, slab.ErrCorrupt, name)
			}
		}
		require.Equal(t, v, w.same(t, ref.Addr))
		require.ErrorIs(t, p.Alloc.FreeBad(ref), slab.ErrFreed, "not the mark")
		require.NoError(t, p.Alloc.FreeBad(mark))
		require.ErrorIs(t, p.Alloc.FreeBad(mark), slab.ErrFreed)
		p.Lane.Rest()
		v = w.same(t, ref.Addr)
		require.Equal(t, proto.StateFree, v.State())
		require.Greater(t, v.Version(), mark.Incarnation.Born())
		_, _, err = o.Lane.Read(ref, nil)
		require.ErrorIs(t, err, slab.ErrFreed)
		require.NoError(t, p.Alloc.Trim())
		require.NoError(t, o.Alloc.Trim())
		for n := 0; ; n++ {
			require.Less(t, n, 5000, "the slab is used again")
			born, err := p.Alloc.Alloc([]byte("other"), w.want())
			require.NoError(t, err)
			if born.Addr == ref.Addr {
				require.Greater(t, born.Incarnation.Born(), v.Version())
				break
			}
		}
	})
}

// Nothing is marked while a replica may have the object, or the session cannot know.
func TestWhatIsNotLostIsNotMarked(t *testing.T) {
	badKinds(t, func(t *testing.T, w *badWorld) {
		replicas := len(w.Nodes)
		for name, c := range map[string]struct {
			min  int // replicas
			f    func(t *testing.T, o *slabtest.Port, s proto.Slab)
			want error
		}{
			"whole": {1, func(_ *testing.T, _ *slabtest.Port, s proto.Slab) { // everywhere
				for i := range replicas {
					w.damage(i, proto.MakeAddr(1, uint32(s.Off)))
				}
			}, slab.ErrWhole},
			"whole at the last replica": {2, func(_ *testing.T, _ *slabtest.Port, s proto.Slab) {
				w.damage(replicas-1, proto.MakeAddr(1, uint32(s.Off)))
			}, slab.ErrWhole},
			"another V at the last replica": {2, func(_ *testing.T, _ *slabtest.Port, s proto.Slab) {
				at := int(s.VOff())
				m := w.Nodes[replicas-1].Memory.Bytes()
				proto.PutWord(m, at, proto.Word(m, at)+2)
			}, slab.ErrCorrupt},
			"no V": {1, func(_ *testing.T, _ *slabtest.Port, s proto.Slab) {
				m := w.Nodes[0].Memory.Bytes()
				proto.PutWord(m, int(s.VOff()), proto.Word(m, int(s.VOff()))|1<<61)
			}, slab.ErrCorrupt},
			"rebuilding": {2, func(_ *testing.T, o *slabtest.Port, _ proto.Slab) { o.Rebuilding(replicas - 1) }, slab.ErrBusy},
			"no lease":   {1, func(_ *testing.T, o *slabtest.Port, _ proto.Slab) { o.Lease.Store(false) }, slab.ErrLease},
			"two READs differ": {1, func(t *testing.T, o *slabtest.Port, s proto.Slab) {
				flipped := false
				o.AfterDo = func(_ int, r *rdma.Round) {
					for i := range r.Len() {
						for _, v := range r.At(i).Verbs {
							if v.Op == rdma.Read && v.Off == s.Off && r.Len() == replicas && len(r.At(i).Verbs) == 1 && !flipped {
								v.Buf[s.ImageOff(2)-s.Off+proto.ImageHeaderBytes] ^= 1
								flipped = true
							}
						}
					}
				}
				t.Cleanup(func() { require.True(t, flipped) })
			}, slab.ErrBusy},
		} {
			if replicas < c.min {
				continue
			}
			t.Run(name, func(t *testing.T) {
				p, o := w.lane(1), w.lane(2)
				ref := w.object(t, p)
				w.lose(ref.Addr)
				c.f(t, o, pairSlab(w.World, ref))
				var was [3]proto.V
				for i := range replicas {
					_, was[i] = w.words(i, ref.Addr)
				}
				_, err := o.Lane.MarkBad(ref.Addr)
				require.ErrorIs(t, err, c.want)
				r, _ := w.words(0, ref.Addr)
				require.Zero(t, r)
				for i := range replicas {
					_, v := w.words(i, ref.Addr)
					require.Equal(t, was[i], v)
				}
			})
		}
	})
}

// A writer holds the slab while its image is damaged, and commits: the mark waits, and finds the new image.
func TestMarkWaitsForTheWriter(t *testing.T) {
	badKinds(t, func(t *testing.T, w *badWorld) {
		if w.kind == proto.Single {
			return
		}
		p, o := w.lane(1), w.lane(2)
		ref := w.object(t, p)
		waits := 0
		o.OnPause = func(int) error { waits++; return nil }
		end := make(chan error)
		_, err := p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) {
			w.lose(ref.Addr)
			go func() {
				_, err := o.Lane.MarkBad(ref.Addr)
				end <- err
			}()
			return []byte("written"), nil
		})
		require.NoError(t, err)
		p.Lane.Rest()
		require.ErrorIs(t, <-end, slab.ErrWhole)
		got, _, err := o.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Equal(t, "written", string(got))
	})
}

// The session that marks, gives up or restores dies behind each verb. Another one finds the slab as it was before or after, at all
// replicas, after a takeover and after a reconcile, and does the same thing.
func TestMarkerDiesAtEachVerb(t *testing.T) {
	for _, op := range []string{"mark", "give up", "restore"} {
		for _, epoch := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,epoch=%v", op, epoch), func(t *testing.T) {
				badKinds(t, func(t *testing.T, w *badWorld) {
					step := slabtest.Stride(t, 7, 9)
					for verbs, died := 0, true; died; verbs += step {
						died = false
						for _, backwards := range []bool{false, true} {
							died = w.markerDies(t, op, epoch, verbs, backwards) || died
						}
					}
				})
			})
		}
	}
}

func (w *badWorld) markerDies(t *testing.T, op string, epoch bool, verbs int, backwards bool) (died bool) {
	p := w.lane(w.next())
	session := w.next()
	dead, o := w.lane(session), w.lane(w.next())
	ref := w.object(t, p)
	w.lose(ref.Addr)
	mark := proto.Ref{}
	if op != "mark" {
		var err error
		mark, err = p.Lane.MarkBad(ref.Addr)
		require.NoError(t, err)
		p.Lane.Rest()
	}
	was := w.same(t, ref.Addr)
	do := func(q *slabtest.Port, payload string) (err error) {
		switch op {
		case "mark":
			mark, err = q.Lane.MarkBad(ref.Addr)
		case "give up":
			_, err = q.Lane.FreeBad(mark)
		case "restore":
			_, err = q.Lane.Restore(ref, mark.Incarnation.Born(), []byte(payload), 0)
		}
		q.Lane.Rest()
		return err
	}
	died = diesBehind(dead, verbs, backwards, func() { require.NoError(t, do(dead, "of the dead")) })
	w.Fence(session)
	if epoch {
		o.NextEpoch()
		reg, err := o.Region(1)
		require.NoError(t, err)
		_, err = o.Lane.Reconcile(reg)
		require.NoError(t, err)
		now := w.same(t, ref.Addr)
		require.True(t, now == was || now.State() != was.State(), "%v behind %v", now, was)
		require.GreaterOrEqual(t, now.Version(), was.Version())
	}
	now := proto.V(0)
	switch err := do(o, "of the taker"); {
	case err == nil:
		now = w.same(t, ref.Addr)
		require.True(t, now.Version() > was.Version() || op == "mark" && epoch)
	default: // the dead session has done it
		require.ErrorIs(t, err, slab.ErrFreed)
		require.NotEqual(t, "mark", op)
		reg, err := o.Region(1)
		require.NoError(t, err)
		block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		_, err = o.Lane.ScrubOnly(reg, block, func(id uint32) bool { return id == session })
		require.NoError(t, err)
		now = w.same(t, ref.Addr)
	}
	require.Equal(t, map[string]proto.State{"mark": proto.StateBad, "give up": proto.StateFree, "restore": proto.StateLive}[op], now.State())
	if op == "restore" {
		got, _, err := o.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Contains(t, []string{"of the dead", "of the taker"}, string(got))
		if w.kind != proto.Single {
			require.NoError(t, update(o.Lane, ref, []byte("next")))
		}
	}
	return died
}

// An object that was restored has the new payload under its reference.
func TestRestore(t *testing.T) {
	badKinds(t, func(t *testing.T, w *badWorld) {
		p, o := w.lane(1), w.lane(2)
		ref := w.object(t, p)
		w.lose(ref.Addr)
		_, err := p.Lane.Restore(ref, 3, []byte("early"), 0)
		require.Error(t, err, "not marked")
		mark, err := p.Lane.MarkBad(ref.Addr)
		require.NoError(t, err)
		p.Lane.Rest()
		k := mark.Incarnation.Born()
		_, err = o.Lane.Restore(ref, k+1, []byte("x"), 0)
		require.Error(t, err, "another mark")
		later := ref
		later.Incarnation = proto.MakeIncarnation(ref.Incarnation.Generation(), k+1)
		_, err = o.Lane.Restore(later, k, []byte("x"), 0)
		require.ErrorIs(t, err, slab.ErrBadRef)
		_, err = o.Lane.Restore(mark, k, []byte("x"), 0)
		require.ErrorIs(t, err, slab.ErrBadRef, "no object is born at the mark")
		require.Equal(t, proto.MakeV(proto.StateBad, k), w.same(t, ref.Addr))
		info, err := o.Lane.Restore(ref, k, []byte("from a copy"), 7)
		require.NoError(t, err)
		o.Lane.Rest()
		require.Greater(t, info.Version, k)
		require.Equal(t, ref.Incarnation.Born(), info.Born)
		require.Equal(t, proto.MakeV(proto.StateLive, info.Version), w.same(t, ref.Addr))
		got, info, err := p.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Equal(t, "from a copy", string(got))
		require.EqualValues(t, 7, info.Tag)
		if w.kind != proto.Single {
			require.NoError(t, update(p.Lane, ref, []byte("next")))
		}
		require.ErrorIs(t, o.Alloc.FreeBad(mark), slab.ErrFreed)
		_, _, err = p.Alloc.Free(ref)
		require.NoError(t, err)
	})
}

// A mark of an agent of an earlier version has the version of the lost object, which may be born at it.
func TestRestoreByAMarkOfAnEarlierVersion(t *testing.T) {
	w := &badWorld{World: slabtest.New(t, 2)}
	p := w.lane(1)
	ref, err := p.Alloc.Alloc([]byte("x"), w.want())
	require.NoError(t, err)
	w.lose(ref.Addr)
	s := pairSlab(w.World, ref)
	for _, n := range w.Nodes {
		proto.PutWord(n.Memory.Bytes(), int(s.VOff()), uint64(proto.MakeV(proto.StateBad, ref.Incarnation.Born())))
	}
	_, err = p.Lane.Restore(ref, ref.Incarnation.Born(), []byte("from a copy"), 0)
	require.NoError(t, err)
	got, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "from a copy", string(got))
}

// A writer has died when its image was whole at the backup. The object is lost then. Its mark is above that image; nobody takes the image for the object, also where a mark has
// its version.
func TestMarkNamesNoImage(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		w := &badWorld{World: slabtest.New(t, 2)}
		dead, o := w.lane(1), w.lane(2)
		ref := w.object(t, dead)
		_, was := w.words(0, ref.Addr)
		// CAS R and READ at P; WRITE at P, WRITE and CAS of V at the backup.
		require.True(t, diesBehind(dead, 2+2, true, func() { _ = update(dead.Lane, ref, []byte("dead")) }))
		w.Fence(1)
		s := pairSlab(w.World, ref)
		for _, n := range w.Nodes {
			n.Memory.Bytes()[s.ImageOff(was.Version())+proto.ImageHeaderBytes] ^= 4
		}
		other := s.Image(w.Nodes[1].Memory.Bytes()[s.Off:][:s.Class.Bytes()], was.Version()+1)
		h, payload, whole := proto.DecodeImage(other, proto.Seed(o.View().Seed, s.Off, ref.Incarnation.Generation()))
		require.True(t, whole)
		require.Equal(t, "dead", string(payload))
		mark, err := o.Lane.MarkBad(ref.Addr)
		require.NoError(t, err)
		require.Greater(t, mark.Incarnation.Born(), h.Version, "for programs of earlier versions, which would take that image")
		for _, n := range w.Nodes { // a mark of such a program
			proto.PutWord(n.Memory.Bytes(), int(s.VOff()), uint64(proto.MakeV(proto.StateBad, h.Version)))
		}
		if readOnly {
			o.ReadOnly()
		}
		_, _, err = o.Lane.Read(ref, nil)
		require.ErrorIs(t, err, slab.ErrBad)
		if !readOnly {
			require.ErrorIs(t, o.Lane.Repair(ref), slab.ErrBad)
		}
		require.Equal(t, proto.MakeV(proto.StateBad, h.Version), w.same(t, ref.Addr))
	}
}

// The version of a Restore that has reached one replica is not given again where words are open.
func TestRestoredVersionIsUsedUp(t *testing.T) {
	for _, way := range []string{"takeover", "reconcile"} {
		t.Run(way, func(t *testing.T) {
			w := &badWorld{World: slabtest.New(t, 2), open: true}
			dead := w.lane(1)
			ref := w.object(t, dead)
			w.lose(ref.Addr)
			mark, err := dead.Lane.MarkBad(ref.Addr)
			require.NoError(t, err)
			dead.Lane.Rest()
			k := mark.Incarnation.Born()
			// CAS R and READ at P, READ at both; then the image alone at the backup.
			require.True(t, diesBehind(dead, 5, true, func() { _, _ = dead.Lane.Restore(ref, k, []byte("dead"), 0) }))
			s := pairSlab(w.World, ref)
			left := uint64(0)
			for place := range uint64(2) {
				left = max(left, proto.ParseImageHeader(w.Nodes[1].Memory.Bytes()[s.ImageOff(place):]).Version)
			}
			require.Greater(t, left, k, "the image stands at the backup")
			next := w.lane(2)
			if way == "reconcile" {
				_, err := next.Lane.Reconcile(next.View())
				require.NoError(t, err)
			} else {
				w.Fence(1)
			}
			info, err := next.Lane.Restore(ref, k, []byte("next"), 0)
			require.NoError(t, err)
			require.Greater(t, info.Version, left)
		})
	}
}

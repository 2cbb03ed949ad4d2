package slab_test

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// openLane is a lane that takes the region for one with open words, and reads at a replica.
func openLane(w *slabtest.World, session uint32, from int) *slabtest.Port {
	p := w.Lane(session)
	p.OpenWords(from)
	return p
}

// vAt is V of a PAIR slab at a replica.
func vAt(w *slabtest.World, ref proto.Ref, replica int) proto.V {
	return proto.V(proto.Word(w.Nodes[replica].Memory.Bytes(), int(pairSlab(w, ref).VOff())))
}

func pairSlab(w *slabtest.World, ref proto.Ref) proto.Slab {
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	h := proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
	return proto.Slab{Off: uint64(ref.Addr.Off()), Class: h.Class(), Kind: h.Kind()}
}

// The cost of operations where words are open: rounds that the caller waits for, the verbs of all
// replicas, those that are posted behind the answer among them, and fences.
func TestCostOfOpenWords(t *testing.T) {
	for _, c := range []struct {
		replicas                         int
		durable                          bool
		birth, update, free, read, batch [3]uint64 // rounds, verbs, fences
	}{
		{replicas: 2, birth: [3]uint64{1, 7, 1}, update: [3]uint64{2, 9, 1}, free: [3]uint64{2, 7, 1}, read: [3]uint64{1, 1, 0}, batch: [3]uint64{2, 64 * 9, 1}},
		{replicas: 3, birth: [3]uint64{1, 10, 1}, update: [3]uint64{2, 12, 1}, free: [3]uint64{2, 9, 1}, read: [3]uint64{1, 1, 0}, batch: [3]uint64{2, 64 * 12, 1}},
		{replicas: 2, durable: true, birth: [3]uint64{1, 11, 5}, update: [3]uint64{2, 13, 5}, free: [3]uint64{2, 9, 3}, read: [3]uint64{1, 1, 0}, batch: [3]uint64{4, 64 * 13, 10}},
	} {
		t.Run(fmt.Sprintf("R=%d,durable=%v", c.replicas, c.durable), func(t *testing.T) {
			w := slabtest.New(t, c.replicas)
			p := openLane(w, 1, c.replicas-1)
			if c.durable {
				p.Durable()
			}
			want := alloc.Want{Replicas: c.replicas}
			refs := make([]proto.Ref, 64)
			payloads, errs := make([][]byte, len(refs)), make([]error, len(refs))
			for i := range refs {
				var err error
				refs[i], err = p.Alloc.Alloc([]byte("first"), want)
				require.NoError(t, err)
				payloads[i] = fmt.Append(nil, i)
			}
			_, err := p.Alloc.Alloc([]byte("fills the magazine"), want)
			require.NoError(t, err)
			p.Lane.Rest()
			cost := func(f func()) [3]uint64 {
				was := *p.Lane.Tally()
				f()
				now := p.Lane.Tally()
				return [3]uint64{now.Rounds - was.Rounds, now.AllVerbs() - was.AllVerbs(), now.Fences - was.Fences}
			}
			var made proto.Ref
			require.Equal(t, c.birth, cost(func() {
				var err error
				made, err = p.Alloc.Alloc([]byte("born"), want)
				require.NoError(t, err)
			}), "birth")
			require.Equal(t, c.update, cost(func() { require.NoError(t, update(p.Lane, made, []byte("new"))) }), "update")
			p.Lane.Rest()
			require.Equal(t, c.read, cost(func() {
				got, _, err := p.Lane.Read(made, nil)
				require.NoError(t, err)
				require.Equal(t, "new", string(got))
			}), "read at a backup")
			require.Equal(t, c.batch, cost(func() { p.Lane.WriteMany(refs, payloads, errs) }), "batch")
			p.Lane.Rest()
			for i, ref := range refs {
				require.NoError(t, errs[i])
				got, _, err := p.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, payloads[i], got)
			}
			require.Equal(t, c.free, cost(func() {
				_, _, _, err := p.Lane.Free(made, false)
				require.NoError(t, err)
			}), "free")
			p.Lane.Rest()
			for i := range c.replicas {
				require.Equal(t, proto.StateFree, vAt(w, made, i).State())
				require.True(t, vAt(w, made, i).Valid(), "settled")
			}
		})
	}
}

func TestOpenUpdatesDoNotAllocate(t *testing.T) {
	w := slabtest.NewSHM(t, 3)
	p := openLane(w, 1, 1)
	ref, err := p.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: 3})
	require.NoError(t, err)
	next := []byte("next!")
	f := func([]byte, *slab.Info) ([]byte, error) { return next, nil }
	require.Zero(t, testing.AllocsPerRun(200, func() {
		if _, err := p.Lane.Update(ref, f); err != nil {
			t.Fatal(err)
		}
	}), "update")
	dst := make([]byte, 0, 64)
	require.Zero(t, testing.AllocsPerRun(200, func() {
		if _, _, err := p.Lane.Read(ref, dst); err != nil {
			t.Fatal(err)
		}
	}), "read")
}

// A reader at any replica answers by what all replicas have, in at most three rounds and without waiting for a writer.
func TestReadsOfOpenWords(t *testing.T) {
	const n = 3
	w := slabtest.New(t, n)
	var lanes [n]*slabtest.Port
	for from := range n {
		lanes[from] = openLane(w, uint32(1+from), from)
	}
	for _, c := range []struct {
		name string
		v    [n]int // above the committed version of before; negative: open
		sees int
	}{
		{"settled", [n]int{0, 0, 0}, 0},
		{"open at one", [n]int{0, 0, -1}, 0},
		{"open at two", [n]int{0, -1, -1}, 0},
		{"open at the primary", [n]int{-1, 0, 0}, 0},
		{"open at all", [n]int{-1, -1, -1}, 1},
		{"settled at one", [n]int{1, -1, -1}, 1},
		{"settle late at one", [n]int{1, 1, -1}, 1},
		{"next open at one, settle late", [n]int{-2, 1, -1}, 1},
		{"next open at two, settle late", [n]int{-2, -2, -1}, 1},
		{"next open at all", [n]int{-2, -2, -2}, 2},
	} {
		for from := range n {
			t.Run(fmt.Sprintf("%s,at %d", c.name, from), func(t *testing.T) {
				p := lanes[from]
				ref, err := p.Alloc.Alloc([]byte("value 0"), alloc.Want{Replicas: n})
				require.NoError(t, err)
				p.Lane.Rest()
				s := pairSlab(w, ref)
				base := vAt(w, ref, 0).Version()
				for i := range n {
					for k := 1; k <= abs(c.v[i]); k++ {
						putImage(p, ref, s, i, base, k)
					}
					putV(w, s, i, base, c.v[i])
				}
				before := p.Lane.Tally().Rounds
				got, info, err := p.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, fmt.Sprintf("value %d", c.sees), string(got))
				require.Equal(t, base+uint64(c.sees), info.Version)
				rounds := p.Lane.Tally().Rounds - before
				require.LessOrEqual(t, rounds, uint64(3))
				if c.v[from] >= 0 {
					require.EqualValues(t, 1, rounds, "a settled word needs no confirmation")
				}
			})
		}
	}
}

func abs(n int) int { return max(n, -n) }

// putImage writes "value k", of the version k above base, to a replica.
func putImage(p *slabtest.Port, ref proto.Ref, s proto.Slab, replica int, base uint64, k int) {
	var img [64]byte
	payload := fmt.Appendf(nil, "value %d", k)
	copy(img[proto.ImageHeaderBytes:], payload)
	b := proto.EncodeImage(img[:], proto.Seed(p.View().Seed, s.Off, ref.Incarnation.Generation()),
		proto.ImageHeader{Length: len(payload), Version: base + uint64(k), Born: ref.Incarnation.Born(), Writer: 1})
	copy(p.World.Nodes[replica].Memory.Bytes()[s.ImageOff(base+uint64(k)):], b)
}

// putV sets V of a replica to the version k above base, open if k is negative.
func putV(w *slabtest.World, s proto.Slab, replica int, base uint64, k int) {
	v := proto.MakeV(proto.StateLive, base+uint64(abs(k)))
	if k < 0 {
		v = v.Open()
	}
	proto.PutWord(w.Nodes[replica].Memory.Bytes(), int(s.VOff()), uint64(v))
}

// A reader has READ an open V, which is put back before it asks the others; they have a later version by then. What it has READ was never
// committed.
func TestReaderMeetsWhatWasPutBack(t *testing.T) {
	w := slabtest.New(t, 3)
	p := openLane(w, 1, 2)
	ref, err := p.Alloc.Alloc([]byte("value 0"), alloc.Want{Replicas: 3})
	require.NoError(t, err)
	p.Lane.Rest()
	s, base := pairSlab(w, ref), vAt(w, ref, 0).Version()
	putImage(p, ref, s, 2, base, 1)
	putV(w, s, 2, base, -1)
	met := false
	p.AfterDo = func(_ int, r *rdma.Round) {
		if v := r.At(0).Verbs[0]; !met && v.Op == rdma.Read && v.Off == s.Off {
			met = true
			for i := range 3 {
				putImage(p, ref, s, i, base, 3)
				putV(w, s, i, base, 3)
			}
		}
	}
	got, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.True(t, met)
	require.Equal(t, "value 3", string(got))
}

// In a durable region a reader of an open word flushes V at every replica, its own too, before it answers; a settled one needs that nowhere.
func TestOpenWordsAreFlushedByReaders(t *testing.T) {
	for from := range 3 {
		w := slabtest.New(t, 3)
		p := openLane(w, 1, from)
		p.Durable()
		ref, err := p.Alloc.Alloc([]byte("value 0"), alloc.Want{Replicas: 3, Durable: true})
		require.NoError(t, err)
		p.Lane.Rest()
		s, base := pairSlab(w, ref), vAt(w, ref, 0).Version()
		flushes := func() uint64 {
			before := p.Lane.Tally().Verbs[rdma.Flush]
			_, _, err := p.Lane.Read(ref, nil)
			require.NoError(t, err)
			return p.Lane.Tally().Verbs[rdma.Flush] - before
		}
		require.Zero(t, flushes())
		for i := range 3 {
			putImage(p, ref, s, i, base, 1)
			putV(w, s, i, base, -1)
		}
		require.EqualValues(t, 3, flushes())
	}
}

// diesBehind runs f on a lane that dies when so many verbs have been executed, those of posted rounds among them. The chains of a round are executed one
// behind the other, from the last replica on where backwards says so. false: f has ended before.
func diesBehind(p *slabtest.Port, verbs int, backwards bool, f func()) (died bool) {
	die := func(r *rdma.Round) {
		n := 0
		for i := range r.Len() {
			n += len(r.At(i).Verbs)
		}
		if n <= verbs {
			verbs -= n
			return
		}
		for k := range r.Len() {
			i := k
			if backwards {
				i = r.Len() - 1 - k
			}
			var one rdma.Round
			c := r.At(i)
			if n := min(verbs, len(c.Verbs)); n > 0 {
				one.Chain(c.To).Verbs = c.Verbs[:n]
				rdma.Do(&one)
				verbs -= n
			}
		}
		panic(slabtest.ErrDied)
	}
	p.BeforeDo, p.OnPost = func(_ int, r *rdma.Round) { die(r) }, die
	defer func() {
		if r := recover(); r != nil {
			if r != slabtest.ErrDied {
				panic(r)
			}
			died = true
		}
	}()
	f()
	return false
}

// A writer dies behind each verb of an update, a free and a birth, and then its taker behind each of some. Readers at every replica see
// one value, before and after the takeover, and never the older one again.
func TestOpenWriterDiesAtEachVerb(t *testing.T) {
	step := slabtest.Stride(t, 3, 6)
	for _, replicas := range []int{2, 3} {
		for _, backwards := range []bool{false, true} {
			verbs := 0
			for died := true; died; verbs += step {
				died = false
				t.Run(fmt.Sprintf("R=%d,backwards=%v,%d verbs", replicas, backwards, verbs), func(t *testing.T) {
					died = openWriterDies(t, replicas, verbs, backwards)
				})
			}
			require.Greater(t, verbs, 4*replicas)
		}
	}
}

func openWriterDies(t *testing.T, replicas, verbs int, backwards bool) (died bool) {
	w := slabtest.New(t, replicas)
	dead := openLane(w, 1, 0)
	ref, err := dead.Alloc.Alloc([]byte("old"), alloc.Want{Replicas: replicas})
	require.NoError(t, err)
	dead.Lane.Rest()
	answered := false
	died = diesBehind(dead, verbs, backwards, func() {
		require.NoError(t, update(dead.Lane, ref, []byte("new")))
		answered = true
		dead.Lane.Rest()
	})
	var readers []*slabtest.Port
	for i := range replicas {
		readers = append(readers, openLane(w, uint32(10+i), i))
	}
	saw := ""
	look := func() {
		for _, p := range readers {
			got, _, err := p.Lane.Read(ref, nil)
			require.NoError(t, err)
			if saw == "" {
				saw = string(got)
			}
			require.Equal(t, saw, string(got))
		}
	}
	look()
	require.Contains(t, []string{"old", "new"}, saw)
	if answered {
		require.Equal(t, "new", saw)
	}
	w.Fence(1)
	taker := openLane(w, 2, 0)
	diesBehind(taker, 3+verbs%9, backwards, func() {
		_, err := taker.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
			require.Equal(t, saw, string(old))
			return nil, errors.New("leave it")
		})
		require.Error(t, err)
	})
	look()
	w.Fence(2)
	before := vAt(w, ref, 0).Version()
	last := openLane(w, 3, 0)
	_, err = last.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
		require.Equal(t, saw, string(old))
		return []byte("last"), nil
	})
	require.NoError(t, err)
	last.Lane.Rest()
	saw = ""
	look()
	require.Equal(t, "last", saw)
	for i := range replicas {
		require.True(t, vAt(w, ref, i).Valid(), "settled")
		require.Greater(t, vAt(w, ref, i).Version(), before)
	}
	return died
}

// A version that a dead session has used at a backup alone is not given again: a READ that brings the dead session's image and V of
// the next change together shows no image.
func TestOpenVersionIsUsedUp(t *testing.T) {
	for _, way := range []string{"takeover", "takeover by a free", "reconcile"} {
		t.Run(way, func(t *testing.T) {
			w := slabtest.New(t, 2)
			dead := openLane(w, 1, 0)
			ref, err := dead.Alloc.Alloc([]byte("old"), alloc.Want{Replicas: 2})
			require.NoError(t, err)
			dead.Lane.Rest()
			// CAS R and READ at P; then the image alone at the backup.
			require.True(t, diesBehind(dead, 3, true, func() { _ = update(dead.Lane, ref, []byte("dead")) }))
			s := pairSlab(w, ref)
			left := proto.ParseImageHeader(w.Nodes[1].Memory.Bytes()[s.ImageOff(vAt(w, ref, 1).Version()+1):]).Version
			require.Equal(t, vAt(w, ref, 1).Version()+1, left, "the image stands at the backup")
			next := openLane(w, 2, 1)
			if way == "reconcile" {
				_, err := next.Lane.Reconcile(next.View())
				require.NoError(t, err)
			} else {
				w.Fence(1)
			}
			if way == "takeover by a free" {
				_, _, _, err := next.Lane.Free(ref, false)
				require.NoError(t, err)
			} else {
				require.NoError(t, update(next.Lane, ref, []byte("next")))
			}
			next.Lane.Rest()
			require.Greater(t, vAt(w, ref, 0).Version(), left)
		})
	}
}

// Connections lose chains and answers, those of posted rounds too: what was acknowledged is there, at every replica.
func TestOpenWordsLoseAnswers(t *testing.T) {
	for _, replicas := range []int{2, 3} {
		t.Run(fmt.Sprintf("R=%d", replicas), func(t *testing.T) {
			w := slabtest.New(t, replicas)
			sound := openLane(w, 1, 0)
			ref, err := sound.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: replicas})
			require.NoError(t, err)
			var wg sync.WaitGroup
			var mu sync.Mutex
			acked, unknown := 0, 0
			for c := range 3 {
				p := openLane(w, uint32(c+10), c%replicas)
				p.Flaky(uint64(c+1), 12)
				wg.Go(func() {
					seen := uint64(0)
					for k := range 150 {
						_, err := p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
							n := make([]byte, 8)
							proto.PutWord(n, 0, proto.Word(old, 0)+1)
							return n, nil
						})
						if k%3 != 0 {
							p.Lane.Rest() // the others leave it to their next round
						}
						b, _, rerr := p.Lane.Read(ref, nil)
						mu.Lock()
						if rerr != nil {
							t.Errorf("read: %v", rerr)
						} else if n := proto.Word(b, 0); n < seen {
							t.Errorf("read %d behind %d", n, seen)
						} else {
							seen = n
						}
						switch {
						case err == nil:
							acked++
						case errors.Is(err, slab.ErrUnknown):
							unknown++
						default:
							t.Errorf("%v", err)
						}
						mu.Unlock()
					}
					p.Lane.Rest()
				})
			}
			wg.Wait()
			sound.Lane.Rest()
			for i := range replicas {
				b, _, err := openLane(w, uint32(20+i), i).Lane.Read(ref, nil)
				require.NoError(t, err)
				n := int(proto.Word(b, 0))
				require.GreaterOrEqual(t, n, acked)
				require.LessOrEqual(t, n, acked+unknown)
			}
			require.Greater(t, acked, 400)
		})
	}
}

// A damaged image at the replica that a client reads at is answered from the primary, and mended by RepairAll.
func TestReadsPassOverDamage(t *testing.T) {
	w := slabtest.New(t, 2)
	p := openLane(w, 1, 1)
	ref, err := p.Alloc.Alloc(bytes.Repeat([]byte("x"), 200), alloc.Want{Replicas: 2})
	require.NoError(t, err)
	p.Lane.Rest()
	s := pairSlab(w, ref)
	w.Nodes[1].Memory.Bytes()[s.ImageOff(vAt(w, ref, 1).Version())+100] ^= 1
	got, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, bytes.Repeat([]byte("x"), 200), got)
	require.NoError(t, p.Lane.RepairAll(ref))
	p.Lane.Rest()
	before := p.Lane.Tally().Rounds
	_, _, err = p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, p.Lane.Tally().Rounds-before)
}

// Without open words in its view a client takes an open V for damage, and never for a value.
func TestOpenWordIsRefusedElsewhere(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	ref, err := p.Alloc.Alloc([]byte("x"), alloc.Want{Replicas: 1})
	require.NoError(t, err)
	s := pairSlab(w, ref)
	proto.PutWord(w.Nodes[0].Memory.Bytes(), int(s.VOff()), uint64(vAt(w, ref, 0).Open()))
	_, _, err = p.Lane.Read(ref, nil)
	require.ErrorIs(t, err, slab.ErrCorrupt)
	require.ErrorIs(t, update(p.Lane, ref, []byte("y")), slab.ErrCorrupt)
}

package raw_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

const (
	data = proto.RawDataOff
	word = data + 4096
)

// lane is a lane of a session over raw regions.
func lane(t testing.TB, w *slabtest.World, session uint32) (*slabtest.Port, *raw.Lane) {
	p := w.Lane(session)
	p.Raw()
	l, err := raw.New(p.Lane)
	require.NoError(t, err)
	return p, l
}

// has is the word at off of replica k.
func has(w *slabtest.World, k int, off uint64) uint64 {
	return proto.Word(w.Nodes[k].Memory.Bytes()[off:], 0)
}

// alike compares the data and the reservations of all replicas with those that the first should have.
func alike(w *slabtest.World) error {
	p := w.Nodes[0].Memory.Bytes()
	for i := range proto.RawWords {
		if r := proto.RawR(proto.Word(p[proto.RawWordsOff:], 8*i)); r != 0 {
			return fmt.Errorf("reservation %d is left: %v", i, r)
		}
	}
	for k := 1; k < len(w.Nodes); k++ {
		if !bytes.Equal(p[data:], w.Nodes[k].Memory.Bytes()[data:]) {
			return fmt.Errorf("replica %d differs", k)
		}
	}
	return nil
}

// killAt has a lane die before a round of its own. It returns a function that runs f until then, and says whether it died.
func killAt(p *slabtest.Port, round int) func(f func()) bool {
	first := p.Rounds()
	p.BeforeDo = func(n int, _ *rdma.Round) {
		if n-first == round {
			panic(slabtest.ErrDied)
		}
	}
	return func(f func()) (died bool) {
		defer func() {
			if died = recover() == slabtest.ErrDied; !died {
				p.BeforeDo = nil
			}
		}()
		f()
		return false
	}
}

// TestWritesReachEveryReplica: pieces anywhere, one round, and what is read is what was written.
func TestWritesReachEveryReplica(t *testing.T) {
	w := slabtest.New(t, 3)
	p, l := lane(t, w, 1)
	long := bytes.Repeat([]byte("0123456789abcde"), 20000)
	pieces := []raw.Piece{{1, data, []byte("first")}, {1, data + 3<<20 - 100_000, long}, {1, proto.MinRegionBytes - 4, []byte("last")}, {1, data + 99, nil}}
	before := p.Rounds()
	require.NoError(t, l.Write(pieces))
	require.Equal(t, 1, p.Rounds()-before, "rounds of a Write")
	require.NoError(t, alike(w))
	for i := range pieces {
		pieces[i].Buf = make([]byte, len(pieces[i].Buf))
	}
	before = p.Rounds()
	require.NoError(t, l.Read(pieces))
	require.Equal(t, 1, p.Rounds()-before, "rounds of a Read")
	require.Equal(t, "first", string(pieces[0].Buf))
	require.Equal(t, long, pieces[1].Buf)
	require.Equal(t, "last", string(pieces[2].Buf))
}

// TestWordsAreCountedExactly: sessions add to words of one reservation, over tcp and shm.
func TestWordsAreCountedExactly(t *testing.T) {
	const sessions, adds = 4, 60
	for name, world := range map[string]func(testing.TB, int) *slabtest.World{"tcp": slabtest.New, "shm": slabtest.NewSHM} {
		for _, replicas := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s-%d", name, replicas), func(t *testing.T) {
				w := world(t, replicas)
				var wg sync.WaitGroup
				for s := range sessions {
					_, l := lane(t, w, uint32(s+1))
					wg.Go(func() {
						for i := range adds {
							if s%2 == 0 {
								_, err := l.Add(1, word, 1)
								require.NoError(t, err)
								continue
							}
							for {
								old, err := l.Load(1, word)
								require.NoError(t, err)
								was, err := l.CompareAndSwap(1, word, old, old+1)
								require.NoError(t, err)
								if was == old {
									break
								}
							}
							if i%8 == 0 {
								_, err := l.Add(1, word+8*proto.RawWords, 1) // the same reservation
								require.NoError(t, err)
							}
						}
					})
				}
				wg.Wait()
				require.NoError(t, alike(w))
				require.EqualValues(t, sessions*adds, has(w, replicas-1, word))
				require.EqualValues(t, 2*((adds+7)/8), has(w, replicas-1, word+8*proto.RawWords))
			})
		}
	}
}

// dies kills a session before each round of a change in turn. Another session goes on with the word, and then the replicas are alike. It
// returns what was wrong first.
func dies(t *testing.T, rebuild bool) error {
	for round := 1; ; round++ {
		w := slabtest.New(t, 2)
		a, dead := lane(t, w, 1)
		b, next := lane(t, w, 2)
		if rebuild {
			a.Rebuild(1)
			b.Rebuild(1)
		}
		require.NoError(t, next.Store(1, word, 5))
		died := killAt(a, round)(func() { _, _ = dead.Add(1, word, 10) })
		if died {
			w.Fence(1)
		}
		// Another word of the reservation: the taker goes by what the reservation says.
		_, err := next.Add(1, word+8*proto.RawWords, 1)
		require.NoError(t, err)
		if err := alike(w); err != nil {
			return fmt.Errorf("killed before round %d: %w", round, err)
		}
		if v := has(w, 0, word); v != 5 && v != 15 || !died && v != 15 {
			return fmt.Errorf("killed before round %d: the word is %d", round, v)
		}
		if !died {
			return nil
		}
	}
}

// TestDeathInAChange: hazards of a change of a word whose session dies.
func TestDeathInAChange(t *testing.T) {
	require.NoError(t, dies(t, false))
	require.NoError(t, dies(t, true))
}

// TestReadersSeeWhatEveryBackupHas: at the moment a changed word is seen at the primary, a failover keeps it.
func TestReadersSeeWhatEveryBackupHas(t *testing.T) {
	seen := func() (err error) {
		w := slabtest.New(t, 2)
		p, l := lane(t, w, 1)
		p.AfterDo = func(int, *rdma.Round) {
			if at, backup := has(w, 0, word), has(w, 1, word); at > backup {
				err = fmt.Errorf("%d at the primary, %d at the backup", at, backup)
			}
		}
		for range 3 {
			_, aerr := l.Add(1, word, 1)
			require.NoError(t, aerr)
		}
		return err
	}
	require.NoError(t, seen())
}

// TestReconcile: the primary wins, only what differs is copied, and reservations end.
func TestReconcile(t *testing.T) {
	reconcile := func() error {
		w := slabtest.New(t, 3)
		p, l := lane(t, w, 1)
		require.NoError(t, l.Write([]raw.Piece{{1, data + 5<<20, []byte("acknowledged")}}))
		copy(w.Nodes[0].Memory.Bytes()[data+7<<20:], "at the primary alone")
		copy(w.Nodes[2].Memory.Bytes()[data+9<<20:], "at a backup alone")
		proto.PutWord(w.Nodes[0].Memory.Bytes(), int(proto.RawWordOff(word)), uint64(proto.MakeRawR(9, 1, 1, word)))
		p.NextEpoch()
		var copied uint64
		for b := range p.View().Geometry.Blocks {
			n, err := l.ReconcileBlock(p.View(), b)
			require.NoError(t, err)
			copied += n
		}
		if err := alike(w); err != nil {
			return err
		}
		require.EqualValues(t, 3<<20, copied)
		require.Equal(t, "acknowledged", string(w.Nodes[2].Memory.Bytes()[data+5<<20:][:12]))
		require.Equal(t, "at the primary alone", string(w.Nodes[2].Memory.Bytes()[data+7<<20:][:20]))
		return nil
	}
	require.NoError(t, reconcile())
}

// TestCopyBesideWriters: a writer comes before each round of the copier in turn.
func TestCopyBesideWriters(t *testing.T) {
	copied := func() error {
		for at := 1; at <= 8; at++ {
			w := slabtest.New(t, 2)
			c, copier := lane(t, w, 1)
			p, writer := lane(t, w, 2)
			require.NoError(t, writer.Write([]raw.Piece{{1, data, bytes.Repeat([]byte{7}, 1<<20)}}))
			c.Rebuild(1)
			p.Rebuild(1)
			first := c.Rounds()
			c.BeforeDo = func(n int, _ *rdma.Round) {
				if n-first == at {
					require.NoError(t, writer.Write([]raw.Piece{{1, data + 13, bytes.Repeat([]byte{9}, 300)}}))
					_, err := writer.Add(1, word, 1)
					require.NoError(t, err)
				}
			}
			for b := range c.View().Geometry.Blocks {
				_, err := copier.CopyBlock(c.View(), b)
				require.NoError(t, err)
			}
			if err := alike(w); err != nil {
				return fmt.Errorf("a writer before round %d: %w", at, err)
			}
		}
		return nil
	}
	require.NoError(t, copied())
}

// TestCopyOfAWordThatKeepsChanging ends, because the replica gets what writers write.
func TestCopyOfAWordThatKeepsChanging(t *testing.T) {
	w := slabtest.New(t, 2)
	c, copier := lane(t, w, 1)
	p, writer := lane(t, w, 2)
	require.NoError(t, writer.Store(1, word, 100))
	c.Rebuild(1)
	p.Rebuild(1)
	left := 12
	c.BeforeDo = func(int, *rdma.Round) {
		if left--; left >= 0 {
			_, err := writer.Add(1, word, 1)
			require.NoError(t, err)
		}
	}
	_, err := copier.CopyBlock(c.View(), 0)
	require.NoError(t, err)
	require.NoError(t, alike(w))
}

// TestLostAnswers: connections break under changes. Each change is done once, or its caller knows that it may be.
func TestLostAnswers(t *testing.T) {
	w := slabtest.New(t, 2)
	_, check := lane(t, w, 9)
	var mu sync.Mutex
	done, unknown := uint64(0), uint64(0)
	var wg sync.WaitGroup
	for s := range 3 {
		p, l := lane(t, w, uint32(s+1))
		p.Flaky(uint64(s+1), 12)
		wg.Go(func() {
			for i := range 60 {
				_, err := l.Add(1, word, 1)
				mu.Lock()
				switch {
				case err == nil:
					done++
				default:
					require.ErrorIs(t, err, slab.ErrUnknown)
					unknown++
				}
				mu.Unlock()
				require.NoError(t, l.Write([]raw.Piece{{1, data + uint64(s)<<20, []byte{byte(i), byte(i)}}}))
			}
		})
	}
	wg.Wait()
	v, err := check.Load(1, word)
	require.NoError(t, err)
	require.GreaterOrEqual(t, v, done)
	require.LessOrEqual(t, v, done+unknown)
	require.Zero(t, unknown, "within one epoch every change with several replicas is settled")
	require.NoError(t, alike(w))
}

// TestScrubWords settles what dead sessions hold, and that alone.
func TestScrubWords(t *testing.T) {
	w := slabtest.New(t, 2)
	p, l := lane(t, w, 1)
	put := func(session uint32, off uint64) {
		proto.PutWord(w.Nodes[0].Memory.Bytes(), int(proto.RawWordOff(off)), uint64(proto.MakeRawR(session, 1, 1, off)))
		proto.PutWord(w.Nodes[1].Memory.Bytes(), int(off), 77)
	}
	put(5, word)
	put(6, word+8)
	taken, err := l.ScrubWords(p.View(), func(id uint32) bool { return id == 5 })
	require.NoError(t, err)
	require.Equal(t, 1, taken)
	require.Zero(t, has(w, 1, word))
	require.Zero(t, has(w, 0, proto.RawWordOff(word)))
	require.EqualValues(t, 77, has(w, 1, word+8))
	require.EqualValues(t, 6, proto.RawR(has(w, 0, proto.RawWordOff(word+8))).Session())
}

// TestRefused: what no raw region has.
func TestRefused(t *testing.T) {
	w := slabtest.New(t, 1)
	p, l := lane(t, w, 1)
	for _, off := range []uint64{0, 8, data - 1, proto.MinRegionBytes - 3, 1 << 40, 1<<64 - 2} {
		require.ErrorIs(t, l.Write([]raw.Piece{{1, off, make([]byte, 4)}}), raw.ErrOutside, "%#x", off)
		require.ErrorIs(t, l.Read([]raw.Piece{{1, off, make([]byte, 4)}}), raw.ErrOutside, "%#x", off)
		require.ErrorIs(t, l.Flush(1, off, 4), raw.ErrOutside, "%#x", off)
	}
	for _, off := range []uint64{word + 1, word + 4} {
		_, err := l.Add(1, off, 1)
		require.ErrorIs(t, err, raw.ErrUnaligned)
		_, err = l.Load(1, off)
		require.ErrorIs(t, err, raw.ErrUnaligned)
	}
	_, _, err := p.Lane.Read(proto.Ref{Addr: proto.MakeAddr(1, data), Incarnation: proto.MakeIncarnation(0, 1)}, nil)
	require.ErrorIs(t, err, slab.ErrBadRef, "there are no objects here")
	q := w.Lane(2)
	slabs, err := raw.New(q.Lane)
	require.NoError(t, err)
	require.ErrorIs(t, slabs.Store(1, word, 1), raw.ErrNotRaw)
}

// TestHashes: the node computes them, or the bytes are READ where it cannot; the answer is the same, in one round.
func TestHashes(t *testing.T) {
	w := slabtest.New(t, 2)
	p, l := lane(t, w, 1)
	require.NoError(t, l.Write([]raw.Piece{{1, data, []byte("some bytes")}}))
	ranges := []raw.Range{{1, data, 10}, {1, data + 4, 4096}}
	m := w.Nodes[0].Memory.Bytes()
	want := []uint64{rdma.Hash(m[data:data+10], 0), rdma.Hash(m[data+4:data+4100], 0)}
	for _, computes := range []bool{true, false} {
		p.View().To[0].Window.Verifies = computes
		got := make([]uint64, len(ranges))
		before := p.Rounds()
		require.NoError(t, l.Hashes(ranges, got))
		require.Equal(t, 1, p.Rounds()-before)
		require.Equal(t, want, got, "the node computes: %v", computes)
	}
	for _, bad := range []raw.Range{{1, data - 8, 8}, {1, data, 0}} {
		require.ErrorIs(t, l.Hashes([]raw.Range{bad}, make([]uint64, 1)), raw.ErrOutside)
	}
	require.ErrorContains(t, l.Hashes([]raw.Range{{1, data, raw.MaxBatch}, {1, data, 1}}, make([]uint64, 2)), "at most")
}

// TestCompare: a range is alike where every replica has the same bytes and none is being rebuilt, in a round for each replica.
func TestCompare(t *testing.T) {
	for _, computes := range []bool{true, false} {
		w := slabtest.New(t, 3)
		p, l := lane(t, w, 1)
		require.NoError(t, l.Write([]raw.Piece{{1, data, []byte("some bytes")}}))
		v := p.View()
		for k := range v.To[:v.N] {
			v.To[k].Window.Verifies = computes
		}
		ranges := []raw.Range{{1, data, 4096}, {1, data + 4096, 4096}, {1, data + 8192, 4096}}
		compare := func() (hashes []uint64, alike []bool) {
			hashes, alike = make([]uint64, 3), make([]bool, 3)
			before := p.Rounds()
			require.NoError(t, l.Compare(ranges, hashes, alike))
			require.Equal(t, 3, p.Rounds()-before)
			return hashes, alike
		}
		want := make([]uint64, 3)
		require.NoError(t, l.Hashes(ranges, want))
		hashes, alike := compare()
		require.Equal(t, want, hashes)
		require.Equal(t, []bool{true, true, true}, alike)

		w.Nodes[1].Memory.Bytes()[data+4096] = 1 // as a Write leaves it whose client died
		w.Nodes[2].Memory.Bytes()[data+8192] = 1
		hashes, alike = compare()
		require.Equal(t, want, hashes, "those of the primary")
		require.Equal(t, []bool{true, false, false}, alike)

		require.NoError(t, l.Write([]raw.Piece{{1, data + 4096, make([]byte, 8192)}}))
		v.Rebuilding[2] = true
		_, alike = compare()
		require.Equal(t, []bool{false, false, false}, alike, "a replica that is being rebuilt may miss what a dead client wrote")
	}
	_, l := lane(t, slabtest.New(t, 2), 1)
	require.ErrorIs(t, l.Compare([]raw.Range{{1, data - 8, 8}}, make([]uint64, 1), make([]bool, 1)), raw.ErrOutside)
	require.ErrorIs(t, l.Compare([]raw.Range{{1, data, raw.MaxBatch}, {1, data, 1}}, make([]uint64, 2), make([]bool, 2)), raw.ErrLimit)
}

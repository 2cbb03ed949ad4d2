package verbs

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// asking is a message for ranges of 64 bytes that begin at multiples of 4096.
func asking(ranges int) asked {
	a := asked{make([]byte, notesBytes)}
	a.start(7, taskFlush, 3, 1<<40)
	for i := range ranges {
		a.add(4096*uint64(i), 64, 0)
	}
	return a
}

// A node's answer to a request means that a loss of power keeps every range that it counts, in the order of the
// request, and a session that is fenced meanwhile has nothing more flushed.
func TestWhatIsAskedForSurvivesALossOfPower(t *testing.T) {
	for _, fencedAfter := range []int{maxRanges, 5, 0} {
		m, ledger, err := host.NewLedgerMemory("asked", maxRanges*4096)
		require.NoError(t, err)
		defer m.Close()
		for i := range m.Bytes() {
			m.Bytes()[i] = byte(i/4096) + 1 // as an adapter does: stores that nothing has written back
		}
		left := fencedAfter
		var made progress
		more, err := asking(maxRanges).flush(&made, func(region uint32, epoch, off, n uint64) error {
			require.Equal(t, uint32(3), region)
			require.Equal(t, uint64(1<<40), epoch)
			return m.Persist(off, n)
		}, func() error {
			if left == 0 {
				return rdma.ErrRevoked
			}
			left--
			return nil
		})
		done := made.done
		require.False(t, more)
		require.Equal(t, fencedAfter, done)
		if fencedAfter < maxRanges {
			require.ErrorIs(t, err, rdma.ErrRevoked)
		} else {
			require.NoError(t, err)
		}
		image := ledger.Cut(pmem.None)
		for i := range maxRanges {
			kept := bytes.Equal(m.Bytes()[4096*i:4096*i+64], image[4096*i:4096*i+64])
			require.Equal(t, i < done, kept, "range %d", i)
		}
		flushed, _ := ledger.Lines()
		require.EqualValues(t, done, flushed)
	}
}

// hashing is a message for the hashes of ranges, by seeds of their own.
func hashing(ranges int) asked {
	a := asked{make([]byte, notesBytes)}
	a.start(8, taskHash, 3, 1)
	for i := range ranges {
		a.add(8*uint64(i), 100, uint64(i)<<33)
	}
	return a
}

// An answer to a request for hashes has one for each range, in its order, up to the one that was refused. Requests and answers of the most
// ranges have room in a page.
func TestHashesThatAreAskedFor(t *testing.T) {
	a := hashing(maxHashes)
	require.False(t, a.room())
	require.LessOrEqual(t, a.len(), maxAsked)
	require.LessOrEqual(t, maxAsked, answeredAt)
	require.Equal(t, maxAnswered, a.answerBytes())
	got, err := decodeAsked(a.b[:a.len()])
	require.NoError(t, err)
	for _, refused := range []int{maxHashes, 7, 0} {
		var p progress
		more, err := got.hash(&p, func(region uint32, epoch, off, n, seed uint64) (uint64, error) {
			if p.done == refused {
				return 0, rdma.ErrKey
			}
			require.Equal(t, []uint64{3, 1, 8 * uint64(p.done), 100, uint64(p.done) << 33}, []uint64{uint64(region), epoch, off, n, seed})
			return seed + 5, nil
		}, func() error { return nil })
		require.False(t, more)
		require.Equal(t, refused, p.done)
		b := make([]byte, maxAnswered)
		f := answered{tag: 8, err: err, done: p.done}
		f.put(b, p.hashes[:a.hashes()])
		back, err := decodeAnswered(b, a)
		require.NoError(t, err)
		require.Equal(t, f, back)
		for i := range refused {
			require.Equal(t, uint64(i)<<33+5, hashIn(b, i))
		}
	}
	// In steps.
	long := asked{make([]byte, notesBytes)}
	long.start(8, taskHash, 3, 1)
	for _, n := range []uint64{stepBytes - 1, 1, 1} {
		long.add(0, n, 0)
	}
	var p progress
	hash := func(uint32, uint64, uint64, uint64, uint64) (uint64, error) { return 1, nil }
	more, err := long.hash(&p, hash, func() error { return nil })
	require.NoError(t, err)
	require.True(t, more)
	require.Equal(t, 2, p.done, "the third range is of the next step")
	more, err = long.hash(&p, hash, func() error { return nil })
	require.NoError(t, err)
	require.False(t, more)
	require.Equal(t, 3, p.done)
	// No more than a chain may have.
	for name, ranges := range map[string][]uint64{"a range": {stepBytes + 1}, "all": {stepBytes, stepBytes, stepBytes, stepBytes, 1}, "no sum": {1, ^uint64(0)}} {
		much := asked{make([]byte, notesBytes)}
		much.start(8, taskHash, 3, 1)
		for _, n := range ranges {
			much.add(0, n, 0)
		}
		_, err := decodeAsked(much.b[:much.len()])
		require.ErrorIs(t, err, errPeer, name)
	}
	p = progress{}
	more, err = long.hash(&p, hash, func() error { return rdma.ErrRevoked })
	require.False(t, more)
	require.ErrorIs(t, err, rdma.ErrRevoked)
	require.Zero(t, p.done, "a session that is fenced has nothing hashed")
}

// A request is carried out in steps of at most stepBytes, each byte once and in order, and a range counts when all of it is durable.
func TestLongRequestsAreFlushedInSteps(t *testing.T) {
	type span struct{ off, n uint64 }
	ranges := []span{{64, 3*stepBytes + 5}, {1 << 40, 0}, {8, 100}, {4096, 2 * stepBytes}}
	a := asked{make([]byte, notesBytes)}
	a.start(7, taskFlush, 3, 1)
	for _, r := range ranges {
		a.add(r.off, r.n, 0)
	}
	var made progress
	var got []span
	steps, step := 1, uint64(0)
	for {
		more, err := a.flush(&made, func(_ uint32, _, off, n uint64) error {
			if step += n; made.bytes > 0 {
				last := &got[len(got)-1]
				require.Equal(t, last.off+last.n, off)
				last.n += n
			} else {
				got = append(got, span{off, n})
			}
			return nil
		}, func() error { return nil })
		require.NoError(t, err)
		require.LessOrEqual(t, step, uint64(1<<20))
		if !more {
			break
		}
		require.Equal(t, len(got), made.done+min(1, int(made.bytes)))
		steps, step = steps+1, 0
	}
	require.Equal(t, 6, steps)
	require.Equal(t, ranges, got)
	require.Equal(t, progress{done: len(ranges)}, made)
}

// Entries come in the order in which they were added, but those that have left.
func TestTurns(t *testing.T) {
	q := newTurns[int]()
	for i := range 5 {
		q.add(i)
	}
	q.remove(3)
	q.remove(0)
	q.remove(7)
	for _, want := range []int{1, 2, 4} {
		got, ok := q.next()
		require.True(t, ok)
		require.Equal(t, want, got)
	}
	got := make(chan int)
	go func() {
		for x, ok := q.next(); ok; x, ok = q.next() {
			got <- x
		}
		close(got)
	}()
	q.add(9)
	require.Equal(t, 9, <-got)
	q.close()
	_, ok := <-got
	require.False(t, ok)
	require.Zero(t, testing.AllocsPerRun(100, func() { q.add(1); q.remove(1) }))
}

func TestAskedForms(t *testing.T) {
	for _, n := range []int{1, 2, maxRanges} {
		a := asking(n)
		got, err := decodeAsked(a.b[:a.len()])
		require.NoError(t, err)
		require.Equal(t, n, got.ranges())
		require.Equal(t, uint32(7), got.tag())
		for name, bad := range map[string][]byte{
			"short":           a.b[:a.len()-1],
			"long":            a.b[:a.len()+1],
			"empty":           nil,
			"head":            a.b[:askedBytes],
			"two longer":      append(bytes.Clone(a.b[:a.len()]), make([]byte, 2*rangeBytes)...),
			"of no task":      func() []byte { b := bytes.Clone(a.b[:a.len()]); b[12] = 2; return b }(),
			"of another task": func() []byte { b := bytes.Clone(a.b[:a.len()]); b[12] = 1; return b }(),
			"more ranges":     func() []byte { b := bytes.Clone(a.b[:a.len()]); b[7] = 0x80; return b }(),
		} {
			_, err := decodeAsked(bad)
			require.ErrorIs(t, err, errPeer, name)
		}
	}
	none := asked{make([]byte, askedBytes)}
	_, err := decodeAsked(none.b)
	require.ErrorIs(t, err, errPeer, "no range")

	a, b := asking(3), make([]byte, maxAnswered)
	for _, f := range []answered{{tag: 7, done: 3}, {tag: 7, err: rdma.ErrKey, done: 1}, {tag: 7, err: rdma.ErrBroken}} {
		f.put(b, nil)
		got, err := decodeAnswered(b, a)
		require.NoError(t, err)
		require.Equal(t, f, got)
	}
	for name, f := range map[string]answered{
		"another's":              {tag: 8, done: 3},
		"not all and no reason":  {tag: 7, done: 2},
		"all and a reason":       {tag: 7, err: rdma.ErrKey, done: 3},
		"more than was asked":    {tag: 7, done: 4},
		"more, and a reason too": {tag: 7, err: rdma.ErrKey, done: 1 << 20},
	} {
		f.put(b, nil)
		_, err := decodeAnswered(b, a)
		require.ErrorIs(t, err, errPeer, name)
	}
}

// A refused range ends the chain at its FLUSH; a change behind that has been executed, so the outcome is unknown.
func TestUnflushed(t *testing.T) {
	var c rdma.Chain
	c.Write(0, make([]byte, 8))
	c.Flush(rdma.Persistent, 0, 8)
	c.Flush(rdma.Visible, 0, 8)
	c.Write(8, make([]byte, 8))
	c.Flush(rdma.Persistent, 8, 8)
	at, overtaken := unflushed(c.Verbs, 0, persistent)
	require.Equal(t, 1, at)
	require.True(t, overtaken)
	at, overtaken = unflushed(c.Verbs, 1, persistent)
	require.Equal(t, 4, at)
	require.False(t, overtaken)
	at, _ = unflushed(c.Verbs, 0, func(v *rdma.Verb) bool { return persistent(v) && v.Off == 8 })
	require.Equal(t, 4, at, "the node was not asked for the first")
}

// Where a verb is refused, no FLUSH before it counts that was left to one behind it, or for which the node's answer is out; a change
// behind such a FLUSH has been executed, so the outcome is unknown.
func TestRefusedBeforeAFlush(t *testing.T) {
	var c rdma.Chain
	c.Write(0, make([]byte, 8)) // 0
	c.Flush(rdma.Persistent, 0, 8)
	c.Read(0, make([]byte, 8)) // for which the first is carried out
	c.Write(8, make([]byte, 8))
	c.Flush(rdma.Persistent, 8, 8) // 4, left to the last
	c.Write(16, make([]byte, 8))
	c.Write(24, make([]byte, 8))
	c.Flush(rdma.Persistent, 16, 8) // 7
	c.Write(32, make([]byte, 8))
	for at, want := range map[int]struct {
		first     int
		overtaken bool
	}{0: {0, false}, 1: {1, false}, 4: {4, false}, 5: {4, false}, 6: {4, true}, 7: {4, true}, 8: {8, false}} {
		first, overtaken := unpushed(c.Verbs, at, false)
		require.Equal(t, want.first, first, "%d", at)
		require.Equal(t, want.overtaken, overtaken, "%d", at)
	}
	first, overtaken := unpushed(c.Verbs[3:], 2, true)
	require.Equal(t, 1, first)
	require.False(t, overtaken)
	first, overtaken = unpushed(c.Verbs[3:], 5, true)
	require.Equal(t, 1, first)
	require.True(t, overtaken)
}

// A request that came over the fabric is refused, or has one form.
func FuzzAsked(f *testing.F) {
	a := asking(2)
	f.Add(a.b[:a.len()])
	h := hashing(2)
	f.Add(h.b[:h.len()])
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAsked(b)
		if err != nil {
			return
		}
		again := asked{make([]byte, notesBytes)}
		again.start(a.tag(), a.task(), a.region(), a.epoch())
		for i := range a.ranges() {
			off, bytes := a.at(i)
			seed := uint64(0)
			if a.task() == taskHash {
				seed = a.seed(i)
			}
			again.add(off, bytes, seed)
		}
		if !bytes.Equal(again.b[:again.len()], b) {
			t.Fatal("a request has two forms")
		}
	})
}

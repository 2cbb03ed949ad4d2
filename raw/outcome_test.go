package raw_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// loseAnswer has the first chain of a round run, and its answer get lost.
func loseAnswer(p *slabtest.Port, round int) {
	first := p.Rounds()
	p.AfterDo = func(n int, r *rdma.Round) {
		if n-first == round {
			r.At(0).Err = fmt.Errorf("%w: on purpose", rdma.ErrBroken)
		}
	}
}

// giveUp has a caller give up when it would try again.
func giveUp(p *slabtest.Port) error {
	gone := errors.New("the caller has given up")
	p.OnPause = func(int) error { return gone }
	return gone
}

// TestStoreWithOneReplica: atomics alone change a word that others change by atomics, and none of those changes is overwritten.
func TestStoreWithOneReplica(t *testing.T) {
	w := slabtest.New(t, 1)
	p, l := lane(t, w, 1)
	_, other := lane(t, w, 2)
	var seen []uint64
	p.BeforeDo = func(n int, r *rdma.Round) {
		for i := range r.At(0).Verbs {
			require.NotEqual(t, rdma.Write, r.At(0).Verbs[i].Op)
		}
		if n == 3 || n == 4 { // the second CAS of the second Store, and its repetition
			old, err := other.Add(1, word, 1000)
			require.NoError(t, err)
			seen = append(seen, old)
		}
	}
	require.NoError(t, l.Store(1, word, 5))
	require.Equal(t, 1, p.Rounds(), "a word that is 0")
	require.NoError(t, l.Store(1, word, 7))
	require.Equal(t, []uint64{5, 1005}, seen)
	require.Equal(t, 5, p.Rounds())
	require.EqualValues(t, 7, has(w, 0, word))
	require.NoError(t, l.Store(1, word, 7))
	require.EqualValues(t, 7, has(w, 0, word))
}

// TestNoAnswerWithoutALease: a failover does not wait for a session without a lease, so that it must not answer from what it has READ.
func TestNoAnswerWithoutALease(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		p, l := lane(t, slabtest.New(t, replicas), 1)
		p.Lease.Store(false)
		_, err := l.Load(1, word)
		require.ErrorIs(t, err, slab.ErrLease)
		require.ErrorIs(t, l.Read([]raw.Piece{{1, data, make([]byte, 4)}}), slab.ErrLease)
		_, err = l.CompareAndSwap(1, word, 1, 2)
		require.ErrorIs(t, err, slab.ErrLease)
	}
}

// TestUnknownOutcomes: a Write whose answer is lost, and that is not made again, may have been made. So may a change of a word.
func TestUnknownOutcomes(t *testing.T) {
	p, l := lane(t, slabtest.New(t, 2), 1)
	gone := giveUp(p)
	loseAnswer(p, 1)
	err := l.Write([]raw.Piece{{1, data, make([]byte, 4)}})
	require.ErrorIs(t, err, slab.ErrUnknown)
	require.ErrorIs(t, err, gone)
	require.NoError(t, p.Ended)

	p, l = lane(t, slabtest.New(t, 1), 1)
	loseAnswer(p, 1)
	_, err = l.Add(1, word, 1)
	require.ErrorIs(t, err, slab.ErrUnknown)
}

// TestRefusedIsNotDone: if nodes refuse every chain before any of it has run, nothing was done, and the session goes on.
func TestRefusedIsNotDone(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		w := slabtest.New(t, replicas)
		p, l := lane(t, w, 1)
		w.Fence(1)
		refused := func(err error) {
			require.ErrorIs(t, err, rdma.ErrRevoked)
			require.NotErrorIs(t, err, slab.ErrUnknown)
			require.NoError(t, p.Ended)
		}
		refused(l.Write([]raw.Piece{{1, data, make([]byte, 4)}}))
		refused(l.Store(1, word, 1))
		_, err := l.Add(1, word, 1)
		refused(err)
	}
}

// TestGivenUpReservation: a call that ends behind a lost answer leaves no reservation.
func TestGivenUpReservation(t *testing.T) {
	w := slabtest.New(t, 2)
	p, l := lane(t, w, 1)
	gone := giveUp(p)
	loseAnswer(p, 1)
	_, err := l.Add(1, word, 1)
	require.ErrorIs(t, err, gone)
	require.NotErrorIs(t, err, slab.ErrUnknown)
	require.Zero(t, has(w, 0, proto.RawWordOff(word)))
	require.Zero(t, has(w, 0, word))
}

// TestOutcomeOfATakeover: a change that has not begun is not unknown because a takeover before it, or the release behind a swap that
// is not made, ends the session.
func TestOutcomeOfATakeover(t *testing.T) {
	w := slabtest.New(t, 2)
	a, dead := lane(t, w, 1)
	require.True(t, killAt(a, 2)(func() { _, _ = dead.Add(1, word, 1) }))
	w.Fence(1)
	p, l := lane(t, w, 2)
	lost := errors.New("lost")
	fail := func(round int) {
		first := p.Rounds()
		loseAnswer(p, round)
		p.OnRegion = func() error {
			if p.Rounds()-first == round {
				return lost
			}
			return nil
		}
	}
	fail(2)
	_, err := l.Add(1, word, 1)
	require.ErrorIs(t, err, lost)
	require.NotErrorIs(t, err, slab.ErrUnknown)
	require.Error(t, p.Ended, "a reservation is left")

	p, l = lane(t, slabtest.New(t, 2), 3)
	fail(2)
	_, err = l.CompareAndSwap(1, word, 1, 2)
	require.ErrorIs(t, err, lost)
	require.NotErrorIs(t, err, slab.ErrUnknown)
	require.Error(t, p.Ended, "a reservation is left")
}

// TestRegionDeletedInAChange: a region that goes takes its reservations with it, and leaves the session alone.
func TestRegionDeletedInAChange(t *testing.T) {
	for round := 1; round <= 3; round++ {
		p, l := lane(t, slabtest.New(t, 2), 1)
		loseAnswer(p, round)
		p.OnRegion = func() error {
			if p.Rounds() >= round {
				return slab.ErrNoRegion
			}
			return nil
		}
		_, err := l.Add(1, word, 1)
		require.NoError(t, p.Ended, "round %d", round)
		if round == 1 {
			require.ErrorIs(t, err, slab.ErrNoRegion)
			require.NotErrorIs(t, err, slab.ErrUnknown)
		} else {
			require.ErrorIs(t, err, slab.ErrUnknown)
		}
	}
}

// TestWritesAreCopied: a WRITE without an answer may run when the caller uses its memory for other things.
func TestWritesAreCopied(t *testing.T) {
	p, l := lane(t, slabtest.New(t, 2), 1)
	p.Rebuilding(1)
	mine, seen := []byte("the caller's"), 0
	p.BeforeDo = func(_ int, r *rdma.Round) {
		for _, v := range r.At(0).Verbs {
			seen++
			require.NotSame(t, &mine[0], &v.Buf[0])
			require.Equal(t, mine, v.Buf)
		}
	}
	require.NoError(t, l.Write([]raw.Piece{{1, data, mine}}))
	require.Equal(t, 2, seen)
}

// TestNoAllocations: reads and writes allocate nothing.
func TestNoAllocations(t *testing.T) {
	_, l := lane(t, slabtest.NewSHM(t, 1), 1)
	buf := make([]byte, 4096)
	pieces := func() []raw.Piece {
		two := l.Pieces(2)
		two[0], two[1] = raw.Piece{Region: 1, Off: data, Buf: buf}, raw.Piece{Region: 1, Off: data + 1<<20, Buf: buf}
		return two
	}
	for name, f := range map[string]func() error{
		"Load":  func() error { _, err := l.Load(1, word); return err },
		"Add":   func() error { _, err := l.Add(1, word, 1); return err },
		"Read":  func() error { return l.Read(pieces()) },
		"Write": func() error { return l.Write(pieces()) },
	} {
		require.NoError(t, f())
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if err := f(); err != nil {
				t.Fatal(err)
			}
		}), name)
	}
}

// TestLimits: more than one call moves, and memory of a region that is no data.
func TestLimits(t *testing.T) {
	p, l := lane(t, slabtest.New(t, 1), 1)
	before := p.Rounds()
	many := make([]raw.Piece, raw.MaxPieces+1)
	for i := range many {
		many[i] = raw.Piece{Region: 1, Off: data, Buf: make([]byte, 1)}
	}
	require.ErrorIs(t, l.Read(many), raw.ErrLimit)
	require.ErrorIs(t, l.Write(many), raw.ErrLimit)
	many = []raw.Piece{{1, data, make([]byte, raw.MaxBatch)}, {1, data, make([]byte, 1)}}
	require.ErrorIs(t, l.Read(many), raw.ErrLimit)
	require.ErrorIs(t, l.Write(many), raw.ErrLimit)
	p.RawOf(proto.MaxRawRegionBytes) // on pages of 1 GiB
	const end = data + proto.MaxRawData
	require.ErrorContains(t, l.Store(1, end, 1), fmt.Sprintf("%#x of its data", uint64(proto.MaxRawData)))
	require.ErrorIs(t, l.Store(1, end, 1), raw.ErrOutside)
	require.ErrorIs(t, l.Write([]raw.Piece{{1, end - 1, make([]byte, 2)}}), raw.ErrOutside)
	require.Equal(t, before, p.Rounds())
}

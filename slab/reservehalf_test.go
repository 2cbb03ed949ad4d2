package slab_test

import (
	"bytes"
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// bigObject is an object in a PAIR slab of more than 4 KiB, and the bytes of that slab.
func bigObject(t *testing.T, p *slabtest.Port) (ref proto.Ref, slabBytes uint64) {
	t.Helper()
	ref, err := p.Alloc.Alloc(make([]byte, 1900), alloc.Want{Replicas: 1})
	require.NoError(t, err)
	return ref, uint64(pairSlab(p.World, ref).Class.Bytes())
}

// TestReserveReadsHalf: an Update, and a Free, READ the half of a large slab that is expected to hold the image, R and V, and the header of the
// other image. A wrong guess costs one round, and nothing else.
func TestReserveReadsHalf(t *testing.T) {
	w := slabtest.New(t, 1)
	a, b := w.Lane(1), w.Lane(2)
	ref, whole := bigObject(t, a)
	half := whole/2 + 8
	was := make([]byte, 1900)
	// change returns the rounds of an Update, and the bytes but for the image that it WRITEs.
	change := func(p *slabtest.Port, b byte) (rounds int, read uint64) {
		t.Helper()
		before, sent := p.Rounds(), p.Lane.Tally().Bytes
		payload := bytes.Repeat([]byte{b}, 1900)
		_, err := p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
			require.True(t, bytes.Equal(was, old))
			return payload, nil
		})
		require.NoError(t, err)
		was = payload
		return p.Rounds() - before, p.Lane.Tally().Bytes - sent - uint64(proto.ImageLen(1900))
	}
	require.NoError(t, update(a.Lane, ref, was)) // the block's header is cached
	for i := range 5 {
		rounds, read := change(a, byte(i))
		require.Equal(t, 2, rounds)
		require.Equal(t, half+proto.ImageHeaderBytes, read)
	}
	require.NoError(t, update(b.Lane, ref, was)) // header, and by luck or not the parity
	rounds, read := change(b, 9)
	require.Equal(t, []any{2, half + proto.ImageHeaderBytes}, []any{rounds, read})
	rounds, read = change(a, 10) // b has made two changes: the parity is the same
	require.Equal(t, []any{2, half + proto.ImageHeaderBytes}, []any{rounds, read})
	rounds, read = change(b, 11) // a has made one
	require.Equal(t, []any{3, half + proto.ImageHeaderBytes + whole}, []any{rounds, read})
	rounds, read = change(b, 12) // careful now
	require.Equal(t, []any{2, whole}, []any{rounds, read})

	before, sent := a.Rounds(), a.Lane.Tally().Bytes
	_, last, _, err := a.Lane.Free(ref, false)
	require.NoError(t, err)
	require.True(t, bytes.Equal(was, last))
	require.LessOrEqual(t, a.Rounds()-before, 3)
	require.Less(t, a.Lane.Tally().Bytes-sent, 2*whole)
	require.ErrorIs(t, update(b.Lane, ref, was), slab.ErrFreed)
}

// TestHazard254_HeaderOfTheOtherHalf: a dead writer has left an image in the half that a reservation does not READ. The next change has
// another version than that image, whichever half it is.
func TestHazard254_HeaderOfTheOtherHalf(t *testing.T) {
	for changes := range 2 {
		w := slabtest.New(t, 1)
		p := w.Lane(1)
		ref, _ := bigObject(t, p)
		for range 2 + changes {
			require.NoError(t, update(p.Lane, ref, make([]byte, 1900)))
		}
		memory, s := w.Nodes[0].Memory.Bytes(), pairSlab(w, ref)
		v := proto.V(proto.Word(memory, int(s.VOff()))).Version()
		other := memory[s.ImageOff(v+1):][:proto.ImageHeaderBytes]
		copy(other, proto.Burn(other, v+1))
		require.Equal(t, v+1, proto.ParseImageHeader(other).Version)

		_, info, err := p.Lane.Read(ref, nil) // the lane's buffer has nothing of the other half
		require.NoError(t, err)
		require.Equal(t, v, info.Version)
		sent := p.Lane.Tally().Bytes
		require.NoError(t, update(p.Lane, ref, nil))
		require.Less(t, p.Lane.Tally().Bytes-sent, uint64(s.Class.Bytes()), "a half was READ")
		_, info, err = p.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Equal(t, v+3, info.Version)
	}
}

// endedCall is a port whose call has to end: a failed round that has only READ is not settled, unless the operation holds a slab.
type endedCall struct {
	*slabtest.Port
	lose, holds bool
}

func (p *endedCall) Holds() { p.holds = true }

func (p *endedCall) Do(r *rdma.Round) {
	if p.lose && r.Len() == 1 && readsOnly(r.At(0)) {
		p.lose, r.At(0).Err = false, rdma.ErrBroken
		return
	}
	p.Port.Do(r)
}

func (p *endedCall) Settle(reg *slab.Region, r *rdma.Round) error {
	if readsOnly(r.At(0)) && !p.holds {
		return context.DeadlineExceeded
	}
	return p.Port.Settle(reg, r)
}

func readsOnly(c *rdma.Chain) bool {
	return !slices.ContainsFunc(c.Verbs, func(v rdma.Verb) bool { return v.Op != rdma.Read })
}

// TestHazard255_CallEndsWhileItHolds: the deadline of a call passes in a round that only READs, while the call holds a slab. It has time to go on, and its
// session does not end.
func TestHazard255_CallEndsWhileItHolds(t *testing.T) {
	w := slabtest.New(t, 1)
	p, other := &endedCall{Port: w.Lane(1)}, w.Lane(2)
	var err error
	p.Lane, err = slab.NewLane(p)
	require.NoError(t, err)
	ref, _ := bigObject(t, other)
	require.NoError(t, update(p.Lane, ref, make([]byte, 1900)))
	require.NoError(t, update(other.Lane, ref, make([]byte, 1900))) // p expects the other half from now on
	p.lose = true
	require.NoError(t, update(p.Lane, ref, make([]byte, 1900)))
	require.NoError(t, p.Ended)
	require.False(t, p.lose)
}

// TestFreedBehindAHolder: an object was freed, and its slab has another one whose image is in the half that is not expected; a session holds that. A caller
// with the reference of before is told that its object is freed, and does not wait.
func TestFreedBehindAHolder(t *testing.T) {
	w := slabtest.New(t, 1)
	p, stale := w.Lane(1), w.Lane(2)
	ref, _ := bigObject(t, p)
	require.NoError(t, update(stale.Lane, ref, make([]byte, 1900))) // V is even: the next is expected to be
	_, _, _, err := p.Lane.Free(ref, false)                         // odd
	require.NoError(t, err)
	memory, s := w.Nodes[0].Memory.Bytes(), pairSlab(w, ref)
	v := proto.V(proto.Word(memory, int(s.VOff())))
	img := make([]byte, proto.ImageLen(8))
	seed := proto.Seed(p.View().Seed, s.Off, ref.Incarnation.Generation())
	for version := v.Version() + 1; ; version++ { // born again, by a session that holds it
		if version&1 == 0 {
			continue
		}
		copy(memory[s.ImageOff(version):], proto.EncodeImage(img, seed, proto.ImageHeader{Version: version, Born: version, Length: 8}))
		proto.PutWord(memory, int(s.VOff()), uint64(proto.MakeV(proto.StateLive, version)))
		break
	}
	proto.PutWord(memory, int(s.ROff()), uint64(p.Reservation()))
	require.ErrorIs(t, update(stale.Lane, ref, nil), slab.ErrFreed)
}

// TestHazard306_CallEndsWhileItConfirmsASet: the deadline of a call passes in the READ by which Hold finds out that it holds all slabs of a set. It has time to
// give them back, and its session does not end.
func TestHazard306_CallEndsWhileItConfirmsASet(t *testing.T) {
	w := slabtest.New(t, 1)
	p, other := &endedCall{Port: w.Lane(1)}, w.Lane(2)
	var err error
	p.Lane, err = slab.NewLane(p)
	require.NoError(t, err)
	refs := objects(t, other, 2)
	require.NoError(t, p.Lane.Hold(refs)) // headers are cached
	require.NoError(t, p.Lane.Drop())
	require.NoError(t, other.Lane.Hold(refs[:1]))
	p.OnPause = func(int) error { // the set takes more than one round
		p.OnPause, p.lose = nil, true
		return other.Lane.Drop()
	}
	require.NoError(t, p.Lane.Hold(refs))
	require.False(t, p.lose)
	require.NoError(t, p.Ended)
	require.NoError(t, p.Lane.Drop())
	require.Zero(t, heldBy(w, refs[0]))
}

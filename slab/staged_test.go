package slab_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

type stagedWay struct {
	name     string
	bytes    int
	capacity int
	next     func(old []byte, i int) []byte
}

// stagedWays are the two ways in which a STAGED slab is changed: a byte of 1000 in a slab with room for a
// record, and all of 128, which go to another slab first.
var stagedWays = []stagedWay{
	{"record", 1000, 1200, func(old []byte, i int) []byte {
		next := bytes.Clone(old)
		next[40] = byte(i)
		return next
	}},
	{"shadow", 128, 128, func(old []byte, i int) []byte { return bytes.Repeat([]byte{byte(i)}, 128) }},
}

func stagedWant(capacity int) alloc.Want {
	return alloc.Want{Kind: proto.Staged, Replicas: 1, Capacity: capacity}
}

// shadowed is a world of one node with an object whose updates need a shadow, and the way they change it. Session 1 has made it.
func shadowed(t *testing.T) (w *slabtest.World, writer *slabtest.Port, ref proto.Ref, way stagedWay) {
	way = stagedWays[1]
	w = slabtest.New(t, 1)
	writer = w.Lane(1)
	ref, err := writer.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
	require.NoError(t, err)
	return w, writer, ref, way
}

// update replaces the payload of an object.
func update(l *slab.Lane, ref proto.Ref, payload []byte) error {
	_, err := l.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return payload, nil })
	return err
}

// An update of a STAGED slab takes two rounds, as that of a PAIR, and one fence in a volatile region:
// record or shadow, L, CAS V, home, CAS R are one chain. In a durable region home is behind the FLUSH of V.
func TestCostOfStagedUpdates(t *testing.T) {
	for _, way := range stagedWays {
		for _, durable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,durable=%v", way.name, durable), func(t *testing.T) {
				p := slabtest.New(t, 1).Lane(1)
				if durable {
					p.Durable()
				}
				payload := make([]byte, way.bytes)
				want := stagedWant(way.capacity)
				want.Durable = durable
				ref, err := p.Alloc.Alloc(payload, want)
				require.NoError(t, err)
				verbs, fences := 2+5, 1
				if durable {
					verbs, fences = 2+9, 4
				}
				for i := range 5 {
					payload = way.next(payload, i+1)
					rounds, before := p.Rounds(), *p.Lane.Tally()
					require.NoError(t, update(p.Lane, ref, payload))
					require.Equal(t, 2, p.Rounds()-rounds)
					after := p.Lane.Tally()
					sent := 0
					for k := range after.Verbs {
						sent += int(after.Verbs[k] - before.Verbs[k])
					}
					require.Equal(t, verbs, sent)
					require.EqualValues(t, fences, after.Fences-before.Fences)
					rounds = p.Rounds()
					got, info, err := p.Lane.Read(ref, nil)
					require.NoError(t, err)
					require.Equal(t, payload, got)
					require.EqualValues(t, ref.Incarnation.Born()+uint64(i)+1, info.Version)
					require.Equal(t, 1, p.Rounds()-rounds)
				}
				_, _, err = p.Alloc.Free(ref)
				require.NoError(t, err)
				_, _, err = p.Lane.Read(ref, nil)
				require.ErrorIs(t, err, slab.ErrFreed)
			})
		}
	}
}

func TestStagedUpdatesDoNotAllocate(t *testing.T) {
	for _, way := range stagedWays {
		p := slabtest.NewSHM(t, 1).Lane(1)
		ref, err := p.Alloc.Alloc(make([]byte, way.bytes), stagedWant(way.capacity))
		require.NoError(t, err)
		payload, dst := make([]byte, way.bytes), make([]byte, 0, way.bytes)
		f := func([]byte, *slab.Info) ([]byte, error) { return payload, nil }
		i := byte(0)
		require.Zero(t, testing.AllocsPerRun(100, func() {
			i++
			payload[40] = i
			if way.name == "shadow" {
				for k := range payload {
					payload[k] += i
				}
			}
			_, err := p.Lane.Update(ref, f)
			require.NoError(t, err)
			_, _, err = p.Lane.Read(ref, dst)
			require.NoError(t, err)
		}), way.name)
	}
}

// Batches mix kinds and ways. Those that find no shadow are written by themselves.
func TestStagedBatches(t *testing.T) {
	for _, durable := range []bool{false, true} {
		p := slabtest.New(t, 1).Lane(1)
		if durable {
			p.Durable()
		}
		var refs []proto.Ref
		var payloads [][]byte
		for i := range 80 {
			way := stagedWays[i%2]
			want := stagedWant(way.capacity)
			want.Durable = durable
			if i%3 == 0 {
				want.Kind = proto.Pair
			}
			payload := make([]byte, way.bytes)
			ref, err := p.Alloc.Alloc(payload, want)
			require.NoError(t, err)
			refs, payloads = append(refs, ref), append(payloads, way.next(payload, i+1))
		}
		errs := make([]error, len(refs))
		p.Lane.WriteMany(refs, payloads, errs)
		for i := range refs {
			require.NoError(t, errs[i])
		}
		require.NoError(t, p.Lane.ReadMany(refs, func(i int, payload []byte, _ slab.Info, err error) {
			require.NoError(t, err)
			require.Equal(t, payloads[i], payload)
		}))
	}
}

// A callback that writes into the payload that it is lent does not spoil the record: what is in home is
// not what the record would be made from.
func TestStagedCallbackMayWriteIntoThePayload(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	ref, err := p.Alloc.Alloc(make([]byte, 1000), stagedWant(1200))
	require.NoError(t, err)
	dieAfter(t, p, 3, func() { // record or shadow, L, CAS V; not home
		_, _ = p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
			old[7] = 7
			return old, nil
		})
	})
	got, _, err := w.Lane(2).Lane.Read(ref, nil)
	require.NoError(t, err)
	require.EqualValues(t, 7, got[7])
}

// dieAfter runs f until the lane's next commit, of which only the first verbs are executed, and kills the lane.
// It returns how many verbs there were.
func dieAfter(t *testing.T, p *slabtest.Port, verbs int, f func()) (all int) {
	p.BeforeDo = func(_ int, r *rdma.Round) {
		c := r.At(0)
		if c.Verbs[0].Op != rdma.Write {
			return
		}
		all = len(c.Verbs)
		if c.Verbs = c.Verbs[:min(verbs, all)]; len(c.Verbs) > 0 {
			rdma.Do(r)
		}
		panic(slabtest.ErrDied)
	}
	defer func() { require.Equal(t, slabtest.ErrDied, recover()) }()
	f()
	return all
}

// A writer dies behind each verb of its commit. Readers see the old value until the CAS of V and the new
// one afterwards, at once; a taker, a scrub and a reconcile make home whole, and no version is given twice.
func TestStagedWriterDiesAtEachVerb(t *testing.T) {
	step := slabtest.Stride(t, 1, 4)
	for _, way := range stagedWays {
		for _, end := range []string{"taker", "scrub", "free", "reconcile"} {
			for verbs, all := 0, 1; verbs < all; verbs += step {
				all = stagedWriterDies(t, &way, end, verbs)
			}
		}
	}
}

// stagedWriterDies kills a writer behind so many verbs of its commit, and returns how many it has. The world ends with it: a device
// keeps the memory of its regions.
func stagedWriterDies(t *testing.T, way *stagedWay, end string, verbs int) (all int) {
	t.Run(fmt.Sprintf("%s/%s/%d", way.name, end, verbs), func(t *testing.T) {
		w := slabtest.New(t, 1)
		p := w.Lane(1)
		was := make([]byte, way.bytes)
		ref, err := p.Alloc.Alloc(was, stagedWant(way.capacity))
		require.NoError(t, err)
		was = way.next(was, 1)
		require.NoError(t, update(p.Lane, ref, was))
		next := way.next(was, 2)
		done := func() (n int) { return dieAfter(t, p, verbs, func() { _ = update(p.Lane, ref, next) }) }
		if all = done(); all == 0 {
			t.Fatal("no commit")
		}
		where := fmt.Sprintf("%s, %s, behind %d verbs of %d", way.name, end, verbs, all)
		want, version := was, ref.Incarnation.Born()+1
		if verbs >= 3 {
			want, version = next, version+1
		}
		o := w.Lane(2)
		sees := func(want []byte, version uint64) {
			got, info, err := o.Lane.Read(ref, nil)
			require.NoError(t, err, where)
			require.Equal(t, want, got, where)
			require.Equal(t, version, info.Version, where)
		}
		sees(want, version)
		w.Fence(1)
		reg, err := o.Region(1)
		require.NoError(t, err)
		switch end {
		case "taker":
			next := way.next(want, 3)
			require.NoError(t, update(o.Lane, ref, next), where)
			got, info, err := o.Lane.Read(ref, nil)
			require.NoError(t, err, where)
			require.Equal(t, next, got, where)
			require.Greater(t, info.Version, version, where)
			require.Equal(t, version+2, info.Version, where) // the dead writer's version, or the one that it would have had, is taken
		case "scrub":
			_, err := o.Lane.Scrub(reg, func(id uint32) bool { return id == 1 })
			require.NoError(t, err, where)
			sees(want, version)
		case "reconcile":
			o.NextEpoch()
			st, err := o.Lane.Reconcile(o.View())
			require.NoError(t, err, where)
			require.Zero(t, st.Bad, where)
			sees(want, version)
		case "free":
			_, _, err := o.Alloc.Free(ref)
			require.NoError(t, err, where)
			_, _, err = o.Lane.Read(ref, nil)
			require.ErrorIs(t, err, slab.ErrFreed, where)
			return
		}
		block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		h := proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
		i, _ := w.Geometry.SlabIndex(uint64(ref.Addr.Off()), h.Class())
		s := w.Geometry.Slab(block, i, h)
		mem := bytes.Clone(w.Nodes[0].Memory.Bytes()[s.Off:][:h.Class().Bytes()])
		r, v := s.Words(mem)
		require.Zero(t, r, where)
		_, _, from := s.Compose(mem, v.Version(), proto.Seed(reg.Seed, s.Off, h.Generation()))
		require.Equal(t, proto.FromHome, from, where)
	})
	return all
}

func TestStagedSlabsNeedOneReplica(t *testing.T) {
	w := slabtest.New(t, 2)
	_, err := w.Lane(1).Alloc.Alloc(nil, alloc.Want{Kind: proto.Staged, Replicas: 2})
	require.ErrorIs(t, err, alloc.ErrStagedReplicas)
}

// A client takes a slab over and reads the dead writer's shadow; the scrub of the dead writer frees that
// shadow, and another client uses it, only when the taker has released the slab.
func TestScrubWaitsForTakers(t *testing.T) {
	w, dead, ref, way := shadowed(t)
	taker, scrub := w.Lane(2), w.Lane(3)
	next := way.next(nil, 2)
	dieAfter(t, dead, 3, func() { _ = update(dead.Lane, ref, next) }) // committed, home is not written
	w.Fence(1)
	reg, err := scrub.Region(1)
	require.NoError(t, err)
	started, ended := make(chan struct{}), make(chan error)
	taker.AfterDo = func(_ int, r *rdma.Round) {
		if v := r.At(0).Verbs[0]; v.Op != rdma.CompareSwap || !v.Swapped() || v.Expect == 0 || v.Off != uint64(ref.Addr.Off()) {
			return
		}
		taker.AfterDo = nil               // it has taken R over, and not read the shadow
		scrub.OnPause = func(int) error { // it waits
			scrub.OnPause = nil
			close(started)
			return nil
		}
		go func() {
			_, err := scrub.Lane.Scrub(reg, func(id uint32) bool { return id == 1 })
			ended <- err
		}()
		select {
		case <-started:
		case err := <-ended:
			t.Errorf("the scrub has ended (%v) while a taker needs a shadow", err)
			close(started)
			go func() { ended <- err }()
		}
	}
	got := []byte(nil)
	_, err = taker.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
		got = bytes.Clone(old)
		return way.next(old, 3), nil
	})
	require.NoError(t, err)
	require.Equal(t, next, got)
	<-started
	require.NoError(t, <-ended)
}

// wordsOf are R, V and L of the slab of an object, as they are in memory.
func wordsOf(w *slabtest.World, ref proto.Ref) (proto.R, proto.V, proto.Locator) {
	mem, at := w.Nodes[0].Memory.Bytes(), int(ref.Addr.Off())
	return proto.R(proto.Word(mem, at)), proto.V(proto.Word(mem, at+8)), proto.Locator(proto.Word(mem, at+16))
}

// The scrub settles all slabs of the dead before it frees the first claim that may be a shadow, also where
// the shadow comes first in the region.
func TestScrubSettlesBeforeItFreesShadows(t *testing.T) {
	w, dead, ref, way := shadowed(t)
	scrub := w.Lane(2)
	dieAfter(t, dead, 3, func() { _ = update(dead.Lane, ref, way.next(nil, 2)) })
	w.Fence(1)
	_, _, lead := wordsOf(w, ref)
	require.Equal(t, proto.RecordShadow, lead.Kind())
	require.Less(t, lead.Off(), ref.Addr.Off())
	taken := false
	scrub.AfterDo = func(_ int, r *rdma.Round) {
		if v := r.At(0).Verbs[0]; v.Op == rdma.CompareSwap && v.Off == uint64(lead.Off()) && !taken {
			holder, _, _ := wordsOf(w, ref)
			require.Zero(t, holder, "a shadow is freed before its slab is settled")
			taken = true
		}
	}
	reg, err := scrub.Region(1)
	require.NoError(t, err)
	_, err = scrub.Lane.Scrub(reg, func(id uint32) bool { return id == 1 })
	require.NoError(t, err)
	require.True(t, taken)
	r, _, _ := wordsOf(w, proto.Ref{Addr: proto.MakeAddr(1, lead.Off())})
	require.Zero(t, r)
}

// Between the READ of a slab and that of its shadow the change ends, and the next one of the same
// session is written to the same shadow: it is not committed, and not what V named.
func TestReaderComparesTheShadow(t *testing.T) {
	w, dead, ref, way := shadowed(t)
	reader := w.Lane(2)
	next := way.next(nil, 2)
	dieAfter(t, dead, 3, func() { _ = update(dead.Lane, ref, next) })
	_, v, lead := wordsOf(w, ref)
	reg, err := reader.Region(1)
	require.NoError(t, err)
	reader.AfterDo = func(_ int, r *rdma.Round) {
		if r.At(0).Verbs[0].Off != uint64(ref.Addr.Off()) {
			return
		}
		reader.AfterDo = nil
		mem := w.Nodes[0].Memory.Bytes()
		shadow := mem[lead.Off()+proto.StagedLead:][:lead.Bytes()]
		copy(mem[ref.Addr.Off()+proto.StagedLead:], shadow)
		h := proto.ParseImageHeader(shadow)
		h.Version++
		copy(shadow[proto.ImageHeaderBytes:], way.next(nil, 3))
		proto.EncodeImage(shadow, proto.Seed(reg.Seed, uint64(ref.Addr.Off()), ref.Incarnation.Generation()), h)
	}
	got, info, err := reader.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, next, got)
	require.Equal(t, v.Version(), info.Version)
	require.Nil(t, reader.AfterDo)
}

// A writer dies behind home and before its FLUSH: the taker makes home durable before it goes on, because its
// own record is written over that of the dead writer.
func TestTakerFlushesHome(t *testing.T) {
	way := stagedWays[0]
	w := slabtest.New(t, 1)
	dead, taker := w.Lane(1), w.Lane(2)
	dead.Durable()
	want := stagedWant(way.capacity)
	want.Durable = true
	ref, err := dead.Alloc.Alloc(make([]byte, way.bytes), want)
	require.NoError(t, err)
	kinds := dead.BeforeDo
	all := dieAfter(t, dead, 0, func() { _ = update(dead.Lane, ref, make([]byte, way.bytes)) })
	require.Equal(t, 9, all, "record, L and home with a FLUSH each, CAS V and its FLUSH, CAS R")
	w.Fence(1)
	taker.Durable()
	home := uint64(ref.Addr.Off()) + proto.StagedLead
	flushed := false
	taker.BeforeDo = func(n int, r *rdma.Round) {
		for _, v := range r.At(0).Verbs {
			switch {
			case v.Op == rdma.Flush && v.Off <= home && v.Off+v.Bytes >= home+uint64(way.bytes):
				flushed = true
			case v.Op == rdma.Write:
				require.True(t, flushed, "something is written before home is durable")
			}
		}
		kinds(n, r)
	}
	require.NoError(t, update(taker.Lane, ref, way.next(make([]byte, way.bytes), 3)))
	require.True(t, flushed)
}

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

// A fence is a round trip of its own on a queue pair. A batch has as many as a single object:
// its chains are fenced once for each kind of verbs.
func TestFencesOfOperations(t *testing.T) {
	for _, c := range []struct {
		replicas            int
		durable             bool
		birth, write, batch uint64
	}{
		// CAS R behind CAS V.
		{replicas: 1, birth: 1, write: 1, batch: 1},
		{replicas: 3, birth: 1, write: 1, batch: 1},
		// CAS V behind the FLUSH of the image, FLUSH of V behind CAS V, CAS R behind that.
		{replicas: 1, durable: true, birth: 3, write: 3, batch: 2 * 3},
		// At each backup CAS V and the FLUSH of V; at the primary the FLUSH of V and CAS R.
		{replicas: 2, durable: true, birth: 4, write: 4, batch: 2 * 4},
		{replicas: 3, durable: true, birth: 6, write: 6, batch: 2 * 6},
	} {
		t.Run(fmt.Sprintf("R=%d,durable=%v", c.replicas, c.durable), func(t *testing.T) {
			w := slabtest.New(t, c.replicas)
			l := w.Lane(1)
			if c.durable {
				l.Durable()
			}
			fences := func(f func()) uint64 {
				before := l.Lane.Tally().Fences
				f()
				return l.Lane.Tally().Fences - before
			}
			refs := make([]proto.Ref, 64) // of a durable region 51 fit into a chain
			payloads, errs := make([][]byte, len(refs)), make([]error, len(refs))
			for i := range refs {
				var err error
				refs[i], err = l.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: c.replicas})
				require.NoError(t, err)
				payloads[i] = fmt.Append(nil, i)
			}
			require.Equal(t, c.birth, fences(func() {
				_, err := l.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: c.replicas})
				require.NoError(t, err)
			}))
			require.Equal(t, c.write, fences(func() {
				_, err := l.Lane.Update(refs[0], func([]byte, *slab.Info) ([]byte, error) { return []byte("x"), nil })
				require.NoError(t, err)
			}))
			require.Equal(t, c.batch, fences(func() { l.Lane.WriteMany(refs, payloads, errs) }))
			for i, ref := range refs {
				require.NoError(t, errs[i])
				got, _, err := l.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, payloads[i], got)
			}
			require.Zero(t, fences(func() {
				_, _, err := l.Lane.Read(refs[0], nil)
				require.NoError(t, err)
			}))
		})
	}
}

// A durable Update takes as many rounds as a volatile one. Over an adapter that flushes by itself, or by a READ behind the WRITEs, that is all;
// where the node is asked to flush, a chain goes in parts, each ordered behind the answer to the one before: two trips more.
func TestRoundsOfDurableUpdates(t *testing.T) {
	for _, c := range []struct{ replicas, rounds, trips int }{{1, 2, 4}, {2, 3, 5}, {3, 3, 5}} {
		t.Run(fmt.Sprintf("R=%d", c.replicas), func(t *testing.T) {
			for _, durable := range []bool{false, true} {
				l := slabtest.New(t, c.replicas).Lane(1)
				if durable {
					l.Durable()
				}
				ref, err := l.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: c.replicas, Durable: durable})
				require.NoError(t, err)
				trips, hooked := 0, l.BeforeDo
				l.BeforeDo = func(n int, r *rdma.Round) {
					most := 0
					for i := range r.Len() {
						most = max(most, parts(r.At(i).Verbs))
					}
					if trips += most; hooked != nil {
						hooked(n, r)
					}
				}
				before := l.Lane.Tally().Rounds
				_, err = l.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return []byte("x"), nil })
				require.NoError(t, err)
				require.EqualValues(t, c.rounds, l.Lane.Tally().Rounds-before, "durable: %v", durable)
				require.Equal(t, map[bool]int{false: c.rounds, true: c.trips}[durable], trips, "durable: %v", durable)
			}
		})
	}
}

// The same counted on a device: the parts that its queue pairs were given. By appliance a durable Update posts as many as a volatile one; by agent
// one more to the backup, whose V is ordered behind its image, and one more to the primary, whose R is ordered behind V.
func TestPartsOfDurableUpdatesOnADevice(t *testing.T) {
	if !slabtest.HasDevice() {
		t.Skip("no RDMA device: make test and make test-rdma run this in a virtual machine that has one")
	}
	for _, c := range []struct {
		replicas          int
		method            rdma.FlushMethod
		volatile, durable uint64
		pushed, asked     uint64
	}{
		{replicas: 1, method: rdma.ReadAfterWrite, volatile: 2, durable: 2, pushed: 2},
		{replicas: 2, method: rdma.ReadAfterWrite, volatile: 4, durable: 4, pushed: 4},
		{replicas: 1, method: rdma.Message, volatile: 2, durable: 4, asked: 2},
		{replicas: 2, method: rdma.Message, volatile: 4, durable: 6, asked: 4},
	} {
		t.Run(fmt.Sprintf("R=%d,%v", c.replicas, c.method), func(t *testing.T) {
			w := slabtest.NewFlushed(t, c.replicas, c.method)
			for _, durable := range []bool{false, true} {
				l := w.Lane(map[bool]uint32{false: 1, true: 2}[durable])
				if durable {
					l.Durable()
				}
				ref, err := l.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: c.replicas, Durable: durable})
				require.NoError(t, err)
				before := w.Posted()
				_, err = l.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return []byte("x"), nil })
				require.NoError(t, err)
				after := w.Posted()
				require.Equal(t, map[bool]uint64{false: c.volatile, true: c.durable}[durable], after.Parts-before.Parts, "durable: %v", durable)
				if durable {
					require.Equal(t, []uint64{c.pushed, c.asked}, []uint64{after.Pushed - before.Pushed, after.Asked - before.Asked})
				}
			}
		})
	}
}

// parts is how many parts a chain has where the node is asked to flush: one more for each request that a verb is ordered behind.
func parts(verbs []rdma.Verb) int {
	n := 1
	for i := range verbs {
		if v := &verbs[i]; v.Op == rdma.Flush && v.Kind == rdma.Persistent && i+1 < len(verbs) && !rdma.LeftToLater(verbs, i) {
			n++
		}
	}
	return n
}

// A batch with slabs of both kinds releases none of them ahead of the CAS of a V, or of a FLUSH, of its chain:
// otherwise the next session could find R free and V as it was. One fence for each kind of verbs is enough.
func TestMixedBatchesReleaseBehindV(t *testing.T) {
	for _, c := range []struct {
		replicas int
		durable  bool
		fences   uint64
	}{
		// WRITE home behind CAS V; CAS R is behind a WRITE by itself.
		{replicas: 1, fences: 1},
		{replicas: 1, durable: true, fences: 4},
		// CAS R of the PAIR slabs behind CAS V. Homes and the releases of STAGED slabs are in rounds of their own.
		{replicas: 2, fences: 1},
		{replicas: 2, durable: true, fences: 4},
	} {
		for _, first := range []proto.Kind{proto.Staged, proto.Pair} {
			t.Run(fmt.Sprintf("R=%d,durable=%v,%v first", c.replicas, c.durable, first), func(t *testing.T) {
				l := slabtest.New(t, c.replicas).Lane(1)
				l.Wants(1)
				if c.durable {
					l.Durable()
				}
				var refs []proto.Ref
				var payloads [][]byte
				for i := range 4 {
					kind := first
					if i%2 == 1 {
						kind = proto.Staged + proto.Pair - first
					}
					ref, err := l.Alloc.Alloc(make([]byte, 1000), alloc.Want{Kind: kind, Replicas: 1, Capacity: 1200, Durable: c.durable})
					require.NoError(t, err)
					refs, payloads = append(refs, ref), append(payloads, append(make([]byte, 999), byte(i+1)))
				}
				kinds, released := l.BeforeDo, 0
				l.BeforeDo = func(n int, r *rdma.Round) {
					for i := range r.Len() {
						released += releasesInOrder(t, r.At(i))
					}
					if kinds != nil {
						kinds(n, r)
					}
				}
				errs, before := make([]error, len(refs)), l.Lane.Tally().Fences
				l.Lane.WriteMany(refs, payloads, errs)
				require.Equal(t, c.fences, l.Lane.Tally().Fences-before)
				require.Equal(t, len(refs), released)
				for i, ref := range refs {
					require.NoError(t, errs[i])
					got, _, err := l.Lane.Read(ref, nil)
					require.NoError(t, err)
					require.Equal(t, payloads[i], got)
				}
			})
		}
	}
}

// releasesInOrder checks that each CAS of R to 0 is behind every other CAS and every FLUSH of its chain, and counts
// them.
func releasesInOrder(t *testing.T, c *rdma.Chain) (releases int) {
	unordered := 0 // CAS of V and FLUSHes behind the last fence
	for i := range c.Verbs {
		v := &c.Verbs[i]
		if v.Fence {
			unordered = 0
		}
		switch {
		case v.Op == rdma.CompareSwap && v.New == 0:
			releases++
			require.Zero(t, unordered, "verb %d of %d, CAS of R, may overtake a CAS of V or a FLUSH", i, len(c.Verbs))
		case v.Op == rdma.CompareSwap || v.Op == rdma.Flush:
			unordered++
		}
	}
	return releases
}

// A processor that makes an Update of one replica durable writes each changed line back once, the image's and then V's, and waits twice: the image is
// durable before V is changed, V before the caller is answered. The line of R is never written back.
func TestWriteBacksOfDurableUpdates(t *testing.T) {
	for bytes, want := range map[int]uint64{8: 1 + 1, 128: 3 + 1, 1000: 17 + 1} {
		w := slabtest.NewLedgers(t, 1)
		l := w.Lane(1)
		l.Durable()
		ref, err := l.Alloc.Alloc(make([]byte, bytes), alloc.Want{Replicas: 1, Durable: true})
		require.NoError(t, err)
		ledger := w.Nodes[0].Ledger
		for range uint8(4) { // both images, twice
			lines, needless := ledger.Lines()
			steps := ledger.Steps()
			_, err = l.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
				img := make([]byte, len(old))
				for i := range img {
					img[i] = old[i] + 1
				}
				return img, nil
			})
			require.NoError(t, err)
			after, afterNeedless := ledger.Lines()
			require.EqualValues(t, 4, ledger.Steps()-steps, "two write-backs, a fence each")
			require.Equal(t, want, after-lines, "lines of %d bytes", bytes)
			require.Equal(t, needless, afterNeedless, "lines that were durable already")
		}
	}
}

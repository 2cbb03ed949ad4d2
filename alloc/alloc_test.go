package alloc_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

func want(n int) alloc.Want { return alloc.Want{Replicas: n} }

// TestRoundsAndVerbs pins the table of docs/DESIGN.md#operations: rounds, and verbs on the
// primary, of every warm operation.
func TestRoundsAndVerbs(t *testing.T) {
	for _, tc := range []struct {
		r                         int
		read, update, birth, free [2]int // rounds, verbs on the primary
		freeBit                   [2]int
	}{
		{1, [2]int{1, 1}, [2]int{2, 5}, [2]int{1, 3}, [2]int{2, 3}, [2]int{2, 4}},
		{2, [2]int{1, 1}, [2]int{3, 5}, [2]int{2, 3}, [2]int{3, 3}, [2]int{3, 4}},
		{3, [2]int{1, 1}, [2]int{3, 5}, [2]int{2, 3}, [2]int{3, 3}, [2]int{3, 4}},
	} {
		t.Run(fmt.Sprintf("R=%d", tc.r), func(t *testing.T) {
			w := slabtest.New(t, tc.r)
			p := w.Lane(1)
			rounds, verbs := 0, 0
			p.BeforeDo = func(_ int, r *rdma.Round) {
				rounds++
				for i := range r.Len() {
					if c := r.At(i); c.To == mustRegion(t, p).P() {
						verbs += len(c.Verbs)
					}
				}
			}
			cost := func(f func()) [2]int {
				rounds, verbs = 0, 0
				f()
				return [2]int{rounds, verbs}
			}
			ref, err := p.Alloc.Alloc([]byte("warm up"), want(tc.r))
			require.NoError(t, err)
			require.Equal(t, tc.birth, cost(func() {
				ref, err = p.Alloc.Alloc([]byte("birth"), want(tc.r))
				require.NoError(t, err)
			}), "Alloc + Birth")
			require.Equal(t, tc.read, cost(func() {
				b, _, err := p.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, "birth", string(b))
			}), "Read")
			require.Equal(t, tc.update, cost(func() {
				_, err := p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
					require.Equal(t, "birth", string(old))
					return []byte("second"), nil
				})
				require.NoError(t, err)
			}), "Update")
			require.Equal(t, tc.free, cost(func() {
				_, last, _, err := p.Lane.Free(ref, true)
				require.NoError(t, err)
				require.Equal(t, "second", string(last))
			}), "Free, kept")
			ref, err = p.Alloc.Alloc([]byte("x"), want(tc.r))
			require.NoError(t, err)
			require.Equal(t, tc.freeBit, cost(func() {
				_, _, _, err := p.Lane.Free(ref, false)
				require.NoError(t, err)
			}), "Free, released")
		})
	}
}

func mustRegion(t *testing.T, p *slabtest.Port) *slab.Region {
	reg, err := p.Region(1)
	require.NoError(t, err)
	return reg
}

// TestRefillCostsTwoRounds: 64 claims, two rounds, when the block is known.
func TestRefillCostsTwoRounds(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	for range 64 {
		_, err := p.Alloc.Alloc(nil, want(1))
		require.NoError(t, err)
	}
	require.Zero(t, p.Alloc.Held())
	before := p.Rounds()
	_, err := p.Alloc.Alloc(nil, want(1))
	require.NoError(t, err)
	require.Equal(t, 63, p.Alloc.Held())
	require.Equal(t, 3, p.Rounds()-before, "two for the refill, one for the birth")
}

func TestEveryClassAndKind(t *testing.T) {
	w := slabtest.New(t, 2)
	p := w.Lane(1)
	for _, kind := range []proto.Kind{proto.Pair, proto.Single} {
		for _, n := range []int{0, 1, 16, 24, 25, 100, 1000, 4000, 60_000, proto.MaxPayloadBytes(kind)} {
			payload := []byte(strings.Repeat("q", n))
			ref, err := p.Alloc.Alloc(payload, alloc.Want{Kind: kind, Replicas: 2, Tag: 9})
			require.NoError(t, err, n)
			b, info, err := p.Lane.Read(ref, nil)
			require.NoError(t, err)
			require.Equal(t, payload, append([]byte{}, b...))
			require.EqualValues(t, 9, info.Tag)
			_, err = p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return nil, nil })
			if kind == proto.Single {
				require.ErrorIs(t, err, slab.ErrImmutable)
			} else {
				require.NoError(t, err)
			}
			_, _, err = p.Alloc.Free(ref)
			require.NoError(t, err)
			_, _, err = p.Lane.Read(ref, nil)
			require.ErrorIs(t, err, slab.ErrFreed)
		}
		_, err := p.Alloc.Alloc(make([]byte, proto.MaxPayloadBytes(kind)+1), alloc.Want{Kind: kind, Replicas: 2})
		require.ErrorIs(t, err, alloc.ErrTooLarge)
		require.ErrorContains(t, err, fmt.Sprint(proto.MaxPayloadBytes(kind)))
	}
}

// TestHazard18_ReuseDoesNotAnswerOldRefs and 19: an old Ref to a slab that lives
// again is refused, for reading, updating and freeing.
func TestHazard18_ReuseDoesNotAnswerOldRefs(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	old, err := p.Alloc.Alloc([]byte("old"), want(1))
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(old)
	require.NoError(t, err)
	ref, err := p.Alloc.Alloc([]byte("new"), want(1))
	require.NoError(t, err)
	require.Equal(t, old.Addr, ref.Addr, "the magazine hands the slab out again")
	require.NotEqual(t, old.Incarnation, ref.Incarnation)
	_, _, err = p.Lane.Read(old, nil)
	require.ErrorIs(t, err, slab.ErrFreed)
	_, err = p.Lane.Update(old, func([]byte, *slab.Info) ([]byte, error) { return nil, nil })
	require.ErrorIs(t, err, slab.ErrFreed)
	b, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "new", string(b))
}

func TestHazard19_SecondFreeFails(t *testing.T) {
	w := slabtest.New(t, 2)
	p := w.Lane(1)
	ref, err := p.Alloc.Alloc([]byte("a"), want(2))
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(ref)
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(ref)
	require.ErrorIs(t, err, slab.ErrFreed)
	again, err := p.Alloc.Alloc([]byte("b"), want(2))
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(ref)
	require.ErrorIs(t, err, slab.ErrFreed)
	_, _, err = p.Lane.Read(again, nil)
	require.NoError(t, err)
}

// TestHazard01_DeadHolderIsTakenOver: a client dies at every round of an update;
// readers never wait, and after the fence another client updates.
func TestHazard01_DeadHolderIsTakenOver(t *testing.T) {
	for _, replicas := range []int{1, 2, 3} {
		for die := 1; die <= 3; die++ {
			t.Run(fmt.Sprintf("R=%d/round%d", replicas, die), func(t *testing.T) {
				w := slabtest.New(t, replicas)
				dead, heir := w.Lane(1), w.Lane(2)
				ref, err := dead.Alloc.Alloc([]byte("v1"), want(replicas))
				require.NoError(t, err)
				start := dead.Rounds()
				dead.BeforeDo = func(n int, r *rdma.Round) {
					if n-start == die+1 {
						panic(slabtest.ErrDied)
					}
				}
				func() {
					defer func() { _ = recover() }()
					_, _ = dead.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return []byte("v2"), nil })
				}()
				b, _, err := heir.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Contains(t, []string{"v1", "v2"}, string(b))
				w.Fence(1)
				var saw string
				_, err = heir.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
					saw = string(old)
					return []byte("v3"), nil
				})
				require.NoError(t, err)
				require.Equal(t, string(b), saw)
				b, _, err = heir.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, "v3", string(b))
				requireSameReplicas(t, w, ref)
			})
		}
	}
}

// requireSameReplicas: V and the active image are equal on all nodes.
func requireSameReplicas(t *testing.T, w *slabtest.World, ref proto.Ref) {
	p := w.Lane(100)
	reg := mustRegion(t, p)
	_, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	b, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	h := reg.Headers.Load(b)
	s := proto.Slab{Off: uint64(ref.Addr.Off()), Class: h.Class(), Kind: h.Kind()}
	first := w.Nodes[0].Memory.Bytes()[s.Off:][:h.Class().Bytes()]
	_, v := s.Words(first)
	for i, n := range w.Nodes[1:] {
		mem := n.Memory.Bytes()
		require.Equal(t, uint64(h), proto.Word(mem, int(w.Geometry.HeaderOff(b))), "header on backup %d", i+1)
		other := mem[s.Off:][:h.Class().Bytes()]
		_, ov := s.Words(other)
		require.Equal(t, v, ov, "V on backup %d", i+1)
		if v.State() == proto.StateLive {
			n := proto.ImageLen(proto.ParseImageHeader(s.Image(first, v.Version())).Length)
			require.Equal(t, s.Image(first, v.Version())[:n], s.Image(other, v.Version())[:n])
		}
	}
}

func TestFullRegion(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	var refs []proto.Ref
	for {
		ref, err := p.Alloc.Alloc(make([]byte, 500_000), want(1))
		if err != nil {
			require.ErrorIs(t, err, alloc.ErrNoSpace)
			require.ErrorContains(t, err, "1048576")
			break
		}
		refs = append(refs, ref)
	}
	require.Len(t, refs, int(w.Geometry.ShadowBlock()), "the last two blocks of a region with one replica hold no objects")
	seen := map[proto.Addr]bool{}
	for _, r := range refs {
		require.False(t, seen[r.Addr])
		seen[r.Addr] = true
	}
	_, _, err := p.Alloc.Free(refs[3])
	require.NoError(t, err)
	_, err = p.Alloc.Alloc(make([]byte, 500_000), want(1))
	require.NoError(t, err)
}

// TestManyClients: allocations of many lanes never overlap, and what they write
// stays what it is while others free and allocate around it.
func TestManyClients(t *testing.T) {
	w := slabtest.New(t, 2)
	var wg sync.WaitGroup
	var mu sync.Mutex
	live := map[proto.Addr]string{}
	for c := range 6 {
		p := w.Lane(uint32(c + 1))
		wg.Go(func() {
			var mine []proto.Ref
			for i := range 300 {
				text := fmt.Sprintf("client %d object %d %s", c, i, strings.Repeat("x", (i*37)%200))
				ref, err := p.Alloc.Alloc([]byte(text), want(2))
				if !errors.Is(err, nil) {
					t.Error(err)
					return
				}
				mu.Lock()
				if was, ok := live[ref.Addr]; ok {
					t.Errorf("%v holds %q and %q", ref, was, text)
				}
				live[ref.Addr] = text
				mu.Unlock()
				mine = append(mine, ref)
				if i%3 == 2 {
					old := mine[0]
					mine = mine[1:]
					mu.Lock()
					want := live[old.Addr]
					delete(live, old.Addr)
					mu.Unlock()
					last, _, err := p.Alloc.Free(old)
					if err != nil || string(last) != want {
						t.Errorf("free of %v: %v, %q instead of %q", old, err, last, want)
						return
					}
				}
			}
			if err := p.Alloc.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	p := w.Lane(50)
	for addr, text := range live {
		_ = addr
		_ = text
	}
	require.Len(t, live, 6*200)
	require.NoError(t, p.Alloc.Close())
	// Nothing is left but the live objects: every taken bit is a LIVE slab's.
	reg := mustRegion(t, p)
	mem := w.Nodes[0].Memory.Bytes()
	taken := 0
	for b := range w.Geometry.Blocks {
		h := proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(b))))
		if h.State() != proto.BlockActive {
			continue
		}
		for i := range h.Class().Slabs() {
			s := w.Geometry.Slab(b, i, h)
			word := proto.Word(mem, int(reg.Geometry.MapOff(b))+i/64*8)
			bit := word>>(i%64)&1 == 1
			r, v := proto.R(proto.Word(mem, int(s.ROff()))), proto.V(proto.Word(mem, int(s.VOff())))
			require.Zero(t, r)
			require.Equal(t, v.State() == proto.StateLive, bit, "block %d slab %d %v", b, i, v)
			if bit {
				taken++
			}
		}
	}
	require.Equal(t, 6*200, taken)
}

func TestUpdatesOfOneSlabAddUp(t *testing.T) {
	for _, r := range []int{1, 3} {
		w := slabtest.New(t, r)
		p := w.Lane(99)
		ref, err := p.Alloc.Alloc(make([]byte, 8), want(r))
		require.NoError(t, err)
		var wg sync.WaitGroup
		const clients, each = 4, 100
		for c := range clients {
			q := w.Lane(uint32(c + 1))
			wg.Go(func() {
				for range each {
					_, err := q.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
						n := make([]byte, 8)
						proto.PutWord(n, 0, proto.Word(old, 0)+1)
						return n, nil
					})
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		b, info, err := p.Lane.Read(ref, nil)
		require.NoError(t, err)
		require.EqualValues(t, clients*each, proto.Word(b, 0))
		require.EqualValues(t, clients*each+1, info.Version)
		requireSameReplicas(t, w, ref)
	}
}

func TestBatches(t *testing.T) {
	for _, r := range []int{1, 2} {
		w := slabtest.New(t, r)
		p := w.Lane(1)
		var refs []proto.Ref
		var payloads [][]byte
		for i := range 64 {
			ref, err := p.Alloc.Alloc(fmt.Appendf(nil, "first %d", i), want(r))
			require.NoError(t, err)
			refs = append(refs, ref)
			payloads = append(payloads, fmt.Appendf(nil, "second %d", i))
		}
		errs := make([]error, len(refs))
		before := p.Rounds()
		p.Lane.WriteMany(refs, payloads, errs)
		for i, err := range errs {
			require.NoError(t, err, i)
		}
		require.Equal(t, map[int]int{1: 2, 2: 3}[r], p.Rounds()-before)
		before = p.Rounds()
		got := map[int]string{}
		require.NoError(t, p.Lane.ReadMany(refs, func(i int, payload []byte, _ slab.Info, err error) {
			require.NoError(t, err)
			got[i] = string(payload)
		}))
		require.Equal(t, 1, p.Rounds()-before)
		require.Len(t, got, 64)
		require.Equal(t, "second 17", got[17])
		_, _, err := p.Alloc.Free(refs[5])
		require.NoError(t, err)
		p.Lane.WriteMany(refs[:10], payloads[:10], errs[:10])
		require.ErrorIs(t, errs[5], slab.ErrFreed)
		require.NoError(t, errs[6])
		requireSameReplicas(t, w, refs[6])
	}
}

// source is a Source without a region, whose Grow fails with an error.
type source struct{ err error }

func (s source) Regions(alloc.Home) []uint32   { return nil }
func (s source) Grow(alloc.Home, uint32) error { return s.err }
func (s source) Random() uint64                { return 0 }

// TestNoSpaceIsAnAnswer: Alloc fails with ErrNoSpace where the cluster has no room for a
// region. Where it has not said so, the error is the one that kept it from saying.
func TestNoSpaceIsAnAnswer(t *testing.T) {
	p := slabtest.New(t, 1).Lane(1)
	for _, cause := range []error{alloc.ErrNoSpace, context.DeadlineExceeded} {
		a, err := alloc.New(p.Lane, source{cause})
		require.NoError(t, err)
		_, err = a.Alloc([]byte("x"), want(1))
		require.ErrorIs(t, err, cause)
		require.Equal(t, cause == alloc.ErrNoSpace, errors.Is(err, alloc.ErrNoSpace), "%v", err)
	}
}

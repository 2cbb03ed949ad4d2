package alloc_test

import (
	"bytes"
	"context"
	"encoding/binary"
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
	require.Len(t, refs, int(w.Geometry.Blocks))
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
				text := fmt.Sprintf("client %d object %d %s", c, i, strings.Repeat("x", (i*37)%400))
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

// TestHazard20_ReclaimChangesClass: a block goes to another class only when
// nothing in it lives or is held, and old refs into it stay dead.
func TestHazard20_ReclaimChangesClass(t *testing.T) {
	w := slabtest.New(t, 2)
	p, agent := w.Lane(1), w.Lane(2)
	old, err := p.Alloc.Alloc([]byte("small"), want(2))
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(old.Addr.Off()))
	passes := 0
	pass := func() error { passes++; return nil }

	freed, err := agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, pass)
	require.NoError(t, err)
	require.Zero(t, freed, "an object lives there")
	_, _, err = p.Lane.Read(old, nil)
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(old)
	require.NoError(t, err)
	freed, err = agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, pass)
	require.NoError(t, err)
	require.Zero(t, freed, "a magazine holds it")
	require.NoError(t, p.Alloc.Close())
	freed, err = agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, pass)
	require.NoError(t, err)
	require.Equal(t, 1, freed)
	require.Equal(t, 4, passes)

	fresh := w.Lane(3) // its session starts after the pass: no header of before
	_, _, err = fresh.Lane.Read(old, nil)
	require.ErrorIs(t, err, slab.ErrFreed)
	for range int(w.Geometry.Blocks) {
		ref, err := fresh.Alloc.Alloc(make([]byte, 300_000), want(2))
		require.NoError(t, err, "every block, the reclaimed one too, takes the large class")
		if b, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off())); b == block {
			require.EqualValues(t, 1, ref.Incarnation.Generation())
			requireSameReplicas(t, w, ref)
		}
	}
	_, _, err = fresh.Lane.Read(old, nil)
	require.ErrorIs(t, err, slab.ErrFreed)
}

// TestHazard20_BirthUnderTheReadOfABlock: a client has a claim in the block and births it while
// the agent's READ of the block is under way. The READ returns V from before and R from
// behind it: the slab seems to be free.
func TestHazard20_BirthUnderTheReadOfABlock(t *testing.T) {
	w := slabtest.New(t, 2)
	p, agent := w.Lane(1), w.Lane(2)
	first, err := p.Alloc.Alloc(make([]byte, 300_000), want(2)) // the only slab of its block
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(first) // it stays claimed
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(first.Addr.Off()))
	off := w.Geometry.BlockOff(block)
	var born proto.Ref
	before := make([]byte, proto.BlockBytes)
	reads := func(r *rdma.Round) bool {
		v := &r.At(0).Verbs[0]
		return v.Op == rdma.Read && v.Len() == proto.BlockBytes
	}
	agent.BeforeDo = func(_ int, r *rdma.Round) {
		if born == (proto.Ref{}) && reads(r) {
			copy(before, w.Nodes[0].Memory.Bytes()[off:])
			born, err = p.Alloc.Alloc(bytes.Repeat([]byte("b"), 300_000), want(2))
			require.NoError(t, err)
		}
	}
	tampered := false
	agent.AfterDo = func(_ int, r *rdma.Round) {
		if tampered || !reads(r) {
			return
		}
		tampered = true
		s := proto.Slab{Class: mustHeader(t, w, block).Class(), Kind: proto.Pair}
		got := r.At(0).Verbs[0].Buf
		for in := 0; in < len(got); in += s.Class.Bytes() {
			reserved, _ := s.Words(got[in:])
			_, v := s.Words(before[in:])
			if reserved == 0 {
				binary.LittleEndian.PutUint64(got[in+int(s.VOff()):], uint64(v))
			}
		}
	}
	_, err = agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{block}, func() error { return nil })
	require.NoError(t, err)
	require.True(t, tampered)
	require.Equal(t, first.Addr, born.Addr)
	got, _, err := p.Lane.Read(born, nil)
	require.NoError(t, err, "the block was reclaimed under an object")
	require.Equal(t, bytes.Repeat([]byte("b"), 300_000), got)
}

func mustHeader(t *testing.T, w *slabtest.World, block uint32) proto.Header {
	h := proto.Header(proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
	require.True(t, h.Valid())
	return h
}

// TestReclaimDiesAnywhere: whatever round a reclaim dies before, the next one frees the block.
func TestReclaimDiesAnywhere(t *testing.T) {
	w := slabtest.New(t, 3)
	generation := map[uint32]uint32{} // of blocks
	for at := 1; ; at++ {
		session := uint32(3 * at)
		p, dies, next := w.Lane(session), w.Lane(session+1), w.Lane(session+2)
		ref, err := p.Alloc.Alloc([]byte("x"), want(3))
		require.NoError(t, err)
		block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		_, _, err = p.Alloc.Free(ref)
		require.NoError(t, err)
		require.NoError(t, p.Alloc.Close())
		pass := func() error { return nil }
		dies.BeforeDo = func(n int, _ *rdma.Round) {
			if n == at {
				panic(slabtest.ErrDied)
			}
		}
		died := func() (died bool) {
			defer func() { died = recover() != nil }()
			freed, err := dies.Alloc.Reclaim(mustRegion(t, dies), []uint32{block}, pass)
			require.NoError(t, err)
			require.Equal(t, 1, freed)
			return false
		}()
		w.Fence(session + 1)
		if died {
			freed, err := next.Alloc.Reclaim(mustRegion(t, next), []uint32{block}, pass)
			require.NoError(t, err, "died before round %d", at)
			require.Equal(t, 1, freed, "died before round %d", at)
		}
		generation[block]++
		for i, n := range w.Nodes {
			h := proto.Header(proto.Word(n.Memory.Bytes(), int(w.Geometry.HeaderOff(block))))
			require.Equal(t, proto.MakeHeader(proto.BlockFree, 0, 0, generation[block], 0), h, "replica %d, died before round %d", i, at)
		}
		if !died {
			require.Greater(t, at, 10, "rounds of a reclaim with three replicas")
			return
		}
	}
}

// TestPendingBitsOfAReclaimedBlock: bits that a lane still has to clear are not cleared
// in a block that has another class by now.
func TestPendingBitsOfAReclaimedBlock(t *testing.T) {
	w := slabtest.New(t, 1)
	p, agent, other := w.Lane(1), w.Lane(2), w.Lane(3)
	var refs []proto.Ref
	for range 40 { // more than a magazine keeps of this class
		ref, err := p.Alloc.Alloc(make([]byte, 30_000), want(1))
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	blocks := map[uint32]bool{}
	for _, ref := range refs {
		_, _, err := p.Alloc.Free(ref)
		require.NoError(t, err)
		b, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
		blocks[b] = true
	}
	freed := 0
	for b := range blocks {
		n, err := agent.Alloc.Reclaim(mustRegion(t, agent), []uint32{b}, func() error { p.Raise(); return nil })
		require.NoError(t, err)
		freed += n
	}
	require.NotZero(t, freed, "a block without a claim of the magazine's, its bits pending")
	for {
		_, err := other.Alloc.Alloc(make([]byte, 3000), want(1))
		if errors.Is(err, alloc.ErrNoSpace) {
			break
		}
		require.NoError(t, err)
	}
	was := map[uint32][]byte{}
	mem := w.Nodes[0].Memory.Bytes()
	for b := range blocks {
		off := w.Geometry.MapOff(b)
		if h := proto.Header(proto.Word(mem, int(w.Geometry.HeaderOff(b)))); h.Generation() == 1 && h.State() == proto.BlockActive {
			was[b] = append([]byte{}, mem[off:off+proto.MapBytes]...)
		}
	}
	require.Len(t, was, freed)
	require.NoError(t, p.Alloc.Close())
	for b, bits := range was {
		off := w.Geometry.MapOff(b)
		require.True(t, bytes.Equal(bits, mem[off:off+proto.MapBytes]), "map of block %d has changed", b)
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

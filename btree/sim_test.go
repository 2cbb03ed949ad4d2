package btree

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

var seedsFlag = flag.Int("seeds", 300, "random runs of the tree")

var smallNode, _ = NodeClass(minNodeBytes)

// Histories: one register with a condition per key.

type opKind uint8

const (
	opGet opKind = iota
	opPut
	opDelete
	opAbsent // PutIfAbsent
)

type opInput struct {
	kind  opKind
	key   string
	value string
}

type opOutput struct {
	value   string // of opGet; "" for none
	ok      bool   // the key was there (opGet, opDelete); the put took place (opAbsent)
	unknown bool
}

var register = porcupine.Model{
	Partition: func(h []porcupine.Operation) [][]porcupine.Operation {
		at := map[string]int{}
		var out [][]porcupine.Operation
		for _, o := range h {
			k := o.Input.(opInput).key
			i, ok := at[k]
			if !ok {
				i = len(out)
				at[k], out = i, append(out, nil)
			}
			out[i] = append(out[i], o)
		}
		return out
	},
	Init: func() any { return "" },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(string), input.(opInput), output.(opOutput)
		switch in.kind {
		case opGet:
			return out.unknown || out.ok == (s != "") && out.value == s, s
		case opPut:
			return true, in.value
		case opDelete:
			return out.unknown || out.ok == (s != ""), ""
		default:
			if s != "" {
				return out.unknown || !out.ok, s
			}
			return out.unknown || out.ok, in.value
		}
	},
	Equal: func(a, b any) bool { return a == b },
}

// scenario is one random run.
type scenario struct {
	seed     uint64
	clients  int
	ops      int
	keys     int
	killOne  int // one step in so many kills its client; 0 never
	lossy    bool
	nodeSize int
	layers   bool
	rising   bool // each client goes through keys of its own in rising order
}

func (sc *scenario) key(i int) []byte {
	if sc.layers {
		return long(i)
	}
	return key4(i)
}

type outcome struct {
	shared  []*Shared
	history []porcupine.Operation
	kills   int
	world   *world
	// splitRuns counts the keys that were put in the split of their leaf.
	splitRuns int
}

func (o *outcome) sum(f func(*counters) uint64) (n uint64) {
	for _, s := range o.shared {
		n += f(&s.stats)
	}
	return n
}

const fixedEvery = 12

func key4(i int) []byte { return fmt.Appendf(nil, "key%04d", i) }

// long is key i where half of the keys that come and go are in layers of a few keys each.
func long(i int) []byte {
	if i%fixedEvery < fixedEvery/2 {
		return key4(i)
	}
	return fmt.Appendf(nil, "layer%0*d/%04d", limits(smallNode, proto.Pair, false, 0).InlineKeyBytes-5, i/fixedEvery, i)
}

// play runs a scenario: keys divisible by fixedEvery are put first and never changed, all
// others are put, deleted and read by all clients; scans must find the fixed ones
// in order, each once.
func play(t testing.TB, sc scenario) *outcome { return playWith(t, sc, nil) }

// playWith is play beside further clients, which begin starts.
func playWith(t testing.TB, sc scenario, begin func(w *world, sh *Shared)) *outcome {
	w := &world{memory: newMemory(), rng: rand.New(rand.NewPCG(sc.seed, 1))}
	setup := w.store(t)
	cfg := Config{NodeBytes: sc.nodeSize}
	sh, err := Make(setup, cfg)
	require.NoError(t, err)
	pad := make([]byte, 60)
	for i := range pad {
		pad[i] = '.'
	}
	first := NewProgram(sh, setup)
	for i := 0; i < sc.keys; i += fixedEvery {
		_, err := first.Put(sc.key(i), append([]byte("fixed"), pad...), Cond{})
		require.NoError(t, err)
	}
	if sc.seed%3 == 0 { // the tree was made before its clients encrypt
		cfg.Overhead, w.overhead = proto.EncryptionBytes, proto.EncryptionBytes
	}
	out := &outcome{shared: []*Shared{sh}, world: w}
	for id := range sc.clients {
		mine, err := Attach(setup, sh.root, cfg) // a cache of its own
		require.NoError(t, err)
		out.shared = append(out.shared, mine)
		rng := rand.New(rand.NewPCG(sc.seed, uint64(id)+100))
		c := w.start(t, mine, func(c *simClient) {
			for n := range sc.ops {
				w.operate(t, c, rng, id, n, sc, pad, out)
			}
		})
		if sc.lossy {
			c.lossy = rand.New(rand.NewPCG(sc.seed, uint64(id)+200))
		}
	}
	if begin != nil {
		mine, err := Attach(setup, sh.root, cfg)
		require.NoError(t, err)
		begin(w, mine)
	}
	w.run(func(c *simClient) {
		if sc.killOne > 0 && !c.spared && w.rng.IntN(sc.killOne) == 0 {
			c.kill()
			out.kills++
		}
	})
	return out
}

// operate does one random operation and records it. A client that dies in the
// middle leaves an operation without an end.
func (w *world) operate(t testing.TB, c *simClient, rng *rand.Rand, id, n int, sc scenario, pad []byte, out *outcome) {
	// Clients move through the keys together, so that they fill and empty the same leaves.
	phase := n * 6 / sc.ops
	i := rng.IntN(sc.keys)
	if sc.rising && rng.IntN(8) > 0 {
		i = (id*sc.keys/sc.clients + n%(sc.ops/6)*2) % sc.keys
	}
	if i%fixedEvery == 0 {
		i = min(i+1, sc.keys-1)
	}
	in := opInput{key: string(sc.key(i)), value: fmt.Sprintf("%d.%d", id, n)}
	switch r := rng.IntN(20); {
	case r == 0 && i%fixedEvery != 0:
		w.scan(t, c, sc, rng.IntN(2) == 0)
		return
	case r == 6 && phase%2 == 0:
		w.putRun(t, c, id, n, i, sc, pad, out)
		return
	case r == 7 && phase%2 == 1 && rng.IntN(3) == 0:
		if _, err := compactAll(c.prog, 100); err != nil && !errors.Is(err, slab.ErrUnknown) {
			t.Fatalf("seed %d: client %d compacts: %v", sc.seed, id, err)
		}
		return
	case r < 4:
		in.kind = opGet
	case r < 6:
		in.kind = opAbsent
	case phase%2 == 0:
		in.kind = opPut
	default:
		in.kind = opDelete
	}
	value := append([]byte(in.value), pad...)
	if rng.IntN(20) == 0 {
		value = append(value, make([]byte, 300)...)
	}
	at := len(out.history)
	out.history = append(out.history, porcupine.Operation{ClientId: id, Input: in, Call: w.now, Output: opOutput{unknown: true}, Return: 1 << 60})
	var res opOutput
	var err error
	switch in.kind {
	case opGet:
		var b []byte
		if b, _, err = c.prog.Get([]byte(in.key), nil); err == nil {
			for j := range b {
				if b[j] == '.' && j+1 < len(b) && b[j+1] == '.' {
					b = b[:j]
					break
				}
			}
			res.value, res.ok = string(b), true
		}
		if errors.Is(err, ErrNoKey) {
			err = nil
		}
	case opPut:
		_, err = c.prog.Put([]byte(in.key), value, Cond{})
	case opAbsent:
		_, err = c.prog.Put([]byte(in.key), value, IfAbsent())
		res.ok = err == nil
		if errors.Is(err, ErrKeyExists) {
			err = nil
		}
	case opDelete:
		err = c.prog.Delete([]byte(in.key), Cond{})
		res.ok = err == nil
		if errors.Is(err, ErrNoKey) {
			err = nil
		}
	}
	if err != nil {
		if !errors.Is(err, slab.ErrUnknown) {
			t.Fatalf("seed %d: client %d, %+v: %v", sc.seed, id, in, err)
		}
		return
	}
	w.now++
	out.history[at].Output, out.history[at].Return = res, w.now
}

// putRun puts some neighbours, in no order, as kv.Tree.WriteRun does.
func (w *world) putRun(t testing.TB, c *simClient, id, n, from int, sc scenario, pad []byte, out *outcome) {
	var writes []Write
	at := len(out.history)
	for i := min(from, sc.keys-1); i < min(from+fixedEvery, sc.keys) && i%fixedEvery != 0; i++ {
		in := opInput{kind: opPut, key: string(sc.key(i)), value: fmt.Sprintf("%d.%d", id, n)}
		writes = append(writes, Write{Key: []byte(in.key), Value: append([]byte(in.value), pad...)})
		out.history = append(out.history, porcupine.Operation{ClientId: id, Input: in, Call: w.now, Output: opOutput{unknown: true}, Return: 1 << 60})
	}
	slices.Reverse(writes)
	last := at + len(writes) - 1 // the first write's place in the history
	for done := 0; done < len(writes); {
		made, split := writeSome(c.prog, writes[done:])
		out.splitRuns += split
		for i := done; i < done+made; i++ {
			if err := writes[i].Err; err == nil {
				w.now++
				out.history[last-i].Output, out.history[last-i].Return = opOutput{}, w.now
			} else if !errors.Is(err, slab.ErrUnknown) {
				t.Fatalf("seed %d: client %d, run of %q: %v", sc.seed, id, writes[i].Key, err)
			}
		}
		done += made
	}
}

// writeSome makes the first n writes, and says how many of them in the split of their leaf.
func writeSome(p *Program, writes []Write) (n, split int) {
	if leaf, ok := p.Leaf(&writes[0]); ok {
		taken := 0
		p.WriteGroup(leaf, func() *Write {
			if taken == len(writes) || taken > 0 && writes[taken-1].Alone {
				return nil
			}
			if next, ok := p.Leaf(&writes[taken]); !ok || next != leaf {
				return nil
			}
			taken++
			return &writes[taken-1]
		})
		lost := false
		for ; n < taken && !writes[n].Alone; n++ {
			lost = lost || unknown(writes[n].Err)
		}
		if !lost {
			split = p.SplitRun(leaf, writes[n:])
			n += split
		}
	}
	if n == 0 {
		writes[0].Version, writes[0].Err = p.Put(writes[0].Key, writes[0].Value, writes[0].Cond)
		n = 1
	}
	return n, split
}

func (w *world) scan(t testing.TB, c *simClient, sc scenario, reverse bool) {
	last, fixed := "", 0
	err := c.prog.Scan(Range{Reverse: reverse}, func(k, v []byte, _ uint64) bool {
		if s := string(k); last != "" && (s > last) == reverse || s == last {
			t.Fatalf("seed %d: scan gives %q after %q", sc.seed, s, last)
		}
		last = string(k)
		if string(v[:5]) == "fixed" {
			fixed++
		}
		return true
	})
	if err != nil {
		t.Fatalf("seed %d: scan: %v", sc.seed, err)
	}
	if want := (sc.keys + fixedEvery - 1) / fixedEvery; fixed != want {
		t.Fatalf("seed %d: a scan found %d of %d keys that no writer changes", sc.seed, fixed, want)
	}
}

// settleAll has a new client touch everything once and proves the tree whole.
func (o *outcome) settleAll(t testing.TB, sc scenario) Report {
	st := o.world.store(t)
	sh, err := Attach(st, o.shared[0].root, Config{Overhead: o.world.overhead})
	require.NoError(t, err)
	p := NewProgram(sh, st)
	rep := checkWhole(t, o.world.memory, st, sh, true)
	seen := map[string]string{}
	require.NoError(t, p.Scan(Range{}, func(k, v []byte, _ uint64) bool {
		seen[string(k)] = string(v)
		return true
	}))
	require.Equal(t, rep.Keys, len(seen), "seed %d", sc.seed)
	for i := range sc.keys {
		k := sc.key(i)
		v, _, err := p.Get(k, nil)
		want, ok := seen[string(k)]
		if !ok {
			require.ErrorIs(t, err, ErrNoKey, "seed %d: %s", sc.seed, k)
		} else {
			require.NoError(t, err, "seed %d: %s", sc.seed, k)
			require.Equal(t, want, string(v))
		}
		// A write repairs what stands in its way.
		if ok && i%fixedEvery != 0 {
			require.NoError(t, p.Delete(k, Cond{}), "seed %d: %s", sc.seed, k)
		} else if ok {
			_, err = p.Put(k, v, Cond{})
			require.NoError(t, err, "seed %d: %s", sc.seed, k)
		}
	}
	after := checkWhole(t, o.world.memory, st, sh, true)
	require.Equal(t, (sc.keys+fixedEvery-1)/fixedEvery, after.Keys, "seed %d", sc.seed)
	return after
}

func TestManyClientsAreLinearizable(t *testing.T) {
	seeds := *seedsFlag
	if testing.Short() {
		t.Log("-short: fewer seeds")
		seeds = min(seeds, 60)
	}
	var total struct{ splitRuns, layers, splits, splitsAtKey, merges, shifts, grows, shrinks, thawed, unlinked, posted, kills uint64 }
	for seed := range seeds {
		sc := scenario{seed: uint64(seed), clients: 2 + seed%4, ops: 60, keys: 60, nodeSize: 1 << 10, layers: seed%2 == 0, rising: seed%5 == 0}
		switch seed % 3 {
		case 1:
			sc.killOne, sc.clients = 600, 5
		case 2:
			sc.lossy = true
		}
		o := play(t, sc)
		// An operation of unknown outcome may have taken effect at any later time.
		res := porcupine.CheckOperationsTimeout(register, o.history, 10*time.Minute)
		require.Equal(t, porcupine.Ok, res, "seed %d", seed)
		o.settleAll(t, sc)
		total.splitRuns += uint64(o.splitRuns)
		total.layers += o.sum(func(c *counters) uint64 { return c.layers.Load() })
		total.splits += o.sum(func(c *counters) uint64 { return c.splits.Load() })
		total.splitsAtKey += o.sum(func(c *counters) uint64 { return c.splitsAtKey.Load() })
		total.merges += o.sum(func(c *counters) uint64 { return c.merges.Load() })
		total.shifts += o.sum(func(c *counters) uint64 { return c.shifts.Load() })
		total.grows += o.sum(func(c *counters) uint64 { return c.grows.Load() })
		total.shrinks += o.sum(func(c *counters) uint64 { return c.shrinks.Load() })
		total.thawed += o.sum(func(c *counters) uint64 { return c.thawed.Load() })
		total.unlinked += o.sum(func(c *counters) uint64 { return c.unlinked.Load() })
		total.posted += o.sum(func(c *counters) uint64 { return c.posted.Load() })
		total.kills += uint64(o.kills)
	}
	t.Logf("%d runs: %+v", seeds, total)
	require.NotZero(t, total.layers)
	require.NotZero(t, total.splitsAtKey)
	require.NotZero(t, total.splitRuns)
	require.NotZero(t, total.merges)
	require.NotZero(t, total.shifts)
	require.NotZero(t, total.thawed)
	require.NotZero(t, total.shrinks)
}

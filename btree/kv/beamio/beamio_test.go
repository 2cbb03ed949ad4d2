package beamio

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/register"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/runners/prism"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/transforms/stats"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

func TestMain(m *testing.M) {
	beam.Init()
	os.Exit(m.Run())
}

func init() {
	register.Function3x0(splitWords)
	register.Function2x2(entry)
	register.DoFn4x0[[]byte, func(*[]byte) bool, func(*[]byte) bool, func([]byte, []byte)](&joinFn{})
	register.Emitter1[string]()
	register.Iter1[[]byte]()
}

func splitWords(_, text []byte, emit func(string)) {
	for _, w := range strings.Fields(string(text)) {
		emit(w)
	}
}

func entry(word string, n int) ([]byte, []byte) {
	return []byte(word), strconv.AppendInt(nil, int64(n), 10)
}

// joinFn joins a person's name with the cities that the person has lived in.
type joinFn struct{}

func (*joinFn) ProcessElement(key []byte, names, cities func(*[]byte) bool, emit func(key, value []byte)) {
	var name, city []byte
	for names(&name) {
		for cities(&city) {
			emit(key, fmt.Appendf(nil, "%s of %s", name, city))
		}
	}
}

// rig has the trees of a cluster that QUARRY_CONTROLLER names.
func rig(t *testing.T) (tree func(name string, entries map[string]string) *kv.Tree) {
	if os.Getenv("QUARRY_CONTROLLER") == "" {
		t.Skip("it needs a cluster: QUARRY_CONTROLLER=http://HOST:PORT (quarry dev); TestBeam (examples) starts one")
	}
	c, release, err := acquire(t.Context(), Cluster{})
	require.NoError(t, err)
	t.Cleanup(release)
	return func(name string, entries map[string]string) *kv.Tree {
		tree, err := kv.Create(t.Context(), c, name, btree.Config{NodeBytes: 1024})
		require.NoError(t, err)
		for k, v := range entries {
			require.NoError(t, tree.Put(t.Context(), []byte(k), []byte(v)))
		}
		return tree
	}
}

// all are the entries of a tree.
func all(t *testing.T, tree *kv.Tree) map[string]string {
	out := map[string]string{}
	require.NoError(t, tree.Scan(t.Context(), btree.Range{}, func(k, v []byte, _ uint64) bool {
		out[string(k)] = string(v)
		return true
	}))
	return out
}

// Words of a tree are counted into another one, also if the pipeline runs again; two trees are joined by key.
func TestPipelines(t *testing.T) {
	tree := rig(t)
	texts, counts := map[string]string{}, map[string]int{}
	for i := range 300 {
		words := fmt.Sprintf("stone w%d w%d", i%7, i%11)
		texts[fmt.Sprintf("line %04d", i)] = words
		for _, w := range strings.Fields(words) {
			counts[w]++
		}
	}
	tree("beam/texts", texts)
	counted := tree("beam/counts", map[string]string{"w1": "stale"})
	names, cities, joined := map[string]string{}, map[string]string{}, map[string]string{}
	for i := range 60 {
		key := fmt.Sprintf("p%03d", i)
		if i%2 == 0 {
			names[key] = fmt.Sprint("name ", i)
		}
		if i%3 == 0 {
			cities[key] = fmt.Sprint("city ", i)
		}
		if i%6 == 0 && i >= 12 {
			joined[key] = fmt.Sprintf("name %d of city %d", i, i)
		}
	}
	tree("beam/names", names)
	tree("beam/cities", cities)
	to := tree("beam/joined", nil)

	p, s := beam.NewPipelineWithRoot()
	words := beam.ParDo(s, splitWords, Read(s, Source{Tree: "beam/texts", Parts: 8}))
	Write(s, Sink{Tree: "beam/counts"}, beam.ParDo(s, entry, stats.Count(s, words)))
	both := beam.CoGroupByKey(s, Read(s, Source{Tree: "beam/names", From: []byte("p012")}), Read(s, Source{Tree: "beam/cities"}))
	Write(s, Sink{Tree: "beam/joined"}, beam.ParDo(s, &joinFn{}, both))
	want := map[string]string{}
	for w, n := range counts {
		want[w] = strconv.Itoa(n)
	}
	for range 2 {
		_, err := prism.Execute(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, want, all(t, counted))
		require.Equal(t, joined, all(t, to))
	}

	p, s = beam.NewPipelineWithRoot()
	Write(s, Sink{Tree: "beam/counts"}, Read(s, Source{Tree: "beam/none"}))
	_, err := prism.Execute(t.Context(), p)
	require.ErrorContains(t, err, "no such name")
	require.Equal(t, want, all(t, counted))
}

// A tree is cut into ranges as kv.Tree.Splits cuts it.
func TestSpansAreTheSplitsOfTheTree(t *testing.T) {
	tree := rig(t)
	in := map[string]string{}
	for i := range 400 {
		in[fmt.Sprintf("%04d", i)] = "a value of some bytes, for leaves"
	}
	cut := tree("beam/cut", in)
	f := &readFn{Source: Source{Tree: "beam/cut", From: []byte("0100"), To: []byte("0300"), Parts: 4}}
	spans, err := f.SplitRestriction(t.Context(), nil, f.CreateInitialRestriction(nil))
	require.NoError(t, err)
	splits, err := cut.Splits(t.Context(), btree.Range{From: []byte("0100"), To: []byte("0300")}, 4)
	require.NoError(t, err)
	require.Len(t, spans, 4)
	for i, s := range spans {
		require.Equal(t, splits[i].From, s.From)
		require.Equal(t, splits[i].To, s.To)
		require.Positive(t, f.RestrictionSize(nil, s))
	}
	var got []string
	require.NoError(t, f.Setup(t.Context()))
	defer f.Teardown()
	for _, s := range spans {
		rt := f.CreateTracker(s)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		n := 0
		require.NoError(t, f.ProcessElement(ctx, rt, nil, func(key, _ []byte) {
			if n++; n == 10 { // the rest of the span is split off
				primary, residual, err := rt.TrySplit(0)
				require.NoError(t, err)
				require.True(t, rt.IsDone())
				require.Equal(t, primary.(span).To, residual.(span).From)
				spans = append(spans, residual.(span))
			}
			got = append(got, string(key))
		}))
		require.True(t, rt.IsDone())
		cancel()
	}
	for len(spans) > 4 {
		rt := f.CreateTracker(spans[4])
		spans = spans[1:]
		require.NoError(t, f.ProcessElement(t.Context(), rt, nil, func(key, _ []byte) { got = append(got, string(key)) }))
	}
	slices.Sort(got)
	require.Len(t, got, 200)
	for i, key := range got {
		require.Equal(t, fmt.Sprintf("%04d", 100+i), key)
	}
}

// However a span is split while it is read, each key is read once.
func TestSplitsLoseAndRepeatNothing(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		var keys [][]byte
		for range rnd.IntN(60) {
			key := make([]byte, rnd.IntN(6))
			for i := range key {
				key[i] = []byte{0, 1, 'a', 'b', 255}[rnd.IntN(5)]
			}
			keys = append(keys, append([]byte(strings.Repeat("p", round%3*4)), key...))
		}
		slices.SortFunc(keys, bytes.Compare)
		keys = slices.CompactFunc(keys, bytes.Equal)
		todo := []span{{Bytes: 1000}}
		var got [][]byte
		bytesOf := int64(0)
		for spans := 0; len(todo) > 0; spans++ {
			s := todo[0]
			todo = todo[1:]
			tr := newTracker(s)
			split := func() {
				f := []float64{0, 0.3, 0.5, 0.99, 1}[rnd.IntN(5)]
				primary, residual, err := tr.TrySplit(f)
				require.NoError(t, err)
				require.Equal(t, tr.GetRestriction(), primary)
				if residual != nil {
					todo = append(todo, residual.(span))
				}
				if f == 0 {
					require.True(t, tr.IsDone(), "%v", primary)
				}
				done, rest := tr.GetProgress()
				require.GreaterOrEqual(t, done, 0.0)
				require.GreaterOrEqual(t, rest, 0.0)
			}
			if spans < 20 && rnd.IntN(4) == 0 {
				split()
			}
			whole := true
			for _, key := range keys {
				if bytes.Compare(key, s.From) < 0 || len(s.To) > 0 && bytes.Compare(key, s.To) >= 0 || s.None {
					continue
				}
				if whole = tr.TryClaim(key); !whole {
					break
				}
				got = append(got, key)
				if spans < 20 && rnd.IntN(8) == 0 {
					split()
				}
			}
			if whole {
				require.False(t, tr.TryClaim([]byte(nil)))
			}
			require.NoError(t, tr.GetError())
			require.True(t, tr.IsDone())
			require.False(t, tr.TryClaim([]byte("z")))
			bytesOf += tr.GetRestriction().(span).Bytes
		}
		slices.SortFunc(got, bytes.Compare)
		require.Equal(t, len(keys), len(got))
		for i := range got {
			require.Equal(t, keys[i], got[i])
		}
		require.EqualValues(t, 1000, bytesOf)
	}
	tr := newTracker(span{From: []byte("b")})
	require.True(t, tr.TryClaim([]byte("c")))
	require.False(t, tr.TryClaim([]byte("c")))
	require.ErrorContains(t, tr.GetError(), "out of order")
	require.False(t, tr.IsDone())
	require.False(t, newTracker(span{}).TryClaim(7))
	done, rest := newTracker(span{From: []byte("b"), To: []byte("d"), Bytes: 100}).GetProgress()
	require.Equal(t, []float64{0, 100}, []float64{done, rest})
}

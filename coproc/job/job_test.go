package job_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/nearest"
	"github.com/quarrystore/quarry/coproc/plugins/search"
	"github.com/quarrystore/quarry/coproc/plugins/words"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/verify/testbinary"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// rig is a cluster with a tree of texts.
type rig struct {
	testing.TB
	cluster *testcluster.Cluster
	c       *client.Client
	store   *job.Store
}

func newRig(t testing.TB) *rig { return newRigOf(t, 1) }

// newRigOf makes everything with so many replicas.
func newRigOf(t testing.TB, replicas int) *rig {
	return newRigWith(t, testcluster.Options{Nodes: 2}, replicas)
}

// newRigWith has a cluster with these options.
func newRigWith(t testing.TB, o testcluster.Options, replicas int) *rig {
	r := &rig{TB: t, cluster: testcluster.New(t, o)}
	r.c = r.cluster.Connect(client.Config{Replicas: replicas})
	var err error
	r.store, err = job.Open(t.Context(), r.c)
	require.NoError(t, err)
	return r
}

// worker starts one; died is what it dies of.
func (r *rig) worker(name string, change func(*job.Config)) (died chan string) {
	died = make(chan string, 16)
	cfg := job.Config{Client: r.cluster.Connect(client.Config{}), Name: name, Slots: 2, Lease: time.Second,
		Logger: slog.New(slog.DiscardHandler), Die: func(reason string) { died <- reason }}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- job.Work(ctx, cfg) }()
	r.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) { // it had not begun yet
			require.NoError(r, err)
		}
	})
	require.Eventually(r, func() bool {
		all, err := r.store.Workers(r.Context())
		require.NoError(r, err)
		for _, w := range all {
			if w.Name == name {
				return true
			}
		}
		return false
	}, patience, 5*time.Millisecond)
	return died
}

func (r *rig) tree(name string, entries map[string]string) *kv.Tree {
	t, err := kv.Create(r.Context(), r.c, name, btree.Config{NodeBytes: 1024})
	require.NoError(r, err)
	for k, v := range entries {
		require.NoError(r, t.Put(r.Context(), []byte(k), []byte(v)))
	}
	return t
}

// leaves makes a tree with so many keys, which are in leaves for many parts, and returns its entries.
func (r *rig) leaves(name string, keys int) map[string]string {
	in := map[string]string{}
	for i := range keys {
		in[fmt.Sprintf("%04d", i)] = "a value of some length, so that there are leaves for as many parts"
	}
	r.tree(name, in)
	return in
}

func (r *rig) run(spec job.Spec) *job.Job {
	j, err := r.store.Submit(r.Context(), spec)
	require.NoError(r, err)
	return r.wait(j.ID)
}

func (r *rig) wait(id uint64) (j *job.Job) {
	require.Eventually(r, func() bool {
		var err error
		j, err = r.store.Job(r.Context(), id)
		if errors.Is(err, client.ErrFenced) { // a starved machine; the next call has another session
			return false
		}
		require.NoError(r, err)
		return j.State.Ended()
	}, patience, 5*time.Millisecond)
	return j
}

func (r *rig) done(spec job.Spec) *job.Job {
	j := r.run(spec)
	require.Equal(r, job.Done, j.State, j.Error)
	return j
}

func (r *rig) read(tree string) map[string]string {
	t, err := kv.Open(r.Context(), r.c, tree, btree.Config{})
	require.NoError(r, err)
	all := map[string]string{}
	require.NoError(r, t.Scan(r.Context(), btree.Range{}, func(k, v []byte, _ uint64) bool {
		all[string(k)] = string(v)
		return true
	}))
	return all
}

// texts are made of few words, so that they meet again.
func texts(n int) (entries map[string]string, counts map[string]string) {
	rnd := rand.New(rand.NewPCG(1, 2))
	entries, counts = map[string]string{}, map[string]string{}
	total := map[string]int{}
	for i := range n {
		var b strings.Builder
		for range rnd.IntN(60) {
			w := fmt.Sprintf("word%d", rnd.IntN(200))
			total[w]++
			b.WriteString([]string{" ", "\n", ", "}[rnd.IntN(3)] + strings.ToUpper(w[:1]) + w[1:])
		}
		entries[fmt.Sprintf("texts/%04d", i)] = b.String()
	}
	for w, k := range total {
		counts[w] = strconv.Itoa(k)
	}
	return entries, counts
}

// modules builds the WASM modules of the repository once.
var modules = sync.OnceValues(func() (map[string][]byte, error) {
	dir, err := os.MkdirTemp("", "quarry-wasm")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	all := map[string][]byte{}
	for _, name := range []string{"words", "search", "nearest", "add"} {
		file := filepath.Join(dir, name)
		cmd := exec.Command("go", "build", "-o", file, "github.com/quarrystore/quarry/coproc/plugins/"+name+"/wasm")
		cmd.Env = append(testbinary.ToolEnv(), "GOOS=wasip1", "GOARCH=wasm")
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%w: %s", err, out)
		}
		if all[name], err = os.ReadFile(file); err != nil {
			return nil, err
		}
	}
	return all, nil
})

func (r *rig) upload(plugin, as string) {
	all, err := modules()
	require.NoError(r, err)
	m, err := r.store.PutModule(r.Context(), as, all[plugin])
	require.NoError(r, err)
	require.True(r, m.About.WASM)
	require.Equal(r, plugin != "add", m.About.Reduces)
}

func TestWordsAreCounted(t *testing.T) {
	r := newRig(t)
	entries, want := texts(400)
	r.tree("texts", entries)
	r.worker("a", func(c *job.Config) { c.Node = r.cluster.NodeConfig(0).Name })
	r.worker("b", nil)
	j := r.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "texts"}, Output: "counts", MapParts: 7, ReduceParts: 3})
	require.Equal(t, want, r.read("counts"))
	require.Equal(t, 7, j.Maps)
	require.Equal(t, 3, j.Reduces)
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	records := uint64(0)
	for _, p := range parts {
		records += p.Records
	}
	require.EqualValues(t, len(entries), records)

	// The same once more: outputs do not add up.
	r.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "texts"}, Output: "counts", MapParts: 2, ReduceParts: 1})
	require.Equal(t, want, r.read("counts"))

	// What went between the phases has been freed.
	require.Eventually(t, func() bool {
		parts, err := r.store.Parts(t.Context(), j.ID, "map")
		require.NoError(t, err)
		for _, p := range parts {
			if p.Runs != nil {
				return false
			}
		}
		return true
	}, patience, 5*time.Millisecond)

	if testing.Short() {
		return // compiling a module takes seconds
	}
	r.upload("words", "words-wasm")
	r.done(job.Spec{Plugin: "words-wasm", Input: job.Source{Tree: "texts"}, Output: "counts2", MapParts: 5, ReduceParts: 2})
	require.Equal(t, want, r.read("counts2"), "the module and the compiled plugin agree")
}

func TestEmptyInput(t *testing.T) {
	r := newRig(t)
	r.tree("none", nil)
	r.worker("a", nil)
	r.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "none"}, Output: "counts"})
	require.Empty(t, r.read("counts"))
	j := r.done(job.Spec{Plugin: words.Name, Input: job.Source{Objects: "nothing/"}, Output: "counts"})
	require.Zero(t, j.Maps)
}

func TestTextsAreFound(t *testing.T) {
	r := newRig(t)
	for name, text := range map[string]string{
		"text/a": "the quarry gives stone", "text/b": "the stone is grey, the stone is heavy", "text/c": "the river is wide",
	} {
		ref, err := r.c.Alloc(t.Context(), []byte(text), client.AllocOptions{})
		require.NoError(t, err)
		_, err = r.c.Names().Create(t.Context(), name, "object", ref)
		require.NoError(t, err)
	}
	r.worker("a", nil)
	plugins := []string{search.Name}
	if !testing.Short() {
		r.upload("search", "search-wasm")
		plugins = append(plugins, "search-wasm")
	}
	for _, plugin := range plugins {
		out := "index of " + plugin
		r.done(job.Spec{Plugin: plugin, Input: job.Source{Objects: "text/"}, Output: out})
		index, err := kv.Open(t.Context(), r.c, out, btree.Config{})
		require.NoError(t, err)
		hits, err := search.Query(job.ReadTree(t.Context(), index), "grey Stone", 3, 10)
		require.NoError(t, err)
		require.Len(t, hits, 2)
		require.Equal(t, "text/b", hits[0].Name)
		require.Equal(t, []string{"grey", "stone"}, hits[0].Words)
		require.Equal(t, "text/a", hits[1].Name)
		// tf-idf by hand: stone is in 2 of 3 texts and 1 of 4 words of a.
		require.InDelta(t, 0.25*math.Log(1+3.0/3), hits[1].Score, 1e-9)
		hits, err = search.Query(job.ReadTree(t.Context(), index), "mountain", 3, 10)
		require.NoError(t, err)
		require.Empty(t, hits)
	}
}

func TestNearestVectors(t *testing.T) {
	r := newRig(t)
	rnd := rand.New(rand.NewPCG(3, 4))
	vectors := map[string]string{"too short": "abcd"}
	for i := range 500 {
		var b []byte
		for range 4 {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(rnd.NormFloat64())))
		}
		vectors[fmt.Sprintf("v%03d", i)] = string(b)
	}
	var same []byte
	for _, x := range []float32{2, 4, 6, 8} {
		same = binary.LittleEndian.AppendUint32(same, math.Float32bits(x))
	}
	vectors["the same way"] = string(same)
	r.tree("vectors", vectors)
	r.worker("a", nil)
	spec := job.Spec{Plugin: nearest.Name, Input: job.Source{Tree: "vectors"}, Output: "found", MapParts: 6, Args: map[string]string{"query": "1,2,3,4", "k": "5"}}
	r.done(spec)
	found := r.read("found")
	require.Len(t, found, 5)
	require.Equal(t, "1.000000 the same way", found["0001"])
	spec.Output = "found2"
	if !testing.Short() {
		r.upload("nearest", "nearest-wasm")
		spec.Plugin = "nearest-wasm"
	}
	j := r.done(spec)
	require.Equal(t, found, r.read("found2"))
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	var log []string
	for _, p := range parts {
		log = append(log, p.Log...)
	}
	require.Equal(t, []string{"1 vectors have another length than the query's 4"}, log)

	spec.Args = map[string]string{"query": "1,x"}
	bad := r.run(spec)
	require.Equal(t, job.Failed, bad.State)
	require.Contains(t, bad.Error, "argument query")
}

// odd does what its job's argument says.
type odd struct{}

var oddGate = make(chan struct{})

func (odd) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	switch env.Arg("do", "") {
	case "panic":
		panic("oh no")
	case "fail twice":
		if env.Part().Attempt < 3 {
			return errors.New("not yet")
		}
	case "loop":
		<-oddGate
	case "wait":
		<-env.Context().Done()
		return env.Context().Err()
	case "write elsewhere":
		t, err := env.Tree("other")
		if err != nil {
			return err
		}
		return t.Put(key, value)
	case "write an object":
		ref, err := env.Lookup("somebody's")
		if err != nil {
			return err
		}
		return env.Write(ref, []byte("mine"))
	case "objects":
		ref, err := env.Alloc(value)
		if err != nil {
			return err
		}
		if err := env.Write(ref, append(value, '!')); err != nil {
			return err
		}
		b, err := env.Read(ref, nil)
		if err != nil {
			return err
		}
		if err := env.Free(ref); err != nil {
			return err
		}
		return emit(key, b)
	case "rubbish":
		return emit(nil, value)
	}
	return emit(key, value)
}

func init() { coproc.Register("odd", "does as it is told", func() coproc.Plugin { return odd{} }) }

func TestBadPlugins(t *testing.T) {
	r := newRig(t)
	in := map[string]string{"a": "1", "b": "2"}
	r.tree("in", in)
	r.tree("other", map[string]string{"x": "y"})
	ref, err := r.c.Alloc(t.Context(), []byte("theirs"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = r.c.Names().Create(t.Context(), "somebody's", "object", ref)
	require.NoError(t, err)
	died := r.worker("a", nil)
	spec := func(do string) job.Spec {
		return job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out of " + do, Args: map[string]string{"do": do}, PartTimeout: 30 * time.Second}
	}
	for do, want := range map[string]string{
		"panic": "oh no", "write elsewhere": `tree "other"`, "write an object": "outside of what this part may write", "rubbish": "key",
	} {
		j := r.run(spec(do))
		require.Equal(t, job.Failed, j.State, do)
		require.Contains(t, j.Error, want, do)
		require.Contains(t, j.Error, "map part 1", do)
	}
	require.Equal(t, map[string]string{"x": "y"}, r.read("other"))
	b, err := r.c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "theirs", string(b))

	r.done(spec("fail twice"))
	require.Equal(t, in, r.read("out of fail twice"))
	r.done(spec("objects"))
	require.Equal(t, map[string]string{"a": "1!", "b": "2!"}, r.read("out of objects"))
	s := spec("write elsewhere")
	s.Writes = []string{"other"}
	r.done(s)
	require.Equal(t, map[string]string{"x": "y", "a": "1", "b": "2"}, r.read("other"))

	// One that does not stop costs its worker the process, not the job its end.
	s = spec("loop")
	s.PartTimeout = 100 * time.Millisecond
	j, err := r.store.Submit(t.Context(), s)
	require.NoError(t, err)
	require.Contains(t, <-died, "it does not stop")
	require.NoError(t, r.store.Cancel(t.Context(), j.ID))
	close(oddGate)
	require.Equal(t, job.Cancelled, r.wait(j.ID).State)
	r.done(spec("anything else"))
}

func TestCancelledJobStops(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1"})
	r.worker("a", nil)
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out", Args: map[string]string{"do": "wait"}})
	require.NoError(t, err)
	state := func(want job.State) func() bool {
		return func() bool {
			parts, err := r.store.Parts(t.Context(), j.ID, "map")
			require.NoError(t, err)
			return len(parts) == 1 && parts[0].State == want
		}
	}
	require.Eventually(t, state(job.Running), patience, 5*time.Millisecond)
	require.NoError(t, r.store.Cancel(t.Context(), j.ID))
	require.Eventually(t, state(job.Cancelled), patience, 5*time.Millisecond)
	require.ErrorContains(t, r.store.Cancel(t.Context(), j.ID), "it is cancelled")
	require.ErrorIs(t, r.store.Cancel(t.Context(), 999), job.ErrNoJob)
}

func TestBadSpecs(t *testing.T) {
	r := newRig(t)
	r.tree("in", nil)
	ok := job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out"}
	_, err := r.store.Submit(t.Context(), ok)
	require.ErrorIs(t, err, job.ErrNoPlugin)
	require.ErrorContains(t, err, "no worker is there")
	r.worker("a", nil)
	for want, change := range map[string]func(*job.Spec){
		`"nothing"`:        func(s *job.Spec) { s.Plugin = "nothing" },
		"no such name":     func(s *job.Spec) { s.Input.Tree = "missing" },
		"one input":        func(s *job.Spec) { s.Input.Objects = "x" },
		"input and output": func(s *job.Spec) { s.Output = "in" },
		"no output":        func(s *job.Spec) { s.Output = "" },
		"jobs' own tree":   func(s *job.Spec) { s.Output = job.StateTree },
		"4097 map parts":   func(s *job.Spec) { s.MapParts = job.MaxParts + 1 },
		"-1 bytes of rec":  func(s *job.Spec) { s.ShuffleBytes = -1 },
		"-1 reduce parts":  func(s *job.Spec) { s.ReduceParts = -1 },
		"arguments of":     func(s *job.Spec) { s.Args = map[string]string{"x": strings.Repeat("x", 5000)} },
	} {
		s := ok
		change(&s)
		_, err := r.store.Submit(t.Context(), s)
		require.ErrorContains(t, err, want)
	}
	jobs, err := r.store.Jobs(t.Context())
	require.NoError(t, err)
	require.Empty(t, jobs, "nothing has changed")

	_, err = r.store.PutModule(t.Context(), "m", []byte("not wasm"))
	require.ErrorContains(t, err, "not a WASM module")
	// The smallest module: it does nothing, so it does not say what it is.
	_, err = r.store.PutModule(t.Context(), "m", []byte("\x00asm\x01\x00\x00\x00"))
	require.ErrorContains(t, err, "no plugin")
	for _, bad := range []string{"file:x", "tree:", "redis:", "redis:#1", "redis:x#16", "redis:x#", "redis:x#-1", "objects"} {
		_, err = job.ParseSource(bad)
		require.ErrorContains(t, err, "want", bad)
	}
	for _, good := range []string{"tree:a#b", "redis:x", "redis:x#15", "objects:a/"} {
		s, err := job.ParseSource(good)
		require.NoError(t, err)
		require.Equal(t, good, s.String())
	}
}

// group is a plugin that reduces without combining, to see the merge of many runs.
type group struct{}

func (group) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	return emit(value, key)
}

func (group) Reduce(_ coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	n, first := 0, ""
	for v := range values {
		if n++; first == "" {
			first = string(v)
		}
		if n == 2 && string(key) == "stops early" {
			break
		}
	}
	return emit(key, fmt.Appendf(nil, "%d", n))
}

func init() {
	coproc.Register("group", "groups keys by value", func() coproc.Plugin { return group{} })
}

// A reduce part of more runs than are read at a time merges them into fewer ones first, and frees those.
func TestManyRunsAreMergedInPasses(t *testing.T) {
	r := newRig(t)
	in, want := map[string]string{}, map[string]int{}
	for i := range 3000 {
		v := fmt.Sprint("group", i%7)
		in[fmt.Sprintf("k%05d", i)] = v
		want[v]++
	}
	r.tree("in", in)
	tally := &job.Tally{}
	r.worker("a", func(c *job.Config) { c.Tally = tally })
	const maps = 70
	j := r.done(job.Spec{Plugin: "group", Input: job.Source{Tree: "in"}, Output: "out", MapParts: maps, ReduceParts: 1})
	require.Equal(t, maps, j.Maps)
	for v, n := range r.read("out") {
		require.Equal(t, strconv.Itoa(want[v]), n, v)
		delete(want, v)
	}
	require.Empty(t, want)
	require.EqualValues(t, maps+3, tally.Stats().Read["runs"].Objects, "each run once, and the three that they are merged into")
	free := func() (n int) {
		objects := 0
		_, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{r.cluster.Controller.URL()}, Object: func(o fsck.Object) {
			if o.Tag == 0 {
				objects++
			}
		}})
		require.NoError(t, err)
		return objects
	}
	require.Eventually(t, func() bool { return free() == 0 }, patience, 20*time.Millisecond, "no run is left")
}

// A job with more records between map and reduce than its budget fails at once, and leaves nothing of them.
func TestShuffleHasABudget(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: 30 * time.Second}, 1)
	in := map[string]string{}
	for i := range 2000 {
		in[fmt.Sprintf("k%05d", i)] = fmt.Sprint("group", i%7)
	}
	r.tree("in", in)
	r.worker("a", nil)
	spec := job.Spec{Plugin: "group", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 8, ReduceParts: 1, ShuffleBytes: 20 << 10}
	j := r.run(spec)
	require.Equal(t, job.Failed, j.State)
	require.Contains(t, j.Error, "more records between map and reduce than its budget")
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	for _, p := range parts {
		require.LessOrEqual(t, p.Attempt, 1, "the next attempt would need as much")
	}
	require.Eventually(t, func() bool { return r.store.Forget(t.Context(), j.ID) == nil }, patience, 5*time.Millisecond)
	objects := 0
	_, err = fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{r.cluster.Controller.URL()}, Object: func(o fsck.Object) {
		if o.Tag == 0 {
			objects++
		}
	}})
	require.NoError(t, err)
	require.Zero(t, objects, "runs")
	spec.ShuffleBytes = 40 << 10
	r.done(spec)
	require.Len(t, r.read("out"), 7)
}

func TestGroupsComeWhole(t *testing.T) {
	r := newRig(t)
	in := map[string]string{}
	for i := range 900 {
		in[fmt.Sprint("k", i)] = []string{"three", "two", "stops early"}[i%3]
	}
	want := map[string]string{"three": "300", "two": "300", "stops early": "2"}
	r.tree("in", in)
	r.worker("a", nil)
	r.done(job.Spec{Plugin: "group", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 9, ReduceParts: 2})
	require.Equal(t, want, r.read("out"))
}

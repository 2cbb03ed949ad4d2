package job_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testbinary"
)

// greedy takes memory until it is stopped.
type greedy struct{ hold [][]byte }

func (g *greedy) Map(env coproc.Env, _, _ []byte, _ coproc.Emit) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		g.hold = append(g.hold, bytes.Repeat([]byte{1}, 1<<20))
		select {
		case <-tick.C:
		case <-env.Context().Done():
			return env.Context().Err()
		}
	}
}

func init() {
	coproc.Register("greedy", "takes memory", func() coproc.Plugin { return &greedy{} })
}

// A compiled plugin that takes memory without end costs its worker the process, as
// soon as the worker has more than it may; the part fails with the reason.
func TestPluginThatAllocatesWithoutEnd(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1"})
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	died := r.worker("a", func(c *job.Config) { c.ProcessBytes = int(m.HeapAlloc) + 128<<20 })
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "greedy", Input: job.Source{Tree: "in"}, Output: "out"})
	require.NoError(t, err)
	require.Contains(t, <-died, "more memory than it may")
	runtime.ReadMemStats(&m)
	require.Less(t, m.HeapAlloc, uint64(4<<30), "before the host had none left")
	require.NoError(t, r.store.Cancel(t.Context(), j.ID))
	require.Equal(t, job.Cancelled, r.wait(j.ID).State)
	require.Eventually(t, func() bool {
		parts, err := r.store.Parts(t.Context(), j.ID, "map")
		require.NoError(t, err)
		return len(parts) == 1 && parts[0].Error != ""
	}, patience, 5*time.Millisecond)
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	require.Contains(t, parts[0].Error, "more memory than it may")
}

// oddModule is testdata/odd.
func oddModule(t *testing.T) []byte {
	file := filepath.Join(t.TempDir(), "odd.wasm")
	build := exec.Command("go", "build", "-o", file, "./testdata/odd")
	build.Env = append(testbinary.ToolEnv(), "GOOS=wasip1", "GOARCH=wasm")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	wasm, err := os.ReadFile(file)
	require.NoError(t, err)
	return wasm
}

// Whatever a module does, it is the module that ends: the worker runs the next job.
func TestModulesThatMisbehave(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles a module; not with -short")
	}
	r := newRig(t)
	in := map[string]string{"a": "1"}
	r.tree("in", in)
	r.tree("other", map[string]string{"x": "y"})
	_, err := r.store.PutModule(t.Context(), "odd-wasm", oddModule(t))
	require.NoError(t, err)
	died := r.worker("a", func(c *job.Config) { c.ModuleBytes = 64 << 20 })
	spec := func(do string) job.Spec {
		return job.Spec{Plugin: "odd-wasm", Input: job.Source{Tree: "in"}, Output: "out of " + do, Args: map[string]string{"do": do}}
	}
	// Compiling the module counts, once, as the first part's time.
	r.done(spec("nothing odd"))
	require.Equal(t, in, r.read("out of nothing odd"))
	for do, want := range map[string]string{
		"panic": "oh no", "loop": "longer than it may", "sleep": "longer than it may", "allocate": "out of memory", "rubbish": "malformed frame",
		"leave": "ended before its part", "write elsewhere": "outside of what this part may write",
	} {
		s := spec(do)
		if do == "loop" || do == "sleep" {
			s.PartTimeout = 300 * time.Millisecond
		}
		j := r.run(s)
		require.Equal(t, job.Failed, j.State, do)
		require.Contains(t, j.Error, want, do)
		require.Contains(t, j.Error, "map part 1", do)
	}
	require.Equal(t, map[string]string{"x": "y"}, r.read("other"))
	r.done(spec("look around"))
	require.Equal(t, map[string]string{"a": "true true true 0"}, r.read("out of look around"), "no files, no network, no environment")
	r.done(spec("nothing odd"))
	require.Equal(t, in, r.read("out of nothing odd"))
	require.Empty(t, died, "the worker has outlived all of them")
}

// A job's limits hold, a worker bounds them, and the errors say which and what to do.
func TestLimitsThatAJobDeclares(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles a module; not with -short")
	}
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1"})
	wasm := oddModule(t)
	// Another text makes it another module than those of other tests, which may be compiled.
	text := []byte("the end of all numbers")
	require.Contains(t, string(wasm), string(text))
	wasm = bytes.Replace(wasm, text, bytes.ToUpper(text), 1)
	_, err := r.store.PutModule(t.Context(), "first", wasm)
	require.NoError(t, err)
	died := r.worker("a", func(c *job.Config) {
		c.ModuleBytes, c.CompileTimeout, c.PartTimeout = 64<<20, time.Hour, 10*time.Minute
	})
	spec := func(plugin, do string) job.Spec {
		return job.Spec{Plugin: plugin, Input: job.Source{Tree: "in"}, Output: "out", Args: map[string]string{"do": do}}
	}
	fails := func(s job.Spec, want string) {
		t.Helper()
		j := r.run(s)
		require.Equal(t, job.Failed, j.State)
		require.Contains(t, j.Error, want)
	}
	s := spec("first", "nothing odd")
	s.CompileTimeout = time.Nanosecond
	fails(s, "compiling takes longer than 1ns")
	s.CompileTimeout = 2 * time.Hour
	fails(s, "worker a gives 1h0m0s: lower --compile-timeout")
	s.CompileTimeout, s.PartTimeout = 0, 11*time.Minute
	fails(s, "worker a gives 10m0s: lower --part-timeout")
	s.PartTimeout, s.MemoryBytes = 0, 65<<20
	fails(s, "worker a gives 64 MiB: lower --memory")
	s.MemoryBytes = 1 << 16
	fails(s, "the job allows 64 KiB: raise --memory")
	s.MemoryBytes = 32 << 20
	r.done(s)
	s = spec("first", "take 40 MiB")
	r.done(s) // the worker gives 64
	s.MemoryBytes = 32 << 20
	fails(s, "out of memory")

	require.Empty(t, died, "the worker has outlived all of them")

	s = job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out", MemoryBytes: 1 << 20}
	_, err = r.store.Submit(t.Context(), s)
	require.ErrorContains(t, err, "compiled into the workers")
	for _, s := range []job.Spec{{MemoryBytes: 1}, {MemoryBytes: -1}, {MemoryBytes: 5 << 30}, {CompileTimeout: -1}} {
		s.Plugin, s.Input.Tree, s.Output = "first", "in", "out"
		_, err := r.store.Submit(t.Context(), s)
		require.ErrorContains(t, err, "want")
	}
}

// A file that is no module is refused where it is uploaded, and nothing is kept of it.
func TestFilesThatAreNoModules(t *testing.T) {
	r := newRig(t)
	for want, wasm := range map[string][]byte{
		"not a WASM module": []byte("#!/bin/sh\n"),
		"no plugin":         []byte("\x00asm\x01\x00\x00\x00"),
		"at most":           make([]byte, job.MaxModuleBytes+1),
	} {
		_, err := r.store.PutModule(t.Context(), "m", wasm)
		require.ErrorContains(t, err, want)
	}
	_, err := r.store.PutModule(t.Context(), "m", nil)
	require.Error(t, err)
	modules, err := r.store.Modules(t.Context())
	require.NoError(t, err)
	require.Empty(t, modules)
}

func TestUnknownJobsAndPlugins(t *testing.T) {
	r := newRig(t)
	r.tree("in", nil)
	r.worker("a", nil)
	_, err := r.store.Submit(t.Context(), job.Spec{Plugin: "nobody", Input: job.Source{Tree: "in"}, Output: "out"})
	require.ErrorIs(t, err, job.ErrNoPlugin)
	require.ErrorContains(t, err, "upload one with quarry job put")
	_, err = r.store.Job(t.Context(), 12345)
	require.ErrorIs(t, err, job.ErrNoJob)
	_, err = r.store.Wait(t.Context(), 12345)
	require.ErrorIs(t, err, job.ErrNoJob)
	require.ErrorIs(t, r.store.Cancel(t.Context(), 12345), job.ErrNoJob)
}

// A storage node goes away in the middle of a job: the job goes on with the replicas
// that are left.
func TestJobOutlivesAStorageNode(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a failover; not with -short")
	}
	r := newRigOf(t, 2)
	entries, _ := texts(60)
	r.tree("in", entries)
	began, gate := make(chan struct{}, 256), make(chan struct{})
	waits.Store(&waiting{began, gate})
	t.Cleanup(func() { waits.Store(nil) })
	r.worker("a", func(c *job.Config) { c.Client = r.cluster.Connect(client.Config{Replicas: 2}) })
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "waits", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 6})
	require.NoError(t, err)
	<-began
	require.NoError(t, r.cluster.Nodes[1].Close())
	close(gate)
	j = r.wait(j.ID)
	require.Equal(t, job.Done, j.State, j.Error)
	require.Equal(t, entries, r.read("out"))
}

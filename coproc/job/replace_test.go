package job_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testcluster"
	"github.com/quarrystore/quarry/verify/teststop"
)

// halts emits what it gets. In a process of its own it says so and waits, in the phase that its argument names.
type halts struct{}

func (halts) wait(env coproc.Env) {
	if os.Getenv(workerEnv) != "" && env.Arg("at", "") == string(env.Part().Phase) {
		fmt.Println("begun")
		<-env.Context().Done()
	}
}

func (h halts) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	h.wait(env)
	return emit(key, value)
}

func (h halts) Reduce(env coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	for v := range values {
		if err := emit(key, v); err != nil {
			return err
		}
	}
	h.wait(env)
	return nil
}

func init() {
	coproc.Register("halts", "waits in a phase", func() coproc.Plugin { return halts{} })
}

// A job that replaces its output leaves nothing of the former one; a reader that has that open can go on reading it while it
// lingers, and the next job does not wait for that. A job that fails leaves the output as it is.
func TestOutputIsReplaced(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1", "b": "2"})
	r.tree("in2", map[string]string{"b": "3", "c": "4"})
	r.worker("a", nil)
	for _, reduces := range []string{"odd", "halts"} {
		out := "out of " + reduces
		spec := job.Spec{Plugin: reduces, Input: job.Source{Tree: "in"}, Output: out, Replace: true, Linger: job.MaxLinger}
		j := r.done(spec)
		require.Equal(t, map[string]string{"a": "1", "b": "2"}, r.read(out))
		first, err := kv.Open(t.Context(), r.c, out, btree.Config{})
		require.NoError(t, err)

		spec.Input.Tree, spec.Linger = "in2", 0
		r.done(spec)
		require.Equal(t, map[string]string{"b": "3", "c": "4"}, r.read(out), "no stale key")
		b, err := first.Get(t.Context(), []byte("a"), nil)
		require.NoError(t, err, "it lingers")
		require.Equal(t, "1", string(b))
		require.ErrorIs(t, r.store.Forget(t.Context(), j.ID), job.ErrNotEnded)

		spec.Plugin, spec.Input.Tree, spec.Args = "odd", "in", map[string]string{"do": "panic"}
		failed := r.run(spec)
		require.Equal(t, job.Failed, failed.State)
		require.Equal(t, map[string]string{"b": "3", "c": "4"}, r.read(out))
		require.Eventually(t, func() bool { return r.store.Forget(t.Context(), failed.ID) == nil }, patience, 5*time.Millisecond, "it lingers for nobody")

		spec.Args, spec.Linger = nil, 1
		r.done(spec)
		second, err := kv.Open(t.Context(), r.c, out, btree.Config{})
		require.NoError(t, err)
		spec.Input.Tree = "none"
		require.ErrorContains(t, func() error { _, err := r.store.Submit(t.Context(), spec); return err }(), "no such name")
		spec.Input.Tree = "in2"
		r.done(spec)
		require.Equal(t, map[string]string{"b": "3", "c": "4"}, r.read(out))
		require.Eventually(t, func() bool {
			_, err := second.Get(t.Context(), []byte("a"), nil)
			return errors.Is(err, btree.ErrNoTree)
		}, patience, 5*time.Millisecond, "what has lingered is freed")
	}
}

// Two jobs cannot replace one output at the same time. What a job has staged whose records are gone is in the way
// of none.
func TestReplacingJobsExcludeEachOther(t *testing.T) {
	r := newRig(t)
	in := map[string]string{"a": "1"}
	r.tree("in", in)
	r.worker("a", func(c *job.Config) { c.Slots = 2 })
	spec := job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out", Replace: true, Args: map[string]string{"do": "wait"}}
	first, err := r.store.Submit(t.Context(), spec)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		parts, err := r.store.Parts(t.Context(), first.ID, "map")
		require.NoError(t, err)
		return len(parts) == 1 && parts[0].State == job.Running
	}, patience, 5*time.Millisecond)
	spec.Args = nil
	second := r.run(spec)
	require.Equal(t, job.Failed, second.State)
	require.Contains(t, second.Error, fmt.Sprintf("being replaced by job %d", first.ID))
	require.NoError(t, r.store.Cancel(t.Context(), first.ID))
	require.Empty(t, r.read("out"))
	require.Eventually(t, func() bool { return r.store.Forget(t.Context(), first.ID) == nil }, patience, 5*time.Millisecond)
	_, err = kv.Stage(t.Context(), r.c, "out", "job 999")
	require.NoError(t, err)
	r.done(spec)
	require.Equal(t, in, r.read("out"))

	spec.Replace, spec.Linger = false, time.Second
	_, err = r.store.Submit(t.Context(), spec)
	require.ErrorContains(t, err, "does not replace its output")
	spec.Replace, spec.Linger = true, 2*job.MaxLinger
	_, err = r.store.Submit(t.Context(), spec)
	require.ErrorContains(t, err, "lingers for 48h")
}

// A job waits for another one with the same output that has failed, in the queue: the attempts of its parts do not count. A job
// that has failed before it could commit lingers for no reader.
func TestReplacingJobWaitsForCleanUp(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: 30 * time.Second}, 1)
	r.tree("in", map[string]string{"a": "1"})
	state, err := kv.Open(t.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	put := func(key string, v any) {
		b, err := json.Marshal(v)
		require.NoError(t, err)
		require.NoError(t, state.Put(t.Context(), []byte(key), b))
	}
	// A worker of the failed job has a session that lives, and may change memory.
	other := r.cluster.Connect(client.Config{})
	_, session, err := other.Bind(t.Context())
	require.NoError(t, err)
	const id = 999
	spec := job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out", Replace: true, Linger: job.MaxLinger, MapParts: 1}
	_, err = kv.Stage(t.Context(), r.c, "out", fmt.Sprint("job ", id))
	require.NoError(t, err)
	put(fmt.Sprintf("part/%012d/replace/000000", id), job.Part{Job: id, Phase: "replace", State: job.Running, Attempt: 1, Worker: "gone", Session: session})
	put(fmt.Sprintf("job/%012d", id), job.Job{ID: id, Spec: spec, State: job.Failed, Phase: "replace", Ended: time.Now().UTC()})
	put(fmt.Sprintf("active/%012d", id), struct{}{})

	r.worker("a", func(c *job.Config) { c.Slots = 1 })
	j, err := r.store.Submit(t.Context(), spec)
	require.NoError(t, err)
	part := func() *job.Part {
		parts, err := r.store.Parts(t.Context(), j.ID, "plan")
		require.NoError(t, err)
		return parts[0]
	}
	seen := map[uint64]bool{} // beats of the part while it was handed back: one for each attempt
	require.Eventually(t, func() bool {
		p := part()
		require.LessOrEqual(t, p.Attempt, 1)
		if p.State == job.Pending && p.Error != "" {
			require.Contains(t, p.Error, "waits: tree \"out\" is being replaced by job 999: it has ended")
			seen[p.Beat] = true
		}
		return len(seen) > job.MaxAttempts
	}, patience, time.Millisecond)
	require.ErrorIs(t, r.store.Forget(t.Context(), id), job.ErrNotEnded)
	require.NoError(t, other.Close())
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Equal(t, 1, part().Attempt)
	require.Empty(t, part().Error)
	require.Equal(t, map[string]string{"a": "1"}, r.read("out"))
	require.NoError(t, r.store.Forget(t.Context(), id))
}

// The worker of a job that replaces its output is killed, stopped, or cut off from the controllers: in each phase, and
// at each change of the output's name, before it is carried out and after. Another worker ends the job. A reader
// gets all of the former output, or all of the new one, and the worker that goes on later changes nothing.
func TestReplaceOutlivesItsWorkers(t *testing.T) {
	type point struct {
		name    string
		swap    int    // the change of the output's name at which it happens; 0: in a phase
		carried bool   // out
		phase   string // in which the worker waits
	}
	points := []point{{name: "commit answered by none", swap: 2, carried: true}, {name: "commit", swap: 2}, {name: "stage", swap: 1}, {name: "stage answered by none", swap: 1, carried: true},
		{name: "settle", swap: 3}, {name: "settle answered by none", swap: 3, carried: true}, {name: "map", phase: "map"}, {name: "reduce", phase: "reduce"}}
	old, want := map[string]string{"stale": "0", "a": "0"}, map[string]string{"a": "1", "b": "2"}
	for _, fault := range []string{"kill", "stop", "cut"} {
		for i, at := range points {
			if testing.Short() && (fault != "kill" || i > 0) {
				t.Log("-short: a worker that is killed after its commit")
				continue
			}
			t.Run(fault+" at "+at.name, func(t *testing.T) {
				r := newRigWith(t, testcluster.Options{Nodes: 1, Lease: lease}, 1)
				r.tree("in", want)
				r.tree("out", old)
				line := r.cluster.Line()
				p := r.processAt(line.URL, time.Second, client.TransportTCP)
				happened := make(chan bool, 1)
				hit := func() {
					switch fault {
					case "kill":
						_ = p.Process.Kill()
					case "stop":
						assert.NoError(t, teststop.Stop(p.Process.Pid))
					case "cut":
						line.Cut()
					}
					happened <- true
				}
				var swaps atomic.Int32
				line.Break(at.carried, func(method string) bool {
					if method != "SwapName" || int(swaps.Add(1)) != at.swap {
						return false
					}
					hit()
					return true
				})
				j := r.submitOnce(job.Spec{Plugin: "halts", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 1, ReduceParts: 1, Replace: true, Linger: 1, Args: map[string]string{"at": at.phase}})
				if at.phase != "" {
					p.says("begun")
					hit()
				}
				<-happened
				require.Contains(t, []map[string]string{old, want}, r.read("out"))
				r.worker("heir", nil)
				require.Equal(t, job.Done, r.wait(j.ID).State)
				require.Equal(t, want, r.read("out"))
				settled := func() bool {
					tree, err := kv.Open(t.Context(), r.c, "out", btree.Config{})
					require.NoError(t, err)
					return len(tree.Entry().Notes) == 0
				}
				require.Eventually(t, settled, patience, 5*time.Millisecond)
				switch fault {
				case "stop":
					require.NoError(t, p.Process.Signal(unix.SIGCONT))
				case "cut":
					line.Restore()
				}
				// To settle nothing has to be fenced. A worker that is cut off at its stage can still write to storage nodes, and
				// records that its attempt has failed: then the heir fences nothing, and may be done before the lease ends.
				failed := fault == "cut" && at.swap == 1
				if fault != "kill" && at.swap != 3 && !failed {
					p.says("worker begins again")
				}
				require.Equal(t, want, r.read("out"))
				require.True(t, settled())
			})
		}
	}
}

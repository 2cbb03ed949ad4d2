package job_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
)

// gated holds each map and each reduce part until the test lets one go.
type gated struct{}

var gate struct{ begun, let chan bool }

func (gated) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error { return emit(key, value) }

func (gated) Finish(env coproc.Env, _ coproc.Emit) error {
	gate.begun <- true
	select {
	case <-gate.let:
		return nil
	case <-env.Context().Done():
		return env.Context().Err()
	}
}

func init() {
	gate.begun, gate.let = make(chan bool, 100), make(chan bool)
	coproc.Register("gated", "waits in each part", func() coproc.Plugin { return gated{} })
}

// Of a job with a cap no more parts run at once than that, however many slots are free, and the cap is reached.
func TestHazard227_NoMorePartsRunThanTheJobSays(t *testing.T) {
	r := newRig(t)
	in := r.leaves("in", 800)
	const most = 3
	for i := range 3 {
		r.worker(fmt.Sprint(i), func(c *job.Config) { c.Slots = 4 })
	}
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "gated", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 12, MaxRunning: most})
	require.NoError(t, err)
	await := func() {
		t.Helper()
		select {
		case <-gate.begun:
		case <-time.After(patience):
			t.Fatal("no part begins")
		}
	}
	for range most {
		await()
	}
	total := 0
	for ended := 0; total == 0 || ended < total; ended++ {
		now, err := r.store.Job(t.Context(), j.ID)
		require.NoError(t, err)
		total = now.Maps
		running := 0
		parts, err := r.store.Parts(t.Context(), j.ID, "map")
		require.NoError(t, err)
		for _, p := range parts {
			if p.State == job.Running {
				running++
			}
		}
		require.LessOrEqual(t, running, most)
		gate.let <- true
		if ended+most < total {
			await()
		}
	}
	require.Greater(t, total, 2*most)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Empty(t, gate.begun)
	require.Equal(t, in, r.read("out"))
}

// A cap is refused while a worker is there that does not know of caps.
func TestCapsAreForWorkersThatKnowThem(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1"})
	state, err := kv.Open(t.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	require.NoError(t, state.Put(t.Context(), []byte("worker/old"), []byte(`{"name":"old","beat":7,"format":1,"plugins":[{"Name":"odd"}]}`)))
	spec := job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out", MaxRunning: 1}
	_, err = r.store.Submit(t.Context(), spec)
	require.ErrorContains(t, err, "worker old is of an earlier version")
	for _, most := range []int{-1, job.MaxParts + 1} {
		spec.MaxRunning = most
		_, err = r.store.Submit(t.Context(), spec)
		require.ErrorContains(t, err, "parts at once")
	}
}

// A worker runs as many parts of one job as it may, and its other slots run parts of other jobs.
func TestHazard228_WorkerRunsSoManyPartsOfOneJob(t *testing.T) {
	r := newRig(t)
	r.leaves("in", 800)
	r.worker("a", func(c *job.Config) { c.Slots, c.MaxOfJob = 5, 2 })
	var jobs []*job.Job
	for i := range 2 {
		j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "gated", Input: job.Source{Tree: "in"}, Output: fmt.Sprint("out", i), MapParts: 8})
		require.NoError(t, err)
		jobs = append(jobs, j)
	}
	running := func(j *job.Job) (n int) {
		parts, err := r.store.Parts(t.Context(), j.ID, "map")
		require.NoError(t, err)
		for _, p := range parts {
			if p.State == job.Running {
				n++
			}
		}
		return n
	}
	require.Eventually(t, func() bool { return running(jobs[0]) == 2 && running(jobs[1]) == 2 }, patience, 5*time.Millisecond)
	r.done(job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "odd", MapParts: 8}) // by the fifth slot
	for _, j := range jobs {
		require.Equal(t, 2, running(j))
	}
	stop := make(chan bool)
	go func() {
		for {
			select {
			case gate.let <- true:
			case <-gate.begun:
			case <-stop:
				return
			}
		}
	}()
	for _, j := range jobs {
		require.Equal(t, job.Done, r.wait(j.ID).State)
	}
	stop <- true
	for len(gate.begun) > 0 {
		<-gate.begun
	}
}

// A census counts the parts that caps hold up: the job's, the worker's, and the quota's.
func TestCensusCountsWhatCapsHoldUp(t *testing.T) {
	r := newRig(t)
	r.quota(100 << 20)
	r.leaves("in", 800)
	r.tree("one", map[string]string{"a": "1"})
	var tally job.Tally
	r.worker("a", func(c *job.Config) { c.Slots, c.MaxOfJob, c.Tally = 8, 2, &tally })
	submit := func(plugin, in string, most int, bytes int64) *job.Job {
		j, err := r.store.Submit(t.Context(), job.Spec{Plugin: plugin, Input: job.Source{Tree: in}, Output: fmt.Sprint("out/", plugin, most, bytes), MapParts: 8, MaxRunning: most, ShuffleBytes: bytes})
		require.NoError(t, err)
		return j
	}
	began, let := make(chan struct{}, 1), make(chan struct{})
	waits.Store(&waiting{began, let})
	t.Cleanup(func() { waits.Store(nil) })
	jobs := []*job.Job{submit("gated", "in", 1, 0), submit("gated", "in", 0, 0), submit("waits-reduce", "one", 0, 70<<20)}
	<-began
	jobs = append(jobs, submit("waits-reduce", "one", 0, 60<<20))
	parts := func(j *job.Job) int {
		now, err := r.store.Job(t.Context(), j.ID)
		require.NoError(t, err)
		return now.Maps
	}
	require.Eventually(t, func() bool {
		c, err := tally.Census(t.Context())
		require.NoError(t, err)
		capped, free := parts(jobs[0]), parts(jobs[1])
		return capped > 1 && free > 2 && c.Waiting["job"] == capped-1 && c.Capped == free-2 && c.Waiting["quota"] == 1
	}, patience, 10*time.Millisecond)
	for _, j := range jobs {
		require.NoError(t, r.store.Cancel(t.Context(), j.ID))
	}
	require.Eventually(t, func() bool {
		c, err := tally.Census(t.Context())
		require.NoError(t, err)
		return c.Running == 0 && c.Waiting["job"] == 0 && c.Capped == 0 && c.Waiting["quota"] == 0
	}, patience, 10*time.Millisecond)
	for len(gate.begun) > 0 {
		<-gate.begun
	}
}

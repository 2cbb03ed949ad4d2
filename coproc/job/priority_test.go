package job_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
)

// noted notes which job's parts begin, in their order.
type noted struct{}

var notes struct {
	sync.Mutex
	jobs strings.Builder
}

func (noted) Map(coproc.Env, []byte, []byte, coproc.Emit) error { return nil }

func (noted) Finish(env coproc.Env, _ coproc.Emit) error {
	notes.Lock()
	defer notes.Unlock()
	notes.jobs.WriteString(env.Arg("name", "?"))
	return nil
}

func init() {
	coproc.Register("noted", "notes the order of parts", func() coproc.Plugin { return noted{} })
}

// Parts of jobs of higher priority are begun first, and those of lower priority are begun between them, as often as the rule says.
func TestHazard292_HigherPrioritiesComeFirstAndNoneStarves(t *testing.T) {
	r := newRig(t)
	r.leaves("many", 1000)
	r.tree("one", map[string]string{"a": "1"})
	r.worker("a", func(c *job.Config) { c.Slots = 1 })
	first, err := r.store.Submit(t.Context(), job.Spec{Plugin: "stepwise", Input: job.Source{Tree: "one"}, Output: "none", MapParts: 1})
	require.NoError(t, err)
	require.Eventually(t, func() bool { // it has the only slot
		parts, err := r.store.Parts(t.Context(), first.ID, "map")
		require.NoError(t, err)
		return len(parts) == 1 && parts[0].State == job.Running
	}, patience, 5*time.Millisecond)
	const parts = 20
	var jobs []*job.Job
	for _, p := range []job.Priority{job.Low, job.Normal, job.High} { // the last is submitted last
		j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "noted", Input: job.Source{Tree: "many"}, Output: "none", MapParts: parts, Priority: p, Args: map[string]string{"name": string(p[0])}})
		require.NoError(t, err)
		jobs = append(jobs, j)
	}
	steps <- true
	for _, j := range append(jobs, first) {
		require.Equal(t, job.Done, r.wait(j.ID).State)
	}
	order := notes.jobs.String()
	t.Log(order)
	high, normal := strings.LastIndex(order, "h")+1, strings.LastIndex(order, "n")+1
	require.Equal(t, parts, strings.Count(order, "l"))
	require.Equal(t, parts, strings.Count(order[:high], "h"))
	// Beside 20 parts and a plan of high priority, and then of normal priority, there are at least two rounds of 8, and plans may be what is begun between them.
	require.LessOrEqual(t, strings.Count(order[:high], "n"), 3)
	require.LessOrEqual(t, strings.Count(order[:high], "l"), 3)
	require.Positive(t, strings.Count(order[:high], "n")+strings.Count(order[:high], "l"))
	require.Positive(t, strings.Count(order[:normal], "l"))
	require.LessOrEqual(t, strings.Count(order[:normal], "l"), 6)
}

// Priorities that are not known are refused, and all while a worker is there that does not know of priorities.
func TestPrioritiesAreForWorkersThatKnowThem(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1"})
	state, err := kv.Open(t.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	require.NoError(t, state.Put(t.Context(), []byte("worker/old"), []byte(`{"name":"old","beat":7,"format":2,"plugins":[{"Name":"odd"}]}`)))
	spec := job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out", Priority: job.High}
	_, err = r.store.Submit(t.Context(), spec)
	require.ErrorContains(t, err, "worker old is of an earlier version")
	spec.Priority = "urgent"
	_, err = r.store.Submit(t.Context(), spec)
	require.ErrorContains(t, err, `priority "urgent": want low, normal or high`)
	spec.Priority = job.Normal
	j, err := r.store.Submit(t.Context(), spec)
	require.NoError(t, err)
	require.Empty(t, j.Spec.Priority, "as earlier versions write it")
}

package job_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
)

// stepwise takes a step for each part.
type stepwise struct{}

var steps = make(chan bool)

func (stepwise) Map(coproc.Env, []byte, []byte, coproc.Emit) error { return nil }

func (stepwise) Finish(env coproc.Env, _ coproc.Emit) error {
	select {
	case <-steps:
		return nil
	case <-env.Context().Done():
		return env.Context().Err()
	}
}

func init() {
	coproc.Register("stepwise", "takes steps", func() coproc.Plugin { return stepwise{} })
}

// A job of one part does not wait for the parts of a job that was submitted earlier: they take turns.
func TestJobsTakeTurns(t *testing.T) {
	r := newRig(t)
	r.leaves("many", 2000)
	r.tree("one", map[string]string{"a": "1"})
	r.worker("a", func(c *job.Config) { c.Slots = 1 })
	const parts = 40
	step := func() {
		t.Helper()
		select {
		case steps <- true:
		case <-time.After(patience):
			t.Fatal("no part of the large job runs")
		}
	}
	large, err := r.store.Submit(t.Context(), job.Spec{Plugin: "stepwise", Input: job.Source{Tree: "many"}, Output: "none", MapParts: parts})
	require.NoError(t, err)
	step() // its parts run
	small, err := r.store.Submit(t.Context(), job.Spec{Plugin: "odd", Input: job.Source{Tree: "one"}, Output: "out", MapParts: 1})
	require.NoError(t, err)
	ended := func(id uint64) bool {
		j, err := r.store.Job(t.Context(), id)
		require.NoError(t, err)
		return j.State.Ended()
	}
	taken := 1
	for ; taken < parts && !ended(small.ID); taken++ {
		step()
	}
	// A step for the part that runs when the job is submitted, one for each of its two phases, and one to see its end.
	require.LessOrEqual(t, taken, 6, "parts of the large job before the small one had ended")
	for ; taken < parts; taken++ {
		step()
	}
	require.Equal(t, job.Done, r.wait(large.ID).State)
}

package job_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// An attempt that gives way to a second one uses up none of the part's attempts: the third attempt gives way, the worker of the second one is killed
// before it takes the part, and the part has two more attempts.
func TestHazard226_AttemptThatGivesWayIsNotCounted(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: TestSecondAttemptIsDropped runs the same goroutines")
	}
	for _, last := range []job.State{job.Done, job.Failed} {
		t.Run(string(last), func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
			in := dragging()
			r.tree("in", in)
			came := make(chan bool, 1)
			fails := func(coproc.Env) error { return errors.New("it fails") }
			holds := []func(coproc.Env) error{fails, fails, func(env coproc.Env) error { came <- true; return forever(env) }, fails}
			if last == job.Failed {
				holds = append(holds, fails)
			}
			slowdown(t.Name(), "map", holds...)
			r.worker("first", func(c *job.Config) { c.Slots, c.Lease = 1, 12*time.Second }) // a beat is 2 s
			j, second := r.secondIsReady(t.Name(), came)
			require.NoError(t, second.Process.Kill())
			r.worker("heir", nil)
			require.Equal(t, last, r.wait(j.ID).State)
			p := r.slow(j.ID)
			require.True(t, p.Yielded)
			require.Equal(t, job.MaxAttempts+1, p.Attempt)
			if last == job.Failed {
				require.Contains(t, fmt.Sprint(p.Log), "attempt 5")
				return
			}
			require.Equal(t, in, r.named("out"))
		})
	}
}

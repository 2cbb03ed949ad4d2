package job_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
)

// costOfParts runs a job with a part for each of so many objects, and returns the rounds of its only worker by the kinds of calls.
func costOfParts(r *rig, worker *client.Client, parts int) map[string]int {
	prefix := fmt.Sprint("objects", parts, "/")
	for i := range parts {
		ref, err := r.c.Alloc(r.Context(), []byte("x"), client.AllocOptions{WriteOnce: true})
		require.NoError(r, err)
		_, err = r.c.Names().Create(r.Context(), fmt.Sprintf("%s%04d", prefix, i), "object", ref)
		require.NoError(r, err)
	}
	rounds := map[string]int{}
	for kind, k := range worker.Stats().Kinds {
		rounds[kind] -= int(k.Rounds)
	}
	j, err := r.store.Submit(r.Context(), job.Spec{Plugin: "touch", Input: job.Source{Objects: prefix}, Output: "none", MapParts: parts})
	require.NoError(r, err)
	j, err = r.store.Wait(r.Context(), j.ID)
	require.NoError(r, err)
	require.Equal(r, job.Done, j.State, j.Error)
	require.Equal(r, parts, j.Maps)
	for kind, k := range worker.Stats().Kinds {
		rounds[kind] += int(k.Rounds)
	}
	return rounds
}

// A part of one object takes nine rounds of its worker, with one replica: one for the jobs that have not ended, one for the job's record, 2 to claim the part and 2 to
// record its end, and the reads of the object. The records of all parts are made together, in 0.3 rounds each: one by one they took 3. They become longer, and
// leaves are split for that.
func TestRoundsOfAPart(t *testing.T) {
	r := newRig(t)
	w := r.cluster.Connect(client.Config{Replicas: 1})
	r.worker("w", func(c *job.Config) { c.Client, c.Slots, c.Lease = w, 1, time.Hour })
	costOfParts(r, w, 10) // opens trees
	few, many := costOfParts(r, w, 50), costOfParts(r, w, 250)
	perPart := 0.0
	for kind, n := range many {
		cost := float64(n-few[kind]) / 200
		t.Logf("%s: %.2f rounds a part", kind, cost)
		perPart += cost
	}
	require.LessOrEqual(t, perPart, 9.5, "rounds a part")
}

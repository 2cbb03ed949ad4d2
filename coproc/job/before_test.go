package job_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A worker records how the process has ended that had its name: the part's attempt has failed, and the last one of four fails the job. It does not wait for
// a lease, and does not touch a part of an attempt whose session lasts.
func TestHazard290_PredecessorsPartsHaveFailed(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2}, 1)
	r.tree("in", map[string]string{"a": "1"})
	state, err := kv.Open(t.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	require.NoError(t, state.Put(t.Context(), []byte("worker/old"), []byte(`{"name":"old","beat":7,"format":2,"plugins":[{"Name":"odd"}]}`)))
	ended, alive := r.cluster.Connect(client.Config{}), r.cluster.Connect(client.Config{})
	_, of, err := ended.Bind(t.Context())
	require.NoError(t, err)
	require.NoError(t, ended.Close())
	_, living, err := alive.Bind(t.Context())
	require.NoError(t, err)

	left := func(attempt int, life uint64, session client.Session) *job.Job { // a job whose plan a process named "a" has begun
		j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: fmt.Sprint("out", attempt), MapParts: 1})
		require.NoError(t, err)
		parts, err := r.store.Parts(t.Context(), j.ID, "plan")
		require.NoError(t, err)
		p := parts[0]
		p.State, p.Worker, p.Life, p.Attempt, p.Beat, p.Session = job.Running, "a", life, attempt, 5, session
		b, err := json.Marshal(p)
		require.NoError(t, err)
		require.NoError(t, state.Put(t.Context(), fmt.Appendf(nil, "part/%012d/plan/%06d", j.ID, 0), b))
		return j
	}
	third, fourth, runs, first, unknown := left(3, 12, of), left(4, 12, of), left(1, 12, living), left(2, 11, of), left(1, 10, of)
	const reason = "the slot's process was ended: limit 416 MiB"
	r.worker("a", func(c *job.Config) {
		c.Life, c.Before, c.Lease = 13, map[uint64]string{11: "exit status 2", 12: reason}, time.Hour
	})
	plan := func(j *job.Job) *job.Part {
		parts, err := r.store.Parts(t.Context(), j.ID, "plan")
		require.NoError(t, err)
		return parts[0]
	}
	require.Equal(t, job.Done, r.wait(third.ID).State)
	require.Equal(t, 4, plan(third).Attempt)
	require.Contains(t, strings.Join(plan(third).Log, "\n"), "attempt 3 on a: "+reason)
	failed := r.wait(fourth.ID)
	require.Equal(t, job.Failed, failed.State)
	require.Contains(t, failed.Error, "plan part 1: "+reason)
	require.Equal(t, job.Done, r.wait(first.ID).State)
	require.Contains(t, strings.Join(plan(first).Log, "\n"), "attempt 2 on a: exit status 2", "an earlier process's reason, not that of the last one")
	require.Equal(t, job.Running, plan(unknown).State, "left to the lease, without a reason")
	require.Equal(t, job.Running, plan(runs).State)
	require.Equal(t, living, plan(runs).Session)
}

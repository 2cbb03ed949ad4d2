package job_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// waitsReduce is waitsFor with a reduction.
type waitsReduce struct{ waitsFor }

func (waitsReduce) Reduce(_ coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	for v := range values {
		if err := emit(key, v); err != nil {
			return err
		}
	}
	return nil
}

func init() {
	coproc.Register("waits-reduce", "waits for a gate, and reduces", func() coproc.Plugin { return waitsReduce{} })
}

// quota sets the cluster's.
func (r *rig) quota(bytes uint64) {
	_, err := r.cluster.Control().SetDefaults(r.Context(), connect.NewRequest(&quarrypb.SetDefaultsRequest{ShuffleBytes: &bytes}))
	require.NoError(r, err)
}

// queued is how the quota stands.
func (r *rig) queued() client.Quota {
	q, err := r.store.Quota(r.Context())
	require.NoError(r, err)
	return q
}

// A job that needs more of the quota than is free is not begun, and says so. Jobs that do not reduce run meanwhile. When
// all have ended, all of the quota is free.
func TestJobsWaitForTheQuota(t *testing.T) {
	r := newRig(t)
	r.quota(100 << 20)
	r.tree("in", map[string]string{"a": "stone", "b": "stone"})
	began, gate := make(chan struct{}, 1), make(chan struct{})
	waits.Store(&waiting{began, gate})
	t.Cleanup(func() { waits.Store(nil) })
	r.worker("a", nil)
	spec := func(plugin, out string, bytes int64) job.Spec {
		return job.Spec{Plugin: plugin, Input: job.Source{Tree: "in"}, Output: out, ShuffleBytes: bytes}
	}
	_, err := r.store.Submit(t.Context(), spec(words.Name, "never", 101<<20))
	require.ErrorContains(t, err, "needs 101 MiB between map and reduce, and the quota of all jobs is 100 MiB")
	first, err := r.store.Submit(t.Context(), spec("waits-reduce", "first", 70<<20))
	require.NoError(t, err)
	<-began
	second, err := r.store.Submit(t.Context(), spec(words.Name, "second", 60<<20))
	require.NoError(t, err)
	r.done(job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "odd"}) // the worker has looked at all
	r.done(job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "odd2"})

	q := r.queued()
	require.EqualValues(t, 70<<20, q.Used)
	require.Equal(t, []client.Place{{Job: first.ID, Bytes: 70 << 20, Admitted: true}, {Job: second.ID, Bytes: 60 << 20}}, q.Jobs)
	require.Equal(t, "job waits: needs 60 MiB of shuffle, 30 MiB free of 100 MiB", second.Waiting(q))
	require.Empty(t, first.Waiting(q))
	parts, err := r.store.Parts(t.Context(), second.ID, "")
	require.NoError(t, err)
	require.Len(t, parts, 1)
	require.Equal(t, job.Pending, parts[0].State)

	close(gate)
	for _, id := range []uint64{first.ID, second.ID} {
		require.Equal(t, job.Done, r.wait(id).State)
	}
	require.Equal(t, map[string]string{"stone": "2"}, r.read("second"))
	require.Eventually(t, func() bool { q := r.queued(); return q.Used == 0 && len(q.Jobs) == 0 }, patience, 5*time.Millisecond)
	lingers := spec(words.Name, "third", 0)
	lingers.Replace, lingers.Linger = true, job.MaxLinger
	third := r.done(lingers)
	require.EqualValues(t, 64<<20, third.Spec.ShuffleBytes, "a quarter of the quota, or the least")
	require.Eventually(t, func() bool { return len(r.queued().Jobs) == 0 }, patience, 5*time.Millisecond, "while its former output lingers")
}

// The worker of an admitted job is killed: the next one goes on with the same bytes, and they are free after the job. So are those of a
// job that is cancelled while it waits, and of one whose records were lost.
func TestBytesOfTheQuotaOutliveWorkers(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
	r.quota(100 << 20)
	r.tree("in", map[string]string{"a": "1", "b": "2", "z": "3"})
	p := r.process(time.Hour, client.TransportTCP)
	j := r.submitOnce(job.Spec{Plugin: "zombie-reduce", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 1, ReduceParts: 1, ShuffleBytes: 70 << 20})
	p.says("begun")
	require.NoError(t, p.Process.Signal(unix.SIGKILL))
	require.EqualValues(t, 70<<20, r.queued().Used)
	second, err := r.store.Submit(t.Context(), job.Spec{Plugin: "zombie-reduce", Input: job.Source{Tree: "in"}, Output: "out2", ShuffleBytes: 80 << 20})
	require.NoError(t, err)
	require.NoError(t, r.store.Cancel(t.Context(), second.ID))
	r.worker("heir", nil)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Eventually(t, func() bool { q := r.queued(); return q.Used == 0 && len(q.Jobs) == 0 }, patience, 5*time.Millisecond)

	lost := j.ID + 100
	require.NoError(t, r.c.Jobs().Queue(t.Context(), lost, make([]byte, 32), 90<<20))
	_, err = r.c.Jobs().Admit(t.Context(), lost)
	require.NoError(t, err)
	require.EqualValues(t, 90<<20, r.queued().Used)
	require.NoError(t, r.store.Forget(t.Context(), lost))
	require.Zero(t, r.queued().Used)
	require.ErrorIs(t, r.store.Forget(t.Context(), lost), job.ErrNoJob)
}

// A number that has a place, of a job whose records were lost with the jobs' tree, is passed over.
func TestLostJobsKeepTheirNumbers(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "stone"})
	for id := uint64(1); id < 3; id++ {
		require.NoError(t, r.c.Jobs().Queue(t.Context(), id, make([]byte, 32), 1))
	}
	r.worker("a", nil)
	require.EqualValues(t, 3, r.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out"}).ID)
}

// After the end of a delegation no worker frees what a job has written between its phases: its submitter does, when it forgets the job.
func TestForgetSweepsARevokedJob(t *testing.T) {
	g := newGuarded(t)
	r := g.submitters["a"]
	began, gate := make(chan struct{}, 1), make(chan struct{})
	waits.Store(&waiting{began, gate})
	t.Cleanup(func() { waits.Store(nil) })
	t.Cleanup(func() { close(gate) })
	g.serve("w1")
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "waits-reduce", Input: job.Source{Tree: "in"}, Output: "out", ShuffleBytes: 70 << 20})
	require.NoError(t, err)
	<-began
	ref, err := r.c.Alloc(t.Context(), []byte("run"), client.AllocOptions{WriteOnce: true})
	require.NoError(t, err)
	state, err := kv.Open(t.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	listed, err := json.Marshal(map[string]any{"objects": []proto.Ref{ref}, "bytes": 3})
	require.NoError(t, err)
	require.NoError(t, state.Put(t.Context(), fmt.Appendf(nil, "runs/%012d/map/000000/1", j.ID), listed))
	require.NoError(t, r.c.Jobs().End(t.Context(), j.ID, true)) // as Revoke does, and an operator
	require.NoError(t, r.store.Cancel(t.Context(), j.ID))
	require.EqualValues(t, 70<<20, r.queued().Used, "its records are in the store")
	damaged := fmt.Appendf(nil, "runs/%012d/map/000000/2", j.ID)
	require.NoError(t, state.Put(t.Context(), damaged, []byte("{")))
	require.Eventually(t, func() bool { err = r.store.Forget(t.Context(), j.ID); return !errors.Is(err, job.ErrNotEnded) }, patience, 20*time.Millisecond)
	require.ErrorContains(t, err, "freeing its intermediate results", "why it cannot be forgotten")
	require.NoError(t, state.Delete(t.Context(), damaged))
	require.Eventually(t, func() bool { return r.store.Forget(t.Context(), j.ID) == nil }, patience, 20*time.Millisecond)
	require.Zero(t, r.queued().Used)
	require.Empty(t, r.records("runs/"))
	require.Empty(t, r.records("active/"))
	_, err = r.c.Read(t.Context(), ref, nil)
	require.ErrorIs(t, err, client.ErrFreed)
}

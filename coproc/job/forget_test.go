package job_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

// TestForgottenJobs: what a job has written stays when its records are removed, by hand or when their time is over.
func TestForgottenJobs(t *testing.T) {
	r := newRig(t)
	entries, want := texts(50)
	r.tree("texts", entries)
	r.worker("a", nil)
	spec := job.Spec{Plugin: words.Name, Input: job.Source{Tree: "texts"}, Output: "counts", Keep: time.Hour}
	first := r.done(spec)
	spec.Keep = 0
	second := r.done(spec)
	third, err := r.store.Submit(t.Context(), job.Spec{Plugin: "odd", Input: job.Source{Tree: "texts"}, Output: "out", Args: map[string]string{"do": "wait"}})
	require.NoError(t, err)
	ids := func() (ids []uint64) {
		all, err := r.store.Jobs(t.Context())
		require.NoError(t, err)
		for _, j := range all {
			ids = append(ids, j.ID)
		}
		return ids
	}
	require.Eventually(t, func() bool { return len(r.records("active/")) == 1 }, patience, 5*time.Millisecond, "what lay between phases is freed")

	require.ErrorIs(t, r.store.Forget(t.Context(), third.ID), job.ErrNotEnded)
	require.ErrorIs(t, r.store.Forget(t.Context(), 999), job.ErrNoJob)
	require.Equal(t, []uint64{first.ID, second.ID, third.ID}, ids())

	// Each job has its own time, which begins with its end.
	r.store.ForgetExpired(t.Context(), first.Ended.Add(59*time.Minute))
	require.Equal(t, []uint64{first.ID, second.ID, third.ID}, ids())
	r.store.ForgetExpired(t.Context(), first.Ended.Add(61*time.Minute))
	require.Equal(t, []uint64{second.ID, third.ID}, ids())
	parts, err := r.store.Parts(t.Context(), first.ID, "")
	require.NoError(t, err)
	require.Empty(t, parts)
	r.store.ForgetExpired(t.Context(), second.Ended.Add(job.DefaultKeep+time.Second))
	require.Equal(t, []uint64{third.ID}, ids(), "a job that goes on is kept")

	require.NoError(t, r.store.Cancel(t.Context(), third.ID))
	require.Eventually(t, func() bool { return r.store.Forget(t.Context(), third.ID) == nil }, patience, 5*time.Millisecond)
	require.Empty(t, ids())
	for _, prefix := range []string{"part/", "active/", "runs/"} {
		require.Empty(t, r.records(prefix))
	}
	require.Equal(t, want, r.read("counts"))
}

// records are the keys of the jobs' tree with a prefix.
func (r *rig) records(prefix string) (keys []string) {
	tree, err := kv.Open(r.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(r, err)
	err = tree.Scan(r.Context(), btree.Range{From: []byte(prefix), To: []byte(prefix + "~")}, func(key, _ []byte, _ uint64) bool {
		keys = append(keys, string(key))
		return true
	})
	require.NoError(r, err)
	return keys
}

package job_test

import (
	"crypto/sha256"
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
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

// forger writes records of jobs as any program with the right to write in a tenant can.
type forger struct {
	testing.TB
	t *kv.Tree
}

func (f forger) edit(key string, change func(map[string]any)) {
	f.Helper()
	b, err := f.t.Get(f.Context(), []byte(key), nil)
	require.NoError(f, err)
	rec := map[string]any{}
	require.NoError(f, json.Unmarshal(b, &rec))
	change(rec)
	f.put(key, rec)
}

func (f forger) put(key string, rec any) {
	b, err := json.Marshal(rec)
	require.NoError(f, err)
	require.NoError(f, f.t.Put(f.Context(), []byte(key), b))
}

// Whatever a program of a tenant writes into the jobs' tree, its job fails, and the workers serve the other tenants.
func TestForgedRecordsEndTheirJobAlone(t *testing.T) {
	g := newGuarded(t)
	a := g.submitters["a"]
	jobs, err := client.NewJobs(g.control())
	require.NoError(t, err)
	defer jobs.Close()
	_, _, err = jobs.Poll(t.Context(), client.Worker{Name: "w0", Plugins: []byte(`[{"name":"words","reduces":true}]`)})
	require.NoError(t, err)
	state, err := kv.Open(t.Context(), a.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	f := forger{t, state}
	attacks := map[string]func(id uint64, record string){
		"no plan": func(id uint64, _ string) {
			require.NoError(t, state.Delete(t.Context(), fmt.Appendf(nil, "part/%012d/plan/000000", id)))
		},
		"a plan of nothing": func(id uint64, _ string) {
			f.edit(fmt.Sprintf("part/%012d/plan/000000", id), func(r map[string]any) { r["state"], r["plan"] = "done", []any{nil} })
		},
		"negative reduces": func(_ uint64, record string) { f.edit(record, func(r map[string]any) { r["reduces"] = -1 }) },
		"reduces for all memory": func(_ uint64, record string) {
			f.edit(record, func(r map[string]any) { r["reduces"] = 1 << 40 })
		},
		"a negative part": func(id uint64, record string) {
			f.put(fmt.Sprintf("part/%012d/map/000000", id), map[string]any{"job": id, "phase": "map", "state": "done"})
			f.put(fmt.Sprintf("part/%012d/reduce/-00001", id), map[string]any{"job": id, "phase": "reduce", "index": -1, "state": "pending"})
			f.edit(record, func(r map[string]any) { r["phase"] = "reduce" })
		},
		"another job's part": func(id uint64, _ string) {
			f.edit(fmt.Sprintf("part/%012d/plan/000000", id), func(r map[string]any) { r["job"] = id + 1000 })
		},
		"no such phase": func(_ uint64, record string) { f.edit(record, func(r map[string]any) { r["phase"] = "" }) },
		"rubbish":       func(_ uint64, record string) { require.NoError(t, state.Put(t.Context(), []byte(record), []byte("{"))) },
		"no job":        func(_ uint64, record string) { require.NoError(t, state.Delete(t.Context(), []byte(record))) },
	}
	ids := map[string]uint64{}
	for name, attack := range attacks {
		j, err := a.store.Submit(t.Context(), job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out"})
		require.NoError(t, err)
		ids[name] = j.ID
		attack(j.ID, fmt.Sprintf("job/%012d", j.ID))
	}
	// A submitter chooses the digest: no map parts, over which the planner would divide by zero.
	j := &job.Job{ID: 900, Spec: job.Spec{Plugin: words.Name, Input: job.Source{Objects: "x"}, Output: "out"}, State: job.Running, Phase: "plan"}
	b, err := json.Marshal(struct {
		ID   uint64
		Spec job.Spec
	}{j.ID, j.Spec})
	require.NoError(t, err)
	digest := sha256.Sum256(b)
	_, err = a.c.Jobs().Delegate(t.Context(), j.ID, digest[:], 0)
	require.NoError(t, err)
	f.put("part/000000000900/plan/000000", &job.Part{Job: j.ID, Phase: "plan", State: job.Pending})
	f.put("job/000000000900", j)
	require.NoError(t, state.Put(t.Context(), []byte("active/000000000900"), nil))
	ids["no map parts"] = j.ID

	g.serve("w1")
	g.serve("w2")
	g.submitters["b"].done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out"})
	for name, id := range ids {
		require.Eventually(t, func() bool {
			_, err := state.Get(t.Context(), fmt.Appendf(nil, "active/%012d", id), nil)
			return err != nil
		}, patience, 20*time.Millisecond, name)
		if j, err := a.store.Job(t.Context(), id); name != "rubbish" && name != "no job" {
			require.NoError(t, err, name)
			require.Equal(t, job.Failed, j.State, name)
			require.Contains(t, j.Error, "its records are damaged", name)
		}
	}
	g.submitters["b"].done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out"})
	a.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out"})
}

// A plugin that only other workers have compiled in is not taken from a module that somebody has uploaded since.
func TestNoModuleRunsThatWasNotSubmitted(t *testing.T) {
	g := newGuarded(t)
	a := g.submitters["a"]
	jobs, err := client.NewJobs(g.control())
	require.NoError(t, err)
	defer jobs.Close()
	_, _, err = jobs.Poll(t.Context(), client.Worker{Name: "w0", Plugins: []byte(`[{"name":"ghost"}]`)})
	require.NoError(t, err)
	j, err := a.store.Submit(t.Context(), job.Spec{Plugin: "ghost", Input: job.Source{Tree: "in"}, Output: "out"})
	require.NoError(t, err)
	state, err := kv.Open(t.Context(), a.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	forger{t, state}.put("module/ghost", job.Module{SHA256: "of other code"})
	g.serve("w1")
	// The controllers forget w0. The other worker had as long to claim the part, and has not.
	require.Eventually(t, func() bool {
		why, err := a.store.Unserved(t.Context(), j)
		require.NoError(t, err)
		return strings.Contains(why, "none of the 1 workers that are there has plugin ghost")
	}, patience, 50*time.Millisecond)
	var parts []*job.Part
	require.Eventually(t, func() bool {
		parts, err = a.store.Parts(t.Context(), j.ID, "map")
		require.NoError(t, err)
		return len(parts) > 0
	}, patience, 5*time.Millisecond)
	for _, p := range parts {
		require.Equal(t, job.Pending, p.State)
		require.Zero(t, p.Attempt, "%+v", p)
	}
	require.NoError(t, a.store.Cancel(t.Context(), j.ID))
}

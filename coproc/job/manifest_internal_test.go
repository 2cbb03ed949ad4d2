package job

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// What an attempt that failed has freed does not count against the job's budget, nor do runs that a reduce part merges.
func TestFreedRunsAreInNoBudget(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	store, err := Open(ctx, c)
	require.NoError(t, err)
	w := &worker{c: c, store: store}
	ref, err := c.Alloc(ctx, []byte("run"), client.AllocOptions{WriteOnce: true})
	require.NoError(t, err)
	const budget = 100
	first := w.written(ctx, &Part{Job: 1, Phase: phaseMap, Attempt: 1}, budget)
	require.NoError(t, first.add(ref, 60))
	require.NoError(t, w.written(ctx, &Part{Job: 2, Phase: phaseMap, Attempt: 1}, budget).add(ref, 60), "another job")
	require.NoError(t, w.written(ctx, &Part{Job: 1, Phase: phaseReduce, Attempt: 1}, 0).add(ref, 1000))
	second := w.written(ctx, &Part{Job: 1, Phase: phaseMap, Index: 1, Attempt: 1}, budget)
	require.ErrorIs(t, second.add(ref, 60), errBudget)
	require.ErrorIs(t, second.over, errBudget)
	first.release(ctx)
	require.NoError(t, second.add(ref, 40))
	require.ErrorIs(t, w.written(ctx, &Part{Job: 1, Phase: phaseMap, Attempt: 2}, budget).add(ref, 10), errBudget)
	require.NoError(t, w.dropManifests(ctx, 1))
	require.NoError(t, w.written(ctx, &Part{Job: 1, Phase: phaseMap, Attempt: 2}, budget).add(ref, 100))
}

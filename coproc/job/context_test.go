package job_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestContextsThatHaveEnded: every call of the package returns the error of a context
// that has ended, and does nothing.
func TestContextsThatHaveEnded(t *testing.T) {
	r := newRig(t)
	tree, err := kv.Create(t.Context(), r.c, "tree", btree.Config{})
	require.NoError(t, err)
	testcluster.ContextCalls(t, []any{r.store, &job.Tally{}}, map[string]func(context.Context) error{
		"Open": func(ctx context.Context) error { _, err := job.Open(ctx, r.c); return err },
		"Work": func(ctx context.Context) error { return job.Work(ctx, job.Config{Client: r.c}) },
		"Serve": func(ctx context.Context) error {
			return job.Serve(ctx, job.Config{}, client.Config{Controllers: []string{r.cluster.Controller.URL()}}, func(*client.Client) error { return nil })
		},
		"ReadTree": func(ctx context.Context) error {
			_, err := job.ReadTree(ctx, tree).Get([]byte("key"), nil)
			return err
		},
	}, "name", uint64(1))
	jobs, err := r.store.Jobs(t.Context())
	require.NoError(t, err)
	require.Empty(t, jobs)
}

package pool

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// lateAnswer is a replica whose changes of owner are made, and answered with an error where lost is set.
type lateAnswer struct {
	replica
	lost func(torn bool) bool
}

func (r lateAnswer) own(ctx context.Context, token string, torn bool) error {
	if err := r.replica.own(ctx, token, torn); err != nil || !r.lost(torn) {
		return err
	}
	return errors.New("the answer was lost")
}

// TestHazard305_SyncWhoseAnswerIsLost: a replica is torn, a Sync makes it whole, and the answer to the change that says so is lost. A Persist fails there, and a
// later one does not: the replica is torn again, and Restore takes the other one.
func TestHazard305_SyncWhoseAnswerIsLost(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "frozen"), 0o700))
	w := newSimWorld(rand.New(rand.NewPCG(1, 1)), dir)
	set := &Set{Part: Part{filepath.Join(dir, "part"), HeaderBytes + simBytes}, Pools: []string{"one", "two"}}
	m, err := set.create(ctx, w.world, Options{}, MemoryOptions{})
	require.NoError(t, err)
	lost := false
	m.replicas[0] = lateAnswer{m.replicas[0], func(torn bool) bool { return lost && !torn }}
	persist := func(at, value byte, fails bool) {
		m.Bytes()[at] = value
		if fails {
			w.becomes("one", &fate{})
			require.ErrorIs(t, m.Persist(uint64(at), 1), ErrBehind)
			w.becomes("one", nil)
			return
		}
		require.NoError(t, m.Persist(uint64(at), 1))
	}
	persist(0, 1, true)
	require.True(t, w.pools["one"].torn)
	lost = true
	_, err = m.Sync(ctx, nil)
	require.Error(t, err)
	require.False(t, w.pools["one"].torn)
	persist(1, 2, true)
	persist(2, 3, false)

	w.mu.Lock()
	w.kill()
	w.mu.Unlock()
	_ = m.Close(ctx)
	require.NoError(t, w.again())
	require.NoError(t, os.Remove(set.Part.Path))
	_, err = set.restore(ctx, w.world, "", nil)
	require.NoError(t, err)
	b, err := os.ReadFile(set.Part.Path)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 2, 3}, b[HeaderBytes:][:3], "what both Persists have sent to a replica")
}

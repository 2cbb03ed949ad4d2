package contexts

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Both has ended at once where one of the two has, with the error of that one, and ends with either.
func TestBoth(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Hour))
	defer cancel()
	for _, c := range []struct {
		bound, ctx context.Context
		want       error
	}{{t.Context(), ended, context.Canceled}, {t.Context(), late, context.DeadlineExceeded}, {ended, t.Context(), context.Canceled}, {t.Context(), t.Context(), nil}} {
		both, cancel := Both(c.bound, c.ctx)
		require.Equal(t, c.want, both.Err())
		cancel()
		require.Error(t, both.Err())
	}
	for _, first := range []bool{true, false} {
		one, end := context.WithCancel(t.Context())
		bound, ctx := one, t.Context()
		if !first {
			bound, ctx = ctx, bound
		}
		both, cancel := Both(bound, ctx)
		require.NoError(t, both.Err())
		end()
		<-both.Done()
		require.Equal(t, context.Canceled, both.Err())
		cancel()
	}
}

package job

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Tenants whose jobs never end leave place for those of others.
func TestOneTenantLeavesPlaceForOthers(t *testing.T) {
	s := &server{serving: map[task]serving{}}
	fill := func(tenant string) (n int) {
		for ; n < 2*maxServed && s.mayServe(tenant); n++ {
			s.serving[task{tenant, uint64(n)}] = serving{}
		}
		return n
	}
	require.Equal(t, 12, fill("a"))
	for _, tenant := range []string{"b", "c"} {
		require.Positive(t, fill(tenant), tenant)
	}
	require.LessOrEqual(t, len(s.serving), maxServed)
}

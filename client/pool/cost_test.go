package pool_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestCostOfPersist: a Persist takes one round to all replicas, one WRITE for each, and no allocation; so does that of a set with one pool.
func TestCostOfPersist(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for _, replicas := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/replicas=%d", transport, replicas), func(t *testing.T) {
				c := testcluster.New(t, testcluster.Options{Nodes: replicas})
				cl := c.Connect(client.Config{Transport: transport})
				o := options(false)
				o.Replicas = replicas
				p, err := pool.Create(t.Context(), cl, "p", make([]byte, mib), o)
				require.NoError(t, err)
				m, err := newSet(t, "set", 0).Create(t.Context(), cl, o, pool.MemoryOptions{})
				require.NoError(t, err)
				for name, persist := range map[string]func(off, n uint64) error{"pool": p.Persist, "set": m.Persist} {
					before := cl.Stats().Kinds
					const times = 1000
					for i := range uint64(times) {
						require.NoError(t, persist(i*8, 64))
					}
					rounds, verbs := uint64(0), map[string]uint64{}
					for kind, k := range cl.Stats().Kinds {
						if kind == client.KindOther.String() { // the Client's own work
							continue
						}
						rounds += k.Rounds - before[kind].Rounds
						for verb, n := range k.Verbs {
							if n -= before[kind].Verbs[verb]; n > 0 {
								verbs[verb] += n
							}
						}
					}
					require.EqualValues(t, times, rounds, name)
					require.Equal(t, map[string]uint64{"WRITE": uint64(times * replicas)}, verbs, name)
					if raceEnabled {
						t.Log("the race detector allocates: allocations are not counted")
						continue
					}
					call := func() {
						if err := persist(64, 64); err != nil {
							t.Error(err)
						}
					}
					// Allocations of the whole process are counted, also those of the controller and the nodes: the best of some runs is that of calls.
					allocs := testing.AllocsPerRun(200, call)
					for range 20 {
						allocs = min(allocs, testing.AllocsPerRun(200, call))
					}
					require.Zero(t, allocs, name)
				}
				require.NoError(t, m.Close(t.Context()))
				require.NoError(t, p.Close(t.Context()))
			})
		}
	}
}

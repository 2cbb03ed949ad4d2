package client_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A node answers messages over each transport that has them, also after it was restarted.
func TestEcho(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
			c := cluster.Connect(client.Config{Transport: transport, Lanes: 2})
			answer := make([]byte, client.MaxEcho)
			echo := func(node string, n int) {
				t.Helper()
				payload := make([]byte, n)
				for i := range payload {
					payload[i] = byte(i*31 + n)
				}
				got, err := c.Echo(t.Context(), node, payload, answer)
				require.NoError(t, err)
				require.Equal(t, payload, answer[:got])
			}
			for _, n := range []int{0, 1, 100, client.MaxEcho} {
				echo("node1", n)
				echo("node2", n)
				echo("", n)
			}
			// Verbs and messages share the lane's connection.
			ref, err := c.Alloc(t.Context(), []byte("object"), client.AllocOptions{})
			require.NoError(t, err)
			echo("node1", 10)
			b, err := c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			require.Equal(t, "object", string(b))

			_, err = c.Echo(t.Context(), "node7", nil, answer)
			require.ErrorIs(t, err, client.ErrArgument)
			_, err = c.Echo(t.Context(), "node1", make([]byte, client.MaxEcho+1), make([]byte, client.MaxEcho+1))
			require.ErrorIs(t, err, client.ErrArgument)
			_, err = c.Echo(t.Context(), "node1", make([]byte, 10), answer[:9])
			require.ErrorIs(t, err, client.ErrArgument)
			reader := cluster.Connect(client.Config{Transport: transport, ReadOnly: true})
			_, err = reader.Echo(t.Context(), "node1", nil, answer)
			require.ErrorIs(t, err, client.ErrReadOnly)

			require.NoError(t, cluster.Nodes[1].Close())
			cluster.RestartNode(1)
			require.Eventually(t, func() bool {
				_, err := c.Echo(t.Context(), "node2", nil, answer)
				return err == nil
			}, patience, time.Millisecond)
			echo("node2", 100)
			if raceEnabled {
				t.Log("the race detector allocates: allocations are not counted")
			} else {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				payload := make([]byte, 128)
				call := func() {
					if _, err := c.Echo(ctx, "node1", payload, answer); err != nil {
						t.Error(err)
					}
				}
				// Allocations of the whole process are counted, also those of the controller: the best of some runs is that of calls.
				allocs := testing.AllocsPerRun(500, call)
				for range 5 {
					allocs = min(allocs, testing.AllocsPerRun(200, call))
				}
				require.Less(t, allocs, 1.0)
			}
		})
	}
}

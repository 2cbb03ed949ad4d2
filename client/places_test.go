package client_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A worker with more functions than it may offer makes calls of the first of them.
func TestMoreFunctionsThanAnOfferHasRoomFor(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	ref, err := c.Alloc(t.Context(), []byte("object"), client.AllocOptions{})
	require.NoError(t, err)
	var names []string
	for i := range 200 {
		names = append(names, fmt.Sprintf("function-with-a-long-name-of-more-than-forty-bytes-%d", i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- c.ServeFunctions(ctx, cluster.Nodes[0].Stats().Name, client.Functions{Names: names, Slots: 1, Call: func(_ context.Context, q client.FunctionCall) ([]byte, error) {
			return []byte(q.Function), nil
		}})
	}()
	require.Eventually(t, func() bool {
		answer, err := c.Call(t.Context(), ref, names[0], nil)
		return err == nil && string(answer) == names[0]
	}, 3*time.Minute, 5*time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

package flight_test

import (
	"context"
	"net"
	"testing"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
)

// outgoing makes a message that waits behind another one, at a server without a cluster.
func outgoing(t *testing.T, ctx context.Context, message any) *flight.Outgoing {
	s, err := flight.New(flight.Config{Connect: func(context.Context, string, string, bool) (*client.Client, error) { return nil, net.ErrClosed }})
	require.NoError(t, err)
	here, there := net.Pipe()
	t.Cleanup(func() { here.Close(); there.Close() })
	return flight.NewOutgoing(ctx, s, here, message)
}

// A message that ends is not held by its connection: one whose stream ends while it waits for the one before, and one without a byte.
func TestEndedMessagesAreForgotten(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := outgoing(t, ctx, &arrowflight.FlightData{DataBody: []byte("batch")})
	cancel()
	require.ErrorIs(t, o.Send(), context.Canceled)
	require.True(t, o.Ended())
	require.False(t, o.Linked())

	o = outgoing(t, t.Context(), &arrowflight.FlightData{})
	require.NoError(t, o.Marshal())
	require.True(t, o.Ended())
	require.False(t, o.Linked())
}

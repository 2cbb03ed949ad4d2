package flight_test

import (
	"context"
	"net"
	"sync"
	"testing"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
)

// outgoing makes a message that waits behind another one, at a server without a cluster.
func outgoing(t *testing.T, ctx context.Context, message any, taking func()) *flight.Outgoing {
	s, err := flight.New(flight.Config{Connect: func(context.Context, string, string, bool) (*client.Client, error) { return nil, net.ErrClosed }})
	require.NoError(t, err)
	here, there := net.Pipe()
	t.Cleanup(func() { here.Close(); there.Close() })
	return flight.NewOutgoing(ctx, s, here, message, taking)
}

// A message that ends is not held by its connection: one whose stream ends while it waits for the one before, or while gRPC takes it over, and
// one without a byte.
func TestEndedMessagesAreForgotten(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := outgoing(t, ctx, &arrowflight.FlightData{DataBody: []byte("batch")}, func() {})
	cancel()
	require.ErrorIs(t, o.Send(), context.Canceled)
	require.True(t, o.Ended())
	require.False(t, o.Linked())

	ctx, cancel = context.WithCancel(t.Context())
	o = outgoing(t, ctx, &arrowflight.FlightData{DataBody: []byte("batch")}, cancel)
	o.Follow(true)
	require.NoError(t, o.Send())
	require.True(t, o.Ended())
	require.False(t, o.Linked())

	o = outgoing(t, t.Context(), &arrowflight.FlightData{}, func() {})
	o.Follow(true)
	require.NoError(t, o.Send())
	require.NoError(t, o.Marshal())
	require.True(t, o.Ended())
	require.False(t, o.Linked())
}

// awaited is a context that tells when somebody waits for its end.
type awaited struct {
	context.Context
	waits func()
}

func (a awaited) Done() <-chan struct{} {
	a.waits()
	return a.Context.Done()
}

// The time for a message does not run while the one before is not written.
func TestTimeOfMessages(t *testing.T) {
	waits, sent := make(chan struct{}), make(chan error, 1)
	o := outgoing(t, awaited{t.Context(), sync.OnceFunc(func() { close(waits) })}, &arrowflight.FlightData{DataBody: []byte("batch")}, func() {})
	go func() { sent <- o.Send() }()
	<-waits
	require.False(t, o.Timed())
	o.Follow(true)
	require.NoError(t, <-sent)
	require.True(t, o.Timed())
	require.True(t, o.Linked())
}

// A stream fails if a message of it is not written, also before gRPC has seen that its connection is closed.
func TestMessagesThatAreLost(t *testing.T) {
	o := outgoing(t, t.Context(), &arrowflight.FlightData{DataBody: []byte("batch")}, func() {})
	o.Follow(false)
	fails(t, o.Send(), codes.Unavailable, "the connection is closed")
	require.True(t, o.Ended())
}

// A stream fills its batches in the same buffers, which are no larger after a large value.
func TestBatchesShareBuffers(t *testing.T) {
	require.Zero(t, flight.AllocationsOfBatch(1<<20))
	require.NotZero(t, flight.BufferBehind(1<<20, 1<<20))
	require.Zero(t, flight.BufferBehind(1<<20, 8<<20))
}

package flight_test

import (
	"context"
	"testing"
	"time"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// begin opens a put, and sends a batch that is acknowledged.
func begin(t *testing.T, ctx context.Context, c arrowflight.Client, tree string) (arrowflight.FlightService_DoPutClient, error) {
	stream, err := c.DoPut(ctx)
	require.NoError(t, err)
	w := arrowflight.NewRecordWriter(stream, ipc.WithSchema(binarySchema))
	w.SetFlightDescriptor(path(tree))
	_ = w.Write(batchOf(row{key: "k", value: "v"})) // Recv says why it fails
	_, err = stream.Recv()
	return stream, err
}

// Puts that cannot, or do not, send anything keep no slot from others: those of tokens that only read, those without a schema, and those of
// one caller above its share.
func TestSlotsOfPuts(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, testcluster.Options{Token: "the cluster's own"})
	w.tree("users", 1, 1)
	s, addr := w.serve(flight.Config{PutStreams: 2})
	_, reads := w.tokenOf("default", "", mayRead)
	_, silent := w.tokenOf("default", "", mayRead, mayWrite)
	_, writes := w.tokenOf("default", "", mayRead, mayWrite)
	_, more := w.tokenOf("default", "", mayRead, mayWrite)
	c := dial(t, addr)
	for range 4 {
		stream, err := c.DoPut(as(ctx, reads))
		require.NoError(t, err)
		_, err = stream.Recv() // without a message of it
		fails(t, err, codes.PermissionDenied, "may read, and not write")
	}
	mute, err := c.DoPut(as(ctx, silent))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return flight.PutsOf(s) == 1 }, patience, tick)
	_, err = begin(t, as(ctx, silent), c, "users")
	fails(t, err, codes.ResourceExhausted, "1 streams of this caller are put here already")
	require.Zero(t, s.Stats().Putting, "it has not sent a schema")
	one, err := begin(t, as(ctx, writes), c, "users")
	require.NoError(t, err)
	_, err = begin(t, as(ctx, more), c, "users")
	require.NoError(t, err)
	require.EqualValues(t, 2, s.Stats().Putting)
	_, err = begin(t, as(ctx, w.Options.Token), c, "users")
	fails(t, err, codes.ResourceExhausted, "2 streams are put here already")
	require.NoError(t, one.CloseSend())
	require.Eventually(t, func() bool { return s.Stats().Putting == 1 }, patience, tick)
	_, err = begin(t, as(ctx, writes), c, "users")
	require.NoError(t, err)
	_, err = mute.Recv()
	fails(t, err, codes.DeadlineExceeded, "no message has come for 10s")
}

// A put that stands still between two batches ends.
func TestPutsThatStandStill(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	w.tree("users", 1, 1)
	s, addr := w.serve(flight.Config{SlowReader: 3 * time.Second})
	stream, err := begin(t, t.Context(), dial(t, addr), "users")
	require.NoError(t, err)
	_, err = stream.Recv()
	fails(t, err, codes.DeadlineExceeded, "no message has come for 3s")
	require.Eventually(t, func() bool { return s.Stats().Putting == 0 }, patience, tick)
}

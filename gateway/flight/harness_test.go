package flight_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds every wait of a test, tick is between two looks.
const (
	patience = 3 * time.Minute
	tick     = 5 * time.Millisecond
)

// world is a cluster with Flight servers.
type world struct {
	*testcluster.Cluster
	t testing.TB
	c *client.Client // with every right, in the tenant default
	// transport of the callers' sessions where they show no token.
	transport string
	mu        sync.Mutex
	callers   []*client.Client // sessions that servers have opened for callers without a token
}

func newWorld(t testing.TB, o testcluster.Options) *world {
	cluster := testcluster.New(t, o)
	return &world{Cluster: cluster, t: t, c: cluster.Connect(client.Config{Token: o.Token})}
}

// connect opens sessions for callers as the command does.
func (w *world) connect(ctx context.Context, token, tenant string, readOnly bool) (*client.Client, error) {
	if token != "" {
		return w.c.ConnectAs(ctx, token, tenant, readOnly)
	}
	c, err := client.Connect(ctx, client.Config{Controllers: []string{w.Controller.URL()}, Tenant: tenant, ReadOnly: readOnly, Transport: w.transport, Logger: slog.New(slog.DiscardHandler)})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.callers = append(w.callers, c)
	return c, err
}

// serve starts a server that ends with the test.
func (w *world) serve(cfg flight.Config) (*flight.Server, string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	return w.serveAt(l, cfg), l.Addr().String()
}

func (w *world) serveAt(l net.Listener, cfg flight.Config) *flight.Server {
	cfg.Connect, cfg.Open = w.connect, w.Options.Token == ""
	s, err := flight.New(cfg)
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, nil, l) }()
	w.t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(w.t, err)
		case <-time.After(patience):
			w.t.Error("the server does not end")
		}
	})
	return s
}

// tree makes a tree with n keys k000000.. and values of size bytes.
func (w *world) tree(name string, n, size int) *kv.Tree {
	t, err := kv.Create(w.t.Context(), w.c, name, btree.Config{})
	require.NoError(w.t, err)
	i := 0
	_, err = t.Load(w.t.Context(), func() (key, value []byte, ok bool) {
		if i == n {
			return nil, nil, false
		}
		i++
		return keyOf(i - 1), valueOf(i-1, size), true
	})
	require.NoError(w.t, err)
	return t
}

func keyOf(i int) []byte { return fmt.Appendf(nil, "k%06d", i) }

func valueOf(i, size int) []byte {
	return append(bytes.Repeat([]byte{byte(i), 'v'}, size/2), fmt.Sprintf("#%d", i)...)
}

// row is an entry as it was received.
type row struct {
	key, value string
	version    uint64
}

// dial opens a client of Flight that shows a token.
func dial(t testing.TB, addr string, more ...grpc.DialOption) arrowflight.Client {
	c, err := arrowflight.NewClientWithMiddleware(addr, nil, nil, append(more, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(100<<20), grpc.MaxCallSendMsgSize(100<<20)))...)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// as is a context that shows a token.
func as(ctx context.Context, token string, more ...string) context.Context {
	if token != "" {
		more = append(more, "authorization", "Bearer "+token)
	}
	return metadata.AppendToOutgoingContext(ctx, more...)
}

func path(tree ...string) *arrowflight.FlightDescriptor {
	return &arrowflight.FlightDescriptor{Type: arrowflight.DescriptorPATH, Path: tree}
}

func command(t testing.TB, q flight.Request) *arrowflight.FlightDescriptor {
	b, err := json.Marshal(q)
	require.NoError(t, err)
	return &arrowflight.FlightDescriptor{Type: arrowflight.DescriptorCMD, Cmd: b}
}

// get reads the stream of a ticket; fn gets each batch.
func get(ctx context.Context, c arrowflight.Client, sealed []byte, fn func(arrow.RecordBatch)) error {
	stream, err := c.DoGet(ctx, &arrowflight.Ticket{Ticket: sealed})
	if err != nil {
		return err
	}
	r, err := arrowflight.NewRecordReader(stream)
	if err != nil {
		return err
	}
	defer r.Release()
	for r.Next() {
		fn(r.RecordBatch())
	}
	return r.Err()
}

// rowsOf are the rows of a ticket's stream.
func rowsOf(t testing.TB, ctx context.Context, c arrowflight.Client, sealed []byte) (out []row) {
	require.NoError(t, get(ctx, c, sealed, func(b arrow.RecordBatch) { out = append(out, rowsOfBatch(b)...) }))
	return out
}

func rowsOfBatch(b arrow.RecordBatch) (out []row) {
	for i := range int(b.NumRows()) {
		var r row
		for j, f := range b.Schema().Fields() {
			switch f.Name {
			case flight.KeyColumn:
				r.key = string(b.Column(j).(*array.Binary).Value(i))
			case flight.ValueColumn:
				r.value = string(b.Column(j).(*array.Binary).Value(i))
			case flight.VersionColumn:
				r.version = b.Column(j).(*array.Uint64).Value(i)
			}
		}
		out = append(out, r)
	}
	return out
}

// all reads every endpoint of a descriptor at the server that was asked.
func all(t testing.TB, ctx context.Context, c arrowflight.Client, d *arrowflight.FlightDescriptor) (out []row) {
	info, err := c.GetFlightInfo(ctx, d)
	require.NoError(t, err)
	for _, e := range info.Endpoint {
		out = append(out, rowsOf(t, ctx, c, e.Ticket.Ticket)...)
	}
	return out
}

// scanned are the rows of a scan.
func scanned(t testing.TB, tree *kv.Tree, r btree.Range) (out []row) {
	require.NoError(t, tree.Scan(t.Context(), r, func(key, value []byte, version uint64) bool {
		out = append(out, row{string(key), string(value), version})
		return true
	}))
	return out
}

// without is rows without versions, and without values if they are to have none.
func without(rows []row, values bool) (out []row) {
	for _, r := range rows {
		if r.version = 0; !values {
			r.value = ""
		}
		out = append(out, r)
	}
	return out
}

var binarySchema = arrow.NewSchema([]arrow.Field{{Name: "key", Type: arrow.BinaryTypes.Binary}, {Name: "value", Type: arrow.BinaryTypes.Binary}}, nil)

// batchOf makes a batch to put.
func batchOf(rows ...row) arrow.RecordBatch {
	b := array.NewRecordBuilder(memory.DefaultAllocator, binarySchema)
	defer b.Release()
	for _, r := range rows {
		b.Field(0).(*array.BinaryBuilder).Append([]byte(r.key))
		b.Field(1).(*array.BinaryBuilder).Append([]byte(r.value))
	}
	return b.NewRecordBatch()
}

// put puts batches, each behind the acknowledgement of the one before.
func put(ctx context.Context, c arrowflight.Client, tree string, schema *arrow.Schema, batches ...arrow.RecordBatch) (acks []flight.PutResult, err error) {
	stream, err := c.DoPut(ctx)
	if err != nil {
		return nil, err
	}
	w := arrowflight.NewRecordWriter(stream, ipc.WithSchema(schema))
	w.SetFlightDescriptor(path(tree))
	receive := func() error {
		got, err := stream.Recv()
		if err != nil {
			return err
		}
		var a flight.PutResult
		if err := json.Unmarshal(got.AppMetadata, &a); err != nil {
			return err
		}
		acks = append(acks, a)
		return nil
	}
	for _, b := range batches {
		if err := w.Write(b); err != nil && !errors.Is(err, io.EOF) {
			return acks, err
		}
		if err := receive(); err != nil {
			return acks, err
		}
	}
	if err := errors.Join(w.Close(), stream.CloseSend()); err != nil {
		return acks, err
	}
	if err := receive(); !errors.Is(err, io.EOF) {
		return acks, err
	}
	return acks, nil
}

// fails says that an error has a code and says something.
func fails(t testing.TB, err error, code codes.Code, says string) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, code, status.Code(err), err)
	require.ErrorContains(t, err, says)
}

// tokenOf makes a token of role client, with grants in a tenant if there are any.
func (w *world) tokenOf(tenant, prefix string, rights ...quarrypb.Right) (id, token string) {
	made, err := w.Control().CreateToken(w.t.Context(), connect.NewRequest(&quarrypb.CreateTokenRequest{Role: "client"}))
	require.NoError(w.t, err)
	id = made.Msg.Token.Id
	if len(rights) > 0 {
		_, err = w.Control().Grant(w.t.Context(), connect.NewRequest(&quarrypb.GrantRequest{Tenant: tenant, Grant: &quarrypb.Grant{Identity: "token:" + id, Prefix: prefix, Rights: rights}}))
		require.NoError(w.t, err)
	}
	return id, made.Msg.Secret
}

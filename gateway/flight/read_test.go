package flight_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// Together the endpoints of a tree are what a scan of it gives, in its order; so are those of a range, of a prefix, and what a filter leaves.
func TestATreeIsWhatAScanGives(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	tree := w.tree("users", 3000, 120)
	_, addr := w.serve(flight.Config{BatchBytes: 4096})
	c := dial(t, addr)
	ctx := t.Context()
	whole := scanned(t, tree, btree.Range{})
	require.Len(t, whole, 3000)

	info, err := c.GetFlightInfo(ctx, path("users"))
	require.NoError(t, err)
	require.Greater(t, len(info.Endpoint), 8, "a tree of this size has as many parts as are asked for, or nearly")
	require.InDelta(t, 3000, info.TotalRecords, 1500)
	var keys []string
	var parts flight.Part
	for _, e := range info.Endpoint {
		require.NoError(t, json.Unmarshal(e.AppMetadata, &parts))
		require.NotEmpty(t, parts.Node)
		require.Empty(t, e.Location, "without peers the service itself is the place")
		part := rowsOf(t, ctx, c, e.Ticket.Ticket)
		require.NotEmpty(t, part)
		for _, r := range part {
			keys = append(keys, r.key)
		}
	}
	require.True(t, slices.IsSorted(keys))
	require.Len(t, slices.Compact(keys), 3000, "each key once")
	require.Equal(t, without(whole, true), all(t, ctx, c, path("users")))

	for _, v := range []struct {
		q    flight.Request
		want []row
	}{
		{flight.Request{From: "k000100", To: "k000200"}, without(whole[100:200], true)},
		{flight.Request{Prefix: "k0012"}, without(whole[1200:1300], true)},
		{flight.Request{PrefixBase64: []byte("k0012"), Columns: []string{"key"}}, without(whole[1200:1300], false)},
		{flight.Request{Prefix: "k0012", Columns: []string{"key", "value", "version"}, Parts: 1}, whole[1200:1300]},
		{flight.Request{Contains: "#1234"}, without(whole[1234:1235], true)},
		{flight.Request{Contains: "#12", To: "k000200", Columns: []string{"key"}}, without(append(slices.Clone(whole[12:13]), whole[120:130]...), false)},
		{flight.Request{From: "x"}, nil},
	} {
		v.q.Tree = "users"
		require.Equal(t, v.want, all(t, ctx, c, command(t, v.q)), fmt.Sprint(v.q))
	}
}

func TestSchemasAndLists(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	w.tree("users", 1, 10)
	w.tree("prices", 1, 10)
	ref, err := w.c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = w.c.Names().Create(t.Context(), "users.object", "object", ref)
	require.NoError(t, err)
	_, addr := w.serve(flight.Config{})
	c := dial(t, addr)
	schema := func(d *arrowflight.FlightDescriptor) string {
		res, err := c.GetSchema(t.Context(), d)
		require.NoError(t, err)
		s, err := arrowflight.DeserializeSchema(res.Schema, memory.DefaultAllocator)
		require.NoError(t, err)
		var out []string
		for _, f := range s.Fields() {
			require.False(t, f.Nullable)
			out = append(out, f.Name+" "+f.Type.String())
		}
		return strings.Join(out, ", ")
	}
	require.Equal(t, "key binary, value binary", schema(path("users")))
	require.Equal(t, "version uint64, key binary", schema(command(t, flight.Request{Tree: "users", Columns: []string{"version", "key"}})))
	list := func(prefix string) (names []string) {
		stream, err := c.ListFlights(t.Context(), &arrowflight.Criteria{Expression: []byte(prefix)})
		require.NoError(t, err)
		for {
			info, err := stream.Recv()
			if err != nil {
				return names
			}
			names = append(names, info.FlightDescriptor.Path...)
		}
	}
	require.Equal(t, []string{"prices", "users"}, list(""))
	require.Equal(t, []string{"users"}, list("us"))

	long := strings.Repeat("k", btree.MaxKeyBytes+1)
	for want, d := range map[string]*arrowflight.FlightDescriptor{
		"no tree is named":           path(""),
		"with 2 path elements":       path("users", "x"),
		"one of them":                command(t, flight.Request{Tree: "users", From: "a", FromBase64: []byte("b")}),
		"prefix and a range":         command(t, flight.Request{Tree: "users", From: "a", Prefix: "b"}),
		`column "name"`:              command(t, flight.Request{Tree: "users", Columns: []string{"name"}}),
		"twice":                      command(t, flight.Request{Tree: "users", Columns: []string{"key", "key"}}),
		"parts: want 1 to 1024":      command(t, flight.Request{Tree: "users", Parts: 1025}),
		"to has 1025 bytes":          command(t, flight.Request{Tree: "users", ToBase64: []byte(long)}),
		"unknown field":              {Type: arrowflight.DescriptorCMD, Cmd: []byte(`{"tree":"users","where":1}`)},
		"more behind":                {Type: arrowflight.DescriptorCMD, Cmd: []byte(`{"tree":"users"} {}`)},
		"at most 65536":              {Type: arrowflight.DescriptorCMD, Cmd: make([]byte, 65537)},
		"descriptor of type UNKNOWN": {},
	} {
		_, err := c.GetFlightInfo(t.Context(), d)
		fails(t, err, codes.InvalidArgument, want)
		_, err = c.GetSchema(t.Context(), d)
		fails(t, err, codes.InvalidArgument, want)
	}
	_, err = c.GetFlightInfo(t.Context(), path("nobody"))
	fails(t, err, codes.NotFound, "nobody")
	_, err = c.GetFlightInfo(t.Context(), path("users.object"))
	fails(t, err, codes.InvalidArgument, "not a tree")

	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	health, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, health.Status)
}

// A batch has at most as many rows and bytes as the server is told, and a value that is longer than a batch has one of its own.
func TestBatchesAreBounded(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 256 << 20})
	tree := w.tree("users", 500, 100)
	big := bytes.Repeat([]byte("big"), 3<<20)
	require.NoError(t, tree.Put(t.Context(), []byte("k000100big"), big))
	require.NoError(t, tree.Put(t.Context(), []byte("k000100bih"), big))
	s, addr := w.serve(flight.Config{BatchBytes: 5000, BatchRows: 20})
	c := dial(t, addr)
	info, err := c.GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	require.Len(t, info.Endpoint, 1)
	var rows []row
	alone := 0
	require.NoError(t, get(t.Context(), c, info.Endpoint[0].Ticket.Ticket, func(b arrow.RecordBatch) {
		part := rowsOfBatch(b)
		size := 0
		for _, r := range part {
			size += len(r.key) + len(r.value)
		}
		require.LessOrEqual(t, len(part), 20)
		if size > 5000 {
			require.Len(t, part, 1)
			alone++
		}
		rows = append(rows, part...)
		require.LessOrEqual(t, len(rows), 502, "a stream without an end")
	}))
	require.Equal(t, 2, alone)
	require.Equal(t, without(scanned(t, tree, btree.Range{}), true), rows)
	require.Zero(t, s.Stats().MemoryBytes)
	require.EqualValues(t, 502, s.Stats().RowsRead)
}

// Memory is shared: streams whose clients read nothing hold no more than there is, and when they go the others go on.
func TestStreamsShareMemory(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 256 << 20})
	tree := w.tree("users", 4000, 4000)
	const memory = 140 << 20
	s, addr := w.serve(flight.Config{MemoryBytes: memory, BatchBytes: 8 << 20})
	info, err := dial(t, addr).GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	for range 12 { // 16 MiB each
		_, err := dial(t, addr).DoGet(ctx, info.Endpoint[0].Ticket)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		n := s.Stats()
		require.LessOrEqual(t, n.MemoryBytes, int64(memory))
		return n.Reading == 12 && n.MemoryBytes == 8*(16<<20)
	}, patience, tick)
	stop()
	require.Equal(t, without(scanned(t, tree, btree.Range{}), true), rowsOf(t, t.Context(), dial(t, addr), info.Endpoint[0].Ticket.Ticket))
	require.Eventually(t, func() bool { n := s.Stats(); return n.Reading == 0 && n.MemoryBytes == 0 }, patience, tick)
}

// A reader that stands still loses its connection, and so its memory; what it has not read counts nowhere.
func TestReadersThatStandStill(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	w.tree("users", 4000, 4000)
	w.tree("few", 200, 4000) // one batch
	_, quick := w.serve(flight.Config{})
	for _, tree := range []string{"users", "few"} {
		info, err := dial(t, quick).GetFlightInfo(t.Context(), command(t, flight.Request{Tree: tree, Parts: 1}))
		require.NoError(t, err)
		// SlowReader bounds the arrival of the request too.
		s, addr := w.serve(flight.Config{BatchBytes: 1 << 20, SlowReader: 300 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
		stream, err := dial(t, addr).DoGet(t.Context(), info.Endpoint[0].Ticket)
		require.NoError(t, err)
		require.Eventually(t, func() bool { n := s.Stats(); return n.Calls == 1 && n.Reading == 0 && n.MemoryBytes == 0 }, patience, tick)
		require.EqualValues(t, 1, s.Stats().Failed, tree)
		require.EqualValues(t, 1, s.Stats().Refused, tree)
		require.Zero(t, s.Stats().RowsRead, tree)
		for err == nil {
			_, err = stream.Recv()
		}
		fails(t, err, codes.Unavailable, "")
	}
}

// The only batch of a stream that is not read holds its slot and its memory, until its caller has read it or has gone.
func TestBatchesThatAreNotRead(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	w.tree("users", 200, 4000)
	s, addr := w.serve(flight.Config{ReadStreams: 4, BatchBytes: 1 << 20})
	info, err := dial(t, addr).GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var streams []arrowflight.FlightService_DoGetClient
	for i := range 4 {
		in := t.Context()
		if i > 0 {
			in = ctx
		}
		stream, err := dial(t, addr).DoGet(in, info.Endpoint[0].Ticket)
		require.NoError(t, err)
		_, err = stream.Recv() // the schema
		require.NoError(t, err)
		streams = append(streams, stream)
	}
	require.Eventually(t, func() bool { return s.Stats().MemoryBytes == 4*(2<<20) }, patience, tick)
	fails(t, get(t.Context(), dial(t, addr), info.Endpoint[0].Ticket.Ticket, func(arrow.RecordBatch) {}), codes.ResourceExhausted, "4 streams are read here already")
	cancel()
	require.Eventually(t, func() bool { n := s.Stats(); return n.Reading == 1 && n.MemoryBytes == 2<<20 }, patience, tick)
	require.Zero(t, s.Stats().RowsRead, "what was dropped was not read")
	for err = nil; err == nil; {
		_, err = streams[0].Recv()
	}
	require.ErrorIs(t, err, io.EOF)
	require.EqualValues(t, 200, s.Stats().RowsRead)
	require.Eventually(t, func() bool { n := s.Stats(); return n.Reading == 0 && n.MemoryBytes == 0 }, patience, tick)
}

// Calls that are no streams of batches are bounded: so many at a time, half of them for one token, with small messages.
func TestShortCallsAreBounded(t *testing.T) {
	w := newWorld(t, testcluster.Options{Token: "the cluster's own"})
	w.tree("users", 1, 1)
	_, addr := w.serve(flight.Config{})
	c, ctx := dial(t, addr), as(t.Context(), w.Options.Token)
	_, err := c.GetFlightInfo(ctx, path("users"))
	require.NoError(t, err)
	_, err = c.GetFlightInfo(ctx, &arrowflight.FlightDescriptor{Type: arrowflight.DescriptorCMD, Cmd: make([]byte, 1<<20)})
	fails(t, err, codes.Internal, "at most 131072")
	fails(t, get(ctx, c, make([]byte, 1<<20), func(arrow.RecordBatch) {}), codes.Internal, "at most 131072")
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	silent, cancel := context.WithCancel(ctx)
	open := func(in context.Context) error { // a call whose request does not come
		_, err := conn.NewStream(in, &grpc.StreamDesc{ClientStreams: true}, "/arrow.flight.protocol.FlightService/GetFlightInfo")
		return err
	}
	require.Eventually(t, func() bool { // a slot is free a moment after its call has ended
		require.NoError(t, open(silent))
		_, err := c.GetFlightInfo(ctx, path("users"))
		return status.Code(err) == codes.ResourceExhausted
	}, patience, tick)
	_, other := w.tokenOf("", "")
	_, err = c.GetFlightInfo(as(t.Context(), other), path("users"))
	require.NoError(t, err, "another token has its own half")
	cancel()
	require.Eventually(t, func() bool {
		_, err := c.GetFlightInfo(ctx, path("users"))
		return err == nil
	}, patience, tick)
}

// A call that goes on after its caller has gone frees its slot once.
func TestSlotsAreFreedOnce(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	w.tree("users", 1, 1)
	entered, held := make(chan struct{}, 1), make(chan struct{})
	s, addr := w.serve(flight.Config{Locations: func(string, string) []string {
		entered <- struct{}{}
		<-held
		return nil
	}})
	c := dial(t, addr)
	free := func() bool { calls, tokens := flight.ShortCalls(s); return calls == 0 && tokens == 0 }
	ctx, cancel := context.WithCancel(t.Context())
	for range 4 {
		go c.GetFlightInfo(ctx, path("users"))
	}
	for range 4 {
		<-entered
	}
	calls, _ := flight.ShortCalls(s)
	require.Equal(t, 4, calls)
	cancel()
	require.Eventually(t, free, patience, tick)
	close(held)
	require.Eventually(t, func() bool { return s.Stats().Calls == 4 }, patience, tick)
	require.Zero(t, s.Stats().Failed, "the calls have answers")
	for range 10 { // time for gRPC to drop these
		_, err := c.GetSchema(t.Context(), path("users"))
		require.NoError(t, err)
	}
	require.Eventually(t, free, patience, tick)
}

// A stream that is the first call of its caller is one of a stranger until the caller has a session, and not as long as it runs.
func TestStreamsOfStrangers(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	w.tree("users", 4000, 4000)
	_, other := w.serve(flight.Config{})
	info, err := dial(t, other).GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	s, addr := w.serve(flight.Config{})
	stream, err := dial(t, addr).DoGet(t.Context(), info.Endpoint[0].Ticket)
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Stats().Reading)
	require.Zero(t, flight.Strangers(s))
}

// A reader that goes away frees its stream; more streams than the server has are refused.
func TestStreamsEndWithTheirReaders(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	w.tree("users", 4000, 4000)
	s, addr := w.serve(flight.Config{ReadStreams: 1})
	c := dial(t, addr)
	info, err := c.GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	ticket := info.Endpoint[0].Ticket
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.DoGet(ctx, ticket)
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	fails(t, get(t.Context(), c, ticket.Ticket, func(arrow.RecordBatch) {}), codes.ResourceExhausted, "1 streams are read here already")
	cancel()
	require.Eventually(t, func() bool { return s.Stats().Reading == 0 }, patience, tick)
	require.Less(t, s.Stats().RowsRead, uint64(4000), "it has not read on")
	require.Len(t, rowsOf(t, t.Context(), c, ticket.Ticket), 4000)
}

// Two servers, each beside a storage node: every endpoint is read at its own location, where the node is that holds the range.
func TestEndpointsAreReadAtTheirLocations(t *testing.T) {
	w := newWorld(t, testcluster.Options{Nodes: 2})
	tree := w.tree("users", 50_000, 240) // more than one region has room for
	at := map[string]string{}
	var ports []net.Listener
	for i := range w.Nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ports = append(ports, l)
		at[w.Nodes[i].Stats().Name] = "grpc+tcp://" + l.Addr().String()
	}
	cfg := flight.Config{Locations: func(node, host string) []string {
		require.Equal(t, "127.0.0.1", host)
		return []string{at[node]}
	}}
	servers := []*flight.Server{w.serveAt(ports[0], cfg), w.serveAt(ports[1], cfg)}
	info, err := dial(t, ports[0].Addr().String()).GetFlightInfo(t.Context(), path("users"))
	require.NoError(t, err)
	var rows []row
	used := map[string]bool{}
	for _, e := range info.Endpoint {
		var p flight.Part
		require.NoError(t, json.Unmarshal(e.AppMetadata, &p))
		require.Len(t, e.Location, 1)
		require.Equal(t, at[p.Node], e.Location[0].Uri)
		used[e.Location[0].Uri] = true
		rows = append(rows, rowsOf(t, t.Context(), dial(t, strings.TrimPrefix(e.Location[0].Uri, "grpc+tcp://")), e.Ticket.Ticket)...)
	}
	require.Len(t, used, 2, "both nodes hold some of it")
	require.Equal(t, without(scanned(t, tree, btree.Range{}), true), rows)
	for _, s := range servers {
		require.Positive(t, s.Stats().RowsRead)
	}
}

// A ticket is for its tree as that was, for a time, and whole.
func TestBadTickets(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	tree := w.tree("users", 10, 10)
	_, addr := w.serve(flight.Config{TicketTTL: time.Hour})
	_, past := w.serve(flight.Config{TicketTTL: time.Nanosecond})
	c := dial(t, addr)
	ask := func(addr string) []byte {
		info, err := dial(t, addr).GetFlightInfo(t.Context(), path("users"))
		require.NoError(t, err)
		return info.Endpoint[0].Ticket.Ticket
	}
	read := func(b []byte) error { return get(t.Context(), c, b, func(arrow.RecordBatch) {}) }
	good := ask(addr)
	require.NoError(t, read(good))
	fails(t, read(nil), codes.InvalidArgument, "not one of GetFlightInfo")
	fails(t, read(make([]byte, 17<<10)), codes.InvalidArgument, "at most")
	for _, at := range []int{0, 31, 32, 60, len(good) - 1} {
		bad := bytes.Clone(good)
		bad[at] ^= 1
		fails(t, read(bad), codes.PermissionDenied, "another token, or was changed")
	}
	fails(t, read(good[:len(good)-1]), codes.PermissionDenied, "was changed")
	fails(t, read(ask(past)), codes.FailedPrecondition, "it was good until")
	require.NoError(t, tree.Drop(t.Context()))
	fails(t, read(good), codes.NotFound, "users")
	w.tree("users", 10, 10)
	fails(t, read(good), codes.FailedPrecondition, "was replaced since")
	require.NoError(t, read(ask(addr)))
}

// A stream of a tree that is dropped in the middle fails, and does not end as if that was all.
func TestTreeDroppedUnderAReader(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	tree := w.tree("users", 5000, 2000)
	_, addr := w.serve(flight.Config{})
	c := dial(t, addr)
	info, err := c.GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	rows, dropped := 0, false
	err = get(t.Context(), c, info.Endpoint[0].Ticket.Ticket, func(b arrow.RecordBatch) {
		if rows += int(b.NumRows()); !dropped {
			dropped = true
			require.NoError(t, tree.Drop(t.Context()))
		}
	})
	require.Less(t, rows, 5000)
	fails(t, err, codes.FailedPrecondition, "dropped")
}

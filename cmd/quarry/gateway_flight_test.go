package main

import (
	"io"
	"net/http"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/certs"
)

// flightKeys reads the keys of a tree at the server of each endpoint, which is the one that was asked.
func flightKeys(t *testing.T, address, tree string, header ...string) (keys []string, locations []string, err error) {
	ctx := metadata.AppendToOutgoingContext(t.Context(), header...)
	c, err := flight.NewClientWithMiddleware(address, nil, nil, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer c.Close()
	info, err := c.GetFlightInfo(ctx, &flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{tree}})
	if err != nil {
		return nil, nil, err
	}
	for _, e := range info.Endpoint {
		for _, l := range e.Location {
			locations = append(locations, l.Uri)
		}
		stream, err := c.DoGet(ctx, e.Ticket)
		require.NoError(t, err)
		r, err := flight.NewRecordReader(stream)
		require.NoError(t, err)
		for r.Next() {
			for i := range int(r.RecordBatch().NumRows()) {
				keys = append(keys, string(r.RecordBatch().Column(0).(*array.Binary).Value(i)))
			}
		}
		require.NoError(t, r.Err())
		r.Release()
	}
	return keys, locations, nil
}

// flightPut puts one entry.
func flightPut(t *testing.T, address, tree, key string) error {
	c, err := flight.NewClientWithMiddleware(address, nil, nil, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer c.Close()
	stream, err := c.DoPut(t.Context())
	require.NoError(t, err)
	schema := arrow.NewSchema([]arrow.Field{{Name: "key", Type: arrow.BinaryTypes.Binary}, {Name: "value", Type: arrow.BinaryTypes.Binary}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	b.Field(0).(*array.BinaryBuilder).AppendString(key)
	b.Field(1).(*array.BinaryBuilder).AppendString("value")
	w := flight.NewRecordWriter(stream, ipc.WithSchema(schema))
	w.SetFlightDescriptor(&flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{tree}})
	require.NoError(t, w.Write(b.NewRecordBatch()))
	_, err = stream.Recv()
	return err
}

// A server of the command: what is put by one is read by another process, it is watched, and it ends quietly.
func TestFlightGateway(t *testing.T) {
	on(t, "kv", "create", "-t", "flown").ok(t)
	start := func(args ...string) *local.Process {
		p, err := local.Spawn(t.Context(), executable(t), append([]string{"gateway", "flight", "-C", cluster(t).URL, "--listen", "127.0.0.1:0"}, args...)...)
		require.NoError(t, err)
		t.Cleanup(func() { p.Stop() })
		return p
	}
	p := start("--metrics-listen", "127.0.0.1:0", "--spread")
	require.NoError(t, flightPut(t, p.Ready["address"], "flown", "ada"))
	require.Equal(t, "value", on(t, "kv", "get", "-t", "flown", "ada").ok(t))
	keys, at, err := flightKeys(t, p.Ready["address"], "flown")
	require.NoError(t, err)
	require.Equal(t, []string{"ada"}, keys)
	require.Equal(t, []string{p.Ready["uri"]}, at, "the nodes are on this host")
	peers := start("--peer", "nobody=grpc+tcp://10.0.0.1:1")
	_, at, err = flightKeys(t, peers.Ready["address"], "flown")
	require.NoError(t, err)
	require.Empty(t, at)
	var nodes []struct{ Name string }
	on(t, "node", "list", "--json").decode(t, &nodes)
	var args []string
	for _, n := range nodes {
		args = append(args, "--peer", n.Name+"=grpc+tcp://10.0.0.1:8815")
	}
	peers = start(args...)
	_, at, err = flightKeys(t, peers.Ready["address"], "flown")
	require.NoError(t, err)
	require.Equal(t, []string{"grpc+tcp://10.0.0.1:8815"}, at)

	res, err := http.Get(p.Ready["metrics"])
	require.NoError(t, err)
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	for _, line := range []string{`quarry_flight_rows_total{direction="put"} 1`, `quarry_flight_rows_total{direction="read"} 1`, "quarry_flight_callers 1", `quarry_flight_streams{direction="read"} 0`} {
		require.Contains(t, string(text), line)
	}
	require.NoError(t, p.Signal(syscall.SIGINT))
	require.Zero(t, p.Wait().ExitCode(), p.Log())
	require.Empty(t, p.Log())
}

// Where the cluster asks for a token so does the server, and the token of a caller is what counts, not the server's.
func TestFlightGatewayAsksForAToken(t *testing.T) {
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "1", "--token", "the cluster's own")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop()) })
	as := func(token string, args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=" + p.Ready["url"], "QUARRY_TOKEN=" + token}, "", args...)
	}
	as("the cluster's own", "kv", "create", "-t", "users").ok(t)
	as("the cluster's own", "kv", "put", "-t", "users", "ada", "-d", "x").ok(t)
	var made, other struct{ Token string }
	as("the cluster's own", "token", "create", "--role", "client", "--json").decode(t, &made)
	as("the cluster's own", "token", "create", "--role", "viewer", "--json").decode(t, &other)
	g, err := local.Spawn(t.Context(), executable(t), "gateway", "flight", "-C", p.Ready["url"], "--token", "the cluster's own", "--listen", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Stop()) })
	_, _, err = flightKeys(t, g.Ready["address"], "users")
	require.Equal(t, codes.Unauthenticated, status.Code(err), err)
	_, _, err = flightKeys(t, g.Ready["address"], "users", "authorization", "Bearer qt_no")
	require.Equal(t, codes.Unauthenticated, status.Code(err), err)
	_, _, err = flightKeys(t, g.Ready["address"], "users", "authorization", "Bearer "+other.Token)
	require.Equal(t, codes.PermissionDenied, status.Code(err), err)
	keys, _, err := flightKeys(t, g.Ready["address"], "users", "authorization", "Bearer "+made.Token)
	require.NoError(t, err)
	require.Equal(t, []string{"ada"}, keys)
}

func TestFlightGatewayMistakes(t *testing.T) {
	ca := certs.New(t, "prod")
	mine := ca.Files(identity.Gateway, "g1", "127.0.0.1")
	for want, args := range map[string][]string{
		"give --token, or --tls-cert":  {"--listen", "0.0.0.0:0"},
		"want a URI":                   {"--peer", "n1=10.0.0.1:8815"},
		"go together":                  {"--listen-cert", mine.Cert},
		"--client-ca: no certificate":  {"--client-ca", ca.CA},
		"no such file":                 {"--listen-cert", filepath.Join(t.TempDir(), "no"), "--listen-key", mine.Key},
		"--memory":                     {"--memory", "1MiB"},
		"--batch-rows -1":              {"--batch-rows=-1"},
		"--streams 0":                  {"--streams", "0"},
		"--ticket-ttl -1s":             {"--ticket-ttl=-1s"},
		"--slow-reader 0s":             {"--slow-reader", "0s"},
		"--stop-timeout 0s":            {"--stop-timeout", "0s"},
		"--pprof needs --metrics-list": {"--pprof"},
	} {
		quarry(t, nil, "", append([]string{"gateway", "flight", "-C", cluster(t).URL, "--listen", "127.0.0.1:0"}, args...)...).fails(t, exitUsage, want)
	}
	require.Contains(t, quarry(t, nil, "", "gateway", "flight", "--help").ok(t), "--spread")
}

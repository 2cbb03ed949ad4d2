package flight_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"os"
	"testing"

	"connectrpc.com/connect"
	"github.com/apache/arrow-go/v18/arrow"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/certs"
	"github.com/quarrystore/quarry/verify/testcluster"
)

const (
	mayRead  = quarrypb.Right_RIGHT_READ
	mayWrite = quarrypb.Right_RIGHT_WRITE
)

// What a caller may do is what its token may: the server's own rights, which are all there are, are of no use to it.
func TestRightsAreThoseOfTheCaller(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, testcluster.Options{Token: "the cluster's own"})
	for _, name := range []string{"shop", "bank"} {
		_, err := w.Control().CreateTenant(ctx, connect.NewRequest(&quarrypb.CreateTenantRequest{Name: name}))
		require.NoError(t, err)
		for _, tree := range []string{"users", "secrets"} {
			in := w.Connect(client.Config{Token: w.Options.Token, Tenant: name})
			made, err := kv.Create(ctx, in, tree, btree.Config{})
			require.NoError(t, err)
			require.NoError(t, made.Put(ctx, []byte("of"), []byte(name+" "+tree)))
		}
	}
	w.tree("users", 3, 10)
	_, addr := w.serve(flight.Config{})
	c := dial(t, addr)
	read := func(ctx context.Context) []row { return all(t, ctx, c, path("users")) }
	refused := func(ctx context.Context, tree string, code codes.Code, says string) {
		t.Helper()
		_, err := c.GetFlightInfo(ctx, path(tree))
		fails(t, err, code, says)
		_, err = c.GetSchema(ctx, path(tree))
		fails(t, err, code, says)
		_, err = put(ctx, c, tree, binarySchema, batchOf(row{key: "k", value: "v"}))
		fails(t, err, code, says)
	}
	refused(ctx, "users", codes.Unauthenticated, "no token")
	refused(as(ctx, "", "authorization", "Basic YTpi"), "users", codes.Unauthenticated, "want Bearer TOKEN")
	refused(as(ctx, "qt_1234"), "users", codes.Unauthenticated, "")
	refused(as(ctx, "a", "authorization", "Bearer b"), "users", codes.Unauthenticated, "want it once")

	_, plain := w.tokenOf("", "")
	require.Len(t, read(as(ctx, plain)), 3, "without grants it works in the tenant default")
	refused(as(ctx, plain, flight.TenantHeader, "shop"), "users", codes.PermissionDenied, "")
	reader, reads := w.tokenOf("shop", "", mayRead)
	require.Equal(t, []row{{key: "of", value: "shop users"}}, read(as(ctx, reads)))
	_, err := put(as(ctx, reads), c, "users", binarySchema, batchOf(row{key: "k", value: "v"}))
	fails(t, err, codes.PermissionDenied, "may read, and not write")
	require.Len(t, read(as(ctx, reads)), 1)
	_, writes := w.tokenOf("bank", "users", mayRead, mayWrite)
	_, err = put(as(ctx, writes), c, "users", binarySchema, batchOf(row{key: "k", value: "v"}))
	require.NoError(t, err)
	require.Equal(t, []row{{key: "k", value: "v"}, {key: "of", value: "bank users"}}, read(as(ctx, writes)))
	refused(as(ctx, writes), "secrets", codes.PermissionDenied, "")
	list, err := c.ListFlights(as(ctx, writes), &arrowflight.Criteria{Expression: []byte("users")})
	require.NoError(t, err)
	only, err := list.Recv()
	require.NoError(t, err)
	require.Equal(t, []string{"users"}, only.FlightDescriptor.Path)
	operator := as(ctx, w.Options.Token, flight.TenantHeader, "bank")
	require.Len(t, read(operator), 2, "the cluster's own token works in every tenant")
	made, err := w.Control().CreateToken(ctx, connect.NewRequest(&quarrypb.CreateTokenRequest{Role: "viewer"}))
	require.NoError(t, err)
	refused(as(ctx, made.Msg.Secret), "users", codes.PermissionDenied, "")

	ticket := func(ctx context.Context) []byte {
		info, err := c.GetFlightInfo(ctx, path("users"))
		require.NoError(t, err)
		return info.Endpoint[0].Ticket.Ticket
	}
	shown := func(ctx context.Context, b []byte) error { return get(ctx, c, b, func(arrow.RecordBatch) {}) }
	of := ticket(as(ctx, reads))
	require.NoError(t, shown(as(ctx, reads), of))
	fails(t, shown(as(ctx, writes), of), codes.PermissionDenied, "a caller with another token")
	fails(t, shown(as(ctx, w.Options.Token), of), codes.PermissionDenied, "a caller with another token")
	fails(t, shown(ctx, of), codes.Unauthenticated, "no token")
	fails(t, shown(as(ctx, w.Options.Token), ticket(operator)), codes.PermissionDenied, `for tenant "bank"`)

	// The session of a caller is open, and it does not outlast the caller's rights: a call asks again.
	_, err = w.Control().RevokeToken(ctx, connect.NewRequest(&quarrypb.RevokeTokenRequest{Id: reader}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return shown(as(ctx, reads), of) != nil }, patience, tick)
	fails(t, shown(as(ctx, reads), of), codes.Unauthenticated, "")
}

// Sessions are bounded: one that is in use stays, one that is not makes room, and without calls none is left.
func TestSessionsOfCallers(t *testing.T) {
	w := newWorld(t, testcluster.Options{Token: "the cluster's own", RegionBytes: 64 << 20})
	w.tree("users", 4000, 4000)
	s, addr := w.serve(flight.Config{Callers: 1, ReadStreams: 8})
	_, one := w.tokenOf("", "")
	_, two := w.tokenOf("", "")
	c := dial(t, addr)
	info, err := c.GetFlightInfo(as(t.Context(), one), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	stream, err := c.DoGet(as(t.Context(), one), info.Endpoint[0].Ticket)
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	_, err = c.GetFlightInfo(as(t.Context(), two), path("users"))
	fails(t, err, codes.ResourceExhausted, "1 callers have sessions here")
	for err = nil; err == nil; {
		_, err = stream.Recv()
	}
	require.ErrorIs(t, err, io.EOF)
	require.Eventually(t, func() bool {
		_, err := c.GetFlightInfo(as(t.Context(), two), path("users"))
		return err == nil
	}, patience, tick)
	require.EqualValues(t, 1, s.Stats().Callers)
	flight.Forget(s)
	require.Eventually(t, func() bool { return s.Stats().Callers == 0 }, patience, tick)
	_, err = c.GetFlightInfo(as(t.Context(), one), path("users"))
	require.NoError(t, err)
}

// An old session that is in use stays the caller's own while there is no room for another one; one token has half of the sessions.
func TestSessionsThatAreOld(t *testing.T) {
	w := newWorld(t, testcluster.Options{Token: "the cluster's own", RegionBytes: 64 << 20})
	w.tree("users", 4000, 4000)
	for _, name := range []string{"shop", "bank"} {
		_, err := w.Control().CreateTenant(t.Context(), connect.NewRequest(&quarrypb.CreateTenantRequest{Name: name}))
		require.NoError(t, err)
	}
	s, addr := w.serve(flight.Config{Callers: 4})
	ctx, c := as(t.Context(), w.Options.Token), dial(t, addr)
	in := func(tenant string) error {
		_, err := c.GetFlightInfo(as(t.Context(), w.Options.Token, flight.TenantHeader, tenant), path("users"))
		return err
	}
	open := func() arrowflight.FlightService_DoGetClient {
		info, err := c.GetFlightInfo(ctx, command(t, flight.Request{Tree: "users", Parts: 1}))
		require.NoError(t, err)
		stream, err := c.DoGet(ctx, info.Endpoint[0].Ticket)
		require.NoError(t, err)
		_, err = stream.Recv()
		require.NoError(t, err)
		return stream
	}
	open()
	require.EqualValues(t, 1, s.Stats().Callers)
	flight.Age(s)
	open()
	require.EqualValues(t, 2, s.Stats().Callers, "there is room for a new one")
	flight.Age(s)
	_, err := c.GetFlightInfo(ctx, path("users"))
	require.NoError(t, err, "there is none, and the old one works")
	require.EqualValues(t, 2, s.Stats().Callers)
	fails(t, in("shop"), codes.ResourceExhausted, "this token has 2 sessions here")
	_, other := w.tokenOf("", "")
	_, err = c.GetFlightInfo(as(t.Context(), other), path("users"))
	require.NoError(t, err)
	flight.Age(s)
	_, err = c.GetFlightInfo(as(t.Context(), other), path("users"))
	require.NoError(t, err)
	require.EqualValues(t, 3, s.Stats().Callers, "an old one that is not in use makes room")
}

// Calls whose tokens are not known yet are few at a time, so that little is read of strangers; callers that are known are served meanwhile.
func TestStrangersAreFew(t *testing.T) {
	w := newWorld(t, testcluster.Options{Token: "the cluster's own"})
	w.tree("users", 1, 1)
	held := make(chan struct{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s, err := flight.New(flight.Config{Connect: func(ctx context.Context, token, tenant string, readOnly bool) (*client.Client, error) {
		if token == w.Options.Token {
			return w.connect(ctx, token, tenant, readOnly)
		}
		<-held
		return nil, connect.NewError(connect.CodeUnauthenticated, nil)
	}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, nil, l) }()
	c := dial(t, l.Addr().String())
	known := as(t.Context(), w.Options.Token)
	require.Len(t, all(t, known, c, path("users")), 1)
	answers := make(chan error, 40)
	for range cap(answers) {
		go func() {
			_, err := c.GetFlightInfo(as(t.Context(), "qt_of_a_stranger"), path("users"))
			answers <- err
		}()
	}
	for range cap(answers) - flight.MaxStrangers {
		fails(t, <-answers, codes.ResourceExhausted, "tokens that are not known yet")
	}
	require.Len(t, all(t, known, c, path("users")), 1)
	close(held)
	for range flight.MaxStrangers {
		fails(t, <-answers, codes.Unauthenticated, "")
	}
	require.Eventually(t, func() bool {
		_, err := c.GetFlightInfo(as(t.Context(), "qt_of_a_stranger"), path("users"))
		return status.Code(err) == codes.Unauthenticated
	}, patience, tick, "they are counted until they end")
	cancel()
	require.NoError(t, <-done)
}

// Calls of strangers that are refused while all slots are taken are strangers no more.
func TestStrangersThatAreRefused(t *testing.T) {
	w := newWorld(t, testcluster.Options{Token: "the cluster's own"})
	w.tree("users", 1, 1)
	s, addr := w.serve(flight.Config{})
	silent, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 { // tokens, half of the slots for each
		_, token := w.tokenOf("default", "", mayRead)
		c := dial(t, addr)
		_, err := c.GetFlightInfo(as(t.Context(), token), path("users"))
		require.NoError(t, err)
		require.Eventually(t, func() bool { calls, _ := flight.ShortCalls(s); return calls%(flight.MaxShort/2) == 0 }, patience, tick)
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		defer conn.Close()
		for range flight.MaxShort / 2 { // calls whose request does not come
			_, err := conn.NewStream(as(silent, token), &grpc.StreamDesc{ClientStreams: true}, "/arrow.flight.protocol.FlightService/GetFlightInfo")
			require.NoError(t, err)
		}
	}
	require.Eventually(t, func() bool { calls, _ := flight.ShortCalls(s); return calls == flight.MaxShort }, patience, tick)
	c := dial(t, addr)
	for range 2 * flight.MaxStrangers {
		_, err := c.GetFlightInfo(as(t.Context(), "qt_of_a_stranger"), path("users"))
		fails(t, err, codes.ResourceExhausted, "64 calls run already")
	}
	require.Eventually(t, func() bool { return flight.Strangers(s) == 0 }, patience, tick)
}

// Connections on which nothing was authenticated close the oldest of them, and keep no caller out.
func TestSilentConnections(t *testing.T) {
	w := newWorld(t, testcluster.Options{Token: "the cluster's own"})
	w.tree("users", 1, 1)
	s, addr := w.serve(flight.Config{Connections: 3})
	c := dial(t, addr)
	ctx := as(t.Context(), w.Options.Token)
	require.Len(t, all(t, ctx, c, path("users")), 1)
	for range 20 {
		nc, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer nc.Close()
	}
	require.Eventually(t, func() bool { return s.Stats().Refused >= 18 }, patience, tick)
	require.Len(t, all(t, ctx, c, path("users")), 1, "its connection is open")
	require.Len(t, all(t, ctx, dial(t, addr), path("users")), 1, "a new one finds a place")
}

// Over TLS, with a client's certificate where the server has authorities.
func TestOverTLS(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	w.tree("users", 5, 10)
	ca := certs.New(t, "prod")
	port, mine := ca.Source(identity.Gateway, "g1", "127.0.0.1"), ca.Files(identity.Client, "app")
	pool := x509.NewCertPool()
	pem, err := os.ReadFile(ca.CA)
	require.NoError(t, err)
	require.True(t, pool.AppendCertsFromPEM(pem))
	s, err := flight.New(flight.Config{Connect: w.connect, Open: true})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, port.Public(), l) }()
	dialTLS := func(certificates ...tls.Certificate) arrowflight.Client {
		c, err := arrowflight.NewClientWithMiddleware(l.Addr().String(), nil, nil, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs: pool, Certificates: certificates,
		})))
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	pair, err := tls.LoadX509KeyPair(mine.Cert, mine.Key)
	require.NoError(t, err)
	require.Len(t, all(t, t.Context(), dialTLS(pair), path("users")), 5)
	_, err = dialTLS().GetFlightInfo(t.Context(), path("users"))
	fails(t, err, codes.Unavailable, "")
	_, err = dial(t, l.Addr().String()).GetFlightInfo(t.Context(), path("users"))
	fails(t, err, codes.Unavailable, "")
	cancel()
	require.NoError(t, <-done)
}

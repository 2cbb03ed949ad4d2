package controller_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/etcdembed"
	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/keyring"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

const patience = 3 * time.Minute

type rpc = quarrypbconnect.ControllerClient

// store is an etcd of the test's own.
func store(t testing.TB) (*etcdembed.Server, *clientv3.Client) {
	srv, err := etcdembed.Start(t.Context(), etcdembed.Config{NoSync: true, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(srv.Close)
	return srv, etcdClient(t, srv)
}

func etcdClient(t testing.TB, srv *etcdembed.Server) *clientv3.Client {
	etcd, err := srv.Client()
	require.NoError(t, err)
	t.Cleanup(func() { etcd.Close() })
	return etcd
}

// cutoff forwards connections to etcd until it is cut: then bytes stay where they are.
type cutoff struct{ cut atomic.Bool }

// through is an etcd client whose way to the server can be cut.
func through(t testing.TB, srv *etcdembed.Server, c *cutoff) *clientv3.Client {
	u, err := url.Parse(srv.Endpoint())
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	pass := func(to, from net.Conn) {
		defer to.Close()
		b := make([]byte, 32<<10)
		for {
			n, err := from.Read(b)
			if err != nil {
				return
			}
			if !c.cut.Load() {
				to.Write(b[:n])
			}
		}
	}
	go func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", u.Path)
			if err != nil {
				in.Close()
				continue
			}
			go pass(in, out)
			go pass(out, in)
		}
	}()
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + ln.Addr().String()}, DialTimeout: patience, Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { etcd.Close() })
	return etcd
}

// start runs a controller that ends with the test, if not before.
func start(t testing.TB, cfg controller.Config) (*controller.Controller, rpc) {
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.RegionBytes == 0 {
		cfg.RegionBytes = 16 << 20
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c, err := controller.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c, quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL())
}

// lead waits until a controller leads.
func lead(t testing.TB, c *controller.Controller) {
	require.Eventually(t, c.Leads, patience, time.Millisecond)
}

// do calls an RPC that must succeed.
func do[Q, A any](t testing.TB, call func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), q *Q) *A {
	t.Helper()
	a, err := try(t, call, q)
	require.NoError(t, err)
	return a
}

// publicKey is that of every node and session, secret that of every registration, and proofs
// are those of the sessions that were opened last, by serial.
var (
	publicKey, secret = keyring.NewSigner([keyring.SeedBytes]byte{1}).Public(), [32]byte{2}
	proofs            sync.Map
)

// prove fills in what the rightful sender of a request shows.
func prove(q any) {
	proof := func(serial uint64) []byte {
		p, _ := proofs.Load(serial)
		b, _ := p.([]byte)
		return b
	}
	switch q := q.(type) {
	case *quarrypb.OpenSessionRequest:
		q.Key = publicKey[:]
	case *quarrypb.HeartbeatRequest:
		q.Proof = proof(q.Serial)
	case *quarrypb.CloseSessionRequest:
		q.Proof = proof(q.Serial)
	case *quarrypb.CertifyFenceRequest:
		q.Proof = proof(q.Serial)
	case *quarrypb.RegisterNodeRequest:
		q.Secret = secret[:]
	case *quarrypb.NodeHeartbeatRequest:
		q.Secret = secret[:]
	}
}

func try[Q, A any](t testing.TB, call func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), q *Q) (*A, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	prove(q)
	resp, err := call(ctx, connect.NewRequest(q))
	if err != nil {
		return nil, err
	}
	if opened, ok := any(resp.Msg).(*quarrypb.OpenSessionResponse); ok {
		proofs.Store(opened.Ticket.Serial, opened.Proof)
	}
	return resp.Msg, nil
}

// refused calls an RPC that must fail with a code and a text.
func refused[Q, A any](t testing.TB, call func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), q *Q, code connect.Code, text string) {
	t.Helper()
	_, err := try(t, call, q)
	require.ErrorContains(t, err, text)
	require.Equal(t, code, connect.CodeOf(err))
}

// agent is a storage node without memory: it says yes, and remembers to what.
type agent struct {
	quarrypbconnect.UnimplementedAgentHandler
	t    testing.TB
	srv  *httptest.Server
	rec  *quarrypb.Node
	keys keyring.Ring
	self atomic.Pointer[agentauth.Node]
	gate chan struct{} // Fence waits for it, if set

	mu     sync.Mutex
	calls  []string
	fenced map[uint64]bool
	term   uint64
	refuse string // what HostRegion says, if anything
}

func newAgent(t testing.TB, name, domain string, incarnation uint64) *agent {
	a := &agent{t: t, fenced: map[uint64]bool{}}
	mux := http.NewServeMux()
	path, calls := quarrypbconnect.NewAgentHandler(a)
	mux.Handle(path, httpserver.Gate{Allow: agentauth.Allow(&a.keys, func() (agentauth.Node, bool) {
		if self := a.self.Load(); self != nil {
			return *self, true
		}
		return agentauth.Node{}, false
	}), MaxBytes: func(string) int64 { return 1 << 20 }, Body: agentauth.Body}.Before(calls))
	a.srv = httptest.NewServer(mux)
	t.Cleanup(a.srv.Close)
	a.rec = &quarrypb.Node{
		Name: name, FailureDomain: domain, Incarnation: incarnation, AgentUrl: a.srv.URL, CapacityBytes: 1 << 40, Domain: 1, Key: publicKey[:], Fabric: wire.FabricVersion,
		Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: "127.0.0.1:1"}},
	}
	return a
}

// join registers the agent and keeps it registered, with heartbeats, until the test ends.
func (a *agent) join(to rpc) {
	a.register(to)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			resp, err := to.NodeHeartbeat(ctx, connect.NewRequest(&quarrypb.NodeHeartbeatRequest{Id: a.rec.Id, Incarnation: a.rec.Incarnation, Secret: secret[:]}))
			if err == nil && resp.Msg.Unknown {
				if resp, err := to.RegisterNode(ctx, connect.NewRequest(&quarrypb.RegisterNodeRequest{Node: a.rec, Secret: secret[:]})); err == nil {
					a.learn(resp.Msg)
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	a.t.Cleanup(func() { cancel(); done.Wait() })
}

func (a *agent) register(to rpc) {
	resp := do(a.t, to.RegisterNode, &quarrypb.RegisterNodeRequest{Node: a.rec})
	a.rec.Id = resp.Id
	a.learn(resp)
}

func (a *agent) learn(r *quarrypb.RegisterNodeResponse) {
	a.keys.Set(keyring.Public(r.Keys[0]))
	a.self.Store(&agentauth.Node{Cluster: [16]byte(r.Cluster), Number: r.Id})
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range r.FencedSerials {
		a.fenced[s] = true
	}
}

// said notes a call and checks that terms never fall.
func (a *agent) said(term uint64, format string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, fmt.Sprintf(format, args...))
	if term < a.term {
		a.t.Errorf("term %d after %d", term, a.term)
	}
	a.term = max(a.term, term)
}

func (a *agent) heard() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string{}, a.calls...)
}

func (a *agent) isFenced(serial uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.fenced[serial]
}

func (a *agent) HostRegion(_ context.Context, r *connect.Request[quarrypb.HostRegionRequest]) (*connect.Response[quarrypb.HostRegionResponse], error) {
	a.said(r.Msg.ControllerTerm, "host %d", r.Msg.Region)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refuse != "" {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%s", a.refuse))
	}
	return connect.NewResponse(&quarrypb.HostRegionResponse{}), nil
}

func (a *agent) OpenRegion(_ context.Context, r *connect.Request[quarrypb.OpenRegionRequest]) (*connect.Response[quarrypb.OpenRegionResponse], error) {
	a.said(r.Msg.ControllerTerm, "open %d@%d", r.Msg.Region, r.Msg.Epoch)
	return connect.NewResponse(&quarrypb.OpenRegionResponse{}), nil
}

func (a *agent) CloseRegion(_ context.Context, r *connect.Request[quarrypb.CloseRegionRequest]) (*connect.Response[quarrypb.CloseRegionResponse], error) {
	a.said(r.Msg.ControllerTerm, "close %d@%d", r.Msg.Region, r.Msg.Epoch)
	return connect.NewResponse(&quarrypb.CloseRegionResponse{}), nil
}

func (a *agent) DropRegion(_ context.Context, r *connect.Request[quarrypb.DropRegionRequest]) (*connect.Response[quarrypb.DropRegionResponse], error) {
	a.said(r.Msg.ControllerTerm, "drop %d", r.Msg.Region)
	return connect.NewResponse(&quarrypb.DropRegionResponse{}), nil
}

func (a *agent) Fence(ctx context.Context, r *connect.Request[quarrypb.FenceRequest]) (*connect.Response[quarrypb.FenceResponse], error) {
	if a.gate != nil {
		select {
		case <-a.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	a.said(r.Msg.ControllerTerm, "fence %v", r.Msg.Serials)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range r.Msg.Serials {
		a.fenced[s] = true
	}
	return connect.NewResponse(&quarrypb.FenceResponse{}), nil
}

func (a *agent) Ping(context.Context, *connect.Request[quarrypb.PingRequest]) (*connect.Response[quarrypb.PingResponse], error) {
	answer := &quarrypb.PingResponse{Incarnation: a.rec.Incarnation}
	if self := a.self.Load(); self != nil { // a controller may ping before register has returned
		answer.Id = self.Number
	}
	return connect.NewResponse(answer), nil
}

// ownConnection is a client with connections of its own, and what ends them.
func ownConnection(t testing.TB, url string) (rpc, func()) {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return quarrypbconnect.NewControllerClient(&http.Client{Transport: tr}, url), tr.CloseIdleConnections
}

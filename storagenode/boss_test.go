package storagenode_test

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/internal/pulse"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/storagenode"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// boss is a controller whose decisions the test makes: also those that a real one
// would not make, or not in this order.
type boss struct {
	quarrypbconnect.UnimplementedControllerHandler
	t       testing.TB
	url     string
	cluster [16]byte
	key     *keyring.Signer

	mu       sync.Mutex
	answer   *quarrypb.RegisterNodeResponse // Cluster, Keys and Id are filled in
	leader   string                         // if set, this is a standby
	forget   bool                           // answer the next heartbeat with unknown
	joined   []*quarrypb.RegisterNodeRequest
	beats    int
	resident uint64
	calmMs   uint32   // of answers to heartbeats, and pulse
	pulse    []string // addresses
}

func newBoss(t testing.TB) *boss {
	b := &boss{t: t, answer: &quarrypb.RegisterNodeResponse{Id: 1, HeartbeatMs: 40, NextSerial: 1, ControllerTerm: 1}}
	rand.Read(b.cluster[:])
	var seed [keyring.SeedBytes]byte
	rand.Read(seed[:])
	b.key = keyring.NewSigner(seed)
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(b))
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	b.url = srv.URL
	return b
}

func (b *boss) standby() error {
	if b.leader == "" {
		return nil
	}
	err := connect.NewError(connect.CodeUnavailable, errors.New("not the leader"))
	err.Meta().Set(quarrypb.LeaderHeader, b.leader)
	return err
}

func (b *boss) RegisterNode(_ context.Context, r *connect.Request[quarrypb.RegisterNodeRequest]) (*connect.Response[quarrypb.RegisterNodeResponse], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.standby(); err != nil {
		return nil, err
	}
	b.joined = append(b.joined, r.Msg)
	public := b.key.Public()
	return connect.NewResponse(&quarrypb.RegisterNodeResponse{
		Id: b.answer.Id, HeartbeatMs: b.answer.HeartbeatMs, Cluster: b.cluster[:], Keys: [][]byte{public[:]}, PulseKey: pulse.NodeSecret(make([]byte, 32), b.cluster[:], r.Msg.Node.Incarnation),
		NextSerial: b.answer.NextSerial, LiveSerials: b.answer.LiveSerials, FencedSerials: b.answer.FencedSerials,
		ControllerTerm: b.answer.ControllerTerm,
	}), nil
}

func (b *boss) NodeHeartbeat(_ context.Context, r *connect.Request[quarrypb.NodeHeartbeatRequest]) (*connect.Response[quarrypb.NodeHeartbeatResponse], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.standby(); err != nil {
		return nil, err
	}
	b.beats++
	b.resident = r.Msg.ResidentBytes
	unknown := b.forget
	b.forget = false
	return connect.NewResponse(&quarrypb.NodeHeartbeatResponse{Unknown: unknown, CalmMs: b.calmMs, Pulse: b.pulse}), nil
}

// registrations are those heard so far.
func (b *boss) registrations() []*quarrypb.RegisterNodeRequest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.joined)
}

// with changes how the boss answers.
func (b *boss) with(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// config of a node that obeys the boss; dir "" keeps nothing.
func (b *boss) config(dir string) storagenode.Config {
	return storagenode.Config{Controllers: []string{b.url}, Name: "n1", FailureDomain: "/dc/rack/n1", Dir: dir,
		Socket: filepath.Join(b.t.TempDir(), "shm"), CapacityBytes: 64 << 20, Logger: quiet()}
}

// startAs starts a node on a folder once the boss is of a later term.
func (b *boss) startAs(term uint64, dir string) *storagenode.Node {
	b.with(func() { b.answer.ControllerTerm = term })
	return b.start(b.config(dir))
}

func (b *boss) start(cfg storagenode.Config) *storagenode.Node {
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	n, err := storagenode.Start(ctx, cfg)
	require.NoError(b.t, err)
	b.t.Cleanup(func() { n.Close() })
	return n
}

// agent calls a node's agent in the cluster's name.
func (b *boss) agent(n *storagenode.Node) quarrypbconnect.AgentClient {
	return b.agentAt(n.Stats().Agent)
}

func (b *boss) agentAt(url string) quarrypbconnect.AgentClient {
	hc := &http.Client{Transport: &http.Transport{}}
	b.t.Cleanup(hc.CloseIdleConnections)
	return quarrypbconnect.NewAgentClient(agentauth.Client(hc, b.key, agentauth.Node{Cluster: b.cluster, Number: 1}), url)
}

func (b *boss) hostReq(term uint64, region uint32) *quarrypb.HostRegionRequest {
	return &quarrypb.HostRegionRequest{Region: region, Uuid: append(make([]byte, 15), byte(region)), Cluster: b.cluster[:],
		SizeBytes: proto.MinRegionBytes, ControllerTerm: term}
}

// call makes a call of the agent and returns its code, 0 if it went well.
func call[Q, A any](t testing.TB, method func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), q *Q) connect.Code {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := method(ctx, connect.NewRequest(q)); err != nil {
		return connect.CodeOf(err)
	}
	return 0
}

// hostAndOpen makes a region and serves it.
func (b *boss) hostAndOpen(n *storagenode.Node, region uint32, epoch uint64) {
	a := b.agent(n)
	require.Zero(b.t, call(b.t, a.HostRegion, b.hostReq(1, region)))
	require.Zero(b.t, call(b.t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: region, Epoch: epoch, ControllerTerm: 1}))
}

func (b *boss) ticket(serial uint64) *rdma.Credentials {
	return rdma.Issue(b.key, rdma.Ticket{Cluster: b.cluster, Session: uint32(serial), Serial: serial, Rights: rdma.ReadWrite})
}

// lane is one connection of a session.
type lane struct {
	t    testing.TB
	conn rdma.Conn
	to   rdma.Target
	buf  []byte
}

func (b *boss) dial(d rdma.Dialer, addr string, serial uint64, number, region uint32, epoch uint64) (*lane, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	conn, err := d.Dial(ctx, addr, b.ticket(serial), number)
	if err != nil {
		return nil, err
	}
	b.t.Cleanup(func() { conn.Close() })
	w, err := conn.Open(ctx, region, epoch)
	if err != nil {
		return nil, err
	}
	return &lane{t: b.t, conn: conn, to: rdma.Target{Conn: conn, Window: w}, buf: make([]byte, 64)}, nil
}

func (c *lane) write(off uint64, v byte) error {
	for i := range c.buf {
		c.buf[i] = v
	}
	var r rdma.Round
	r.Chain(&c.to).Write(off, c.buf)
	rdma.Do(&r)
	return r.Err()
}

func (c *lane) read(off uint64, n int) ([]byte, error) {
	b := make([]byte, n)
	var r rdma.Round
	r.Chain(&c.to).Read(off, b)
	rdma.Do(&r)
	return b, r.Err()
}

// eventually polls a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, patience, 5*time.Millisecond, what)
}

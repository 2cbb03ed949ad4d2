package tcp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// relayed is a node whose tcp clients are passed on to another provider, which here
// is a second Access in the place of an adapter.
type relayed struct {
	*rdmatest.Host              // tcp
	adapter        *host.Access // who alone touches the memory
	inner          *rdmatest.Host
	broken         *breaking
}

func startRelayed(t testing.TB, c rdmatest.Cluster, how *tcp.TLS) *relayed {
	n := &relayed{}
	own := shm.NewInproc()
	n.inner = rdmatest.StartHost(t, rdmatest.Cluster{UUID: c.UUID, Key: c.Key, Offences: c.Offences}, incarnations.Add(1), func(a *host.Access) (string, func()) {
		n.adapter = a
		a.Own = c.Ring()
		own.Add("adapter", a)
		return "", func() {}
	}, nil)
	n.broken = &breaking{Dialer: own}
	n.Host = rdmatest.StartHost(t, c, incarnations.Add(1), func(a *host.Access) (string, func()) {
		a.Through(&host.Loop{Dialer: n.broken, Addr: "adapter", Cluster: c.UUID, Key: c.Key, Ended: func(uint32) {}})
		return serve(t, a, how)
	}, nil)
	return n
}

func (n *relayed) OpenRegion(ctx context.Context, tenant, region uint32, epoch uint64) error {
	return errors.Join(n.inner.OpenRegion(ctx, tenant, region, epoch), n.Host.OpenRegion(ctx, tenant, region, epoch))
}

func (n *relayed) CloseRegion(ctx context.Context, region uint32, epoch uint64) error {
	return errors.Join(n.inner.CloseRegion(ctx, region, epoch), n.Host.CloseRegion(ctx, region, epoch))
}

func (n *relayed) Bytes(region uint32) []byte { return n.inner.Bytes(region) }

// breaking makes connections that fail when told.
type breaking struct {
	rdma.Dialer
	chains atomic.Int64 // until the next failure; 0 never
}

type breakingConn struct {
	rdma.Conn
	d *breaking
}

func (b *breaking) Dial(ctx context.Context, addr string, t *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c, err := b.Dialer.Dial(ctx, addr, t, lane)
	if err != nil {
		return nil, err
	}
	return breakingConn{c, b}, nil
}

func (c breakingConn) Wait(ch *rdma.Chain, deadline int64) {
	c.Conn.Wait(ch, deadline)
	if c.d.chains.Load() > 0 {
		if c.d.chains.Add(-1) == 0 {
			ch.Err, ch.Done = rdma.ErrBroken, 0
		}
	}
}

// The contract holds for clients that are passed on.
func TestContractThroughAdapter(t *testing.T) {
	rdmatest.Run(t, rdmatest.Provider{Name: "tcp", Dialer: tcp.Dialer{},
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node { return startRelayed(t, c, nil) }})
}

var relayCluster = rdmatest.Cluster{UUID: [16]byte{1, 2, 3}, Key: keyring.NewSigner([32]byte{4, 5, 6})}

func openOne(t *testing.T, d rdma.Dialer, addr string, lane uint32) *rdma.Target {
	c, err := d.Dial(t.Context(), addr, relayCluster.Ticket(1, rdma.ReadWrite), lane)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	w, err := c.Open(t.Context(), 1, 1)
	require.NoError(t, err)
	return &rdma.Target{Conn: c, Window: w}
}

func add(to *rdma.Target) (uint64, error) {
	r := rdma.Round{Deadline: clock.In(time.Minute)}
	r.Chain(to).FetchAdd(0, 1)
	rdma.Do(&r)
	return r.At(0).Verbs[0].Old, r.At(0).Err
}

// A failure on the way to the adapter is an unknown outcome for the client, whose
// next connection goes on.
func TestRelayBreaks(t *testing.T) {
	n := startRelayed(t, relayCluster, nil)
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	to := openOne(t, tcp.Dialer{}, n.Addr(), 0)
	_, err := add(to)
	require.NoError(t, err)
	n.broken.chains.Store(1)
	_, err = add(to)
	require.ErrorIs(t, err, rdma.ErrBroken)
	require.NoError(t, to.Conn.Reset(t.Context()))
	old, err := add(to)
	require.NoError(t, err)
	require.Equal(t, uint64(2), old, "the chain without an answer had run")
}

// shm clients are kept out of the adapter's domain, and memory out of the other's.
func TestHazard34_Domains(t *testing.T) {
	n := startRelayed(t, relayCluster, nil)
	require.Equal(t, proto.DomainAdapter, n.Access.Domain())
	page, err := host.NewSharedPage()
	require.NoError(t, err)
	defer page.Close()
	challenge := n.Access.Challenge()
	hello, err := host.NewHello(relayCluster.Ticket(1, rdma.ReadWrite), 0, &challenge, host.Binding{})
	require.NoError(t, err)
	_, err = n.Access.Admit(t.Context(), &hello, &challenge, host.Entry{Provider: "shm", Shared: page})
	require.ErrorIs(t, err, rdma.ErrDomain)
	for domain, a := range map[proto.Domain]*host.Access{proto.DomainCPU: n.Access, proto.DomainAdapter: n.adapter} {
		m, err := host.NewMemory("foreign", proto.MinRegionBytes)
		require.NoError(t, err)
		defer m.Close()
		h := proto.RegionHeader{Domain: domain, UUID: [16]byte{1}, Cluster: [16]byte{2}, RegionBytes: proto.MinRegionBytes, Region: 7, Incarnation: 1, Epoch: 1}
		copy(m.Bytes(), h.Encode())
		require.ErrorIs(t, a.OpenRegion(t.Context(), 7, 1, m), rdma.ErrDomain)
	}
}

// A hello whose sender has given up waiting, read after that of a later connection,
// must not take the lane.
func TestLateHelloDoesNotTakeTheLane(t *testing.T) {
	n := rdmatest.StartHost(t, relayCluster, incarnations.Add(1), func(a *host.Access) (string, func()) { return serve(t, a, nil) }, nil)
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	nc, err := net.Dial("tcp", n.Addr())
	require.NoError(t, err)
	defer nc.Close()
	hello := rdmatest.Hello(t, nc, relayCluster.Ticket(1, rdma.ReadWrite), 0)
	_, err = nc.Write(hello[:50])
	require.NoError(t, err)
	to := openOne(t, tcp.Dialer{}, n.Addr(), 0)
	_, err = nc.Write(hello[50:])
	require.NoError(t, err)
	var b [host.WelcomeBytes]byte
	nc.SetReadDeadline(time.Now().Add(time.Minute))
	_, err = io.ReadFull(nc, b[:])
	require.NoError(t, err)
	w, err := host.DecodeWelcome(b[:])
	require.NoError(t, err)
	require.ErrorIs(t, w.Err, rdma.ErrBroken)
	_, err = add(to)
	require.NoError(t, err, "the later connection keeps the lane")
}

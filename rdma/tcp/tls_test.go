package tcp_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/verify/certs"
)

func mode(t testing.TB, ca *certs.Authority, role identity.Role, name, how string) *tcp.TLS {
	s, err := tcp.NewTLS(how, ca.Source(role, name))
	require.NoError(t, err)
	return s
}

// recordGarbage: crypto/tls allocates a reader for each read of a record, here and at the node.
const recordGarbage = 32

// The contract holds for lanes that are encrypted.
func TestContractEncrypted(t *testing.T) {
	ca := certs.New(t, "prod")
	rdmatest.Run(t, rdmatest.Provider{Name: "tcp", Dialer: tcp.Dialer{TLS: mode(t, ca, identity.Client, "app", tcp.TLSRequired)},
		Start: starting(mode(t, ca, identity.Node, "s1", tcp.TLSRequired)), Garbage: recordGarbage})
}

// And for those of them that are passed on to an adapter.
func TestContractEncryptedThroughAdapter(t *testing.T) {
	ca := certs.New(t, "prod")
	how := mode(t, ca, identity.Node, "s1", tcp.TLSOn)
	rdmatest.Run(t, rdmatest.Provider{Name: "tcp", Dialer: tcp.Dialer{TLS: mode(t, ca, identity.Node, "s2", tcp.TLSOn)},
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node { return startRelayed(t, c, how) }, Garbage: recordGarbage})
}

// middle is between clients and a node. It keeps what clients send.
type middle struct {
	addr   string
	change func(fromClient bool, at int, b []byte) // may change bytes on the way; at is the offset of the first

	mu   sync.Mutex
	sent []byte
	ends []net.Conn // closed with the test, which may have left connections open
}

func between(t testing.TB, node string, change func(fromClient bool, at int, b []byte)) *middle {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &middle{addr: l.Addr().String(), change: change}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { m.carry(near, node) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		m.mu.Lock()
		for _, nc := range m.ends {
			nc.Close()
		}
		m.mu.Unlock()
		wg.Wait()
	})
	return m
}

func (m *middle) carry(near net.Conn, node string) {
	defer near.Close()
	far, err := net.Dial("tcp", node)
	if err != nil {
		return
	}
	defer far.Close()
	m.mu.Lock()
	m.ends = append(m.ends, near, far)
	m.mu.Unlock()
	var wg sync.WaitGroup
	pass := func(to, from net.Conn, fromClient bool) {
		defer to.Close()
		defer from.Close()
		b := make([]byte, 64<<10)
		for at := 0; ; {
			n, err := from.Read(b)
			if n > 0 {
				if m.change != nil {
					m.change(fromClient, at, b[:n])
				}
				at += n
				if fromClient {
					m.mu.Lock()
					m.sent = append(m.sent, b[:n]...)
					m.mu.Unlock()
				}
				if _, err := to.Write(b[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	wg.Go(func() { pass(far, near, true) })
	wg.Go(func() { pass(near, far, false) })
	wg.Wait()
}

func (m *middle) saw(b []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes.Contains(m.sent, b)
}

// ticketBytes are what must not leave a client before it knows the node.
func ticketBytes(as *rdma.Credentials) []byte {
	b, _ := as.Ticket.AppendBinary(nil)
	return b[:88]
}

func node(t testing.TB, how *tcp.TLS) *rdmatest.Host {
	n := rdmatest.StartHost(t, relayCluster, incarnations.Add(1), func(a *host.Access) (string, func()) { return serve(t, a, how) }, nil)
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	return n
}

// Each mode of a client meets each mode of a node: plain, encrypted, or refused before a ticket is sent.
func TestModesOfEncryption(t *testing.T) {
	ca := certs.New(t, "prod")
	const plain, encrypted, refused = 0, 1, 2
	for _, c := range []struct {
		client, node string
		want         int
	}{
		{tcp.TLSOff, tcp.TLSOff, plain}, {tcp.TLSOff, tcp.TLSOn, plain}, {tcp.TLSOff, tcp.TLSRequired, refused},
		{tcp.TLSOn, tcp.TLSOff, plain}, {tcp.TLSOn, tcp.TLSOn, encrypted}, {tcp.TLSOn, tcp.TLSRequired, encrypted},
		{tcp.TLSRequired, tcp.TLSOff, refused}, {tcp.TLSRequired, tcp.TLSOn, encrypted}, {tcp.TLSRequired, tcp.TLSRequired, encrypted},
	} {
		n := node(t, mode(t, ca, identity.Node, "s1", c.node))
		m := between(t, n.Addr(), nil)
		as := relayCluster.Ticket(1, rdma.ReadWrite).For(1, "s1")
		conn, err := tcp.Dialer{TLS: mode(t, ca, identity.Client, "app", c.client)}.Dial(t.Context(), m.addr, as, 0)
		if c.want == refused {
			require.ErrorIs(t, err, rdma.ErrBroken, "%v", c)
			require.ErrorIs(t, err, rdma.ErrTLS, "%v", c)
			require.ErrorContains(t, err, "--fabric-tls", "%v", c)
			require.False(t, m.saw(ticketBytes(as)), "%v", c)
			continue
		}
		require.NoError(t, err, "%v", c)
		w, err := conn.Open(t.Context(), 1, 1)
		require.NoError(t, err)
		secret := bytes.Repeat([]byte("secret! "), 64)
		var r rdma.Round
		r.Chain(&rdma.Target{Conn: conn, Window: w}).Write(0, secret)
		rdma.Do(&r)
		require.NoError(t, r.Err())
		require.Equal(t, secret, n.Bytes(1)[:len(secret)])
		require.Equal(t, c.want == plain, m.saw(ticketBytes(as)), "%v", c)
		require.Equal(t, c.want == plain, m.saw([]byte("secret! ")), "%v", c)
		require.NoError(t, conn.Close())
	}
}

// A node that requires encryption reads no plain hello.
func TestPlainHelloIsNotRead(t *testing.T) {
	n := node(t, mode(t, certs.New(t, "prod"), identity.Node, "s1", tcp.TLSRequired))
	nc, err := net.Dial("tcp", n.Addr())
	require.NoError(t, err)
	defer nc.Close()
	_, err = nc.Write(rdmatest.Hello(t, nc, relayCluster.Ticket(1, rdma.ReadWrite), 0))
	require.NoError(t, err)
	_, err = nc.Read(make([]byte, 1))
	require.Error(t, err, "no welcome")
}

// TestFalseNodesGetNoTicket: a client sends no ticket to a process that does not show the certificate of
// the node that it dials.
func TestFalseNodesGetNoTicket(t *testing.T) {
	ca, foreign := certs.New(t, "prod"), certs.New(t, "prod")
	me := mode(t, ca, identity.Client, "app", tcp.TLSRequired)
	for name, c := range map[string]struct {
		node *tcp.TLS
		want string
	}{
		"another authority": {mode(t, foreign, identity.Node, "s1", tcp.TLSOn), "unknown authority"},
		"a client as node":  {mode(t, ca, identity.Client, "s1", tcp.TLSOn), "incompatible key usage"},
		"another role":      {mode(t, ca, identity.Gateway, "s1", tcp.TLSOn), "want a certificate of role [node]"},
		"another node":      {mode(t, ca, identity.Node, "s2", tcp.TLSOn), "want spiffe://prod/node/s1"},
	} {
		m := between(t, node(t, c.node).Addr(), nil)
		as := relayCluster.Ticket(1, rdma.ReadWrite).For(1, "s1")
		_, err := tcp.Dialer{TLS: me}.Dial(t.Context(), m.addr, as, 0)
		require.ErrorIs(t, err, rdma.ErrBroken, name)
		require.ErrorContains(t, err, c.want, name)
		require.False(t, m.saw(ticketBytes(as)), name)
	}
	good := node(t, mode(t, ca, identity.Node, "s1", tcp.TLSOn))
	for name, bad := range map[string]*tcp.TLS{
		"another authority": mode(t, foreign, identity.Client, "app", tcp.TLSRequired), "a controller": mode(t, ca, identity.Controller, "c1", tcp.TLSRequired),
	} {
		_, err := tcp.Dialer{TLS: bad}.Dial(t.Context(), good.Addr(), relayCluster.Ticket(1, rdma.ReadWrite).For(1, "s1"), 0)
		require.ErrorIs(t, err, rdma.ErrBroken, name)
	}
	for _, as := range []identity.Role{identity.Client, identity.Worker, identity.Gateway, identity.Operator, identity.Node} {
		conn, err := tcp.Dialer{TLS: mode(t, ca, as, "x", tcp.TLSRequired)}.Dial(t.Context(), good.Addr(), relayCluster.Ticket(1, rdma.ReadWrite).For(1, "s1"), 0)
		require.NoError(t, err, as)
		require.NoError(t, conn.Close())
	}
}

// A middle that takes the offer of TLS out of the challenge gets no ticket of a client that requires it,
// and no lane with that of another.
func TestStrippedOffer(t *testing.T) {
	ca := certs.New(t, "prod")
	n := node(t, mode(t, ca, identity.Node, "s1", tcp.TLSOn))
	m := between(t, n.Addr(), func(fromClient bool, at int, b []byte) {
		if !fromClient && at == 0 {
			b[10] = 0
		}
	})
	as := relayCluster.Ticket(1, rdma.ReadWrite)
	_, err := tcp.Dialer{TLS: mode(t, ca, identity.Client, "app", tcp.TLSRequired)}.Dial(t.Context(), m.addr, as, 0)
	require.ErrorIs(t, err, rdma.ErrBroken)
	require.ErrorContains(t, err, "the node offers none")
	require.False(t, m.saw(ticketBytes(as)))
	_, err = tcp.Dialer{TLS: mode(t, ca, identity.Client, "app", tcp.TLSOn)}.Dial(t.Context(), m.addr, as, 0)
	require.ErrorIs(t, err, rdma.ErrTicket, "the proof is over another challenge")
}

// flip READs and WRITEs 4 KiB at an offset over a connection on which one byte is changed, and says
// whether the connection came so far.
func flip(t *testing.T, node string, me tcp.Dialer, serial uint64, off uint64, fromClient bool, at int, deadline time.Duration) (sent, received int, err error) {
	var mu sync.Mutex
	var up, down int // bytes that have passed; guarded by mu
	m := between(t, node, func(from bool, start int, b []byte) {
		mu.Lock()
		defer mu.Unlock()
		if from {
			up = start + len(b)
		} else {
			down = start + len(b)
		}
		if from == fromClient && start <= at && at < start+len(b) {
			b[at-start] ^= 4
		}
	})
	err = func() error {
		conn, err := me.Dial(t.Context(), m.addr, relayCluster.Ticket(serial, rdma.ReadWrite).For(1, "s1"), 0)
		if err != nil {
			return err
		}
		defer conn.Close()
		w, err := conn.Open(t.Context(), 1, 1)
		if err != nil {
			return err
		}
		r := rdma.Round{Deadline: clock.In(deadline)}
		got := make([]byte, 4096)
		c := r.Chain(&rdma.Target{Conn: conn, Window: w})
		c.Read(off, got)
		c.Write(off, bytes.Repeat([]byte{9}, len(got)))
		rdma.Do(&r)
		if c.Err == nil && !bytes.Equal(got, bytes.Repeat([]byte{7}, len(got))) {
			t.Errorf("byte %d: a READ has brought something else", at)
		}
		return c.Err
	}()
	mu.Lock()
	defer mu.Unlock()
	return up, down, err
}

// A byte that is changed on the way ends the connection, wherever it is. Nothing that it was part of runs.
func TestFlippedBytes(t *testing.T) {
	ca := certs.New(t, "prod")
	me := tcp.Dialer{TLS: mode(t, ca, identity.Client, "app", tcp.TLSRequired)}
	n := node(t, mode(t, ca, identity.Node, "s1", tcp.TLSRequired))
	good := bytes.Repeat([]byte{7}, 4096)
	copy(n.Bytes(1), good)
	sent, received, err := flip(t, n.Addr(), me, 1, 0, true, -1, 5*time.Minute)
	require.NoError(t, err)
	var wg sync.WaitGroup
	serials := uint64(1)
	for fromClient, length := range map[bool]int{true: sent, false: received} {
		for at := 8; at < length-64; at += 97 { // signatures differ in length by some bytes
			serials++
			serial, off := serials, 4096*serials
			copy(n.Bytes(1)[off:], good)
			wg.Go(func() {
				// A length that is changed makes both wait for the rest: the deadline ends that.
				_, _, err := flip(t, n.Addr(), me, serial, off, fromClient, at, 2*time.Second)
				switch {
				case err == nil, !errors.Is(err, rdma.ErrBroken) && (fromClient || at >= host.ChallengeBytes):
					t.Errorf("byte %d of %d, of the client %v: %v", at, length, fromClient, err)
				case fromClient && !bytes.Equal(n.Bytes(1)[off:off+4096], good):
					t.Errorf("byte %d of %d: a chain has run", at, length)
				}
			})
		}
	}
	wg.Wait()
}

// A lane that both sides fill at once does not lock up: what does not fit waits while answers are read.
func TestEncryptedBothWays(t *testing.T) {
	ca := certs.New(t, "prod")
	n := node(t, mode(t, ca, identity.Node, "s1", tcp.TLSRequired))
	to := openOne(t, tcp.Dialer{TLS: mode(t, ca, identity.Client, "app", tcp.TLSRequired)}, n.Addr(), 0)
	out, in := bytes.Repeat([]byte("0123456789abcdef"), 1<<16), make([]byte, 1<<20)
	r := rdma.Round{Deadline: clock.In(5 * time.Minute)}
	for range 8 {
		c := r.Chain(to)
		c.Write(0, out)
		c.Read(0, in)
	}
	rdma.Do(&r)
	require.NoError(t, r.Err())
	require.Equal(t, out, in)
	require.NoError(t, to.Conn.Reset(t.Context()))
	_, err := add(to)
	require.NoError(t, err)
}

func TestNewTLSRefuses(t *testing.T) {
	ca := certs.New(t, "prod")
	src := ca.Source(identity.Node, "s1")
	_, err := tcp.NewTLS("yes", src)
	require.ErrorContains(t, err, "want off, on or required")
	for _, how := range []string{tcp.TLSOn, tcp.TLSRequired} {
		_, err = tcp.NewTLS(how, nil)
		require.ErrorContains(t, err, "--tls-cert")
	}
	for how, want := range map[string]string{"": tcp.TLSOn, tcp.TLSOff: tcp.TLSOff, tcp.TLSOn: tcp.TLSOn, tcp.TLSRequired: tcp.TLSRequired} {
		got, err := tcp.NewTLS(how, src)
		require.NoError(t, err)
		require.Equal(t, want, got.Mode())
	}
	got, err := tcp.NewTLS("", nil)
	require.NoError(t, err)
	require.Nil(t, got)
}

// A port of TLS that is not the fabric's is no node, even with a node's certificate.
func TestOtherPortsOfTLS(t *testing.T) {
	ca := certs.New(t, "prod")
	n := node(t, mode(t, ca, identity.Node, "s1", tcp.TLSOn))
	nc, err := net.Dial("tcp", n.Addr())
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, nc.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.ReadFull(nc, make([]byte, host.ChallengeBytes))
	require.NoError(t, err)
	require.Error(t, tls.Client(nc, ca.Source(identity.Client, "app").Client(identity.Node)).Handshake(), "without the fabric's protocol")
}

package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// withheld passes connections on to a node. The third message of a client goes on when gate is closed.
func withheld(t *testing.T, node string, gate <-chan struct{}, waiting chan<- struct{}) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", node)
			if err != nil {
				in.Close()
				continue
			}
			go func() { io.Copy(in, out); in.Close() }()
			go func() {
				defer out.Close()
				b := make([]byte, 64<<10)
				for frames := 0; ; frames++ {
					n, err := in.Read(b)
					if err != nil {
						return
					}
					if frames == 2 { // behind the hello and the open
						waiting <- struct{}{}
						<-gate
					}
					if _, err := out.Write(b[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// TestHazard190_OtherAddressEndsTheOldConnection: a lane posts an atomic over one address, gets no answer and goes on over another. The atomic, which
// the network delivers then, does not run: the welcome has said that the old connection is dead, wherever it came in.
func TestHazard190_OtherAddressEndsTheOldConnection(t *testing.T) {
	a, first := serve(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	second := NewServer(a, nil) // stricter than a node, which has one server for all of its addresses
	served := make(chan error, 1)
	go func() { served <- second.Serve(l) }()
	t.Cleanup(func() { second.Close(); require.NoError(t, <-served) })

	gate, waiting := make(chan struct{}), make(chan struct{}, 1)
	old := dial(t, withheld(t, first, gate, waiting), 1, 0)
	var r rdma.Round
	r.Chain(old).FetchAdd(0, 1)
	old.Conn.Post(r.At(0))
	<-waiting // the network has it

	now := dial(t, l.Addr().String(), 1, 0)
	close(gate)
	// The old connection has ended at the node: it answers nothing any more.
	old.Conn.Wait(r.At(0), clock.In(time.Minute))
	require.ErrorIs(t, r.At(0).Err, rdma.ErrBroken)
	ch := do(now, clock.In(time.Minute), func(c *rdma.Chain) { c.FetchAdd(0, 0) })
	require.NoError(t, ch.Err)
	require.Zero(t, ch.Verbs[0].Old, "the atomic of the old connection has run")
}

// TestDialFrom: a connection comes from the address of its rail, and a host that has not this address makes none.
func TestDialFrom(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	seen := make(chan net.Addr, 1)
	_, addr := serve(t, &noted{l, seen})
	c, err := Dialer{From: netip.MustParseAddr("127.0.0.9"), Redundant: true}.Dial(t.Context(), addr, ticket(1), 0)
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, "127.0.0.9", (<-seen).(*net.TCPAddr).IP.String())
	_, err = Dialer{From: netip.MustParseAddr("192.0.2.1")}.Dial(context.Background(), addr, ticket(1), 0)
	require.True(t, errors.Is(err, rdma.ErrBroken), "%v", err)
}

// noted is a listener that tells where its connections come from.
type noted struct {
	net.Listener
	seen chan<- net.Addr
}

func (n *noted) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	if err == nil {
		n.seen <- c.RemoteAddr()
	}
	return c, err
}

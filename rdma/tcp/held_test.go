package tcp

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

const heldProcedure = 100

// serveHeld starts a node with a procedure that is held until release is called, and tells of each call that is.
func serveHeld(t *testing.T, left func(serial uint64)) (addr string, held chan struct{}, release func()) {
	held = make(chan struct{}, 1)
	ready, released := make(chan struct{}, 1), atomic.Bool{}
	_, addr = serveTLS(t, nil, nil, func(a *host.Access) {
		a.OnLeft(left)
		a.Handle(heldProcedure, func(_ *rdma.Ticket, request, answer []byte) (int, error) {
			if released.Load() {
				return copy(answer, request), nil
			}
			select {
			case held <- struct{}{}:
			default:
			}
			return 0, &host.Held{Ready: ready, Until: clock.In(time.Millisecond)} // is asked again and again
		})
	})
	return addr, held, func() {
		released.Store(true)
		ready <- struct{}{}
	}
}

// followed is a connection on which another chain follows each that is posted, before that is answered.
type followed struct {
	rdma.Conn
	next func() *rdma.Chain
	last *rdma.Chain
}

func (f *followed) Post(c *rdma.Chain) {
	f.Conn.Post(c)
	if f.next != nil {
		f.last = f.next()
		f.Conn.Post(f.last)
	}
}

// mailbox opens a mailbox over a connection.
func mailbox(t *testing.T, conn rdma.Conn) *msg.Client {
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	t.Cleanup(func() { arena.Close() })
	c, err := msg.Open(t.Context(), conn, arena)
	require.NoError(t, err)
	c.Once = true
	return c
}

// A frame that comes while a call is held is executed behind it, and not lost.
func TestAFrameBehindAHeldCall(t *testing.T) {
	addr, held, release := serveHeld(t, nil)
	to := dial(t, addr, 1, 0)
	f := &followed{Conn: to.Conn}
	c := mailbox(t, f)
	var rounds []*rdma.Round
	f.next = func() *rdma.Chain {
		f.next = nil // behind the call, not behind the looks for its answer
		<-held
		r := &rdma.Round{}
		rounds = append(rounds, r)
		chain := r.Chain(to)
		chain.FetchAdd(64, 5)
		go func() {
			for range 20 { // in which the node reads ahead
				<-held
			}
			release()
		}()
		return chain
	}
	answer := make([]byte, 16)
	n, err := c.Call(t.Context(), heldProcedure, []byte("held"), answer)
	require.NoError(t, err)
	require.Equal(t, "held", string(answer[:n]))
	to.Conn.Wait(f.last, 0)
	require.NoError(t, f.last.Err)
	require.EqualValues(t, 5, do(to, 0, func(c *rdma.Chain) { c.FetchAdd(64, 1) }).Verbs[0].Old)
	require.Len(t, rounds, 1)
}

// The node notices that the client of a held call is gone: its lane ends.
func TestTheClientOfAHeldCallDies(t *testing.T) {
	left := make(chan uint64, 1)
	addr, held, _ := serveHeld(t, func(serial uint64) { left <- serial })
	conn, err := Dialer{}.Dial(context.Background(), addr, ticket(3), 0)
	require.NoError(t, err)
	c := mailbox(t, conn)
	called := make(chan error, 1)
	go func() {
		_, err := c.Call(context.Background(), heldProcedure, nil, nil)
		called <- err
	}()
	<-held
	require.NoError(t, conn.Close())
	require.ErrorIs(t, <-called, msg.ErrUnknown)
	require.EqualValues(t, 3, <-left)
}

// A request that is too long to be held is refused.
func TestALongRequestIsNotHeld(t *testing.T) {
	addr, _, _ := serveHeld(t, nil)
	conn, err := Dialer{}.Dial(context.Background(), addr, ticket(3), 0)
	require.NoError(t, err)
	defer conn.Close()
	c := mailbox(t, conn)
	_, err = c.Call(t.Context(), heldProcedure, make([]byte, msg.MaxHeld+1), nil)
	var refusal *msg.Refusal
	require.ErrorAs(t, err, &refusal)
	require.Contains(t, refusal.Text, "too long")
}

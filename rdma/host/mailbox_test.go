package host

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

var mailKey = keyring.NewSigner([32]byte{7})

func mailAccess(t *testing.T, limits Limits) *Access {
	a := New([16]byte{1}, keyring.NewRing(mailKey.Public()), 1, 1, limits)
	t.Cleanup(func() { require.NoError(t, a.Close(context.Background())) })
	return a
}

func mailLane(t *testing.T, a *Access, serial uint64, number uint32) *Lane {
	as := rdma.Issue(mailKey, rdma.Ticket{Cluster: [16]byte{1}, Session: uint32(serial), Serial: serial, Rights: rdma.ReadWrite})
	challenge := a.Challenge()
	hello, err := NewHello(as, number, &challenge, Binding{})
	require.NoError(t, err)
	l, err := a.Admit(t.Context(), &hello, &challenge, Entry{Provider: "inproc"})
	require.NoError(t, err)
	return l
}

// laneConn is a connection whose chains run in the lane.
type laneConn struct{ l *Lane }

func (c laneConn) Post(ch *rdma.Chain) {
	ch.Done, ch.Err = c.l.Run(ch.To.Window.Slot, ch.To.Window.Key, ch.Verbs)
}
func (laneConn) Wait(*rdma.Chain, int64)     {}
func (laneConn) Reset(context.Context) error { return rdma.ErrBroken }
func (laneConn) Provider() string            { return "inproc" }
func (laneConn) Close() error                { return nil }
func (c laneConn) Open(_ context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	w, _, err := c.l.Open(region, epoch, 0)
	return w, err
}

// A node has so many mailboxes: those of lanes that are here stay, one whose lane has left makes room.
func TestMailboxesAreLimited(t *testing.T) {
	a := mailAccess(t, Limits{Mailboxes: 2})
	first, second, third := mailLane(t, a, 1, 0), mailLane(t, a, 2, 0), mailLane(t, a, 3, 0)
	_, _, err := first.Open(rdma.Mailbox, 5, 0)
	require.NoError(t, err)
	w, _, err := second.Open(rdma.Mailbox, 5, 0)
	require.NoError(t, err)
	_, _, err = third.Open(rdma.Mailbox, 5, 0)
	require.ErrorIs(t, err, rdma.ErrFull)
	second.Leave()
	_, _, err = third.Open(rdma.Mailbox, 5, 0)
	require.NoError(t, err)
	require.Len(t, a.mailboxes, 2)
	back := mailLane(t, a, 2, 0)
	_, _, err = back.Open(rdma.Mailbox, 5, 0)
	require.ErrorIs(t, err, rdma.ErrFull, "its room is another's")
	first.Leave()
	again, _, err := back.Open(rdma.Mailbox, 5, 0)
	require.NoError(t, err)
	require.NotEqual(t, w.Key, again.Key, "what was executed is forgotten: what is sent again must be refused")
	require.NoError(t, a.Fence(t.Context(), 3))
	require.Len(t, a.mailboxes, 1)
	require.NoError(t, a.EndBelow(t.Context(), 10, nil))
	require.Empty(t, a.mailboxes)
}

// A lane that comes back under its nonce has its mailbox with the same key; another nonce is a new one.
func TestMailboxOutlivesItsConnection(t *testing.T) {
	a := mailAccess(t, Limits{})
	l := mailLane(t, a, 1, 0)
	w, _, err := l.Open(rdma.Mailbox, 5, 3)
	require.NoError(t, err)
	l.Leave()
	_, _, err = l.Open(rdma.Mailbox, 5, 3)
	require.ErrorIs(t, err, rdma.ErrBroken, "a lane that has left")
	l = mailLane(t, a, 1, 0)
	again, _, err := l.Open(rdma.Mailbox, 5, 3)
	require.NoError(t, err)
	require.Equal(t, w, again)
	other, _, err := l.Open(rdma.Mailbox, 6, 3)
	require.NoError(t, err)
	require.NotEqual(t, w.Key, other.Key)
	_, err = l.Run(w.Slot, w.Key, []rdma.Verb{{Op: rdma.Read, Buf: make([]byte, 8)}})
	require.ErrorIs(t, err, rdma.ErrKey)
	_, _, err = l.Open(rdma.Mailbox, 6, 4)
	require.ErrorIs(t, err, rdma.ErrLimit, "one slot")
}

// farConn is a connection whose chains do not run in the process that serves the mailbox.
type farConn struct{ laneConn }

func (c farConn) Post(ch *rdma.Chain) {
	ch.Done, ch.Err = c.l.Runner.Run(ch.To.Window.Slot, ch.To.Window.Key, ch.Verbs)
}

// A lane that opens its mailbox, in another goroutine than the one that serves it, waits for the procedure that runs: what a former client of
// the lane has called does not run on beside the new mailbox.
func TestAnOpenWaitsForTheProcedure(t *testing.T) {
	for _, nonce := range []uint64{5, 6} { // the mailbox that the lane has had, and a new one
		a := mailAccess(t, Limits{})
		entered, opened := make(chan struct{}), make(chan error, 1)
		a.Handle(7, func(*rdma.Ticket, []byte, []byte) (int, error) {
			close(entered)
			for until := time.Now().Add(20 * time.Millisecond); len(opened) == 0 && time.Now().Before(until); {
				runtime.Gosched()
			}
			if len(opened) > 0 {
				t.Error("the mailbox was opened while a procedure ran")
			}
			return 0, nil
		})
		l := mailLane(t, a, 1, 0)
		arena, err := rdma.NewArena(msg.BufferBytes)
		require.NoError(t, err)
		defer arena.Close()
		c, err := msg.Open(t.Context(), farConn{laneConn{l}}, arena)
		require.NoError(t, err)
		if nonce == 5 {
			l.messages.box.nonce = nonce
		}
		go func() {
			<-entered
			_, _, err := l.Open(rdma.Mailbox, nonce, 0)
			opened <- err
		}()
		_, err = c.Send(t.Context(), 7, nil)
		require.NoError(t, err)
		served, err := l.Serve()
		require.NoError(t, err)
		require.Equal(t, 1, served)
		require.NoError(t, <-opened)
		_, err = l.Serve()
		require.NoError(t, err)
	}
}

// A fence returns when the procedure that the session has called has ended, and no other runs then.
func TestAFenceWaitsForTheProcedure(t *testing.T) {
	a := mailAccess(t, Limits{})
	entered, leave := make(chan struct{}), make(chan struct{})
	calls := 0
	a.Handle(7, func(from *rdma.Ticket, _, _ []byte) (int, error) {
		calls++
		close(entered)
		<-leave
		return 0, nil
	})
	l := mailLane(t, a, 1, 0)
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	c, err := msg.Open(t.Context(), laneConn{l}, arena)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() {
		_, err := c.Call(t.Context(), 7, nil, nil)
		served <- err
	}()
	<-entered
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, a.Fence(ended, 1), context.Canceled, "the procedure is still running")
	close(leave)
	require.NoError(t, a.Fence(t.Context(), 1))
	require.ErrorIs(t, <-served, msg.ErrUnknown, "it was executed, and the answer is out of reach")
	require.Equal(t, 1, calls)
	_, err = l.Serve()
	require.ErrorIs(t, err, rdma.ErrRevoked)
}

// No procedure starts once a fence has shut the gate, also of requests that came together with the one that runs. What has not run is
// given up when the mailbox is opened again.
func TestNoProcedureStartsAfterAFence(t *testing.T) {
	a := mailAccess(t, Limits{})
	entered, leave := make(chan struct{}), make(chan struct{})
	calls := 0
	a.Handle(7, func(*rdma.Ticket, []byte, []byte) (int, error) {
		if calls++; calls == 1 {
			close(entered)
			<-leave
		}
		return 0, nil
	})
	l := mailLane(t, a, 1, 0)
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	c, err := msg.Open(t.Context(), farConn{laneConn{l}}, arena)
	require.NoError(t, err)
	for range 2 {
		_, err = c.Send(t.Context(), 7, nil)
		require.NoError(t, err)
	}
	served := make(chan error, 1)
	go func() {
		_, err := l.Serve()
		served <- err
	}()
	<-entered
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, a.Fence(ended, 1), context.Canceled, "the first procedure is still running")
	close(leave)
	require.NoError(t, <-served)
	require.NoError(t, a.Fence(t.Context(), 1))
	require.Equal(t, 1, calls)
}

// The end of a region's epoch does not wait for the procedures of lanes that have the region open, a fence does.
func TestACloseLeavesProcedures(t *testing.T) {
	a := mailAccess(t, Limits{})
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, memory(t, 1<<20)))
	entered, leave := make(chan struct{}), make(chan struct{})
	a.Handle(7, func(*rdma.Ticket, []byte, []byte) (int, error) {
		close(entered)
		<-leave
		return 0, nil
	})
	l := mailLane(t, a, 1, 0)
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	c, err := msg.Open(t.Context(), laneConn{l}, arena)
	require.NoError(t, err)
	w, _, err := l.Open(1, 1, 1)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() {
		_, err := c.Call(t.Context(), 7, nil, nil)
		served <- err
	}()
	<-entered
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // it ends a test that would hang
	defer cancel()
	closed := a.CloseRegion(ctx, 1, 1)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	fenced := a.Fence(ended, 1)
	close(leave)
	require.NoError(t, closed, "the procedure was waited for")
	require.ErrorIs(t, fenced, context.Canceled, "the procedure is still running")
	<-served
	require.NoError(t, a.Fence(t.Context(), 1))
	_, err = l.Run(w.Slot, w.Key, []rdma.Verb{{Op: rdma.FetchAdd, New: 1}})
	require.ErrorIs(t, err, rdma.ErrRefused)
}

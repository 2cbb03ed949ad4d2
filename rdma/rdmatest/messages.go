package rdmatest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

// testMessages is the group of what messages promise over each provider.
func testMessages(t *testing.T, p Provider) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Provider)
	}{
		{"Calls", testCalls},
		{"AtMostOnce", testOnce},
		{"Busy", testBusy},
		{"Answers", testAnswers},
		{"ReopenWaits", testReopenWaits},
		{"TestSecurity08_Fence", testMessagesFenced},
		{"TestSecurity09_ReadOnly", testMessagesReadOnly},
		{"TestSecurity03_AnotherMailbox", testMailboxKeys},
		{"TestSecurity04_Offence", testMessagesOffence},
		{"NoAllocations", testMessagesAllocations},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, p) })
	}
}

// Procedures of the tests.
const (
	countProcedure  = 100 // counts, and answers the number that the request asks for in its first 8 bytes and the count
	refuseProcedure = 101
	slowProcedure   = 102 // see testReopenWaits
)

// messenger is a node with the procedures of the tests.
type messenger struct {
	*bench
	executed [1 << 16]atomic.Uint32 // by the number in the request
}

func startMessenger(t *testing.T, p Provider, c Cluster) *messenger {
	c = contractCluster(c)
	m := &messenger{bench: &bench{TB: t, dialer: p.Dialer, Node: p.Start(t, c), Cluster: c}}
	h := m.Node
	h.Handle(countProcedure, func(_ *rdma.Ticket, request, answer []byte) (int, error) {
		id := binary.LittleEndian.Uint64(request)
		binary.LittleEndian.PutUint64(answer, id)
		binary.LittleEndian.PutUint64(answer[8:], uint64(m.executed[id].Add(1)))
		return 16, nil
	})
	h.Handle(refuseProcedure, func(from *rdma.Ticket, request, _ []byte) (int, error) {
		return 0, errors.New("session " + string(rune('0'+from.Session)) + " may not " + string(request))
	})
	return m
}

func buffers(t testing.TB) rdma.Buffers {
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	t.Cleanup(func() { arena.Close() })
	return arena
}

// open dials a lane and opens its mailbox.
func (m *messenger) open(as *rdma.Credentials, lane uint32) (*msg.Client, rdma.Conn) {
	conn, err := m.dialer.Dial(m.Context(), m.Addr(), as, lane)
	require.NoError(m, err)
	m.Cleanup(func() { conn.Close() })
	c, err := msg.Open(m.Context(), conn, buffers(m))
	require.NoError(m, err)
	return c, conn
}

func number(id uint64) []byte { return binary.LittleEndian.AppendUint64(nil, id) }

// testCalls: what is called, with every length.
func testCalls(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	c, _ := m.open(m.Ticket(3, rdma.ReadWrite), 0)
	answer := make([]byte, msg.MaxPayload)
	for _, n := range []int{0, 1, 7, 8, 9, 64, 65, 1000, 4000, msg.MaxPayload - 1, msg.MaxPayload} {
		want := pattern(n, byte(n))
		got, err := c.Call(t.Context(), msg.Echo, want, answer)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, answer[:got]), "%d bytes", n)
	}
	_, err := c.Call(t.Context(), msg.Echo, make([]byte, msg.MaxPayload+1), answer)
	require.ErrorIs(t, err, msg.ErrTooLong)
	_, err = c.Call(t.Context(), msg.Echo, make([]byte, 100), answer[:99])
	require.ErrorIs(t, err, msg.ErrTooLong)
	_, err = c.Call(t.Context(), 65535, []byte("x"), answer)
	require.ErrorIs(t, err, msg.ErrProcedure)
	_, err = c.Call(t.Context(), refuseProcedure, []byte("climb"), answer[:4])
	var refused *msg.Refusal
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "session 3 may not climb", refused.Text)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := c.Call(ended, countProcedure, number(1), answer); err != nil { // tcp and inproc answer at once
		require.ErrorIs(t, err, msg.ErrUnknown)
	} else {
		require.Equal(t, 16, n)
	}
	n, err := c.Call(t.Context(), msg.Echo, []byte("after a call that was given up"), answer)
	require.NoError(t, err)
	require.Equal(t, "after a call that was given up", string(answer[:n]))
}

// testOnce: a connection that is reset at any time, and calls that are sent again each time.
func testOnce(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	c, _ := m.open(m.Ticket(1, rdma.ReadWrite), 0)
	answer := make([]byte, 64)
	id := uint64(0)
	for round := range 40 {
		calls := map[msg.Call]uint64{}
		for range round%msg.Slots + 1 {
			call, err := c.Send(t.Context(), countProcedure, number(id))
			require.NoError(t, err)
			calls[call] = id
			id++
		}
		for range round % 3 {
			require.NoError(t, c.Reset(t.Context()))
		}
		for call, id := range calls {
			n, err := c.Receive(t.Context(), call, answer)
			require.NoError(t, err)
			require.Equal(t, append(number(id), number(1)...), answer[:n])
		}
	}
	for i := range id {
		require.Equal(t, uint32(1), m.executed[i].Load(), "call %d", i)
	}
	require.NotZero(t, c.Resets)
}

// testBusy: as many calls as slots are under way, and each answer makes room.
func testBusy(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	c, _ := m.open(m.Ticket(1, rdma.ReadWrite), 0)
	var calls []msg.Call
	for i := range uint64(msg.Slots) {
		call, err := c.Send(t.Context(), countProcedure, number(i))
		require.NoError(t, err)
		calls = append(calls, call)
	}
	_, err := c.Send(t.Context(), countProcedure, number(100))
	require.ErrorIs(t, err, msg.ErrBusy)
	answer := make([]byte, 16)
	for i := range calls {
		at := (i + 5) % len(calls)
		_, err := c.Receive(t.Context(), calls[at], answer)
		require.NoError(t, err)
		require.Equal(t, uint64(at), binary.LittleEndian.Uint64(answer))
		_, err = c.Receive(t.Context(), calls[at], answer)
		require.ErrorIs(t, err, msg.ErrUnknown, "an answer is received once")
		_, err = c.Call(t.Context(), countProcedure, number(uint64(200+i)), answer)
		require.NoError(t, err)
	}
	require.Zero(t, m.executed[100].Load())
}

// testAnswers: a lane that is dialled again has a mailbox of its own, and no answer of the earlier one in it.
func testAnswers(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	as := m.Ticket(1, rdma.ReadWrite)
	answer := make([]byte, 16)
	for i := range uint64(5) {
		c, conn := m.open(as, 0)
		for k := range uint64(20) {
			_, err := c.Send(t.Context(), countProcedure, number(100*i+k)) // never received
			if k >= msg.Slots {
				require.ErrorIs(t, err, msg.ErrBusy)
			} else {
				require.NoError(t, err)
			}
		}
		require.NoError(t, c.Reopen(t.Context()))
		for k := range uint64(20) {
			_, err := c.Call(t.Context(), countProcedure, number(1000+100*i+k), answer)
			require.NoError(t, err)
			require.Equal(t, append(number(1000+100*i+k), number(1)...), answer)
		}
		if i%2 == 0 {
			require.NoError(t, conn.Close())
		}
	}
}

// testReopenWaits: no call of an earlier mailbox runs when a lane has opened another one.
func testReopenWaits(t *testing.T, p Provider) {
	c := contractCluster(Cluster{})
	m := &messenger{bench: &bench{TB: t, dialer: p.Dialer, Node: p.Start(t, c), Cluster: c}}
	var running, reopened atomic.Bool
	m.Handle(slowProcedure, func(*rdma.Ticket, []byte, []byte) (int, error) {
		running.Store(true)
		// Time enough for a Reopen that does not wait.
		for until := time.Now().Add(50 * time.Millisecond); !reopened.Load() && time.Now().Before(until); {
			runtime.Gosched()
		}
		if reopened.Load() {
			t.Error("the mailbox was opened while a procedure ran")
		}
		running.Store(false)
		return 0, nil
	})
	client, _ := m.open(m.Ticket(1, rdma.ReadWrite), 0)
	for range 3 {
		reopened.Store(false)
		_, err := client.Send(t.Context(), slowProcedure, nil) // over shm and verbs it runs in another goroutine
		require.NoError(t, err)
		require.NoError(t, client.Reopen(t.Context()))
		require.False(t, running.Load())
		reopened.Store(true)
		answer := make([]byte, 16)
		n, err := client.Call(t.Context(), msg.Echo, []byte("another mailbox"), answer)
		require.NoError(t, err)
		require.Equal(t, "another mailbox", string(answer[:n]))
	}
}

// testMessagesFenced: when a fence has returned, no procedure of the session runs.
func testMessagesFenced(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	other, _ := m.open(m.Ticket(2, rdma.ReadWrite), 0)
	c, _ := m.open(m.Ticket(1, rdma.ReadWrite), 0)
	ended := make(chan error, 1)
	go func() {
		answer := make([]byte, 16)
		for {
			if _, err := c.Call(context.Background(), countProcedure, number(1), answer); err != nil {
				ended <- err
				return
			}
		}
	}()
	eventually(t, "calls", func() bool { return m.executed[1].Load() > 100 })
	require.NoError(t, m.Fence(t.Context(), 1))
	after := m.executed[1].Load()
	answer := make([]byte, 16)
	for range 100 {
		_, err := other.Call(t.Context(), countProcedure, number(2), answer)
		require.NoError(t, err)
	}
	err := <-ended
	require.True(t, errors.Is(err, rdma.ErrRevoked), "%v", err)
	require.Equal(t, after, m.executed[1].Load())
	require.Error(t, c.Reset(t.Context()))
	require.Error(t, c.Reopen(t.Context()))
	require.Equal(t, uint32(100), m.executed[2].Load())
}

func testMessagesReadOnly(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	c, _ := m.open(m.Ticket(1, rdma.ReadOnly), 0)
	_, err := c.Call(t.Context(), countProcedure, number(1), make([]byte, 16))
	require.ErrorIs(t, err, rdma.ErrReadOnly)
	require.NotErrorIs(t, err, msg.ErrUnknown, "it was not executed")
	require.Zero(t, m.executed[1].Load())
}

// testMailboxKeys: a session's mailbox is no other's, nor another lane's.
func testMailboxKeys(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	open := func(serial uint64, lane uint32) *rdma.Target {
		conn, err := m.dialer.Dial(t.Context(), m.Addr(), m.Ticket(serial, rdma.ReadWrite), lane)
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		w, err := conn.Open(t.Context(), rdma.Mailbox, 77)
		require.NoError(t, err)
		return &rdma.Target{Conn: conn, Window: w}
	}
	own := open(1, 0)
	for _, other := range []*rdma.Target{open(2, 0), open(1, 1)} {
		stolen := *other
		stolen.Window.Key = own.Window.Key
		require.NotEqual(t, own.Window.Key, other.Window.Key)
		require.ErrorIs(t, one(&stolen, func(c *rdma.Chain) { c.Write(4096, make([]byte, 64)) }).Err, rdma.ErrKey)
		write(t, other, 8192, pattern(64, 1))
	}
	require.Equal(t, make([]byte, 64), read(t, own, 8192, 64))
	require.ErrorIs(t, one(own, func(c *rdma.Chain) { c.Write(msg.MailboxBytes-8, make([]byte, 16)) }).Err, rdma.ErrBounds)
}

// testMessagesOffence: what no client writes ends the lane, and nobody else's.
func testMessagesOffence(t *testing.T, p Provider) {
	m := startMessenger(t, p, Cluster{})
	as := m.Ticket(1, rdma.ReadWrite)
	other, _ := m.open(m.Ticket(2, rdma.ReadWrite), 0)
	conn, err := m.dialer.Dial(t.Context(), m.Addr(), as, 0)
	require.NoError(t, err)
	defer conn.Close()
	w, err := conn.Open(t.Context(), rdma.Mailbox, 77)
	require.NoError(t, err)
	to := &rdma.Target{Conn: conn, Window: w}
	eventually(t, "the end of the lane", func() bool {
		c := one(to, func(c *rdma.Chain) { c.Write(4096+4088, number(77<<40|16)) })
		if waker, ok := conn.(rdma.Waker); ok && c.Err == nil {
			_ = waker.Wake(&w)
		}
		return c.Err != nil
	})
	answer := make([]byte, 16)
	_, err = other.Call(t.Context(), countProcedure, number(1), answer)
	require.NoError(t, err)
}

// testMessagesAllocations: a call allocates nothing.
func testMessagesAllocations(t *testing.T, p Provider) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	m := startMessenger(t, p, Cluster{})
	c, _ := m.open(m.Ticket(1, rdma.ReadWrite), 0)
	request, answer := pattern(128, 1), make([]byte, 128)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	call := func() {
		if n, err := c.Call(ctx, msg.Echo, request, answer); err != nil || n != len(request) {
			t.Error(n, err)
		}
	}
	for range 20 {
		call()
	}
	require.Less(t, testing.AllocsPerRun(200, call), p.Garbage+1)
}

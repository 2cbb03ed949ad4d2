package msg_test

import (
	"context"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

// still is a connection to a mailbox whose node executes verbs, and looks into the mailbox when the test says so.
type still struct {
	*words
	server *msg.Server
	woken  int
	asleep func() // called once, when the node has told that it sleeps
}

// Set is the node's store.
func (s *still) Set(off, word uint64) {
	s.words.Set(off, word)
	if f := s.asleep; f != nil && off == 64 && word != 0 {
		s.asleep = nil
		f()
	}
}

func (s *still) Open(_ context.Context, _ uint32, nonce uint64) (rdma.Window, error) {
	s.server = msg.NewServer(s, nonce)
	s.server.Sleep(false)
	return rdma.Window{Region: rdma.Mailbox, Key: 1, Bytes: msg.MailboxBytes}, nil
}

func (s *still) Post(c *rdma.Chain) {
	for i := range c.Verbs {
		if v := &c.Verbs[i]; v.Op == rdma.Write {
			s.Store(v.Off, v.Buf)
		} else {
			s.Load(v.Off, v.Buf)
		}
	}
	c.Done, c.Err = len(c.Verbs), nil
}

func (s *still) Wait(*rdma.Chain, int64)     {}
func (s *still) Provider() string            { return "still" }
func (s *still) Close() error                { return nil }
func (s *still) Reset(context.Context) error { s.server.Resume(); s.server.Sleep(false); return nil }
func (s *still) Wake(*rdma.Window) error     { s.woken++; return nil }

// A client wakes a node once in each sleep: over verbs the node has a receive for one WRITE with immediate data until it has looked.
// Behind a Reset it wakes the node again, since what was to wake it has ended with the connection.
func TestWokenOnceInASleep(t *testing.T) {
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	s := &still{words: newWords()}
	c, err := msg.Open(t.Context(), s, arena)
	require.NoError(t, err)
	send := func() msg.Call {
		call, err := c.Send(t.Context(), msg.Echo, []byte("x"))
		require.NoError(t, err)
		return call
	}
	first := send()
	send()
	send()
	require.Equal(t, 1, s.woken, "the node sleeps on")
	s.server.Wake()
	_, err = s.server.Serve(func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }, nil)
	require.NoError(t, err)
	_, err = c.Receive(t.Context(), first, make([]byte, 1))
	require.NoError(t, err)
	send()
	require.Equal(t, 1, s.woken, "the node is awake")
	require.False(t, s.server.Sleep(false), "a request has come")
	_, err = s.server.Serve(func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }, nil)
	require.NoError(t, err)
	require.True(t, s.server.Sleep(false))
	send()
	require.Equal(t, 2, s.woken, "another sleep")

	s.server.Wake()
	serve := func() {
		_, err = s.server.Serve(func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }, nil)
		require.NoError(t, err)
	}
	serve()
	s.asleep = func() { send() }
	require.False(t, s.server.Sleep(false), "a request has come, and its client has seen the node asleep")
	require.Equal(t, 3, s.woken)
	serve()
	require.True(t, s.server.Sleep(false))
	send()
	require.Equal(t, 3, s.woken, "the node has yet to take note of that")
	s.server.Wake()
	serve()
	require.True(t, s.server.Sleep(false))
	send()
	require.Equal(t, 4, s.woken)
	require.NoError(t, c.Reset(t.Context()))
	require.Equal(t, 5, s.woken, "what was to wake the node may be lost")
}

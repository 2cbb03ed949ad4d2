package host

import (
	"context"
	"encoding/binary"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/futex"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

// sleepy is a node's end of a mailbox whose client executes its verbs in another process, as over shm.
type sleepy struct {
	*Lane
	bell   *Doorbell
	served chan error // why serving has ended
}

func serveSleepy(t *testing.T, a *Access, longest time.Duration) *sleepy {
	if !futex.Supported() {
		t.Skip("threads sleep on two words since Linux 5.16, and where a sandbox lets them")
	}
	processors := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(max(2, processors)) // on a single one no thread may sleep
	t.Cleanup(func() { runtime.GOMAXPROCS(processors) })
	s := &sleepy{Lane: mailLane(t, a, 1, 0), bell: NewDoorbell(), served: make(chan error, 1)}
	s.bell.longest = longest
	return s
}

// start begins to serve.
func (s *sleepy) start() { go func() { s.served <- s.ServeMailbox(time.Microsecond, s.bell) }() }

// asleep waits until the client is told that the node sleeps, in a thread or without one.
func (s *sleepy) asleep(t *testing.T, inThread bool) {
	word := make([]byte, 8)
	m := &s.messages
	for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
		_, err := s.Runner.Run(m.slot, m.box.key, []rdma.Verb{{Op: rdma.Read, Off: 64, Buf: word}})
		require.NoError(t, err)
		if n := binary.LittleEndian.Uint64(word); n != 0 && n>>63 == 1 == inThread {
			return
		}
		require.True(t, time.Now().Before(end), "the node does not sleep like that")
	}
}

// earlier is the connection of a client that knows no sleeps in threads.
type earlier struct {
	farConn
	s *sleepy
}

func (c earlier) Wake(*rdma.Window) error { c.s.bell.Ring(); return nil }
func (c earlier) Open(_ context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	c.l.process = &Process{fd: -1} // so that the lane counts as one of another process
	w, _, err := c.l.Open(region, epoch, 0)
	c.l.process = nil
	return w, err
}

// present is that of one that does.
type present struct{ earlier }

func (c present) Ring(w *rdma.Window, off uint64) { c.l.WakeAt(w.Slot, off) }
func (c present) Sleep(w *rdma.Window, off uint64, seen uint32, longest time.Duration) bool {
	c.l.SleepAt(w.Slot, off, seen, longest)
	return true
}

// Clients of this version and of earlier ones wake a node that sleeps in a thread, and one whose time to do so is up.
func TestNodeThatSleepsIsWoken(t *testing.T) {
	for _, longest := range []time.Duration{time.Hour, time.Nanosecond} {
		for _, name := range []string{"present", "earlier"} {
			a := mailAccess(t, Limits{})
			s := serveSleepy(t, a, longest)
			var conn rdma.Conn = earlier{farConn{laneConn{s.Lane}}, s}
			if name == "present" {
				conn = present{earlier{farConn{laneConn{s.Lane}}, s}}
			}
			arena, err := rdma.NewArena(msg.BufferBytes)
			require.NoError(t, err)
			defer arena.Close()
			c, err := msg.Open(t.Context(), conn, arena)
			require.NoError(t, err)
			s.start()
			answer := make([]byte, 16)
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				n, err := c.Call(ctx, msg.Echo, []byte("are you there"), answer)
				cancel()
				require.NoError(t, err)
				require.Equal(t, "are you there", string(answer[:n]))
				s.asleep(t, longest == time.Hour)
			}
			s.bell.End()
			require.NoError(t, <-s.served)
		}
	}
}

// The end of a lane, and a fence, wait for no thread that sleeps. The memory of the mailbox may be gone before the thread is.
func TestHazard317_EndsOfSleepsInThreads(t *testing.T) {
	for _, fence := range []bool{false, true} {
		a := mailAccess(t, Limits{})
		s := serveSleepy(t, a, time.Hour)
		arena, err := rdma.NewArena(msg.BufferBytes)
		require.NoError(t, err)
		defer arena.Close()
		c, err := msg.Open(t.Context(), present{earlier{farConn{laneConn{s.Lane}}, s}}, arena)
		require.NoError(t, err)
		s.start()
		_, err = c.Call(t.Context(), msg.Echo, nil, nil)
		require.NoError(t, err)
		s.asleep(t, true)
		if fence {
			require.NoError(t, a.Fence(t.Context(), 1))
			require.Empty(t, a.mailboxes, "its memory is unmapped")
		}
		s.bell.End()
		if err := <-s.served; err != nil {
			require.True(t, fence && errors.Is(err, rdma.ErrRevoked), "%v", err)
		}
	}
}

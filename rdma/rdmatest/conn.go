package rdmatest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

// testReset: hazard 37: when Reset has returned, nothing posted before can run,
// and windows are as they were.
func testReset(t *testing.T, p Provider) {
	b := setup(t, p)
	require.NoError(t, b.OpenRegion(t.Context(), 2, 5))
	require.NoError(t, b.OpenRegion(t.Context(), 3, 1))
	to := b.lane(1, 0)
	var targets [3]*rdma.Target
	targets[0] = to
	for i, epoch := range []uint64{5, 1} {
		w, err := to.Conn.Open(t.Context(), uint32(i+2), epoch)
		require.NoError(t, err)
		targets[i+1] = &rdma.Target{Conn: to.Conn, Window: w}
	}
	watch := b.lane(2, 0)
	buf := make([]byte, 1<<20)
	for i := range 20 {
		// Posted, never awaited: it may have run, may be running, or may be lost.
		var r rdma.Round
		c := r.Chain(to)
		for j := range 3 {
			c.Write(uint64(j)<<20, pattern(len(buf), byte(i)))
			c.FetchAdd(3<<20, 1)
		}
		to.Conn.Post(c)
		require.NoError(t, to.Conn.Reset(t.Context()))
		first := word(t, watch, 3<<20)
		copy(buf, read(t, watch, 2<<20, 1<<20))
		for range 3 {
			require.Equal(t, first, word(t, watch, 3<<20))
		}
		require.Equal(t, buf, read(t, watch, 2<<20, 1<<20))
		for _, target := range targets {
			write(t, target, 8, []byte("after"))
			require.Equal(t, "after", string(read(t, target, 8, 5)))
		}
	}
	// A window whose epoch has passed stays refused; its neighbours go on.
	require.NoError(t, b.OpenRegion(t.Context(), 2, 6))
	require.NoError(t, to.Conn.Reset(t.Context()))
	require.ErrorIs(t, one(targets[1], func(c *rdma.Chain) { c.Write(0, buf[:8]) }).Err, rdma.ErrKey)
	write(t, targets[2], 8, []byte("after"))
	w, err := to.Conn.Open(t.Context(), 2, 6)
	require.NoError(t, err)
	write(t, &rdma.Target{Conn: to.Conn, Window: w}, 0, buf[:8])
}

// testDialAgain: a second connection of a lane ends the first one.
func testDialAgain(t *testing.T, p Provider) {
	b := setup(t, p)
	first := b.lane(1, 0)
	write(t, first, 0, []byte{1})
	neighbour := b.lane(1, 1)
	second := b.lane(1, 0)
	write(t, second, 0, []byte{2})
	c := one(first, func(c *rdma.Chain) { c.Write(0, []byte{3}) })
	require.ErrorIs(t, c.Err, rdma.ErrBroken)
	require.Equal(t, []byte{2}, read(t, second, 0, 1))
	write(t, neighbour, 8, []byte{2})
	// And the other way: Reset takes the lane back.
	require.NoError(t, first.Conn.Reset(t.Context()))
	write(t, first, 0, []byte{4})
	require.ErrorIs(t, one(second, func(c *rdma.Chain) { c.Read(0, make([]byte, 1)) }).Err, rdma.ErrBroken)

	var lanes []rdma.Conn
	defer func() {
		for _, c := range lanes {
			c.Close()
		}
	}()
	for i := uint32(0); ; i++ {
		c, err := b.dialer.Dial(t.Context(), b.Addr(), b.Ticket(9, rdma.ReadWrite), i)
		if err != nil {
			require.ErrorIs(t, err, rdma.ErrLimit, "lanes of one session are limited: %d", i)
			require.Greater(t, i, uint32(15))
			break
		}
		lanes = append(lanes, c)
		require.Less(t, i, uint32(10_000))
	}
}

func testClosedPeer(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	write(t, to, 0, []byte{1})
	b.Stop()
	eventually(t, "chains fail once the node has stopped", func() bool {
		c := one(to, func(c *rdma.Chain) { c.Read(0, make([]byte, 1)) })
		require.True(t, c.Err == nil || errors.Is(c.Err, rdma.ErrBroken), "%v", c.Err)
		return c.Err != nil
	})
	_, err := to.Conn.Open(t.Context(), 1, 1)
	require.ErrorIs(t, err, rdma.ErrBroken)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	require.ErrorIs(t, to.Conn.Reset(ctx), rdma.ErrBroken)
	require.ErrorIs(t, one(to, func(c *rdma.Chain) { c.Read(0, make([]byte, 1)) }).Err, rdma.ErrBroken)
	_, err = b.dialer.Dial(ctx, b.Addr(), b.Ticket(1, rdma.ReadWrite), 0)
	require.ErrorIs(t, err, rdma.ErrBroken)
	require.NoError(t, errors.Join(to.Conn.Close(), nil))
}

// testCloseWhileBusy: Close comes from another goroutine.
func testCloseWhileBusy(t *testing.T, p Provider) {
	b := setup(t, p)
	for i := range 10 {
		to := b.lane(1, uint32(i))
		var started atomic.Int64
		var done sync.WaitGroup
		var err error
		done.Go(func() { err = hammer(to, 0, &started) })
		eventually(t, "the writer has started", func() bool { return started.Load() == 1 })
		to.Conn.Close()
		done.Wait()
		require.ErrorIs(t, err, rdma.ErrBroken)
		require.ErrorIs(t, one(to, func(c *rdma.Chain) { c.Read(0, make([]byte, 8)) }).Err, rdma.ErrBroken)
		require.Error(t, to.Conn.Reset(t.Context()), "a closed connection stays closed")
	}
	eventually(t, "lanes of closed connections are free again", func() bool {
		c, err := b.dialer.Dial(t.Context(), b.Addr(), b.Ticket(1, rdma.ReadWrite), 0)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// testAllocations: the data path makes no garbage.
func testAllocations(t *testing.T, p Provider) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	b := setup(t, p)
	to := b.lane(1, 0)
	small, large := make([]byte, 128), make([]byte, 100<<10)
	var r rdma.Round
	round := func() {
		r.Reset()
		c := r.Chain(to)
		c.Write(1024, small)
		c.Read(1024, small)
		c.CAS(0, 0, 0)
		c.Write(65536, large)
		c.Read(65536, large)
		r.Deadline = clock.In(time.Second)
		rdma.Do(&r)
	}
	for range 20 {
		round()
	}
	require.NoError(t, r.Err())
	require.Less(t, testing.AllocsPerRun(200, round), p.Garbage+1)
}

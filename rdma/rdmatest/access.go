package rdmatest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

// look is the region as the node sees it: its own memory, or a lane's READs.
func (b *bench) look(region uint32, off, n uint64, by *rdma.Target) []byte {
	if mem := b.Bytes(region); mem != nil {
		return bytes.Clone(mem[off : off+n])
	}
	return read(b, by, off, int(n))
}

// hammer writes at full rate until it is refused, and returns the refusal.
func hammer(to *rdma.Target, at uint64, started *atomic.Int64) error {
	buf := make([]byte, 8192)
	var r rdma.Round
	for i := uint64(1); ; i++ {
		for j := range len(buf) / 8 {
			binary.LittleEndian.PutUint64(buf[8*j:], i)
		}
		r.Reset()
		c := r.Chain(to)
		c.Write(at, buf)
		c.FetchAdd(at+8192, 1)
		c.Write(at+8193+16, buf[:100])
		rdma.Do(&r)
		if i == 3 {
			started.Add(1)
		}
		if err := r.At(0).Err; err != nil {
			return err
		}
		if i%64 == 0 {
			runtime.Gosched()
		}
	}
}

// testRevoked: HAZARDS, security 8: when Fence has returned, no byte changes.
func testRevoked(t *testing.T, p Provider) {
	b := setup(t, p)
	const lanes = 4
	watch := b.lane(100, 0)
	for serial := uint64(1); serial <= 10; serial++ {
		var started atomic.Int64
		var done sync.WaitGroup
		var errs [lanes]error
		for i := range lanes {
			to := b.lane(serial, uint32(i))
			done.Go(func() { errs[i] = hammer(to, uint64(i)*65536, &started) })
		}
		bystander := b.lane(serial+1000, 0)
		eventually(t, "writers have started", func() bool { return started.Load() == lanes })
		require.NoError(t, b.Fence(t.Context(), serial))
		first := b.look(1, 0, lanes*65536, watch)
		for range 3 {
			time.Sleep(time.Millisecond) // gives what must not come a chance to come
			require.True(t, bytes.Equal(first, b.look(1, 0, lanes*65536, watch)), "a byte changed after the fence")
		}
		done.Wait()
		for _, err := range errs {
			require.True(t, errors.Is(err, rdma.ErrRevoked) || errors.Is(err, rdma.ErrBroken), "%v", err)
		}
		_, err := b.dialer.Dial(t.Context(), b.Addr(), b.Ticket(serial, rdma.ReadWrite), 50)
		require.ErrorIs(t, err, rdma.ErrRevoked)
		require.NoError(t, b.Fence(t.Context(), serial, serial), "again")
		write(t, bystander, 2<<20, []byte{1})
	}
}

func testRotation(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	write(t, to, 0, pattern(64, 1))
	require.NoError(t, b.OpenRegion(t.Context(), 1, 1), "the epoch that is served already")
	write(t, to, 0, pattern(64, 2))

	require.NoError(t, b.OpenRegion(t.Context(), 1, 2))
	for range 3 {
		c := b.outdated(to, func(c *rdma.Chain) { c.Write(0, pattern(64, 3)) })
		require.ErrorIs(t, c.Err, rdma.ErrKey)
		require.Zero(t, c.Done)
	}
	_, err := to.Conn.Open(t.Context(), 1, 1)
	require.ErrorIs(t, err, rdma.ErrKey, "an epoch that is over")
	_, err = to.Conn.Open(t.Context(), 1, 3)
	require.ErrorIs(t, err, rdma.ErrKey, "an epoch that is not yet")
	_, err = to.Conn.Open(t.Context(), 9, 1)
	require.ErrorIs(t, err, rdma.ErrKey, "a region that is not here")
	w, err := to.Conn.Open(t.Context(), 1, 2)
	require.NoError(t, err)
	require.NotEqual(t, to.Window.Key, w.Key)
	fresh := &rdma.Target{Conn: to.Conn, Window: w}
	require.Equal(t, pattern(64, 2), read(t, fresh, 0, 64), "rotation keeps the memory")
	require.ErrorIs(t, b.outdated(to, func(c *rdma.Chain) { c.Write(0, pattern(64, 3)) }).Err, rdma.ErrKey, "the old key in the new window's slot")
	require.Error(t, b.OpenRegion(t.Context(), 1, 1), "epochs only rise")
	require.Equal(t, pattern(64, 2), read(t, fresh, 0, 64))
}

func testCloseRegion(t *testing.T, p Provider) {
	b := setup(t, p)
	require.NoError(t, b.OpenRegion(t.Context(), 2, 1))
	to := b.lane(1, 0)
	w, err := to.Conn.Open(t.Context(), 2, 1)
	require.NoError(t, err)
	other := &rdma.Target{Conn: to.Conn, Window: w}
	require.NoError(t, b.CloseRegion(t.Context(), 1, 3))
	require.ErrorIs(t, b.outdated(to, func(c *rdma.Chain) { c.Read(0, make([]byte, 8)) }).Err, rdma.ErrKey)
	write(t, other, 0, []byte{1})
	_, err = to.Conn.Open(t.Context(), 1, 1)
	require.ErrorIs(t, err, rdma.ErrKey)
	for epoch := uint64(0); epoch <= 3; epoch++ {
		require.Error(t, b.OpenRegion(t.Context(), 1, epoch), "closed up to epoch 3")
	}
	require.NoError(t, b.OpenRegion(t.Context(), 1, 4))
	require.NoError(t, b.CloseRegion(t.Context(), 1, 3), "a late call does no harm")
	w, err = to.Conn.Open(t.Context(), 1, 4)
	require.NoError(t, err)
	write(t, &rdma.Target{Conn: to.Conn, Window: w}, 0, []byte{2})
	require.NoError(t, b.CloseRegion(t.Context(), 77, 1), "a region that never was here")
}

// testRotationUnderLoad: lanes reopen as the epoch changes; nothing under an old
// key lands after OpenRegion has returned.
func testRotationUnderLoad(t *testing.T, p Provider) {
	b := setup(t, p)
	const lanes = 4
	var epoch atomic.Uint64
	epoch.Store(1)
	var stop atomic.Bool
	var late, landed atomic.Int64
	var done sync.WaitGroup
	for i := range lanes {
		to := b.lane(1+uint64(i%2), uint32(i))
		done.Go(func() {
			var r rdma.Round
			buf := make([]byte, 256)
			for !stop.Load() {
				r.Reset()
				binary.LittleEndian.PutUint64(buf, to.Window.Epoch)
				c := r.Chain(to)
				c.Write(uint64(i)*4096, buf)
				current := epoch.Load() // raised when OpenRegion has returned
				rdma.Do(&r)
				switch err := r.At(0).Err; {
				case err == nil:
					landed.Add(1)
					if to.Window.Epoch < current {
						late.Add(1)
					}
				default:
					if errors.Is(err, rdma.ErrBroken) {
						to.Conn.Reset(context.Background())
					}
					if w, err := to.Conn.Open(context.Background(), 1, epoch.Load()); err == nil {
						to.Window = w
					}
				}
			}
		})
	}
	for e := uint64(2); e < 60; e++ {
		before := landed.Load()
		require.NoError(t, b.OpenRegion(t.Context(), 1, e))
		epoch.Store(e)
		eventually(t, "writers go on under the new epoch", func() bool { return landed.Load() > before+2*lanes })
	}
	stop.Store(true)
	done.Wait()
	require.Zero(t, late.Load())
}

// testAnotherIncarnation: hazard 32: keys of a node's former incarnation are worth nothing.
func testAnotherIncarnation(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	again := start(t, p, Cluster{})
	next := again.lane(1, 0)
	require.NotEqual(t, to.Window.Key, next.Window.Key)
	forged := &rdma.Target{Conn: next.Conn, Window: to.Window}
	require.ErrorIs(t, one(forged, func(c *rdma.Chain) { c.Write(0, []byte{1}) }).Err, rdma.ErrKey)
}

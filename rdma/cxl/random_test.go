package cxl_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// world is a node, an agent, and a client of the other host that counts up as fast as it can, in whichever session and epoch are the
// newest: a word of each session.
type world struct {
	*node
	t      *testing.T
	epoch  atomic.Uint64
	serial atomic.Uint64
	socket atomic.Pointer[string]
	adds   atomic.Uint64
	ended  map[uint64]uint64 // words of sessions that were fenced, by serial
}

// wordOf is the place of a session's word.
func wordOf(serial uint64) uint64 { return 4096 + 8*serial }

// count adds until ctx ends. Every error has the client dial again.
func (w *world) count(ctx context.Context, number uint32) {
	for ctx.Err() == nil {
		serial := w.serial.Load()
		to, err := laneNumber(ctx, *w.socket.Load(), serial, w.epoch.Load(), number)
		for err == nil && ctx.Err() == nil {
			if err = add(to, wordOf(serial)); err == nil {
				w.adds.Add(1)
			}
		}
		if to != nil {
			to.Conn.Close()
		}
	}
}

// still fails if the client changes a byte: access was taken from it.
func (w *world) still(what string) {
	first := bytes.Clone(w.Bytes(1)[:16384])
	for range 5 {
		time.Sleep(200 * time.Microsecond) // gives what must not come a chance to come
		require.True(w.t, bytes.Equal(first, w.Bytes(1)[:16384]), what)
	}
}

// dead fails if a session that was fenced has counted on.
func (w *world) dead() {
	for serial, had := range w.ended {
		require.Equal(w.t, had, w.word(serial), "session %d was fenced", serial)
	}
}

func (w *world) word(serial uint64) uint64 {
	b := bytes.Clone(w.Bytes(1)[wordOf(serial):][:8])
	return uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24
}

// works waits until the client has counted on.
func (w *world) works() {
	had := w.adds.Load()
	require.Eventually(w.t, func() bool { return w.adds.Load() > had }, patience, 100*time.Microsecond)
}

// reopen closes the epoch and opens the next one; false: the agent did not answer in time.
func (w *world) reopen(limit time.Duration) bool {
	if err := w.home.CloseRegion(within(w.t, limit), 1, w.epoch.Load()); err != nil {
		require.ErrorIs(w.t, err, context.DeadlineExceeded)
		return false
	}
	w.still("the epoch is closed")
	w.open(patience)
	return true
}

func (w *world) open(limit time.Duration) {
	next := w.epoch.Load() + 1
	require.NoError(w.t, w.home.OpenRegion(within(w.t, limit), 1, next, 0, rdmatest.RegionBytes, 0))
	w.epoch.Store(next)
}

// fence ends the session, and has the client use the next one.
func (w *world) fence(limit time.Duration) bool {
	serial := w.serial.Load()
	if err := w.home.Fence(within(w.t, limit), serial); err != nil {
		require.ErrorIs(w.t, err, context.DeadlineExceeded)
		return false
	}
	w.ended[serial] = w.word(serial)
	w.serial.Store(serial + 1)
	return true
}

// replace has the agent die and another one join.
func (w *world) replace() {
	w.agent.kill(w.t)
	w.agent = startAgent(w.t, w.dev, host.Limits{}, nil)
	w.socket.Store(&w.agent.socket)
}

// restart has the home die, and begins another incarnation.
func (w *world) restart() {
	require.NoError(w.t, w.home.Die())
	var err error
	w.home, err = newHome(w.t, w.dev, w.cluster, incarnations.Add(1), nil)
	require.NoError(w.t, err)
	w.still("the former incarnation's clients have lost it")
	serial := w.serial.Load() // what the controllers tell a node that registers
	require.NoError(w.t, w.home.EndBelow(within(w.t, patience), serial+1, []uint64{serial}))
	w.open(patience)
}

// Whatever the order in which sessions are fenced, epochs end, agents hang and die, and the home comes back: what was said to be ended has ended, and
// the client works on.
func TestRandomly(t *testing.T) {
	seeds := 8
	if testing.Short() {
		t.Log("-short: two seeds")
		seeds = 2
	}
	for seed := range seeds {
		w := &world{node: startNode(t, cluster, host.Limits{}), t: t, ended: map[uint64]uint64{}}
		w.serial.Store(1)
		w.socket.Store(&w.agent.socket)
		require.NoError(t, w.OpenRegion(t.Context(), 0, 1, 1))
		w.epoch.Store(1)
		ctx, stop := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		for number := range uint32(2) {
			clients.Go(func() { w.count(ctx, number) })
		}
		r := rand.New(rand.NewPCG(uint64(seed), 0))
		for range 25 {
			w.works()
			switch r.IntN(6) {
			case 0:
				require.True(t, w.fence(patience))
			case 1:
				require.True(t, w.reopen(patience))
			case 2: // it hangs meanwhile; what was given up is asked for again
				fenced := false
				w.agent.hangs(func() { fenced = r.IntN(2) == 0 && w.fence(5*time.Millisecond) })
				if !fenced {
					require.True(t, w.fence(patience))
				}
			case 3:
				closed := false
				w.agent.hangs(func() { closed = w.reopen(5 * time.Millisecond) })
				if !closed {
					require.True(t, w.reopen(patience))
				}
			case 4:
				w.replace()
			case 5:
				w.restart()
			}
			w.dead()
		}
		stop()
		clients.Wait()
		w.Stop()
		t.Logf("seed %d: %d adds, %d sessions fenced, epoch %d", seed, w.adds.Load(), len(w.ended), w.epoch.Load())
	}
}

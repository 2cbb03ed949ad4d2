package host

import (
	"context"
	"encoding/binary"
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// watcher is a client of the procedure, without a connection.
type watcher struct {
	t *testing.T
	a *Access
	*rdma.Ticket
	set uint64
}

func (w *watcher) add(words ...msg.WatchWord) error {
	b := msg.WatchHead(nil, msg.WatchAdd, w.set)
	for i := range words {
		b = words[i].Append(b)
	}
	_, err := w.a.watch(w.Ticket, b, nil)
	return err
}

func (w *watcher) drop(id uint32) error {
	_, err := w.a.watch(w.Ticket, binary.LittleEndian.AppendUint32(msg.WatchHead(nil, msg.WatchDrop, w.set), id), nil)
	return err
}

// ask is one question of wait: what was told, or that it is held.
func (w *watcher) ask(ms uint32) (told map[uint32]uint64, held *Held) {
	w.t.Helper()
	b := make([]byte, msg.MaxPayload)
	n, err := w.a.watch(w.Ticket, binary.LittleEndian.AppendUint32(msg.WatchHead(nil, msg.WatchWait, w.set), ms), b)
	if h, ok := err.(*Held); ok {
		return nil, h
	}
	require.NoError(w.t, err)
	told = map[uint32]uint64{}
	msg.WatchTold(b[:n], func(id uint32, word uint64) { told[id] = word })
	return told, nil
}

// await waits until something is told.
func (w *watcher) await() map[uint32]uint64 {
	w.t.Helper()
	for {
		told, held := w.ask(60000)
		if held == nil {
			return told
		}
		<-held.Ready
	}
}

func watchedRegion(t *testing.T, a *Access, number uint32, epoch uint64) *Memory {
	m, err := NewMemory("watched", 1<<20)
	require.NoError(t, err)
	copy(m.Bytes(), (&proto.RegionHeader{Domain: proto.DomainCPU, RegionBytes: 1 << 20, Region: number, Epoch: epoch}).Encode())
	require.NoError(t, a.OpenRegion(t.Context(), number, epoch, m))
	t.Cleanup(func() { m.Close() })
	return m
}

// A word is told when it is not what the client has seen, whenever that changed, and once for each value that is found.
func TestWatchTellsWhatTheClientHasNotSeen(t *testing.T) {
	a := mailAccess(t, Limits{})
	m := watchedRegion(t, a, 3, 1)
	w := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 1}, set: 9}
	at := func(off uint64) *uint64 { return wordAt(m.mem, off) }
	atomic.StoreUint64(at(8192), 5)
	// Changed before the message came: told at once, without a pass.
	require.NoError(t, w.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 8192, Seen: 4}, msg.WatchWord{ID: 2, Region: 3, Epoch: 1, Off: 9000, Seen: 0}))
	told, held := w.ask(1000)
	require.Nil(t, held)
	require.Equal(t, map[uint32]uint64{1: 5}, told)
	// Nothing is told twice.
	_, held = w.ask(60000)
	require.NotNil(t, held)
	atomic.StoreUint64(at(9000), 7)
	require.Equal(t, map[uint32]uint64{2: 7}, w.await())
	atomic.StoreUint64(at(9000), 8)
	require.Equal(t, map[uint32]uint64{2: 8}, w.await(), "it is looked at on")
	// The time of a wait ends it.
	told, held = w.ask(0)
	require.Nil(t, held)
	require.Empty(t, told)
	// A dropped word is not told, one that is watched again is.
	require.NoError(t, w.drop(1))
	atomic.StoreUint64(at(8192), 6)
	atomic.StoreUint64(at(9000), 9)
	require.Equal(t, map[uint32]uint64{2: 9}, w.await())
	require.NoError(t, w.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 8192, Seen: 5}))
	require.Equal(t, map[uint32]uint64{1: 6}, w.await())
	require.Equal(t, 2, a.Watched())
}

// A region that is not served any more is told to be gone, as is one of another epoch, of another tenant, or unknown; no
// pass touches its memory.
func TestWatchEndsWithItsRegion(t *testing.T) {
	a := mailAccess(t, Limits{})
	m := watchedRegion(t, a, 3, 1)
	w := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 1}, set: 9}
	for i, word := range []msg.WatchWord{{Region: 3, Epoch: 2, Off: 64}, {Region: 4, Epoch: 1, Off: 64}} {
		word.ID = uint32(i + 1)
		require.NoError(t, w.add(word))
		require.Equal(t, map[uint32]uint64{word.ID: msg.WatchGone}, w.await())
	}
	other := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 2, Tenant: 7}, set: 9}
	require.NoError(t, other.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 64}))
	require.Equal(t, map[uint32]uint64{1: msg.WatchGone}, other.await())
	require.ErrorIs(t, w.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 1 << 20}), rdma.ErrBounds)
	require.ErrorIs(t, w.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 4}), rdma.ErrBounds)
	require.ErrorIs(t, w.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 64}, msg.WatchWord{ID: 2, Region: 3, Epoch: 1, Off: 4}), rdma.ErrBounds)
	require.Zero(t, a.Watched(), "a request that is refused adds nothing")

	require.NoError(t, w.add(msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 8192}))
	require.NoError(t, a.CloseRegion(t.Context(), 3, 1))
	require.NoError(t, m.Close())
	changed, _, more := a.watches.pass(0) // would crash if it loaded from the memory
	require.False(t, changed)
	require.True(t, more)
	told, held := w.ask(60000)
	require.Nil(t, held)
	require.Equal(t, map[uint32]uint64{1: msg.WatchGone}, told)
	require.Zero(t, a.Watched())
}

// The words of a region that is not served any more leave their set while they are told, which shortens the queue.
func TestWatchTellsManyWordsOfARegion(t *testing.T) {
	a := mailAccess(t, Limits{})
	watchedRegion(t, a, 3, 1)
	m := watchedRegion(t, a, 4, 1)
	w := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 1}, set: 9}
	want := map[uint32]uint64{}
	for id := range uint32(100) {
		require.NoError(t, w.add(msg.WatchWord{ID: id, Region: 3, Epoch: 1, Off: 8192 + 8*uint64(id)}))
		want[id] = msg.WatchGone
	}
	require.NoError(t, w.add(msg.WatchWord{ID: 100, Region: 4, Epoch: 1, Off: 8192}))
	require.NoError(t, a.CloseRegion(t.Context(), 3, 1))
	atomic.StoreUint64(wordAt(m.mem, 8192), 5)
	_, _, _ = a.watches.pass(0)
	want[100] = 5
	told, held := w.ask(60000)
	require.Nil(t, held)
	require.Equal(t, want, told)
	require.Equal(t, 1, a.Watched())
}

// Words, sets and queues are bounded, and end with the session.
func TestWatchIsBounded(t *testing.T) {
	a := mailAccess(t, Limits{Watches: 8})
	m := watchedRegion(t, a, 3, 1)
	w := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 1}, set: 9}
	word := func(id uint32) msg.WatchWord {
		return msg.WatchWord{ID: id, Region: 3, Epoch: 1, Off: 8192 + 8*uint64(id)}
	}
	require.NoError(t, w.add(word(1), word(2)))
	require.ErrorIs(t, w.add(word(3)), errWatches, "a session has a quarter")
	require.ErrorIs(t, w.add(word(1), word(3), word(4)), errWatches)
	require.Equal(t, 2, a.Watched(), "a request that is refused adds nothing")
	for i := range uint64(100) { // a client that takes nothing
		atomic.StoreUint64(wordAt(m.mem, word(1).Off), i+1)
		require.NoError(t, w.add(word(1)))
	}
	a.watches.mu.Lock()
	require.Len(t, a.watches.sets[setID{1, 9}].queue, 1)
	a.watches.mu.Unlock()
	_, held := w.ask(60000)
	require.Nil(t, held)
	_, held = w.ask(60000)
	require.NotNil(t, held)
	second := &watcher{t: t, a: a, Ticket: w.Ticket, set: 10}
	require.ErrorIs(t, second.add(word(1), word(2), word(3)), errWatches)
	require.NoError(t, w.drop(7), "the first set is there: what was refused has changed nothing")
	require.NoError(t, second.add(word(1)))
	require.ErrorIs(t, w.drop(7), errNoSet, "the sets of a session have a quarter together: the one that was given up made room")
	require.Len(t, held.Ready, 1, "the call that is held for it ends")
	require.Equal(t, 1, a.Watched())
	require.NoError(t, a.Fence(t.Context(), 1))
	require.Zero(t, a.Watched())
	require.ErrorIs(t, w.add(word(1)), rdma.ErrRevoked)
	b := make([]byte, msg.MaxPayload)
	_, err := a.watch(w.Ticket, binary.LittleEndian.AppendUint32(msg.WatchHead(nil, msg.WatchWait, w.set), 1000), b)
	require.ErrorIs(t, err, errNoSet)

	now := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 5}, set: 1}
	require.NoError(t, now.add(word(1)))
	_, _, more := a.watches.pass(1 << 62)
	require.False(t, more, "a client that has not been heard for minutes")
}

// Each connection of a client has a set of its own: the latest has room, and the set that was named longest ago goes.
func TestWatchSetsMakeRoom(t *testing.T) {
	a := mailAccess(t, Limits{})
	m := watchedRegion(t, a, 3, 1)
	atomic.StoreUint64(wordAt(m.mem, 8192), 1)
	word := msg.WatchWord{ID: 1, Region: 3, Epoch: 1, Off: 8192}
	other := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 2}, set: 1}
	require.NoError(t, other.add(word))
	var sets []*watcher
	for set := range uint64(3 * maxSets) {
		w := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 1}, set: set}
		require.NoError(t, w.add(word))
		require.Equal(t, map[uint32]uint64{1: 1}, w.await())
		sets = append(sets, w)
	}
	require.Equal(t, maxSets+1, a.Watched())
	for i, w := range sets {
		if i < len(sets)-maxSets {
			require.ErrorIs(t, w.drop(1), errNoSet)
		} else {
			require.NoError(t, w.drop(1))
		}
	}
	require.NoError(t, other.drop(1), "another session's")
}

// A word that was to be told and is dropped leaves no entry behind for good.
func TestDroppedWordsLeaveTheQueue(t *testing.T) {
	a := mailAccess(t, Limits{})
	m := watchedRegion(t, a, 3, 1)
	w := &watcher{t: t, a: a, Ticket: &rdma.Ticket{Serial: 1}, set: 9}
	require.NoError(t, w.add(msg.WatchWord{ID: 1 << 20, Region: 3, Epoch: 1, Off: 8192, Seen: 5}))
	for i := range uint32(1000) { // with an id of its own, and with the same one
		for _, id := range []uint32{i, 1 << 30} {
			require.NoError(t, w.add(msg.WatchWord{ID: id, Region: 3, Epoch: 1, Off: 8192, Seen: 5}))
			require.NoError(t, w.drop(id))
		}
	}
	a.watches.mu.Lock()
	queued := len(a.watches.sets[setID{1, 9}].queue)
	a.watches.mu.Unlock()
	require.Less(t, queued, 32)
	atomic.StoreUint64(wordAt(m.mem, 8192), 5)
	require.Contains(t, w.await(), uint32(1<<20), "it was to be told")
}

// A pass finds changes in every step, and in what has moved while the lock was free.
func TestAPassLooksAtEveryWord(t *testing.T) {
	a := mailAccess(t, Limits{})
	m := watchedRegion(t, a, 3, 1)
	w := &a.watches
	w.running = true // without a goroutine, the test makes the passes
	s := &watchSet{index: map[uint32]int{}, ready: make(chan struct{}, 1), heard: 1 << 62}
	id := setID{1, 1}
	w.sets[id] = s
	const words = 2*stepWords + 10
	for i := range uint32(words) {
		w.put(s, watched{at: wordAt(m.mem, 8192+8*uint64(i)), id: i, region: 3})
	}
	for i := range uint64(words) {
		atomic.StoreUint64(wordAt(m.mem, 8192+8*i), 1)
	}
	below, changed, _ := w.look(id, math.MaxInt)
	require.True(t, changed)
	require.Equal(t, words-stepWords, below)
	require.Len(t, s.queue, stepWords)
	// The last word, which was looked at, takes the place of one that was not; of two that were looked at it takes the first's.
	require.NoError(t, w.drop(id, binary.LittleEndian.AppendUint32(nil, 3)))
	require.NoError(t, w.drop(id, binary.LittleEndian.AppendUint32(nil, words-1)))
	for below > 0 {
		below, _, _ = w.look(id, below)
	}
	for i := range s.words {
		require.True(t, s.words[i].told, "word %d", s.words[i].id)
	}
	changed, _, more := w.pass(0)
	require.False(t, changed)
	require.True(t, more)
	atomic.StoreUint64(wordAt(m.mem, 8192), 2)
	changed, _, _ = w.pass(0)
	require.True(t, changed)
	w.mu.Lock()
	w.running = false
	w.mu.Unlock()
}

// The pause follows the changes, is a multiple of what a pass takes, and is bounded, however long a pass has taken.
func TestPauseBetweenPasses(t *testing.T) {
	us, ms := time.Microsecond, time.Millisecond
	for _, c := range []struct {
		changed                            bool
		took, rest, gap, wantRest, wantGap time.Duration
	}{
		{true, 0, 10 * ms, 500 * us, quickPass, 0},
		{true, 10 * us, 10 * ms, 500 * us, 90 * us, 40 * us},
		{true, 10 * ms, 10 * ms, 0, 40*ms + quickPass, 40 * ms},
		{true, time.Minute, 10 * ms, 0, longestRest, longestRest},
		{false, 1 * us, 50 * us, 0, 250 * us, 4 * us},
		{false, 1 * us, 4 * ms, 100 * us, 8 * ms, 200 * us},
		{false, 1 * us, 8 * ms, 400 * us, idlePass, longestGap},
		{false, 100 * us, 10 * ms, longestGap, 25 * ms, longestGap},
		{false, 1 * ms, 10 * ms, longestGap, longestRest, 4 * ms},
		{false, 78 * time.Second, 10 * ms, 0, longestRest, longestRest},
	} {
		rest, gap := pause(c.changed, c.took, c.rest, c.gap)
		require.Equal(t, c.wantRest, rest, "%+v", c)
		require.Equal(t, c.wantGap, gap, "%+v", c)
	}
}

// A lane without AwaitHeld refuses what would be held; one with it waits without holding up a fence.
func TestHeldCallsDoNotHoldUpAFence(t *testing.T) {
	a := mailAccess(t, Limits{})
	ready := make(chan struct{}, 1)
	hold := true
	a.Handle(7, func(*rdma.Ticket, []byte, []byte) (int, error) {
		if hold {
			return 0, &Held{Ready: ready, Until: 1 << 62}
		}
		return 0, nil
	})
	a.Handle(8, func(*rdma.Ticket, []byte, []byte) (int, error) { return 0, &Held{Until: 1 << 62} })
	arena, err := rdma.NewArena(3 * msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	l := mailLane(t, a, 1, 0)
	c, err := msg.Open(t.Context(), laneConn{l}, arena)
	require.NoError(t, err)
	_, err = c.Call(t.Context(), 7, nil, nil)
	var refusal *msg.Refusal
	require.ErrorAs(t, err, &refusal)
	require.Contains(t, refusal.Text, "tcp")

	l = mailLane(t, a, 2, 0)
	l.messages.holds = true
	c, err = msg.Open(t.Context(), laneConn{l}, arena)
	require.NoError(t, err)
	_, err = c.Call(t.Context(), 7, nil, nil)
	require.ErrorIs(t, err, ErrHeld, "Run says so to the provider")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, l.AwaitHeld(ctx), context.Canceled)
	// What the mailbox does not hold is refused, and the chain waits for the call that is held.
	_, err = c.Call(t.Context(), 8, nil, nil)
	require.ErrorIs(t, err, ErrHeld)
	require.EqualValues(t, ready, l.messages.held().Ready)
	ready <- struct{}{}
	require.NoError(t, l.AwaitHeld(t.Context()))
	require.NoError(t, a.Fence(t.Context(), 2), "the call is held, and nothing runs")
	_, err = l.Run(l.messages.slot, l.messages.box.key, []rdma.Verb{{Op: rdma.Read, Buf: make([]byte, 8)}})
	require.ErrorIs(t, err, rdma.ErrRevoked)

	l = mailLane(t, a, 3, 0)
	l.messages.holds = true
	c, err = msg.Open(t.Context(), laneConn{l}, arena)
	require.NoError(t, err)
	_, err = c.Call(t.Context(), 7, make([]byte, msg.MaxHeld+1), nil)
	require.ErrorAs(t, err, &refusal)
	require.Contains(t, refusal.Text, "too long")
}

// Passes without changes take less than a hundredth of a processor, as long as one takes a millisecond at most: 10 000 words that no cache has
// (BenchmarkIdleWatches). They settle at the rest before, and a ring may come each time that one is looked for.
func TestIdlePassesTakeAHundredth(t *testing.T) {
	for took := time.Microsecond; took <= time.Millisecond; took += time.Microsecond {
		rest, gap := quickPass, time.Duration(0)
		for range 20 {
			rest, gap = pause(false, took, rest, gap)
		}
		require.Less(t, float64(took)/float64(took+rest), 0.01, "%v", took)
		require.LessOrEqual(t, float64(took)/float64(took+gap), 1./(1+ranShare), "%v: rung for", took)
	}
}

// BenchmarkIdleWatches shows what a pass over 10 000 words costs in processor time, and which share of a processor that is with the rest between
// two passes. Evicted: other memory has been touched since the pass before.
func BenchmarkIdleWatches(b *testing.B) {
	b.Run("cached", func(b *testing.B) { benchIdleWatches(b, nil) })
	b.Run("evicted", func(b *testing.B) { benchIdleWatches(b, make([]byte, 64<<20)) })
}

// threadTime is the processor time of the present thread.
func threadTime(b *testing.B) time.Duration {
	var ts unix.Timespec
	require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}

func benchIdleWatches(b *testing.B, others []byte) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	m, err := NewMemory("watched", 64<<20)
	require.NoError(b, err)
	defer m.Close()
	var w watches
	w.init()
	s := &watchSet{index: map[uint32]int{}, ready: make(chan struct{}, 1), heard: 1 << 62}
	w.sets[setID{1, 1}], w.running = s, true
	for i := range uint32(10000) {
		atomic.StoreUint64(wordAt(m.mem, 4096*uint64(i)), 1) // a page of its own
		w.put(s, watched{at: wordAt(m.mem, 4096*uint64(i)+2040), id: i, region: 1})
	}
	var took time.Duration
	for b.Loop() {
		for i := 0; i < len(others); i += 64 {
			others[i]++
		}
		began := threadTime(b)
		w.pass(0)
		took += threadTime(b) - began
	}
	took /= time.Duration(b.N)
	rest, _ := pause(false, took, idlePass, longestGap)
	b.ReportMetric(float64(took.Nanoseconds())/10000, "cpu-ns/word")
	b.ReportMetric(100*float64(took)/float64(took+rest), "%cpu")
	b.ReportMetric(0, "ns/op") // has what evicts
}

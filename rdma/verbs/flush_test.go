//go:build cgo && verbs

package verbs

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// A visible FLUSH is the adapter's own where library, kernel and device have it; between
// verbs of all kinds the chain gives what it gives with a READ in its place.
func TestNativeFlush(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	native := n.flushes && c.lane.flushes != nil
	t.Logf("native FLUSH: the device says %v, the node's memory takes it %v, the queue pair has it %v", d.Caps().Flush, n.flushes, c.lane.flushes != nil)
	if os.Getenv("RXE_NATIVE_FLUSH") != "" {
		require.True(t, native, "this machine was made for it")
	}
	long := bytes.Repeat([]byte{5}, 9000)
	for i := range uint64(50) {
		back, word := make([]byte, len(long)), make([]byte, 8)
		word[0] = byte(i + 1)
		got := chain(to, guard, func(ch *rdma.Chain) {
			ch.Write(4096, long)
			ch.Write(64, word) // inlined
			ch.Flush(rdma.Visible, 64, 16<<10)
			ch.CAS(0, i, i+1)
			ch.Fenced()
			ch.FetchAdd(8, 2)
			ch.Fenced()
			ch.Read(4096, back)
		})
		require.NoError(t, got.Err)
		require.Equal(t, 6, got.Done)
		require.Equal(t, i, got.Verbs[3].Old)
		require.Equal(t, 2*i, got.Verbs[4].Old)
		require.Equal(t, long, back)
		require.Equal(t, word, n.Bytes(1)[64:72])
		// Chains without one go in between.
		require.NoError(t, chain(to, guard, func(ch *rdma.Chain) { ch.Read(0, word) }).Err)
		require.Equal(t, byte(i+1), word[0])
	}
	if !native {
		require.Zero(t, d.Stats().Flushed)
		return
	}
	require.Equal(t, uint64(50), d.Stats().Flushed)
	// The device looks at key, bounds and rights of a FLUSH as of any verb.
	for name, forge := range map[string]func(w *window, ch *rdma.Chain){
		"key":    func(w *window, ch *rdma.Chain) { w.rkey ^= 0x5500; ch.Flush(rdma.Visible, 0, 8) },
		"bounds": func(w *window, ch *rdma.Chain) { w.Bytes *= 2; ch.Flush(rdma.Visible, rdmatest.RegionBytes-4, 8) },
	} {
		c, to := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
		got := chain(to, guard, func(ch *rdma.Chain) { forge(&c.windows[0], ch) })
		require.ErrorIs(t, got.Err, rdma.ErrKey, name)
		c.Close()
	}
	_, reader := open(t, d, n.addr, ticket(3, 0, rdma.ReadOnly), 0)
	require.NoError(t, chain(reader, guard, func(ch *rdma.Chain) { ch.Flush(rdma.Visible, 0, 64) }).Err)
	require.Equal(t, uint64(53), d.Stats().Flushed)
}

// A FLUSH or VERIFY that the node carries out is for the regions that the lane's ticket opens, and of its tenant.
func TestFlushOfAForeignRegionIsRefused(t *testing.T) {
	m, err := host.NewMemory("foreign", 4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	s := &Server{regions: map[uint32]*region{1: {number: 1, epoch: 5, tenant: 3, memory: m}}}
	hash := func(k rdma.Ticket, off uint64) error {
		_, err := s.hash(&lane{ticket: k}, &host.Hasher{}, 1, 5, off, 8, 0)
		return err
	}
	require.ErrorIs(t, hash(rdma.Ticket{Tenant: 4}, 0), rdma.ErrTicket)
	require.ErrorIs(t, hash(rdma.Ticket{Tenant: 3, Region: 2, Epoch: 5}, 0), rdma.ErrTicket)
	require.ErrorIs(t, hash(rdma.Ticket{Tenant: 3}, 4090), rdma.ErrBounds)
	require.NoError(t, hash(rdma.Ticket{Tenant: 3, Region: 1, Epoch: 5}, 4088))
	persist := func(k rdma.Ticket) error { return s.persist(&lane{ticket: k}, 1, 5, 0, 8) }
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 4}), rdma.ErrTicket)
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3, Region: 2, Epoch: 5}), rdma.ErrTicket)
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3, Region: 1, Epoch: 4}), rdma.ErrTicket)
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3}), rdma.ErrNotPersistent, "its own")
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3, Region: 1, Epoch: 5}), rdma.ErrNotPersistent, "its own")
}

// ledgerServer serves region 1 without an adapter, on memory of three steps.
func ledgerServer(t *testing.T) (*Server, *pmem.Ledger) {
	m, ledger, err := host.NewLedgerMemory("asked", 3*stepBytes)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return &Server{
		asks: newTurns[*lane](), hashes: newTurns[*lane](), chains: newTurns[*lane](), slow: newTurns[*lane](), lanes: make(map[uint64]*lane), log: slog.New(slog.DiscardHandler),
		regions: map[uint32]*region{1: {number: 1, epoch: 5, memory: m}},
	}, ledger
}

// has lets a lane have asked for the first bytes of region 1.
func (l *lane) has(bytes uint64) {
	a := asked{make([]byte, notesBytes)}
	a.start(1, taskFlush, 1, 5)
	a.add(0, bytes, 0)
	l.notes.asked, l.notes.busy = a.b[:a.len()], true
	l.server.asks.add(l)
}

// A request to flush waits for no hash: those have a queue and a worker of their own.
func TestFlushWaitsForNoHash(t *testing.T) {
	s, _ := ledgerServer(t)
	l, other := s.newLane(nil, 0, 0, &rdma.Ticket{}), s.newLane(nil, 1, 0, &rdma.Ticket{})
	h := hashing(maxHashes)
	l.notes.asked = h.b[:h.len()]
	l.turns().add(l)
	f := asking(1)
	other.notes.asked = f.b[:f.len()]
	other.turns().add(other)
	require.Equal(t, []*lane{l}, s.hashes.order)
	require.Equal(t, []*lane{other}, s.asks.order)
	require.NoError(t, l.stop(rdma.ErrRevoked))
	require.Empty(t, s.hashes.order, "a lane that ends leaves its queue")
}

// What was hashed for clients is counted, what was refused is not.
func TestHashedBytesAreCounted(t *testing.T) {
	s, _ := ledgerServer(t)
	h := &host.Hasher{}
	_, err := s.hash(&lane{}, h, 1, 5, 64, 192, 0)
	require.NoError(t, err)
	_, err = s.hash(&lane{}, h, 1, 4, 64, 192, 0)
	require.Error(t, err)
	require.EqualValues(t, 192, s.VerifiedBytes())
}

// A request for much waits behind other lanes after each step. A lane that ends leaves the queue, and has nothing more flushed.
func TestFlushesTakeTurns(t *testing.T) {
	s, ledger := ledgerServer(t)
	long, short := s.newLane(nil, 0, 0, &rdma.Ticket{}), s.newLane(nil, 1, 0, &rdma.Ticket{})
	long.has(3 * stepBytes)
	short.has(64)
	for _, want := range []*lane{long, short, long, long} {
		l, ok := s.asks.next()
		require.True(t, ok)
		require.Same(t, want, l)
		l.serveAsked(&host.Hasher{})
	}
	require.False(t, short.notes.busy)
	require.False(t, long.notes.busy)
	require.Equal(t, progress{done: 1}, long.notes.made)
	require.Empty(t, s.asks.order)

	long.notes.made = progress{}
	long.has(3 * stepBytes)
	l, _ := s.asks.next()
	l.serveAsked(&host.Hasher{})
	short.has(64)
	require.Len(t, s.asks.order, 2)
	before, _ := ledger.Lines()
	require.NoError(t, long.stop(rdma.ErrRevoked))
	require.Equal(t, []*lane{short}, s.asks.order)
	long.serveAsked(&host.Hasher{}) // as a flusher that has just taken it
	after, _ := ledger.Lines()
	require.Equal(t, before, after)
	require.Len(t, s.asks.order, 1, "it is not queued again")
}

// While memory is registered or let go, which holds the region's lock, its flushes go on; when a region is closed none of them runs.
func TestFlushesDoNotWaitForRegistration(t *testing.T) {
	s, ledger := ledgerServer(t)
	r := s.regions[1]
	r.mu.Lock()
	done := make(chan error, 1)
	go func() { done <- s.persist(&lane{}, 1, 5, 0, 64) }()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(guard):
		t.Fatal("it waits for the region's lock")
	}
	r.mu.Unlock()

	begun, goOn := make(chan struct{}), make(chan struct{})
	ledger.Before = sync.OnceFunc(func() { close(begun); <-goOn })
	go func() { done <- s.persist(&lane{}, 1, 5, 0, 64) }()
	<-begun
	shut := make(chan error, 1)
	go func() { shut <- s.CloseRegion(t.Context(), 1, 5) }()
	require.Eventually(t, func() bool { // until it waits for the flush
		if r.serving.TryRLock() {
			r.serving.RUnlock()
			return false
		}
		return true
	}, guard, time.Millisecond)
	require.Empty(t, shut)
	close(goOn)
	require.NoError(t, <-shut)
	require.NoError(t, <-done)
	require.ErrorIs(t, s.persist(&lane{}, 1, 5, 0, 64), rdma.ErrKey)
}

// The host of a client that is gone takes no answer, which ends the queue pair: no verb was refused, and no offence is counted.
func TestAnswerThatDoesNotArriveIsNoOffence(t *testing.T) {
	const retryExceeded, flushErr = 12, 5 // IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR
	for _, status := range []int{0, retryExceeded} {
		s, _ := ledgerServer(t)
		nc, client := net.Pipe()
		defer client.Close()
		l := s.newLane(nc, 0, 0, &rdma.Ticket{Serial: 1})
		s.offences, s.limits = make(map[uint64]uint64), host.Limits{Sessions: 1, Offences: 10}
		s.lanes[4] = l
		d := completion{id: 4 | sendID}
		if status != 0 {
			d.status = retryExceeded
		}
		s.completed(&d)
		s.completed(&completion{id: 4, status: flushErr})
		require.True(t, l.drained)
		require.Equal(t, status == 0, s.AccessErrors() == 1, "status %d", status)
		require.Equal(t, status != 0, len(s.offences) == 0, "status %d", status)
		if status != 0 {
			_, err := client.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF, "the lane ends")
		}
	}
}

// persistentNode serves region 1 on memory whose losses of power show; the adapter of a virtual machine stores by processor, and
// writes nothing back.
func persistentNode(t *testing.T) (*node, *pmem.Ledger) {
	needDevice(t)
	m, ledger, err := host.NewLedgerMemory("ledger", rdmatest.RegionBytes)
	require.NoError(t, err)
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Flush: rdma.Message})
	n.memories[1] = m // closed with the node
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	return n, ledger
}

// What a chain over an adapter has flushed by the agent survives a loss of power, however many ranges there are; a batch asks
// once for all that nothing is ordered behind, and what is ordered behind waits for the answer.
func TestAgentFlushes(t *testing.T) {
	n, ledger := persistentNode(t)
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.Equal(t, rdma.Message, to.Window.Flush)
	for _, ranges := range []int{1, 2, 64, 100} {
		img := bytes.Repeat([]byte{byte(ranges)}, 64)
		asked, tag := d.Stats().Asked, c.askTag
		got := chain(to, guard, func(ch *rdma.Chain) {
			for i := range ranges {
				ch.Write(4096+64*uint64(i), img)
				ch.Flush(rdma.Persistent, 4096+64*uint64(i), 64)
			}
			ch.FetchAdd(64, 1)
			ch.Fenced()
			ch.Flush(rdma.Persistent, 64, 8)
			ch.Fenced()
			ch.Read(64, make([]byte, 8))
		})
		require.NoError(t, got.Err)
		require.Equal(t, 2*ranges+3, got.Done)
		require.Equal(t, n.Bytes(1)[:16384], ledger.Cut(pmem.None)[:16384])
		require.EqualValues(t, ranges+1, d.Stats().Asked-asked)
		require.EqualValues(t, 2, c.askTag-tag, "requests")
	}
	// More ranges than a request holds, and chains that ask one behind the other, posted at once.
	tag := c.askTag
	require.NoError(t, chain(to, guard, func(ch *rdma.Chain) {
		for i := range uint64(200) {
			ch.Flush(rdma.Persistent, 64*i, 8)
		}
	}).Err)
	require.EqualValues(t, 2, c.askTag-tag, "requests")
	r := rdma.Round{Deadline: clock.In(guard)}
	for i := range uint64(8) {
		ch := r.Chain(to)
		ch.Write(64*i, bytes.Repeat([]byte{byte(i + 100)}, 64))
		ch.Flush(rdma.Persistent, 64*i, 64)
		ch.Read(0, make([]byte, 64))
	}
	rdma.Do(&r)
	require.NoError(t, r.Err())
	require.Equal(t, n.Bytes(1)[:16384], ledger.Cut(pmem.None)[:16384])
	// Nothing is flushed that was not asked for.
	require.NoError(t, chain(to, guard, func(ch *rdma.Chain) { ch.Write(32768, bytes.Repeat([]byte{1}, 64)) }).Err)
	require.Zero(t, ledger.Cut(pmem.None)[32768])
}

// Chains of a round that ask several nodes take turns: one node answers its second request only when the other has had its own second
// one, which the client sends although the first chain has not ended.
func TestAgentsFlushSideBySide(t *testing.T) {
	first, one := persistentNode(t)
	second, two := persistentNode(t)
	d := newDialer(t)
	_, a := open(t, d, first.addr, ticket(1, 0, rdma.ReadWrite), 0)
	_, b := open(t, d, second.addr, ticket(1, 0, rdma.ReadWrite), 0)
	met := make(chan struct{})
	const again = 3 // of a write-back and a fence for each request
	steps, others := 0, 0
	one.Before = func() {
		if steps++; steps == again {
			select {
			case <-met:
			case <-t.Context().Done():
			}
		}
	}
	two.Before = func() {
		if others++; others == again {
			close(met)
		}
	}
	r := rdma.Round{Deadline: clock.In(guard)}
	for _, to := range []*rdma.Target{a, b} {
		ch := r.Chain(to)
		ch.Write(4096, bytes.Repeat([]byte{7}, 64))
		ch.Flush(rdma.Persistent, 4096, 64)
		ch.FetchAdd(64, 1)
		ch.Fenced()
		ch.Flush(rdma.Persistent, 64, 8)
		ch.Fenced()
		ch.FetchAdd(128, 1)
		ch.Fenced()
		ch.Read(64, make([]byte, 8))
	}
	rdma.Do(&r)
	require.NoError(t, r.Err())
	for i, n := range []*node{first, second} {
		ch := r.At(i)
		require.Equal(t, len(ch.Verbs), ch.Done)
		require.EqualValues(t, 1, ch.Verbs[5].Buf[0])
		require.EqualValues(t, 1, n.Bytes(1)[128])
	}
	for i, ledger := range []*pmem.Ledger{one, two} {
		require.Equal(t, []*node{first, second}[i].Bytes(1)[:8192][64:72], ledger.Cut(pmem.None)[64:72])
	}

	// One that is refused in the middle keeps its outcome, and holds the other up no more than it did.
	r.Reset()
	for _, to := range []*rdma.Target{a, b} {
		ch := r.Chain(to)
		ch.Write(4096, bytes.Repeat([]byte{8}, 64))
		ch.Flush(rdma.Persistent, 4096, 64)
		at := uint64(64)
		if to == a {
			at = rdmatest.RegionBytes
		}
		ch.FetchAdd(at, 1)
		ch.Fenced()
	}
	rdma.Do(&r)
	require.ErrorIs(t, r.At(0).Err, rdma.ErrBounds)
	require.Equal(t, 2, r.At(0).Done)
	require.NoError(t, r.At(1).Err)
	require.Equal(t, 3, r.At(1).Done)
}

// A chain whose first verb is refused while the client looks at its first part, beside a chain to another node, was not
// overtaken by its own first verb: its outcome is known.
func TestRefusedSideBySide(t *testing.T) {
	first, _ := persistentNode(t)
	second, _ := persistentNode(t)
	d := newDialer(t)
	c, a := open(t, d, first.addr, ticket(1, 0, rdma.ReadWrite), 0)
	_, b := open(t, d, second.addr, ticket(1, 0, rdma.ReadWrite), 0)
	c.windows[0].rkey ^= 0x5500
	r := rdma.Round{Deadline: clock.In(guard)}
	for _, to := range []*rdma.Target{a, b} {
		ch := r.Chain(to)
		ch.CAS(64, 0, 1)
		ch.Flush(rdma.Persistent, 64, 8)
		ch.Read(64, make([]byte, 8))
		ch.Fenced()
	}
	rdma.Do(&r)
	require.ErrorIs(t, r.At(0).Err, rdma.ErrKey)
	require.Zero(t, r.At(0).Done)
	require.NoError(t, r.At(1).Err)
	require.Equal(t, 3, r.At(1).Done)
}

// A request for an epoch that is over is refused, a session that is fenced gets nothing flushed, and the node drains lanes that have
// asked as any others.
func TestAgentRefuses(t *testing.T) {
	n, ledger := persistentNode(t)
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	flush := func(ch *rdma.Chain) { ch.Flush(rdma.Persistent, 0, 64) }
	require.NoError(t, chain(to, guard, flush).Err)
	c.windows[0].Epoch++ // which the node does not serve
	before, _ := ledger.Lines()
	over := *to
	over.Window.Epoch++
	got := chain(&over, guard, flush)
	require.ErrorIs(t, got.Err, rdma.ErrKey)
	require.Zero(t, got.Done)
	after, _ := ledger.Lines()
	require.Equal(t, before, after)
	c.windows[0].Epoch--
	require.NoError(t, chain(to, guard, flush).Err, "the lane goes on")
	require.NoError(t, n.Fence(t.Context(), 1))
	require.ErrorIs(t, chain(to, guard, flush).Err, rdma.ErrBroken)
	require.EqualValues(t, 0, n.AccessErrors())
}

// A message that is no request ends the lane, and no other.
func TestAskedForNothing(t *testing.T) {
	n, _ := persistentNode(t)
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	_, other := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	flush := func(ch *rdma.Chain) { ch.Flush(rdma.Persistent, 0, 64) }
	require.NoError(t, chain(to, guard, flush).Err)
	c.notes[12] = 1 // the message that is sent next is not well-formed
	c.seq++
	taken, err := c.post(1, c.seq) // the SEND again
	require.NoError(t, err)
	require.Equal(t, 1, taken)
	require.Eventually(t, func() bool { return n.AccessErrors() == 1 }, guard, time.Millisecond, "its lane ends")
	require.NoError(t, chain(other, guard, flush).Err)
}

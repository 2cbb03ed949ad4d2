//go:build cgo && verbs

package verbs

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// The contract where the node's processors execute the atomics.
func TestContractWithAgentAtomics(t *testing.T) {
	d := newDialer(t)
	rdmatest.Run(t, rdmatest.Provider{
		Name: "verbs", Dialer: d,
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
			return contractNode{startNodeOf(t, c, Config{Windows: WindowsOff, Atomics: AtomicsAgent})}
		},
	})
	require.Zero(t, Live().QueuePairs, "queue pairs are left")
}

// The contract over an iWARP device, whose node's processors execute the atomics.
func TestContractOverIWARP(t *testing.T) {
	d := newDialer(t)
	if !d.Caps().IWARP {
		t.Skip("no iWARP device: run verify/rxevm/test-rdma.sh iwarp")
	}
	p := rdmatest.Provider{
		Name: "verbs", Dialer: d, Vague: true,
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node { return contractNode{startNode(t, c)} },
	}
	if strings.HasPrefix(d.Caps().Device, "siw") {
		p.Unsuited = []string{"Sizes", "DialAgain"} // short READs across pages; libsiw makes 28 queue pairs of one dialer at a time
	}
	rdmatest.Run(t, p)
	require.Zero(t, Live().QueuePairs, "queue pairs are left")
}

// What is too long for a message goes by the adapter, before it or behind its answer, and order and results are those of one chain.
func TestLongVerbsBesideMessages(t *testing.T) {
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Atomics: AtomicsAgent})
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	_, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	long, back, tail := make([]byte, 64<<10), make([]byte, 64<<10), make([]byte, 64<<10)
	for i := range uint64(20) {
		long[0], long[len(long)-1] = byte(i+1), byte(i+1)
		before := d.Stats()
		got := chain(to, guard, func(ch *rdma.Chain) {
			ch.Write(1<<20, long)
			ch.CAS(0, i, i+1)
			ch.Read(1<<20, back)
			ch.FetchAdd(8, 2)
			ch.Fenced()
			ch.Read(1<<20, tail)
		})
		require.NoError(t, got.Err)
		require.Equal(t, 5, got.Done)
		require.Equal(t, []uint64{i, 2 * i}, []uint64{got.Verbs[1].Old, got.Verbs[3].Old})
		require.Equal(t, long, back)
		require.Equal(t, long, tail)
		require.EqualValues(t, 2, d.Stats().Acted-before.Acted)
		require.EqualValues(t, 3, d.Stats().Parts-before.Parts)
	}
	// The node counts what its processors have executed, and not what its adapter has.
	u := n.Acted().Usage
	require.Equal(t, []uint64{40, 40, 0}, []uint64{u.Chains, u.Verbs, u.Refusals})
	require.Equal(t, u, n.Sessions()[0].Usage)
	// READs and WRITEs alone need no message.
	before := d.Stats().Acted
	require.NoError(t, chain(to, guard, func(ch *rdma.Chain) {
		ch.Write(64, long[:8])
		ch.Read(64, back[:8])
	}).Err)
	require.Equal(t, before, d.Stats().Acted)
}

// No atomic of an adapter reaches a region of the processors' domain, whatever its client believes.
func TestHazard159_AdapterAtomicsAreRefused(t *testing.T) {
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Atomics: AtomicsAgent})
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	c, to := open(t, newDialer(t), n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.True(t, c.windows[to.Window.Slot].acts)
	c.windows[to.Window.Slot].acts = false // as a client of an earlier version has it
	got := chain(to, guard, func(ch *rdma.Chain) { ch.FetchAdd(0, 1) })
	require.ErrorIs(t, got.Err, rdma.ErrKey)
	require.Zero(t, n.Bytes(1)[0])

	strict, err := NewDialer(Config{Atomics: AtomicsRequired})
	require.NoError(t, err)
	defer func() { require.NoError(t, strict.Close()) }()
	_, err = strict.Dial(t.Context(), n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	require.ErrorIs(t, err, rdma.ErrBroken)
	require.ErrorContains(t, err, "--rdma-atomics required")
}

// A connection that ends leaves the outcome of a message open, and the message is not executed again. See also TestContractWithAgentAtomics.
func TestHazard160_BrokenMessageIsUnknown(t *testing.T) {
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Atomics: AtomicsAgent})
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	c, to := open(t, newDialer(t), n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	// The node has the message and cannot come to execute it.
	l := n.sessions[c.as.Serial].lanes[0]
	l.acting.mu.Lock()
	var r rdma.Round
	ch := r.Chain(to)
	ch.FetchAdd(0, 1)
	c.Post(ch)
	require.True(t, c.acting)
	c.nc.Close()
	c.Wait(ch, 0)
	require.ErrorIs(t, ch.Err, rdma.ErrBroken)
	require.NotErrorIs(t, ch.Err, rdma.ErrRefused)
	require.Zero(t, ch.Done)
	l.acting.mu.Unlock()
	require.NoError(t, c.Reset(t.Context()))
	before := n.Bytes(1)[0]
	require.LessOrEqual(t, before, byte(1))
	got := chain(to, guard, func(ch *rdma.Chain) { ch.FetchAdd(0, 1) })
	require.NoError(t, got.Err)
	require.Equal(t, uint64(before), got.Verbs[0].Old)
	require.Equal(t, before+1, n.Bytes(1)[0])
}

// Chains that take long hold up those of no other lane.
func TestHazard173_SlowChainsHoldUpNoOther(t *testing.T) {
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Atomics: AtomicsAgent})
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	rounds := make([]rdma.Round, actors+2)
	var held []*lane
	for i := range rounds {
		c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), uint32(i+1))
		held = append(held, n.sessions[c.as.Serial].lanes[c.number])
		held[i].acting.mu.Lock() // its chain does not come to its end
		ch := rounds[i].Chain(to)
		ch.FetchAdd(0, 1)
		ch.Verify(0, stepBytes, 1)
		ch.Verify(0, 8, 1)
		rdma.Post(&rounds[i])
		require.True(t, c.acting)
	}
	_, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	for i := range uint64(20) {
		got := chain(to, guard, func(ch *rdma.Chain) { ch.FetchAdd(8, 1) })
		require.NoError(t, got.Err)
		require.Equal(t, i, got.Verbs[0].Old)
	}
	for _, l := range held {
		l.acting.mu.Unlock()
	}
	for i := range rounds {
		rdma.Await(&rounds[i])
		require.NoError(t, rounds[i].Err())
	}
}

// What waits behind a chain of the connection that the node executes is sent when that has been awaited, whichever chain is awaited next.
func TestHeldChainsAreSent(t *testing.T) {
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Atomics: AtomicsAgent})
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	var before, behind rdma.Round
	var conns []*conn
	for i := range uint32(2) {
		c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), i)
		conns = append(conns, c)
		before.Chain(to).FetchAdd(0, 1)
		ch := behind.Chain(to)
		ch.FetchAdd(0, 1)
		ch.Fenced()
		ch.Read(0, make([]byte, 8))
	}
	rdma.Post(&before)
	rdma.Post(&behind)
	rdma.Await(&before)
	for _, c := range conns {
		require.True(t, c.queue[0].sent)
	}
	rdma.Await(&behind)
	require.NoError(t, errors.Join(before.Err(), behind.Err()))
	require.Equal(t, byte(4), n.Bytes(1)[0])
}

// A library that makes no more queue pairs, and gives no reason, ends no process: libsiw makes 28 on an open device.
func TestQueuePairsRunOut(t *testing.T) {
	n := startNode(t, testCluster)
	d := newDialer(t)
	if !strings.HasPrefix(d.Caps().Device, "siw") {
		t.Skip("no siw: run verify/rxevm/test-rdma.sh iwarp")
	}
	for i := range uint64(100) {
		c, err := d.Dial(t.Context(), n.addr, ticket(i+1, 0, rdma.ReadWrite), 0)
		if err != nil {
			require.ErrorIs(t, err, rdma.ErrBroken)
			require.ErrorContains(t, err, "it has no more")
			require.NotErrorIs(t, err, unix.EINVAL, "the reason of the try with inline data")
			return
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Log("this library makes more")
}

//go:build cgo && verbs && yardstick

package verbs

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// What is behind a refused READ or atomic without a fence may have been executed: neither the
// chain nor those behind it are called not done, and none is sent again.
func TestRefusedReadLeavesTheRestUnknown(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	word := make([]byte, 8)
	for name, test := range map[string]struct {
		first, behind, next func(c *rdma.Chain)
		want                error
	}{
		"READ alone":             {first: func(c *rdma.Chain) { c.Read(0, word) }, want: rdma.ErrKey},
		"READ, READ":             {first: func(c *rdma.Chain) { c.Read(0, word) }, behind: func(c *rdma.Chain) { c.Read(8, word) }, want: rdma.ErrKey},
		"READ, WRITE":            {first: func(c *rdma.Chain) { c.Read(0, word) }, behind: func(c *rdma.Chain) { c.Write(8, word) }, want: rdma.ErrBroken},
		"READ, fenced WRITE":     {first: func(c *rdma.Chain) { c.Read(0, word) }, behind: func(c *rdma.Chain) { c.Write(8, word); c.Fenced() }, want: rdma.ErrKey},
		"READ, CAS":              {first: func(c *rdma.Chain) { c.Read(0, word) }, behind: func(c *rdma.Chain) { c.CAS(8, 0, 1) }, want: rdma.ErrBroken},
		"CAS, WRITE":             {first: func(c *rdma.Chain) { c.CAS(0, 0, 0) }, behind: func(c *rdma.Chain) { c.Write(8, word) }, want: rdma.ErrBroken},
		"WRITE, WRITE":           {first: func(c *rdma.Chain) { c.Write(0, word) }, behind: func(c *rdma.Chain) { c.Write(8, word) }, want: rdma.ErrKey},
		"READ; WRITE":            {first: func(c *rdma.Chain) { c.Read(0, word) }, next: func(c *rdma.Chain) { c.Write(8, word) }, want: rdma.ErrBroken},
		"READ, fenced READ; CAS": {first: func(c *rdma.Chain) { c.Read(0, word) }, behind: func(c *rdma.Chain) { c.Read(8, word); c.Fenced() }, next: func(c *rdma.Chain) { c.CAS(8, 0, 1) }, want: rdma.ErrKey},
	} {
		t.Run(name, func(t *testing.T) {
			c, to := open(t, d, n.addr, ticket(3, 0, rdma.ReadWrite), 0)
			good := c.windows[0].rkey
			c.windows[0].rkey ^= 0x5500
			var rounds [2]rdma.Round
			chains := make([]*rdma.Chain, 0, 2)
			for i, builds := range [][]func(*rdma.Chain){{test.first, test.behind}, {test.next}} {
				rounds[i].Deadline = clock.In(guard)
				ch := rounds[i].Chain(to)
				for _, build := range builds {
					if build != nil {
						build(ch)
					}
				}
				if len(ch.Verbs) > 0 {
					c.Post(ch)
					chains = append(chains, ch)
				}
			}
			c.windows[0].rkey = good
			for i, ch := range chains {
				c.Wait(ch, rounds[i].Deadline)
			}
			require.ErrorIs(t, chains[0].Err, test.want)
			require.Zero(t, chains[0].Done)
			if len(chains) == 2 && test.want == rdma.ErrBroken {
				require.ErrorIs(t, chains[1].Err, rdma.ErrBroken, "it may have been executed, and is not sent again")
			} else if len(chains) == 2 {
				require.NoError(t, chains[1].Err, "it was held back, and is sent again")
			}
			if test.want == rdma.ErrBroken {
				require.ErrorIs(t, chain(to, guard, add).Err, rdma.ErrBroken)
				require.NoError(t, c.Reset(t.Context()))
			}
			require.NoError(t, chain(to, guard, add).Err)
		})
	}
}

// A chain that was held back by a refusal, and whose window the node does not grant any more when the chain is sent again, is
// refused at once.
func TestHeldBackAndRefused(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	c, to := open(t, newDialer(t), n.addr, ticket(3, 0, rdma.ReadWrite), 0)
	good := c.windows[0].rkey
	c.windows[0].rkey ^= 0x5500
	var rounds [2]rdma.Round
	var chains [2]*rdma.Chain
	for i := range rounds {
		rounds[i].Deadline = clock.In(guard)
		chains[i] = rounds[i].Chain(to)
		chains[i].Read(0, make([]byte, 8))
		c.Post(chains[i])
	}
	c.windows[0].rkey = good
	c.Wait(chains[0], rounds[0].Deadline)
	require.ErrorIs(t, chains[0].Err, rdma.ErrKey)
	to.Window.Key++
	c.Wait(chains[1], rounds[1].Deadline)
	require.ErrorIs(t, chains[1].Err, rdma.ErrKey)
	require.Zero(t, chains[1].Done)
}

// A queue pair that never drains ends the node, in bounded time.
func TestDrainWithoutEnd(t *testing.T) {
	n := startNode(t, testCluster)
	n.draining = 50 * time.Millisecond
	l := n.newLane(nil, 0, 0, &ticket(1, 0, rdma.ReadWrite).Ticket) // nothing will ever close flushed
	n.leave(l)
	err := <-n.Err()
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "has not drained")
}

// Namespaces that share adapters show each other's addresses, which the connection manager
// then refuses: the next candidate is taken.
func TestAddressesOfOthersArePassedOver(t *testing.T) {
	needDevice(t)
	foreign, err := chooseBehind("203.0.113.7")
	require.NoError(t, err)
	require.NotEqual(t, "203.0.113.7", foreign)
	require.Equal(t, Objects{}, Live())
}

// A device that refuses a window costs no client its region: the node goes on with memory
// regions.
func TestWindowsThatCannotBeBound(t *testing.T) {
	needDevice(t)
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOn, unbindable: true})
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	require.NoError(t, n.OpenRegion(t.Context(), 2, 1))
	d := newDialer(t)
	for serial := uint64(1); serial < 4; serial++ {
		for _, region := range []uint32{1, 2} {
			c, err := d.Dial(t.Context(), n.addr, ticket(serial, 0, rdma.ReadWrite), region)
			require.NoError(t, err)
			defer c.Close()
			require.Eventually(t, func() bool {
				w, err := c.Open(t.Context(), region, 1)
				if err != nil {
					require.ErrorIs(t, err, rdma.ErrBroken)
					require.NoError(t, c.Reset(t.Context()))
					return false
				}
				if chain(&rdma.Target{Conn: c, Window: w}, guard, add).Err != nil { // the refused bind has ended its queue pair
					require.NoError(t, c.Reset(t.Context()))
					return false
				}
				return true
			}, guard, time.Millisecond, "session %d has no way to region %d", serial, region)
		}
	}
	require.NoError(t, n.CloseRegion(t.Context(), 1, 1))
	require.NoError(t, n.OpenRegion(t.Context(), 1, 2))
	require.NoError(t, n.OpenRegion(t.Context(), 3, 1))
	require.Zero(t, Live().Windows)
}

// Queue pairs are set to what the configuration says, at both ends.
func TestLinkIsConfigured(t *testing.T) {
	c, err := ParseConfig(",traffic-class=104,ack-timeout=30ms,retries=3,inline=64,spin=0s,windows=off")
	require.NoError(t, err)
	n := startNodeOf(t, testCluster, c)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d, err := NewDialer(c)
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	lane, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	client, node, err := n.ends(lane)
	require.NoError(t, err)
	t.Logf("client %+v, node %+v", client, node)
	for _, end := range []settings{client, node} {
		require.Equal(t, 13, end.timeout, "4.096 us << 13 = 34 ms")
		require.Equal(t, 3, end.retries)
		require.Equal(t, 6, end.rnrRetries)
		require.Equal(t, 104, end.trafficClass)
	}
	require.EqualValues(t, 64, lane.lane.inline_max)
	require.NoError(t, chain(to, guard, add).Err)
	_, err = NewDialer(Config{PKey: 0x1234})
	require.ErrorContains(t, err, "no member of the partition 0x1234")
	member, err := NewDialer(Config{PKey: 0x7fff})
	require.NoError(t, err, "full and limited membership")
	require.NoError(t, member.Close())
}

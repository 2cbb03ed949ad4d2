package testcluster_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestDrain: a node is emptied under writers, struck out, and what it did others do.
func TestDrain(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 3, Log: testing.Verbose()})
	l := startLoad(c, 2, 4, 20)
	l.progress(200)
	ctl := c.Control()
	victim := 0
	for i := range c.Nodes {
		if primaries(c, i) > 0 {
			victim = i
		}
	}
	name := c.Nodes[victim].Stats().Name
	_, err := ctl.RemoveNode(t.Context(), connect.NewRequest(&quarrypb.RemoveNodeRequest{Name: name}))
	require.ErrorContains(t, err, "drain it first")
	l.mark()
	require.Eventually(t, func() bool {
		res, err := ctl.DrainNode(t.Context(), connect.NewRequest(&quarrypb.DrainNodeRequest{Name: name}))
		require.NoError(t, err)
		return res.Msg.Replicas == 0
	}, patience, 20*time.Millisecond)
	l.progress(200)
	gap, _ := l.mark()
	t.Logf("drained: longest gap without a write %v", gap)
	require.Zero(t, primaries(c, victim))
	require.Eventually(t, func() bool { return c.Nodes[victim].Stats().HostedBytes == 0 }, patience, 10*time.Millisecond, "its memory is given back")
	_, err = ctl.RemoveNode(t.Context(), connect.NewRequest(&quarrypb.RemoveNodeRequest{Name: name}))
	require.NoError(t, err)
	// There is no third place now.
	for i := range c.Nodes {
		if i != victim {
			_, err = ctl.DrainNode(t.Context(), connect.NewRequest(&quarrypb.DrainNodeRequest{Name: c.Nodes[i].Stats().Name}))
			require.ErrorContains(t, err, "no other node can take")
		}
	}
	require.Error(t, <-c.Nodes[victim].Err(), "a node that was struck out says so and stops")
	l.end()
	check(c)
}

// TestReplacement: a node stays away, a spare one takes its replicas; when the last
// but one goes too, the service goes on.
func TestReplacement(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 3, ReplaceAfter: time.Second, Log: testing.Verbose()})
	l := startLoad(c, 2, 2, 20)
	l.progress(100)
	gone := map[uint32]bool{}
	kill := func() {
		for i, n := range c.Nodes {
			if id := n.Stats().ID; !gone[id] && primaries(c, i) > 0 {
				require.NoError(t, n.Close())
				gone[id] = true
				return
			}
		}
	}
	kill()
	require.Eventually(t, func() bool {
		r := c.Table().Regions[0]
		for _, p := range r.Replicas {
			if gone[p.Node] || p.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC {
				return false
			}
		}
		return len(r.Replicas) == 2
	}, patience, 20*time.Millisecond, "the spare node is in sync, the one that is gone is struck out")
	kill()
	l.progress(200)
	l.end()
}

// TestPowerLoss: every node that holds a region stops, and comes back with what it
// had: the region goes on with it. Without memory it is lost, and says so.
func TestPowerLoss(t *testing.T) {
	for _, dir := range []bool{true, false} {
		c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: dir, Lease: time.Second, Log: testing.Verbose()})
		cl := c.Connect(client.Config{Replicas: 2})
		var refs []client.Ref
		for i := range 50 {
			var ref client.Ref
			var err error
			require.Eventually(t, func() bool { // a node that was slow to answer at its start is taken for lost, until it answers
				ref, err = cl.Alloc(t.Context(), value(uint64(i)), client.AllocOptions{})
				return !errors.Is(err, client.ErrNoSpace)
			}, patience, 20*time.Millisecond)
			require.NoError(t, err)
			refs = append(refs, ref)
		}
		for _, n := range c.Nodes {
			require.NoError(t, n.Close())
		}
		for i := range c.Nodes {
			c.RestartNode(i)
		}
		if !dir {
			require.Eventually(t, func() bool { return c.Table().Regions[0].State == quarrypb.RegionState_REGION_STATE_LOST }, patience, 20*time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			_, err := cl.Read(ctx, refs[0], nil)
			cancel()
			require.ErrorContains(t, err, "every replica is lost")
			continue
		}
		c.WaitInSync(2)
		for i, ref := range refs {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			got, err := cl.Read(ctx, ref, nil)
			cancel()
			require.NoError(t, err)
			require.Equal(t, value(uint64(i)), got)
		}
		require.NoError(t, cl.Close())
		check(c)
	}
}

// TestDeadClientIsScrubbed: what a client held that never said goodbye is settled,
// and its number comes back.
func TestDeadClientIsScrubbed(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: time.Second, Log: testing.Verbose()})
	cl := c.Connect(client.Config{Replicas: 2, Transport: client.TransportTCP})
	_, err := cl.Alloc(t.Context(), value(1), client.AllocOptions{})
	require.NoError(t, err)
	ctl := c.Control()
	dead := cl.SessionID() // it holds a magazine of claimed slabs
	_, err = ctl.RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: dead}))
	require.NoError(t, err)
	_ = cl.Close() // whatever it says: it has been fenced
	require.Eventually(t, func() bool {
		res, err := ctl.ListSessions(t.Context(), connect.NewRequest(&quarrypb.ListSessionsRequest{}))
		require.NoError(t, err)
		for _, s := range res.Msg.Sessions {
			if s.Session == dead {
				return false
			}
		}
		return true
	}, patience, 20*time.Millisecond, "session %d is forgotten", dead)
	check(c)
}

// TestLeaderDiesInAFailover: a node and the leading controller go at the same time.
func TestLeaderDiesInAFailover(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 3, Log: testing.Verbose()})
	l := startLoad(c, 2, 2, 20)
	l.progress(100)
	url := c.Controller.URL()
	for i := range c.Nodes {
		if primaries(c, i) > 0 {
			require.NoError(t, c.Nodes[i].Close())
			require.NoError(t, c.Controller.Close())
			c.StartController(url[len("http://"):])
			l.progress(200)
			c.RestartNode(i)
			break
		}
	}
	c.WaitInSync(2)
	l.progress(100)
	l.end()
	check(c)
}

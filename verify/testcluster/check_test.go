package testcluster_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestLongCheck: a check that takes long acknowledges reclaim epochs as it goes on, so
// that the numbers of dead sessions do not wait for its end.
func TestLongCheck(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Lease: time.Second})
	cl := c.Connect(client.Config{})
	sizes := []int{100, 1000, 3000, 10_000, 40_000, 150_000}
	for _, bytes := range sizes { // each in a block of its own
		_, err := cl.Alloc(t.Context(), make([]byte, bytes), client.AllocOptions{})
		require.NoError(t, err)
	}
	sessions := func() map[uint32]bool {
		res, err := c.Control().ListSessions(t.Context(), connect.NewRequest(&quarrypb.ListSessionsRequest{}))
		require.NoError(t, err)
		ids := map[uint32]bool{}
		for _, s := range res.Msg.Sessions {
			ids[s.Session] = true
		}
		return ids
	}
	before := sessions()
	c.Connect(client.Config{})
	var dead uint32
	for id := range sessions() {
		if !before[id] {
			dead = id
		}
	}
	require.NotZero(t, dead)

	first, step, gone := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var objects atomic.Int32
	var report *fsck.Report
	ended := make(chan error, 1)
	go func() {
		var err error
		report, err = fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}, Object: func(fsck.Object) {
			switch objects.Add(1) {
			case int32(len(sizes)):
				<-gone
			case 1:
				close(first)
				fallthrough
			default:
				<-step
			}
		}})
		ended <- err
	}()
	select {
	case <-first:
	case err := <-ended:
		require.NoError(t, err)
		t.Fatal("no object was found")
	}
	epoch := c.Table().ReclaimEpoch
	_, err := c.Control().RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: dead, Reason: "test"}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return c.Table().ReclaimEpoch > epoch }, patience, 10*time.Millisecond, "it has been scrubbed")
	require.True(t, sessions()[dead], "the round in hand began before")
	require.Eventually(t, func() bool {
		select {
		case step <- struct{}{}: // a block, and then its heartbeats have time to say so
		default:
		}
		return !sessions()[dead]
	}, patience, 200*time.Millisecond, "its number is free while the check goes on")
	select {
	case err := <-ended:
		t.Fatal("the check is over", err)
	default:
	}
	close(step)
	close(gone)
	require.NoError(t, <-ended)
	require.Empty(t, report.Findings)
}

// TestCheckBeginsAnew: a region moves to another node in the middle of a check. The check begins
// anew and finds every object, unless its caller was given objects and does not take them back.
func TestCheckBeginsAnew(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 3})
	cl := c.Connect(client.Config{})
	sizes := []int{100, 1000, 3000, 10_000, 40_000, 150_000}
	for _, bytes := range sizes { // each in a block of its own
		_, err := cl.Alloc(t.Context(), make([]byte, bytes), client.AllocOptions{})
		require.NoError(t, err)
	}
	require.Len(t, c.Table().Regions, 1)
	drain := func() { // the node that has the region
		var name string
		for _, n := range c.Table().Nodes {
			if n.Id == c.Table().Regions[0].Replicas[0].Node {
				name = n.Name
			}
		}
		require.Eventually(t, func() bool {
			res, err := c.Control().DrainNode(t.Context(), connect.NewRequest(&quarrypb.DrainNodeRequest{Name: name}))
			require.NoError(t, err)
			return res.Msg.Replicas == 0
		}, patience, 20*time.Millisecond)
	}
	var objects, restarts int
	cfg := fsck.Config{Controllers: []string{c.Controller.URL()}, Object: func(fsck.Object) {
		if objects++; objects == 1 && restarts == 0 {
			drain()
		}
	}}
	cfg.Restart = func() { objects, restarts = 0, restarts+1 }
	rep, err := fsck.Cluster(t.Context(), cfg)
	require.NoError(t, err)
	require.Empty(t, rep.Findings)
	require.Equal(t, len(sizes), objects)
	require.NotZero(t, restarts)

	objects, restarts, cfg.Restart = 0, 0, nil
	_, err = fsck.Cluster(t.Context(), cfg)
	require.ErrorIs(t, err, fsck.ErrChanged)
}

// TestCheckOfTheOpenRegions: a check leaves out the regions of a node that is gone, names
// them, and checks the others. Chunks whose index may be in such a region are no orphans,
// though the session that wrote them is over.
func TestCheckOfTheOpenRegions(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: time.Second})
	cl := c.Connect(client.Config{})
	gone := c.Nodes[0].Stats().ID
	parted := func() bool { // chunks on the other node have their index on the one that goes
		var stay []uint32
		for _, r := range c.Table().Regions {
			if r.Replicas[0].Node != gone {
				stay = append(stay, r.Id)
			}
		}
		if len(stay) == 0 || len(stay) == len(c.Table().Regions) {
			return false
		}
		rep, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}, Regions: stay})
		require.NoError(t, err)
		return slices.ContainsFunc(rep.Regions, func(r fsck.RegionReport) bool { return r.Pending > 0 })
	}
	for !parted() {
		_, err := cl.Alloc(t.Context(), make([]byte, 7<<20), client.AllocOptions{})
		require.NoError(t, err)
	}
	session := cl.SessionID()
	require.NoError(t, cl.Close())
	c.AwaitSession(session, "")

	require.NoError(t, c.Nodes[0].Close())
	var open, closed []uint32
	require.Eventually(t, func() bool {
		open, closed = nil, nil
		for _, r := range c.Table().Regions {
			switch {
			case r.Replicas[0].Node != gone:
				open = append(open, r.Id)
			case !r.Usable():
				closed = append(closed, r.Id)
			default:
				return false
			}
		}
		return true
	}, patience, 10*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{c.Controller.URL()}})
	require.ErrorIs(t, err, fsck.ErrUnchecked)
	require.Empty(t, rep.Findings)
	require.False(t, rep.OK())
	var done, left []uint32
	pending := 0
	for _, r := range rep.Regions {
		done = append(done, r.Region)
		pending += r.Pending
	}
	for _, u := range rep.Unchecked {
		left = append(left, u.Region)
		require.Equal(t, "unavailable", u.State)
		require.ErrorContains(t, err, u.String())
	}
	require.Equal(t, open, done)
	require.Equal(t, closed, left)
	require.NotZero(t, pending, "chunks whose index cannot be read")
	rep, err = fsck.Cluster(ctx, fsck.Config{Controllers: []string{c.Controller.URL()}, Regions: open})
	require.NoError(t, err)
	require.True(t, rep.OK())
	_, err = fsck.Cluster(ctx, fsck.Config{Controllers: []string{c.Controller.URL()}, Regions: []uint32{99}})
	require.True(t, errors.Is(err, fsck.ErrNoRegion))
}

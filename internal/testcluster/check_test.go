package testcluster_test

import (
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/fsck"
	"github.com/quarrystore/quarry/internal/testcluster"
	"github.com/quarrystore/quarry/proto/quarrypb"
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
	require.Eventually(t, func() bool { return c.Table().ReclaimEpoch > epoch }, time.Minute, 10*time.Millisecond, "it has been scrubbed")
	require.True(t, sessions()[dead], "the round in hand began before")
	require.Eventually(t, func() bool {
		select {
		case step <- struct{}{}: // a block, and then its heartbeats have time to say so
		default:
		}
		return !sessions()[dead]
	}, time.Minute, 200*time.Millisecond, "its number is free while the check goes on")
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

package controller_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TestSuccessorWaitsOut takes a leader's place away as standbys do. The leader, which
// is well and does not know, may answer until its own count is over; its successor
// must not answer before that (hazard 14).
func TestSuccessorWaitsOut(t *testing.T) {
	_, etcd := store(t)
	a, askA := start(t, controller.Config{Etcd: etcd, Name: "a"})
	lead(t, a)
	b, askB := start(t, controller.Config{Etcd: etcd, Name: "b"})
	s := do(t, askA.OpenSession, &quarrypb.OpenSessionRequest{})
	require.Eventually(t, func() bool { return len(do(t, askA.Status, &quarrypb.StatusRequest{}).Controllers) == 2 }, patience, time.Millisecond)

	// The last answer of a, and the first of b, to what needs no write.
	var lastA, firstB atomic.Int64
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	beat := func(r rpc, got func(at int64)) {
		defer func() { done <- struct{}{} }()
		for ctx.Err() == nil {
			sent := int64(time.Since(began))
			if _, err := r.Heartbeat(ctx, connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial, Proof: s.Proof})); err == nil {
				got(sent)
			}
			time.Sleep(time.Millisecond)
		}
	}
	go beat(askA, func(sent int64) { lastA.Store(sent) })
	go beat(askB, func(int64) { firstB.CompareAndSwap(0, int64(time.Since(began))) })

	res, err := etcd.Get(ctx, "/quarry/leader/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	require.NoError(t, err)
	leader := res.Kvs[0]
	require.Contains(t, string(leader.Value), " a\n")
	require.Contains(t, string(leader.Value), `"hold_ms":1200`)
	mark := fmt.Sprintf("/quarry/deposed/%016x", leader.CreateRevision)
	_, err = etcd.Put(ctx, mark, "1200")
	require.NoError(t, err)
	later := fmt.Sprintf("/quarry/deposed/%016x", leader.CreateRevision+1_000_000)
	_, err = etcd.Put(ctx, later, "1200") // of a leadership that has not been yet
	require.NoError(t, err)
	_, err = etcd.Revoke(ctx, clientv3.LeaseID(leader.Lease))
	require.NoError(t, err)
	revoked := int64(time.Since(began))

	require.Eventually(t, func() bool { return firstB.Load() > 0 }, patience, time.Millisecond)
	require.True(t, b.Leads())
	cancel()
	<-done
	<-done
	require.Greater(t, firstB.Load(), lastA.Load(), "a answered while b led")
	require.GreaterOrEqual(t, time.Duration(firstB.Load()-revoked), 1200*time.Millisecond)
	left, err := etcd.Get(t.Context(), "/quarry/deposed/", clientv3.WithPrefix())
	require.NoError(t, err)
	require.Len(t, left.Kvs, 1, "the mark is removed by whom it was for")
	require.True(t, strings.HasSuffix(later, string(left.Kvs[0].Key)[len("/quarry/"):]))
}

// A leader whose members of the list and probes say that it is well keeps its place.
func TestStandbysLeaveALeaderAlone(t *testing.T) {
	_, etcd := store(t)
	a, askA := start(t, controller.Config{Etcd: etcd, Name: "a"})
	lead(t, a)
	b, _ := start(t, controller.Config{Etcd: etcd, Name: "b"})
	seen := func() int {
		n := 0
		for _, m := range do(t, askA.Status, &quarrypb.StatusRequest{}).Members {
			if m.State == "alive" && len(m.SeenBy) == 2 {
				n++
			}
		}
		return n
	}
	require.Eventually(t, func() bool { return seen() == 2 }, patience, 10*time.Millisecond)
	terms := a.Stats(t.Context()).Terms
	require.Never(t, b.Leads, time.Second, 20*time.Millisecond)
	require.Equal(t, terms, a.Stats(t.Context()).Terms)
	require.Zero(t, b.Stats(t.Context()).Deposed)
	// One that ends in good order makes room at once.
	require.NoError(t, a.Close())
	lead(t, b)
	require.Zero(t, b.Stats(t.Context()).Deposed)
}

// A connection that ends has the node probed: it is well, and keeps all it has.
func TestEndOfAConnectionIsASuspicion(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, GossipListen: controller.NoGossip})
	lead(t, c)
	a := newAgent(t, "a", "/dc/r1/a", 1)
	a.register(rpc)
	cl, end := ownConnection(t, c.URL())
	do(t, cl.NodeHeartbeat, &quarrypb.NodeHeartbeatRequest{Id: a.rec.Id, Incarnation: a.rec.Incarnation})
	before := c.Stats(t.Context()).Suspicions[1]
	end()
	require.Eventually(t, func() bool { return c.Stats(t.Context()).Suspicions[1] > before }, patience, time.Millisecond)
	require.Equal(t, quarrypb.NodeState_NODE_STATE_UP, do(t, rpc.ReadTable, &quarrypb.ReadTableRequest{}).Nodes[0].State)
	require.Empty(t, c.Stats(t.Context()).Members)
}

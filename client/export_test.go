package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/slab"
)

// HeldLane is a lane with a running call, for tests that act between two rounds.
type HeldLane struct{ l *lane }

// Hold takes a lane and starts a call on it.
func Hold(ctx context.Context, c *Client) (*HeldLane, error) {
	l, err := c.lane(ctx, KindOther)
	return &HeldLane{l}, err
}

func (h *HeldLane) Reservation() proto.R                       { return h.l.Reservation() }
func (h *HeldLane) Release()                                   { h.l.session.client.done(h.l, nil) }
func (h *HeldLane) Region(id uint32) (*slab.Region, error)     { return h.l.Region(id) }
func (h *HeldLane) Do(r *rdma.Round)                           { h.l.Do(r) }
func (h *HeldLane) Settle(r *slab.Region, d *rdma.Round) error { return h.l.Settle(r, d) }
func (h *HeldLane) Pause() error                               { return h.l.Pause(yieldAttempts + 1) }

// Acknowledged returns what the present session would acknowledge now.
func Acknowledged(c *Client) (table, reclaim uint64) { return c.current.Load().acknowledgeable() }

// Table returns a copy of the present session's table.
func Table(c *Client) *quarrypb.Table {
	t := c.current.Load().view.Load().table
	out := &quarrypb.Table{Cluster: t.Cluster(), Revision: t.Revision(), ReclaimEpoch: t.ReclaimEpoch(), Whole: true}
	for _, n := range t.Nodes() {
		out.Nodes = append(out.Nodes, pb.CloneOf(n))
	}
	for _, r := range t.Regions() {
		out.Regions = append(out.Regions, pb.CloneOf(r))
	}
	return out
}

// Install installs a table in the present session as if a controller had sent it.
func Install(c *Client, t *quarrypb.Table) error { return c.current.Load().install(t) }

// AllocInTwo is Alloc of a large object. It calls between after it has made the chunks and
// before it makes the index. If between returns an error, there is no index: the chunks are
// freed if the error is that of a deadline, else left.
func AllocInTwo(ctx context.Context, c *Client, payload []byte, between func(chunks []Ref) error) (Ref, error) {
	l, err := c.lane(ctx, KindAlloc)
	if err != nil {
		return Ref{}, err
	}
	x, err := l.writeChunks(payload, alloc.Home{Replicas: c.defaultReplicas()})
	if err == nil {
		if err = between(x.chunks); errors.Is(err, context.DeadlineExceeded) {
			l.freeChunks(x.chunks)
		}
	}
	var ref Ref
	if err == nil {
		ref, err = l.alloc.Alloc(x.encode(), alloc.Want{Kind: proto.Pair, Replicas: c.defaultReplicas(), Tag: proto.TagIndex, Capacity: indexRoom(len(payload), l.chunkBytes())})
	}
	c.done(l, err)
	return ref, err
}

// CloseWithin is Close with a bound on the wait for running calls.
func CloseWithin(c *Client, timeout time.Duration) error { return c.closeWithin(timeout) }

// Disposing returns the number of ended sessions whose memory is not freed yet.
func Disposing(c *Client) int { return int(c.disposing.Load()) }

// CloseTimeout returns how long Close would take at most.
func CloseTimeout(c *Client) time.Duration { return c.closeTimeout() }

// Suspend makes it look to the present session as if the host had been suspended for d.
func Suspend(c *Client, d time.Duration) {
	c.current.Load().suspendedAtOpen.Add(-int64(d))
	StepWallClock(c, d)
}

// StepWallClock makes it look to the present session as if the wall clock had been set by d.
func StepWallClock(c *Client, d time.Duration) { c.current.Load().wallOffset.Add(-int64(d)) }

// AskNode sends a request for an object to a node by name, whatever it is, and returns the answer.
func AskNode(ctx context.Context, c *Client, node string, q msg.ObjectRequest) (a msg.ObjectAnswer, err error) {
	err = c.onLane(ctx, KindOther, func(l *lane) error {
		answer := make([]byte, msg.MaxPayload)
		l.park()
		for attempt := 1; ; attempt++ {
			l.adopt(l.session.view.Load())
			id, incarnation, err := l.nodeNamed(node)
			if err != nil {
				return err
			}
			n, err := l.callOnce(l.ctx, nodeAdapter{node: id}, incarnation, l.until(), attempt, msg.Object, q.Append(nil), answer)
			if err == nil {
				a, err = msg.ParseObjectAnswer(answer[:n])
			}
			if !errors.Is(err, errNotYet) || l.backOff(attempt) != nil {
				return err
			}
		}
	})
	return a, err
}

// NeverDone asks whether a write that a node was to execute under an epoch never will be executed.
func NeverDone(ctx context.Context, c *Client, q msg.ObjectRequest) (bool, error) {
	l, err := c.lane(ctx, KindOther)
	if err != nil {
		return false, err
	}
	defer c.done(l, nil)
	return l.neverDone(&q), nil
}

// FollowForTest has a Client follow n names more, without a wait for any of them.
func FollowForTest(c *Client, n int) {
	for i := range n {
		f := &FollowedName{hub: c.nameHub(), name: fmt.Sprint("more/", i), changed: make(chan struct{}, 1), done: make(chan struct{})}
		if err := f.hub.add(f); err != nil {
			panic(err)
		}
	}
}

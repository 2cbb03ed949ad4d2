package storagenode

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
)

// session is the leased identity of one program that reserves slabs: if this node
// dies with it, the fence and the scrub of the session settle what it held.
//
// It acknowledges no table: it works in one epoch of one region, answers no user from what
// it reads, and ends with the epoch's keys. It acknowledges reclaim epochs when every lane
// has begun another block, or has ended its turn of a reclaim.
type session struct {
	n         *Node
	ticket    *rdma.Credentials // opens the program's region under its epoch, and nothing else
	proof     []byte            // shown to controllers
	lease     time.Duration
	reclaim   atomic.Uint64      // the newest reclaim epoch that it has heard of
	unsettled atomic.Bool        // it has posted verbs that it could not settle: it has to be fenced
	cancel    context.CancelFunc // ends beat
	wg        sync.WaitGroup     // of beat

	mu    sync.Mutex  // guards the fields below
	lanes []*workLane // whose began bounds what is acknowledged
	acked uint64      // the newest reclaim epoch that has been acknowledged, as far as is known
}

// openSession opens the session of a program, and begins its heartbeats. If the controllers do
// not know the session any more, the heartbeats cancel the program. table is what the controllers' answer
// has of it; noRows asks for no rows.
func (w *work) openSession(what string, noRows bool) (_ *session, table *quarrypb.Table, _ error) {
	n, ctx := w.n, w.ctx
	n.mu.Lock()
	node := n.state.Node
	n.mu.Unlock()
	var res *quarrypb.OpenSessionResponse
	ticket := rdma.NewCredentials()
	req := &quarrypb.OpenSessionRequest{Name: fmt.Sprintf("%s of region %d by %s", what, w.req.Region, n.cfg.Name), Rights: uint32(rdma.ReadWrite), Token: n.cfg.Token, NoRows: noRows, Key: ticket.Holder[:],
		Program: &quarrypb.NodeProgram{Node: node, Incarnation: n.incarnation, Secret: n.secret[:], Region: w.req.Region, Epoch: w.req.Epoch}}
	for {
		err := n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
			r, err := cl.OpenSession(ctx, connect.NewRequest(req))
			if err == nil {
				res = r.Msg
			}
			return err
		})
		if err == nil {
			break
		}
		if final(err) || ctx.Err() != nil {
			return nil, nil, fmt.Errorf("open a session: %w", err)
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
	if err := ticket.Accept(res.Ticket); err != nil {
		return nil, nil, fmt.Errorf("open a session: %w", err)
	}
	if ticket.Session == 0 || res.LeaseMs == 0 {
		return nil, nil, errors.New("open a session: the controller's answer has no session")
	}
	s := &session{n: n, lease: time.Duration(res.LeaseMs) * time.Millisecond, ticket: ticket, proof: res.Proof}
	s.reclaim.Store(res.Table.GetReclaimEpoch())
	// Its own context: the lease is kept until the lanes have stopped.
	bctx, cancel := context.WithCancel(n.ctx)
	s.cancel = cancel
	s.wg.Go(func() { s.beat(bctx, res.Table.GetRevision(), w.cancel) })
	return s, res.Table, nil
}

// watch gives the session the lanes whose progress it acknowledges.
func (s *session) watch(lanes []*workLane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lanes {
		l.began.Store(s.reclaim.Load())
	}
	s.lanes = lanes
}

// acknowledge returns the reclaim epoch that a heartbeat may acknowledge, and notes it for
// Hold.
func (s *session) acknowledge() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	reclaim := s.reclaim.Load()
	for _, l := range s.lanes {
		reclaim = min(reclaim, l.began.Load())
	}
	s.acked = max(s.acked, reclaim)
	return reclaim
}

// beat sends heartbeats until ctx ends; lost is called when the session is over.
func (s *session) beat(ctx context.Context, revision uint64, lost context.CancelCauseFunc) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.lease / 4):
		}
		reclaim := s.acknowledge()
		var res *quarrypb.HeartbeatResponse
		err := s.n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
			r, err := cl.Heartbeat(ctx, connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: s.ticket.Serial, TableRevision: revision, ReclaimEpoch: reclaim, NoRows: true, Proof: s.proof}))
			if err == nil {
				res = r.Msg
			}
			return err
		})
		switch {
		case err == nil:
			revision = max(revision, res.Table.GetRevision())
			s.reclaim.Store(max(s.reclaim.Load(), res.ReclaimEpoch))
		case final(err) || connect.CodeOf(err) == connect.CodeNotFound:
			s.unsettled.Store(true)
			lost(fmt.Errorf("the program's session is over: %w", err))
			return
		}
	}
}

// certified says whether a session is fenced in a region.
func (s *session) certified(ctx context.Context, region, holder uint32) (fenced bool) {
	_ = s.n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		r, err := cl.CertifyFence(ctx, connect.NewRequest(&quarrypb.CertifyFenceRequest{Serial: s.ticket.Serial, Region: region, Session: holder, WaitMs: 200, Proof: s.proof}))
		fenced = err == nil && r.Msg.Fenced
		return err
	})
	return fenced
}

// close closes the session if it has settled everything, and has it revoked otherwise.
func (s *session) close(why error) {
	s.cancel()
	s.wg.Wait()
	ctx, cancel := context.WithTimeout(s.n.ctx, time.Second)
	defer cancel()
	_ = s.n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		var err error
		if s.unsettled.Load() {
			_, err = cl.RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Serial: s.ticket.Serial, Reason: fmt.Sprint(why), Proof: s.proof}))
		} else {
			_, err = cl.CloseSession(ctx, connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: s.ticket.Serial, Proof: s.proof}))
		}
		return err
	})
}

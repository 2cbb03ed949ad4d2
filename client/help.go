package client

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/slab"
)

// This file has changes executed by the node of an object's primary, by a message, where others hold the object again and again
// (Config.HelpFromNodes). The node executes the requests for one object one after the other, so that none of them meets another's
// reservation.
//
// A change that the node has done is done. Everything else that it answers leads back to the client's own verbs, but for a
// payload, which the callback of an Update is given: that counts as read under the epoch of the request, and is used while the
// session's table shows that epoch and its lease runs, as for a READ.

const (
	// helpAfter is how many attempts in a row have to find the object held by others before the node is asked. helpAfterRemote is that
	// where each attempt is a round trip to another process, as the message is.
	helpAfter       = 3
	helpAfterRemote = 1
	// helpWait is how long the node may wait for others, helpPatience how long the client waits for its answer beyond that. A change is
	// waited for longer: until the call or the epoch of the request ends.
	helpWait     = 50 * time.Millisecond
	helpPatience = time.Second
	// maxHelp bounds the requests of one call. A writer that uses its turn meets a conflict only with writers that ask no node.
	maxHelp = 32
	// A node that does not execute for the region now, or is not reached now, is asked again after helpSoon, one that cannot execute after
	// helpLater.
	helpSoon  = 20 * time.Millisecond
	helpLater = 10 * time.Second
	// hotFor is how long the node is asked first for an object that others hold, from the last time on that the node has said so.
	hotFor = 100 * time.Millisecond
	// hotObjects bounds the objects that are known to be held by others; a power of 2.
	hotObjects = 64
)

// hot are the objects whose node is asked before any verb. Two addresses with one hash share a slot.
type hot [hotObjects]struct {
	addr  atomic.Uint64
	until atomic.Int64 // clock.Now time
	calls atomic.Int32 // under way at nodes
}

// slot is where an object is noted.
func (h *hot) slot(ref Ref) int {
	return int(uint64(ref.Addr) * 0x9e3779b97f4a7c15 >> (64 - bits.TrailingZeros(hotObjects)))
}

// note notes that others hold an object.
func (h *hot) note(ref Ref) {
	s := &h[h.slot(ref)]
	s.until.Store(clock.In(hotFor))
	s.addr.Store(uint64(ref.Addr))
}

// has says whether the node is to be asked first.
func (h *hot) has(ref Ref) bool {
	s := &h[h.slot(ref)]
	return s.addr.Load() == uint64(ref.Addr) && clock.Now() < s.until.Load()
}

// errContended ends an attempt by verbs. The caller then asks the node.
var errContended = errors.New("others hold the object again and again")

// help is what a lane needs for requests to nodes.
type help struct {
	wanted    bool             // the running call can be executed by a node
	contended int              // attempt of the running call that has found the object held by another session
	request   []byte           // nil before the first request
	answer    []byte           // of the latest request
	again     map[uint32]int64 // by node: clock.Now time before which it is not asked
}

// byNode begins a call that a node can execute, and says whether it is asked at once. If not, an attempt that finds the object held too
// often ends with errContended.
func (l *lane) byNode(ref Ref) bool {
	c := l.session.client
	if !c.cfg.HelpFromNodes || c.cfg.Keys != nil {
		return false
	}
	if c.hot.has(ref) {
		return true
	}
	l.help.wanted, l.help.contended = true, 0
	return false
}

// contended says whether an attempt ends with errContended.
func (l *lane) contended(attempt int) bool {
	if !l.help.wanted || attempt != l.help.contended {
		return false
	}
	if l.remote {
		return attempt > helpAfterRemote
	}
	return attempt > helpAfter
}

// ask has the node of an object's primary execute a request. sure: what the answer shows of the object is current. An error that is not
// ErrUnknown: nothing was executed, and nothing will be.
func (l *lane) ask(q *msg.ObjectRequest) (a msg.ObjectAnswer, sure bool, err error) {
	reg, err := l.Region(q.Ref.Addr.Region())
	if err != nil {
		return a, false, err
	}
	q.Epoch = reg.Epoch
	if q.Op != msg.ObjectCall {
		q.Wait = helpWait
	}
	row := l.adopted.table.Region(reg.ID)
	node, incarnation, ok := primaryOf(l.adopted.table, row)
	if !ok {
		return a, false, errNotYet
	}
	if l.asksLater(node, q.Op) {
		return a, false, errAskLater
	}
	if l.help.request == nil {
		l.help.request, l.help.answer = make([]byte, 0, msg.MaxPayload), make([]byte, msg.MaxPayload)
		l.help.again = map[uint32]int64{}
	}
	l.help.request = q.Append(l.help.request[:0])
	slot := &l.session.client.hot[l.session.client.hot.slot(q.Ref)]
	others := slot.calls.Add(1) > 1 // lanes of this Client
	l.park()
	ctx, end, until := l.ctx, func() {}, clock.In(q.Wait+helpPatience)
	if q.Op == msg.ObjectWrite {
		ctx, end = l.untilOver(q)
		until = l.until()
	}
	n, err := l.callOnce(ctx, nodeAdapter{node, adapterAt(row, node)}, incarnation, until, 1, msg.Object, l.help.request, l.help.answer)
	end()
	l.unpark()
	slot.calls.Add(-1)
	if err == nil {
		a, err = msg.ParseObjectAnswer(l.help.answer[:n])
	}
	now := l.adopted.table.Region(reg.ID)
	switch {
	case err != nil:
		l.noteFailure(node, q.Op, err)
		return a, false, err
	case a.Reason == msg.Elsewhere:
		l.help.again[node] = clock.In(helpSoon)
	case (a.Others || others) && (a.Outcome == msg.Done || a.Reason == msg.Conflict || a.Reason == msg.Busy):
		l.session.client.hot.note(q.Ref)
	}
	return a, now != nil && now.Epoch == q.Epoch && l.LeaseValid(), nil
}

// errAskLater: the node was not asked, because its latest answer says that it cannot execute now.
var errAskLater = fmt.Errorf("%w: the node has been asked a moment ago", errNotYet)

// asksLater says whether a node is not asked now. A call of a function has no other way, and does not go by helpLater.
func (l *lane) asksLater(node uint32, op msg.ObjectOp) bool {
	wait := l.help.again[node] - clock.Now()
	return wait > 0 && (op != msg.ObjectCall || wait <= int64(helpSoon))
}

// noteFailure notes when a node is asked again that has not answered a request.
func (l *lane) noteFailure(node uint32, op msg.ObjectOp, err error) {
	switch {
	case errors.Is(err, ErrUnknown):
	case op == msg.ObjectCall && refused(err): // a node of an earlier version executes the other changes
	case errors.Is(err, errNotYet):
		l.help.again[node] = clock.In(helpSoon)
	default:
		l.help.again[node] = clock.In(helpLater)
	}
}

// refused says whether a procedure of the node has refused the request.
func refused(err error) bool {
	var of *msg.Refusal
	return errors.As(err, &of)
}

// untilOver is the context of a change. It ends with the call's, and when no answer has come for helpPatience and the epoch of the request is over:
// a node that is cut off never answers.
func (l *lane) untilOver(q *msg.ObjectRequest) (context.Context, func()) {
	ctx, cancel := context.WithCancel(l.ctx)
	s, region, epoch := l.session, q.Ref.Addr.Region(), q.Epoch
	t := time.AfterFunc(helpPatience, func() {
		tick := time.NewTicker(helpSoon)
		defer tick.Stop()
		for {
			if r := s.view.Load().table.Region(region); r == nil || r.Epoch != epoch {
				cancel()
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return ctx, func() { t.Stop(); cancel() }
}

// writeByNode is writeObject by the node of the primary. answered: err is the answer of the call; otherwise the node has not done it.
func (l *lane) writeByNode(ref Ref, payload []byte, version uint64) (answered bool, err error) {
	l.help.wanted = false
	if len(payload) > msg.MaxObjectPayload {
		return false, nil
	}
	answered, _, _, err = l.changeByNode(&msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Version: version, Payload: payload})
	l.countHelp(answered, err)
	return answered, err
}

// updateByNode is updateObject by the node of the primary: it reads, runs f, and writes if the object has not changed since. Meanwhile other
// requests at that node wait for their turn.
func (l *lane) updateByNode(ref Ref, f func(old []byte) ([]byte, error)) (answered bool, err error) {
	l.help.wanted = false
	defer func() { l.countHelp(answered, err) }()
	q := msg.ObjectRequest{Op: msg.ObjectRead, Ref: ref, Turn: true}
	for range maxHelp {
		answered, a, sure, err := l.changeByNode(&q)
		switch {
		case answered && q.Op == msg.ObjectWrite:
			return true, err
		case err != nil || !a.Has || !sure:
			return false, nil
		}
		payload, err := l.runCallback(f, a.Payload)
		if err != nil {
			return true, err
		}
		if len(payload) > msg.MaxObjectPayload {
			return false, nil
		}
		q = msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Turn: true, Version: a.Version, Named: a.Turn, Payload: payload}
	}
	return false, nil
}

// countHelp counts a call that a node was asked to execute.
func (l *lane) countHelp(answered bool, err error) {
	if answered && err == nil {
		l.events.helped.Add(1)
	} else {
		l.events.helpless.Add(1)
	}
}

// changeByNode has the node execute a request. answered: the node has executed it (err is nil), or that is unknown (ErrUnknown).
func (l *lane) changeByNode(q *msg.ObjectRequest) (answered bool, a msg.ObjectAnswer, sure bool, err error) {
	a, sure, err = l.ask(q)
	switch {
	case err != nil && !errors.Is(err, ErrUnknown):
		return false, a, false, nil
	case err == nil && a.Outcome == msg.Done:
		return true, a, sure, nil
	case err == nil && a.Outcome == msg.NotDone:
		return false, a, sure, nil
	case q.Op == msg.ObjectRead:
		return false, a, false, nil
	}
	if l.neverDone(q) {
		return false, a, false, nil
	}
	if err == nil {
		err = slab.ErrUnknown
	}
	return true, a, false, err
}

// neverDone finds out whether a write was not executed, and never will be, whose answer is missing or unknown: the epoch under which
// it was to be executed is over, and the object is at the version that the write has named. While the epoch lasts, verbs of the node
// may still arrive: neverDone waits for its end as long as the call may. A version that has passed does not come back.
func (l *lane) neverDone(q *msg.ObjectRequest) bool {
	if q.Version == anyVersion {
		return false
	}
	for attempt := yieldAttempts + 1; ; attempt++ {
		reg, err := l.Region(q.Ref.Addr.Region())
		if err != nil {
			return false
		}
		over := reg.Epoch != q.Epoch // before the View: lanes go by epochs that only rise
		_, info, err := l.slab.View(q.Ref)
		if err != nil || over || info.Version != q.Version {
			return err == nil && over && info.Version == q.Version
		}
		if l.backOff(attempt) != nil {
			return false
		}
	}
}

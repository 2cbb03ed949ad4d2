package storagenode

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/slab"
)

// execLane is a lane that executes procedures of clients: the slab.Port of one request at a time. It waits until the
// request's time is up.
type execLane struct {
	workLane
	x     *executor
	alloc *alloc.Allocator
	// view is the region under the reclaim epoch seen: a later one drops the cached headers of blocks.
	view *slab.Region
	seen uint64

	until int64 // clock.Now time: no attempt begins behind it
}

// open connects the lane.
func (l *execLane) open(want int) (err error) {
	if err := l.workLane.open(); err != nil {
		return err
	}
	l.region.Want = want
	if l.slab, err = slab.NewLane(l); err != nil {
		return err
	}
	l.alloc, err = alloc.New(l.slab, nowhere{})
	return err
}

// idle is what an idle lane has begun: nothing that holds a reclaim epoch back.
const idle = ^uint64(0)

// begin begins a request, which must not wait beyond until.
//
// The lane stores the reclaim epoch that it works by, and then loads the session's again. A heartbeat loads the session's, and then
// looks at the lanes. So it acknowledges no epoch that is later than one that a lane works by.
func (l *execLane) begin(until int64) {
	l.until, l.waited, l.asked = until, 0, 0
	s := l.w.session
	for e := s.reclaim.Load(); ; {
		l.began.Store(e)
		now := s.reclaim.Load()
		if now == e {
			break
		}
		e = now
	}
	if e := l.began.Load(); l.view == nil || e != l.seen {
		next := l.region
		next.Headers = slab.NewHeaders(next.Geometry.Blocks)
		l.view, l.seen = &next, e
	}
}

// end ends a request. What it has claimed is given back when the reclaim epoch rises, as a client's idle lanes do.
func (l *execLane) end() { l.began.Store(idle) }

// Region is the region under the reclaim epoch of the request.
func (l *execLane) Region(id uint32) (*slab.Region, error) {
	if _, err := l.workLane.Region(id); err != nil {
		return nil, err
	}
	return l.view, nil
}

// errTime: the request's time is up.
var errTime = errors.New("the time of the request is up")

// yields is how many attempts only yield the processor: a holder that runs is done within a microsecond or two.
const yields = 3

// Pause backs off until the request's time is up.
func (l *execLane) Pause(attempt int) error {
	if err := context.Cause(l.w.ctx); err != nil || attempt == 0 {
		return err
	}
	if clock.Now() >= l.until {
		return errTime
	}
	if attempt <= yields {
		runtime.Gosched()
		return nil
	}
	d := time.Duration(rand.Int64N(int64(min(pauseLongest, 20*time.Microsecond<<min(attempt-yields, 16)))))
	t := time.NewTimer(d)
	defer t.Stop()
	l.waited += d
	select {
	case <-t.C:
		return nil
	case <-l.w.ctx.Done():
		return context.Cause(l.w.ctx)
	}
}

const (
	// execAsk is how long a request waits for a holder before the node asks whether it is fenced, execAskEvery the time between two
	// questions of one executor, execAskTime how long the answer may take.
	execAsk      = 5 * time.Millisecond
	execAskEvery = 50 * time.Millisecond
	execAskTime  = 50 * time.Millisecond
)

// HolderFenced asks the controllers whether a session is certified fenced in the region, not too often.
func (l *execLane) HolderFenced(region, holder uint32, _ int) bool {
	now, asked := clock.Now(), l.x.asked.Load()
	if l.waited < execAsk || now-asked < int64(execAskEvery) || !l.x.asked.CompareAndSwap(asked, now) {
		return false
	}
	ctx, cancel := context.WithTimeout(l.w.ctx, execAskTime)
	defer cancel()
	if !l.w.session.certified(ctx, region, holder) {
		return false
	}
	l.x.n.executors.takeovers.Add(1)
	return true
}

var (
	errRelease  = errors.New("the object is released as it is")
	errIndirect = errors.New("the object lies in several slabs")
	errVersion  = errors.New("the object is at another version")
)

// execute executes a request for an object.
//
// Linearizes at: a read and a conflict, where slab.View and slab.Update do; a write and a free, at their CAS of V.
func (l *execLane) execute(r *msg.ObjectRequest, answer []byte) msg.ObjectAnswer {
	switch r.Op {
	case msg.ObjectRead:
		return l.read(r, answer)
	case msg.ObjectWrite:
		return l.write(r, answer)
	case msg.ObjectFree:
		return l.free(r)
	}
	return l.release(r)
}

// release reserves an object, which takes it over from a fenced session, and releases it unchanged.
func (l *execLane) release(r *msg.ObjectRequest) (a msg.ObjectAnswer) {
	_, err := l.slab.Update(r.Ref, func(_ []byte, info *slab.Info) ([]byte, error) {
		a.Version, a.Tag = info.Version, info.Tag
		return nil, errRelease
	})
	if !errors.Is(err, errRelease) {
		return refusal(err)
	}
	return a
}

// read answers with the payload of an object.
func (l *execLane) read(r *msg.ObjectRequest, answer []byte) msg.ObjectAnswer {
	payload, info, err := l.slab.View(r.Ref)
	switch {
	case err != nil:
		return refusal(err)
	case info.Tag&proto.TagIndex != 0:
		return refusal(errIndirect)
	}
	a := msg.ObjectAnswer{Version: info.Version, Tag: info.Tag}
	if !show(&a, payload, answer) {
		return refusal(slab.ErrTooLarge)
	}
	return a
}

// show puts an object's payload into an answer. false: it is too long for one.
func show(a *msg.ObjectAnswer, payload, answer []byte) bool {
	room := msg.Room(answer)
	if len(payload) > cap(room) {
		return false
	}
	a.Has, a.Payload = true, append(room, payload...)
	return true
}

// write replaces the payload of an object, if it is at the version that the request names.
func (l *execLane) write(r *msg.ObjectRequest, answer []byte) msg.ObjectAnswer {
	var a msg.ObjectAnswer
	info, err := l.slab.Update(r.Ref, func(old []byte, info *slab.Info) ([]byte, error) {
		switch {
		case info.Tag&proto.TagIndex != 0:
			return nil, errIndirect
		case r.Version != 0 && info.Version != r.Version:
			a = msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Conflict, Version: info.Version, Tag: info.Tag}
			show(&a, old, answer)
			return nil, errVersion
		}
		return r.Payload, nil
	})
	switch {
	case errors.Is(err, errVersion):
		return a
	case err != nil:
		return refusal(err)
	}
	return msg.ObjectAnswer{Version: info.Version, Tag: info.Tag}
}

// free ends an object, if it is at the version that the request names. The version that was looked at stands for any other, so
// that no index is freed without its chunks.
func (l *execLane) free(r *msg.ObjectRequest) msg.ObjectAnswer {
	for {
		_, info, err := l.slab.View(r.Ref)
		switch {
		case err != nil:
			return refusal(err)
		case info.Tag&(proto.TagIndex|proto.TagChunk) != 0:
			return refusal(errIndirect)
		case r.Version != 0 && info.Version != r.Version:
			return msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Conflict, Version: info.Version, Tag: info.Tag}
		}
		_, _, err = l.alloc.FreeVersion(r.Ref, info.Version)
		if r.Version == 0 && errors.Is(err, slab.ErrConflict) {
			if clock.Now() >= l.until {
				return refusal(errTime)
			}
			continue
		}
		if err != nil {
			return refusal(err)
		}
		_ = l.alloc.Tidy() // the object is freed; an error has ended the session, or the epoch
		return msg.ObjectAnswer{Version: info.Version, Tag: info.Tag}
	}
}

// reasons of errors, in the order in which they are looked for.
var reasons = []struct {
	err    error
	reason msg.Reason
}{
	{slab.ErrFreed, msg.Freed}, {slab.ErrConflict, msg.Conflict}, {slab.ErrImmutable, msg.Immutable}, {slab.ErrTooLarge, msg.TooLarge}, {errIndirect, msg.Indirect},
	{slab.ErrKey, msg.Encrypted}, {slab.ErrBadRef, msg.BadRef}, {slab.ErrKind, msg.BadRef}, {slab.ErrCorrupt, msg.Damaged}, {slab.ErrBusy, msg.Busy}, {errTime, msg.Busy},
	{errReplaced, msg.Elsewhere}, {slab.ErrLease, msg.Elsewhere},
}

// refusal is the answer to a request that has failed: unknown, or not done.
func refusal(err error) msg.ObjectAnswer {
	a := msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.OtherCause, Payload: []byte(err.Error())}
	if errors.Is(err, slab.ErrUnknown) {
		a.Outcome, a.Reason = msg.Unknown, msg.NoReason
		return a
	}
	for _, k := range reasons {
		if errors.Is(err, k.err) {
			a.Reason = k.reason
			break
		}
	}
	return a
}

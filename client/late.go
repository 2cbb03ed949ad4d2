package client

import (
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// This file has what a lane posts and does not wait for: the settles of a commit where words are open.

// Post sends a round that the call does not wait for; see slab.Poster.
func (l *lane) Post(r *rdma.Round) {
	rdma.Post(r)
	l.late = r
}

// Await waits for the round that was posted; see slab.Poster.
func (l *lane) Await(*rdma.Round) { l.awaitLate() }

// awaitLate waits for the round that was posted, if it was not waited for yet. A connection
// is not replaced before.
func (l *lane) awaitLate() {
	r := l.late
	if r == nil {
		return
	}
	if l.late, r.Deadline = nil, 0; l.remote {
		r.Deadline = l.until()
	}
	rdma.Await(r)
}

// keepOwing ends a call whose settles were posted. The lane works by no table from now on, and still holds back the reclaim epoch: a
// verb that is under way must not find another use of its block. The session makes sure that
// they are waited for soon, also if no other call comes.
func (l *lane) keepOwing() {
	l.hasParked, l.parkedUntilRound = false, false
	l.parked.Store(true)
	l.owes.Store(true)
	select {
	case l.session.owing <- struct{}{}:
	default:
	}
}

// startOwing begins a call of a lane that owes: it goes on with the view of the call before if that is still the session's.
// Otherwise what is owed is waited for first, because the new view would not hold back the reclaim epoch of that one.
func (l *lane) startOwing() {
	l.owes.Store(false)
	v := l.startView.Load()
	if l.resumeView.Load() == nil && l.session.view.Load() == v {
		l.parked.Store(false)
		if l.session.view.Load() == v {
			return
		}
		l.parked.Store(true)
	}
	l.slab.Rest()
	l.hasParked, l.parkedUntilRound = false, false
	l.resumeView.Store(nil)
	l.adoptStartView()
	l.parked.Store(false)
}

// restAfter is how long a lane may owe when no other call uses it.
const restAfter = 2 * time.Millisecond

// restIdleLanes waits for what idle lanes owe, so that other sessions find the slabs released also where
// an answer was lost.
func (s *session) restIdleLanes() {
	defer s.deactivate()
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		select {
		case <-s.active.Done():
			return
		case <-s.done:
			return
		case <-s.owing:
		}
		t.Reset(restAfter)
		select {
		case <-s.active.Done():
			return
		case <-s.done:
			return
		case <-t.C:
		}
		for _, l := range s.lanes {
			if l.owes.Load() && s.active.Err() == nil && l.busy.CompareAndSwap(false, true) {
				l.rest()
				s.release(l)
			}
		}
	}
}

// rest waits for what an idle lane owes.
// Preconditions: the caller owns the lane.
func (l *lane) rest() {
	if !l.owes.Load() {
		return
	}
	err := l.start(l.session.client.ctx, KindOther)
	if err == nil {
		l.slab.Rest()
		l.finish(nil)
	}
}

// readFrom chooses the replica that a lane reads at where words are open: one in sync.
func (l *lane) readFrom(o *slab.Region) int {
	if !o.OpenWords || l.session.client.cfg.ReadFrom == ReadPrimary {
		return 0
	}
	inSync := 0
	for i := range o.N {
		if o.Rebuilding[i] {
			continue
		}
		if l.session.client.cfg.ReadFrom == ReadNear && o.To[i].Conn.Provider() == TransportSHM {
			return i
		}
		inSync++
	}
	if l.session.client.cfg.ReadFrom == ReadNear {
		return 0
	}
	for i, k := 0, int(l.number)%inSync; ; i++ {
		if o.Rebuilding[i] {
			continue
		}
		if k == 0 {
			return i
		}
		k--
	}
}

// openWords says whether V of a region's slabs may be open.
func openWords(r *quarrypb.Region) bool { return r.Kind == quarrypb.RegionKind_REGION_KIND_OPEN_SLABS }

// hasSlabs says whether a region holds blocks of slabs.
func hasSlabs(r *quarrypb.Region) bool {
	return r.Kind == quarrypb.RegionKind_REGION_KIND_SLABS || openWords(r)
}

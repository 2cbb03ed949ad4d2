package state

import (
	"slices"

	wire "github.com/quarrystore/quarry/proto"
)

// This file keeps the numbers of ended sessions out of use until no operation can meet them.

// maxResting bounds the ids that rest before the reclaim epoch is raised for them.
const maxResting = 1 << 14

// maxForAgents bounds the ids that only agents get.
const maxForAgents = 1 << 10

// resting is the id of a session that its client has closed in good order. No word has the
// id. But an operation that began before may still be about
// to take over a reservation that the session had, as it does for sessions that are
// scrubbed (retire). So the id is not given out before a reclaim epoch has passed that
// was raised after the close. The epoch is not raised for each: ids rest until a retirement
// of scrubbed sessions raises it, or there are many.
//
// A new leader must not give out what rested at its predecessor. Ids are given out in their
// order (cluster.LastSession): until they are used up, a new leader's are new. From then on
// the record of a closed session stays until its id has rested, and a new leader, which
// finds a session that is closing, fences it again and lets its id rest anew.
type resting struct {
	id    uint32
	kept  *session // whose record stays; nil: it is deleted
	epoch uint64   // raised last when the session was closed
	since int64    // when it began to rest
}

// sessionIDs are the ids of sessions: in use, resting, or free.
type sessionIDs struct {
	m       *Machine
	used    [idWords]uint64 // a bit for each id that must not be given out
	highest uint32          // no session gets a higher id
	// forAgents is how many ids only agents get. A scrub has a session of its own: if ended
	// sessions that wait for a scrub had all the ids, there would never be another scrub.
	forAgents int
	resting   []resting
	raising   bool // the reclaim epoch is raised for resting ids
	// retiring are scrubbed sessions. The first of them have raised the reclaim epoch.
	retiring []retired
}

// reserve takes the ids out of use that no session gets: 0, which stands for no session, and those
// above highest. highest 0: all others are used.
func (x *sessionIDs) reserve(highest uint32) {
	x.used[0] = 1
	if x.highest = highest; highest == 0 || highest >= wire.MaxSession {
		x.highest = wire.MaxSession
	}
	x.forAgents = int(min(maxForAgents, x.highest/4))
	if x.highest == wire.MaxSession {
		return
	}
	first := x.highest + 1
	x.used[first/64] |= ^uint64(0) << (first % 64)
	for i := first/64 + 1; i < idWords; i++ {
		x.used[i] = ^uint64(0)
	}
}

// left is how many ids are free.
func (x *sessionIDs) left() int {
	return int(x.highest) - len(x.m.sessions) - len(x.resting) + x.kept()
}

// kept is how many sessions are only kept because their ids rest.
func (x *sessionIDs) kept() (n int) {
	for _, r := range x.resting {
		if r.kept != nil {
			n++
		}
	}
	return n
}

// rest lets the id of a session rest that is closed and fenced, and forgets the session if a
// new leader need not know of it.
func (x *sessionIDs) rest(s *session) {
	r := resting{id: s.rec.Session, epoch: x.m.cluster.ReclaimEpoch, since: x.m.now}
	if x.m.cluster.NextSerial > uint64(x.highest) { // each session has had a serial and an id
		r.kept, s.resting = s, true
	} else {
		x.m.forget(s)
		x.used[r.id/64] |= 1 << (r.id % 64)
	}
	x.resting = append(x.resting, r)
	if len(x.resting) >= maxResting {
		x.raise()
	}
}

// raise raises the reclaim epoch for the ids that rest, unless that is under way.
func (x *sessionIDs) raise() {
	if !x.raising && len(x.resting) > 0 {
		x.raising = true
		x.m.waits.awaitGrace(func(uint64) { x.raising = false })
	}
}

// wake sets free the ids that have rested while a reclaim epoch passed.
func (x *sessionIDs) wake(passed uint64) {
	x.resting = slices.DeleteFunc(x.resting, func(r resting) bool {
		if r.epoch >= passed {
			return false
		}
		x.release(r)
		return true
	})
}

// release sets an id free that has rested.
func (x *sessionIDs) release(r resting) {
	if r.kept != nil {
		x.m.forget(r.kept)
	}
	x.used[r.id/64] &^= 1 << (r.id % 64)
}

// longestResting takes the id that has rested longest, where no other id is free, if it has
// rested for four times as long as a session may hold up a grace period. Then the grace
// period waits for a fence in a region whose nodes are gone, and would never end. An operation
// that began before the close is taken to have ended by then. 0: no id has rested for so long.
func (x *sessionIDs) longestResting() uint32 {
	if len(x.resting) == 0 || x.m.now < x.resting[0].since+4*passLeases*int64(x.m.cfg.Lease) {
		return 0
	}
	r := x.resting[0]
	x.resting = x.resting[1:]
	x.release(r)
	return r.id
}

package slab

import (
	"cmp"
	"slices"

	"github.com/quarrystore/quarry/proto"
)

// SessionState is what the controllers have recorded of a session id.
type SessionState uint8

const (
	// SessionGone: no record. The id was never used, or its last session was closed
	// in good order, or fenced and scrubbed in every region.
	SessionGone SessionState = iota
	SessionLive
	// SessionExpired: the lease is over. The next heartbeat renews it.
	SessionExpired
	// SessionClosing: its client has finished every call and closed it.
	SessionClosing
	// SessionFencing: its fence has begun. Some node may still execute its verbs.
	SessionFencing
	// SessionFenced: no node executes its verbs any more. A commit that has reached a
	// backup and not the primary takes effect if the epoch ends before the scrub has rolled
	// it back.
	SessionFenced
)

func (s SessionState) String() string {
	return [...]string{"gone", "live", "expired", "closing", "fencing", "fenced"}[s]
}

// ParseSessionState reads the state of a session's record. A state that this build
// does not know counts as live.
func ParseSessionState(name string) SessionState {
	for s := SessionExpired; s <= SessionFenced; s++ {
		if s.String() == name {
			return s
		}
	}
	return SessionLive
}

// Over says whether no commit of the session can take effect any more.
func (s SessionState) Over() bool {
	return s == SessionGone || s == SessionClosing
}

// Seen is what a read or a scan has found of an object.
type Seen struct {
	Ref     proto.Ref
	Tag     uint32
	Bytes   int        // of the payload
	Kind    proto.Kind // of the slab
	Version uint64
	Writer  uint32 // id of the session that wrote the image
	// Encrypted says that the payload is, with the key of the id Key.
	Encrypted bool
	Key       uint64
}

// Survey is a way to look at a cluster for orphans: objects that nothing names and nothing will
// ever name. An object is named by a reference in another named object, or by the placement
// library. Orphans calls the methods in the order in which they stand here.
//
// The rule. Three steps, in this order:
//
//  1. The object is read, with the session that wrote it last.
//  2. The sessions are listed: that session is over.
//  3. Everything that is named is walked: the object is not among it.
//
// Why it holds. An operation commits a reference to an object that it has made only under the
// session that made the object: a tree's operation by btree.Store.Begin, a large object's because
// one call writes it on one lane. There are two cases:
//
//   - The object was never named. Only the session that wrote it can still name it, and that
//     session is over at step 2. So the object is named before the walk or never.
//   - The object was named once, and is not any more. No operation names it again: a commit names
//     only what its operation has made, and what it has read from objects whose stamp or version
//     the commit checks.
//
// A repair keeps the writer of an image, so it does not change the answer.
//
// The order matters. A list of sessions from before step 1 says nothing about the object: a new
// session may have got the id of its writer since. A walk from before step 2 misses what the
// session has named between the two.
//
// What the rule has found stays an orphan for ever, and may be freed at any later time.
// FreeVersion frees it at the version of step 1. If the version has changed since, a repair has
// changed it, or the rule is broken.
type Survey interface {
	// Objects reads every object that may be an orphan.
	Objects(saw func(Seen)) error
	// Sessions lists the sessions; the function answers from that list.
	Sessions() (func(session uint32) SessionState, error)
	// Named tells the objects that are named from its beginning to its end, and may
	// tell others. whole is false if it cannot say so of all of them.
	Named(met func(proto.Ref)) (whole bool, err error)
}

// Orphans lists the orphans of a cluster by address. done is false if what is named
// changed too much meanwhile: try again later.
func Orphans(c Survey) (orphans []Seen, done bool, err error) {
	var seen []Seen
	if err := c.Objects(func(o Seen) { seen = append(seen, o) }); err != nil {
		return nil, false, err
	}
	state, err := c.Sessions()
	if err != nil {
		return nil, false, err
	}
	seen = slices.DeleteFunc(seen, func(o Seen) bool { return !state(o.Writer).Over() })
	named := map[proto.Ref]bool{}
	if done, err = c.Named(func(ref proto.Ref) { named[ref] = true }); err != nil || !done {
		return nil, false, err
	}
	seen = slices.DeleteFunc(seen, func(o Seen) bool { return named[o.Ref] })
	slices.SortFunc(seen, func(a, b Seen) int { return cmp.Compare(a.Ref.Addr, b.Ref.Addr) })
	return seen, true, nil
}

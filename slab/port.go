package slab

import (
	"errors"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// This file has what a program sees of the world: Port, a view of a region, and the errors.

// MaxListed bounds the replicas that a row of the table lists, in sync or rebuilding: those that
// the region wants, at most client.MaxReplicas, and those that are about to replace some of them.
const MaxListed = 5

// Port is what a program sees of the world: one lane of one session. The client, the programs of
// storage nodes and the simulator implement it. The lane's goroutine alone calls it.
type Port interface {
	// Do sends a round and returns when every chain has its outcome. It is the only call that
	// waits for the fabric.
	Do(r *rdma.Round)
	// Region is the session's present view of a region. It may wait, when the region has not been
	// opened yet or is RECOVERING. ErrNoRegion: the table has no region of that number.
	// ErrUnavailable: no replica can be used, and the operation has nothing to settle.
	Region(id uint32) (*Region, error)
	// Settle is called after a round in which a chain failed. It returns nil when two things
	// hold: nothing that this lane has posted can still execute at a replica of the region's
	// present epoch; and Region answers from the present table, so that the caller can compare
	// epochs. An error ends the operation: the deadline has passed, the session is over, or no
	// retry changes the node's refusal.
	Settle(reg *Region, r *rdma.Round) error
	// Pause waits a random time before attempt n (from 1), longer with each attempt. An error
	// means that the caller has given up, or that the deadline leaves no room for another
	// attempt.
	//
	// Attempt 0 does not wait. A program of many rounds calls it between two pieces of work, when
	// it holds nothing: others may go first, and the program may end here.
	Pause(attempt int) error
	// HolderFenced says whether a session, found as the holder of a reservation, is certified
	// fenced in the region: at every replica of that region, and of that one alone. It may ask a
	// controller, as often as is sensible at this attempt. false: unknown, so the caller goes on
	// waiting.
	HolderFenced(region, session uint32, attempt int) bool
	// LeaseValid says whether the session's lease still runs. It is asked after a READ has
	// completed and before an answer is drawn from it.
	LeaseValid() bool
	// Reservation is a new value for R. No other operation writes it while a word may hold it.
	Reservation() proto.R
	// EndSession ends the session because it has posted verbs that it cannot settle. The
	// controllers fence it, and takers and the scrub settle the slabs.
	EndSession(reason error)
	// Buffer returns n bytes that verbs can use, as long as the lane exists.
	Buffer(n int) ([]byte, error)
}

// Holder is implemented by ports that end a call early whose failed round has only READ, as when its deadline has passed. Holds says that the
// operation holds a slab, which it has to release before the call ends: a failed round is settled as one that may have changed memory. It is
// called ahead of Settle, and is forgotten with the next Pause.
type Holder interface{ Holds() }

// Epochs is implemented by ports that know of an epoch before its region can be used. Without it a program learns from Region alone that an
// epoch is over, and so not before the next one is open.
type Epochs interface {
	// EpochOf is the epoch of a region in the newest table that the session has, whatever state the region is in; 0: the table has no such
	// region. A region that is open under a later epoch than a reservation's has been reconciled since.
	EpochOf(id uint32) uint64
}

// Poster is implemented by ports that post a round which the program does not wait for. Without
// it a program waits for the settles of its commits.
type Poster interface {
	// Post sends a round and returns at once. The next Do, or Await, waits for it too: then
	// every chain of it has its outcome.
	Post(r *rdma.Round)
	// Await waits for the round that was posted last.
	Await(r *rdma.Round)
}

// Region is a view of a region under one epoch. It is immutable but for the cache of headers;
// another epoch, or another reclaim epoch, is another Region.
type Region struct {
	ID       uint32 // number in the table
	Epoch    uint64 // of the region's configuration; every key and reservation belongs to it
	Seed     uint64 // proto.RegionSeed of its uuid
	Geometry proto.Geometry
	Raw      bool // it holds plain bytes, for package raw: no object is in it
	ReadOnly bool // the session may not write: what is damaged is read elsewhere, not repaired
	Durable  bool // every commit is flushed to persistence before it is acknowledged
	// OpenWords: V of PAIR and SINGLE slabs may be open, and every replica in sync may be read; see
	// open.go.
	OpenWords bool
	// From is the replica, in sync, that reads go to where words may be open; 0 is the primary.
	From int
	// Want is how many replicas the region should have; 0 stands for N. N is smaller while one is
	// lost, and larger while one is replaced or moved.
	Want int
	// The replicas that are not OUT are To[:N]; the first is the primary. Rebuilding says which of
	// them are still being copied: writers write to them, readers and Reconcile do not use them.
	N          int
	To         [MaxListed]*rdma.Target
	Rebuilding [MaxListed]bool
	// Fresh: a rebuilding replica whose slabs are known to be all zero. Reconcile does not READ
	// them.
	Fresh [MaxListed]bool
	// Compares: Reconcile and Copy ask the replica for the hash of a piece that they expect to be the primary's,
	// before they READ or WRITE its bytes; see rdma.Target.Compares.
	Compares [MaxListed]bool
	// Local: this process executes the primary's verbs itself, so that a round costs nothing, and
	// batches may be small enough to stay in the cache.
	Local bool
	// Near prefetches the primary's memory where it is Local; nil otherwise.
	Near rdma.Near
	// Headers are the cached headers of its blocks, shared by all lanes of the session.
	Headers *Headers
}

// Replicas is how many replicas the region is meant to have.
func (r *Region) Replicas() int {
	if r.Want == 0 {
		return r.N
	}
	return r.Want
}

// P is the primary.
func (r *Region) P() *rdma.Target { return r.To[0] }

// flushKind is the kind of FLUSH that commits of durable regions post.
const flushKind = rdma.Persistent

// Errors. All but ErrUnknown mean: not done, and never will be.
var (
	// ErrFreed: the object has been freed.
	ErrFreed = errors.New("object has been freed")
	// ErrBadRef: the reference cannot name an object here.
	ErrBadRef = errors.New("not a reference to an object")
	// ErrImmutable: the object was allocated to be written once.
	ErrImmutable = errors.New("object is write-once")
	// ErrBusy: others kept changing or holding the object until the attempts ran out.
	ErrBusy = errors.New("object is busy")
	// ErrCorrupt: no replica has a whole image.
	ErrCorrupt = errors.New("object is damaged on every replica")
	// ErrKind: the slabs of a block are of a kind that this build does not know.
	ErrKind = errors.New("slabs of a kind that this build does not know")
	// ErrConflict: the object is not at the version that the caller named.
	ErrConflict = errors.New("object is at another version")
	// ErrTooLarge: the payload exceeds what the object's slab holds.
	ErrTooLarge = errors.New("payload too large")
	// ErrLease: the session's lease ran out before the answer could be given.
	ErrLease = errors.New("session lease has run out")
	// ErrNoRegion: the distribution table has no such region.
	ErrNoRegion = errors.New("no such region")
	// ErrUnavailable: the table says that no replica of the region can be used. Nothing was
	// posted to the region, and the call need not wait.
	ErrUnavailable = errors.New("region is unavailable")
	// ErrVersions: the slab has used up its 44-bit versions.
	ErrVersions = errors.New("slab is out of versions")
	// ErrUnknown: may have been done, at most once.
	ErrUnknown = errors.New("outcome unknown: may have been done, at most once")
)

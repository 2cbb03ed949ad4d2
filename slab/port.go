package slab

import (
	"errors"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// MaxListed bounds the replicas that a row of the table lists, in sync or rebuilding: those that
// the region wants, at most client.MaxReplicas, and the ones that take their place.
const MaxListed = 5

// Port is what a program sees of the world: one lane of one session.
type Port interface {
	// Do performs a round. The only call that waits for the fabric.
	Do(r *rdma.Round)
	// Region is the session's present view of a region. Cold calls may wait.
	// ErrNoRegion if the table has none of that number; ErrUnavailable if no replica
	// can be used and the operation has nothing to settle.
	Region(id uint32) (*Region, error)
	// Settle is called after a round in which a chain failed. It returns nil when
	// nothing that this lane posted can still run at a replica of the region's present epoch,
	// and the view of the region is that of the present table: compare epochs. An error is terminal for the
	// operation: the deadline has passed, the session is over, or the node's
	// refusal is one that no retry changes.
	Settle(reg *Region, r *rdma.Round) error
	// Pause backs off before attempt n (from 1), with full jitter. An error means
	// that the caller has given up, or that the deadline leaves no room for another
	// attempt. Attempt 0 is no attempt: a program of many rounds has done a piece and
	// holds nothing, so that others may go first, and the program may end here.
	Pause(attempt int) error
	// HolderFenced says whether a session found holding a reservation in a region is
	// known to be fenced at every replica of it: the certificate, which holds for that
	// region alone. It may ask the controller, no more often than makes sense at this
	// attempt; false means go on waiting.
	HolderFenced(region, session uint32, attempt int) bool
	// LeaseValid says whether answers drawn from a READ that has completed may be given.
	LeaseValid() bool
	// Reservation is a new value for R: no one else writes it while a word may have it.
	Reservation() proto.R
	// EndSession gives the session up: it has posted what it cannot settle.
	EndSession(reason error)
	// Buffer returns n bytes that verbs can use, for the life of the lane.
	Buffer(n int) ([]byte, error)
}

// Region is a view of a region under one epoch. It is immutable but for the
// cache of headers; another epoch is another Region.
type Region struct {
	ID       uint32
	Epoch    uint64
	Seed     uint64 // proto.RegionSeed of its uuid
	Geometry proto.Geometry
	ReadOnly bool // the session may not write: what is damaged is read elsewhere, not repaired
	Durable  bool // every commit is flushed to persistence before it is acknowledged
	// Want is how many replicas the region should have; 0 stands for N. N is smaller while
	// one is lost, and larger while one is rebuilt or moved.
	Want int
	// Replicas; the first is the primary.
	N          int
	To         [MaxListed]*rdma.Target
	Rebuilding [MaxListed]bool
	// Fresh: a rebuilding replica whose slabs are known to be all zero: Reconcile
	// need not look at them.
	Fresh [MaxListed]bool
	// Local: the primary's verbs run in this process, so that a round costs nothing
	// and batches may be small enough to stay in the cache.
	Local bool
	// Near is the primary's memory where it is Local, or else nil.
	Near    rdma.Near
	Headers *Headers
}

// Replicas is how many the region is to have.
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

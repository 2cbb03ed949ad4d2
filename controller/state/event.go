package state

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Event is something that has happened: Ask, Cancel, Reply, Committed, Failed,
// Suspect, PulseLate, HeartbeatsLost, Lead or Tick.
type Event interface{ event() }

// Ask is a request of the control plane, one of the request messages of
// quarrypb.Controller that concern sessions, the table or nodes, or Scrubbed.
type Ask struct {
	Waiter uint64 // named again in the Answer; never used twice
	Msg    any    // the request
	// Random feeds what must not be guessed or collide: 16 bytes for each region of a CreateRegionRequest.
	Random []byte
}

// Cancel says that the caller of an Ask has given up. What was begun goes on.
type Cancel struct{ Waiter uint64 }

// Reply is the outcome of a Call.
type Reply struct {
	Call uint64        // ID of the Call
	Msg  proto.Message // nil if Err is set
	Err  error
	// Refused: the agent has answered, with Err. False: what it did is unknown.
	Refused bool
	NoSpace bool // it was refused for want of room
	// NoListener: the agent's host refused the connection, so no process listens at the agent's address.
	NoListener bool
}

// Committed says that the Commit that is out has taken effect.
type Committed struct{ Revision uint64 }

// Failed says that it has not, or that its outcome is unknown.
type Failed struct{ Err error }

// Suspect says that an incarnation of a node may be gone: a client or an agent could not reach it, or
// a connection with it has ended. Its only effect are probes.
type Suspect struct {
	Node        uint32
	Incarnation uint64
}

// PulseLate says that the pulse of an incarnation of a node is not heard, or not only by this controller:
// its heartbeats come often again.
type PulseLate struct {
	Node        uint32
	Incarnation uint64
}

// Pulsed is the heartbeat of a node whose pulse the controller hears: the next may be later.
type Pulsed struct{ *quarrypb.NodeHeartbeatRequest }

// HeartbeatsLost says that the connection has ended that the last heartbeat of a session
// came over.
type HeartbeatsLost struct{ Serial uint64 }

// Lead says that no other controller leads before Until.
type Lead struct{ Until int64 }

// Tick lets time pass.
type Tick struct{}

// Scrubbed says that a scrub begun after the fences of these sessions were
// complete has found nothing of them in any word: their ids may be used again.
// It is answered with Done.
type Scrubbed struct{ Serials []uint64 }

// Done answers Scrubbed.
type Done struct{}

func (Ask) event()            {}
func (Cancel) event()         {}
func (Reply) event()          {}
func (Committed) event()      {}
func (Failed) event()         {}
func (Suspect) event()        {}
func (PulseLate) event()      {}
func (HeartbeatsLost) event() {}
func (Lead) event()           {}
func (Tick) event()           {}

// Action is something to be done: Commit, Call, Answer, TableChanged, Note or StepDown.
type Action interface{ action() }

// Commit is a transaction on the controller's records.
type Commit struct{ Ops []Op }

// Op puts or deletes one record.
type Op struct {
	Key   string // of the record
	Value []byte // nil: delete
	Prev  uint64 // the record's revision so far; 0: there is none
	Empty string // a key prefix under which there must be nothing; "": none
}

// Call asks the agent at URL.
type Call struct {
	ID   uint64 // names the call in its Reply
	Node uint32
	// Incarnation that the call is for; a node in another one refuses it. 0: any.
	Incarnation uint64
	URL         string        // of the agent
	Msg         proto.Message // a request message of quarrypb.Agent
	Timeout     int64         // ns
	After       int64         // ns; the call is sent so long after the step. Timeout begins then
}

// Answer ends an Ask: with a message, or with an error.
type Answer struct {
	Waiter uint64
	Msg    any
	Err    *Error
	// since is the revision from which the table in Msg starts; filled in on release.
	since uint64
	// bare: the table is sent without rows, with its revision and reclaim epoch alone.
	bare bool
	// bounded: the table is sent with the regions of tenant alone.
	bounded bool
	tenant  uint32
}

// TableChanged says that the table is now at Revision.
type TableChanged struct{ Revision uint64 }

// Note is for the log.
type Note struct{ Text string }

// StepDown ends the machine: what it holds may not be what the records say.
type StepDown struct{ Err error }

func (Commit) action()       {}
func (Call) action()         {}
func (Answer) action()       {}
func (TableChanged) action() {}
func (Note) action()         {}
func (StepDown) action()     {}

// Code is the kind of an Error.
type Code uint8

const (
	Invalid      Code = iota + 1 // the request can never succeed
	NotFound                     // what it names is not there
	Exists                       // what it makes is there
	Precondition                 // not in this state of the cluster
	Exhausted                    // no room
	Denied                       // not allowed
	Busy                         // try again
	NotLeader                    // ask the leader
	Internal                     // our fault, or a record's
)

// Error says why an Ask has changed nothing.
type Error struct {
	Code Code
	Text string
}

func (e *Error) Error() string { return e.Text }

func errorf(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Text: fmt.Sprintf(format, args...)}
}

// Limits of what requests may ask for.
const (
	MaxNameBytes = 255
	MaxEndpoints = 72
	MaxFound     = 1 << 16
	MaxReplicas  = 3
	// MaxListed is how many a region's record lists at most: those that it wants, and
	// others while they are replaced. It is slab.MaxListed: clients refuse a table with more.
	MaxListed   = 5
	MaxCount    = 32 // regions of one request: they and their replicas fit one transaction
	MaxNodes    = 1 << 12
	MaxRegions  = 1 << 18
	MaxSessions = 1 << 17 // live ones: half of the ids, so that a free id is near
	MaxWaiting  = 1 << 16 // certificates waited for
	MaxScrubbed = 64      // sessions of one Scrubbed: they fit one transaction
	MaxTroubles = 64      // of one heartbeat that are looked at
	MaxEnded    = 1024    // sessions of one heartbeat of a node that are looked at
	// MaxComplaints of one node are remembered: more say nothing new.
	MaxComplaints = 1024
	fenceBatch    = 4096 // serials of one Fence call
	// FirstRegionBytes is the size of the first regions of a kind, unless the request names a size.
	FirstRegionBytes = 64 << 20
	maxOps           = 120 // of one transaction; etcd allows 128 unless told otherwise
)

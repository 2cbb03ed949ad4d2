package state

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Event is something that has happened: Registered, Host, Open, Close, Drop, Fence,
// Ended, Work, WorkEnded, AdapterFailed or AdapterRetired.
type Event interface{ event() }

// Registered is a controller's answer to the node's registration.
type Registered struct {
	Term    uint64   // of the controller that answers
	Cluster [16]byte // its uuid
	Node    uint32   // number of this node
	// Of the serials below Next only those in Live may still come; Fenced never.
	Next   uint64
	Live   []uint64
	Fenced []uint64
}

// Host asks for the memory of a replica.
type Host struct {
	Term       uint64
	Region     uint32
	UUID       [16]byte // of the region
	Cluster    [16]byte // that the region belongs to
	Kind       proto.RegionKind
	Bytes      uint64 // of the region
	Persistent bool   // it has to survive a loss of power
	Zero       bool   // the memory must be zeroed, also if it is there already
	MustExist  bool   // no memory is made: the region has data
	Epoch      uint64 // Zero destroys nothing that has heard of a later one
}

// Open asks to serve a replica under an epoch, which ends all earlier ones.
type Open struct {
	Term   uint64
	Region uint32
	Epoch  uint64
	Tenant uint32 // whose sessions may open it
	// Adapter serves it; no other one does.
	Adapter uint32
}

// Close asks to end all epochs up to this one. A replica that serves a later one stays as it is.
type Close struct {
	Term   uint64
	Region uint32
	Epoch  uint64
}

// Drop asks to give the memory of a replica back, unless it has heard of a later epoch.
type Drop struct {
	Term   uint64
	Region uint32
	Epoch  uint64
}

// Fence asks to end sessions for ever: those that are here, and those that come later.
type Fence struct {
	Term    uint64
	Serials []uint64
}

// Ended says that the actions on a region have all been done, or that one failed.
type Ended struct {
	Region uint32
	Failed bool
}

// Kind of a program that the agent runs over a region.
type Kind uint8

const (
	Reconcile Kind = iota + 1 // while no client has a key
	Copy                      // of the region's primary to its rebuilding replicas
	Scrub                     // of what dead sessions have left
	Reclaim                   // of empty blocks
	kinds
)

func (k Kind) String() string { return [...]string{"none", "reconcile", "copy", "scrub", "reclaim"}[k] }

// Work asks to run a program over a region that is open under Epoch. The program
// of the same ID and epoch that runs, or has been done, is joined; one of its kind
// with a lower ID is stopped, for IDs rise.
type Work struct {
	Term   uint64
	Region uint32
	Epoch  uint64
	Kind   Kind
	ID     uint64
}

// WorkEnded says that the program that a Begin with this Run began has ended.
type WorkEnded struct {
	Region uint32
	Kind   Kind
	Run    uint64
	Failed bool
}

func (Registered) event() {}
func (Host) event()       {}
func (Open) event()       {}
func (Close) event()      {}
func (Drop) event()       {}
func (Fence) event()      {}
func (Ended) event()      {}
func (Work) event()       {}
func (WorkEnded) event()  {}

func (AdapterFailed) event()  {}
func (AdapterRetired) event() {}

// Do is what an Action does.
type Do uint8

const (
	// Save puts State.Kept on stable storage.
	Save Do = iota + 1
	// Make makes a replica's memory, all zero but for its header.
	Make
	// Zero zeroes a replica's memory but for its header.
	Zero
	// Mark puts Epoch into the replica's header, on stable storage if there is any.
	Mark
	// Serve opens the replica under Epoch with new keys.
	Serve
	// Cut ends all access to the replica under epochs up to Epoch.
	Cut
	// Free gives the replica's memory back.
	Free
	// EndBelow admits no session of a serial below Next that is not in Serials, and ends those that are in.
	EndBelow
	// End ends the sessions of Serials; none of them is admitted again.
	End
	// Renew registers again when there is time: the list of ended sessions is long.
	Renew
	// Begin begins the program of Kind and ID over the region.
	Begin
	// Stop tells the programs over a region to end. It does not wait for them: their
	// keys die with the Cut behind it.
	Stop
	// Retire ends all access through Adapter: when it is done, no verb runs there, and none ever will. Cuts and
	// the ends of sessions need no answer of that adapter any more.
	Retire
)

// String names the action, for logs.
func (d Do) String() string {
	return [...]string{"nothing", "save", "make", "zero", "mark", "serve", "cut", "free", "end below", "end", "renew", "begin", "stop", "retire"}[d]
}

// Action is something to be done. Region is 0 where it concerns none.
type Action struct {
	Do      Do
	Region  uint32
	Epoch   uint64
	Next    uint64
	Serials []uint64
	Kind    Kind
	ID      uint64
	Run     uint64 // of a Begin: never used twice
	Tenant  uint32 // of a Serve: whose sessions open the replica
	Adapter uint32 // of a Serve: that executes the verbs; of a Retire
}

// String tells the action with what belongs to it, for logs and transcripts.
func (a Action) String() string {
	switch a.Do {
	case Serve:
		if a.Adapter != 0 {
			return fmt.Sprintf("%v region %d epoch %d adapter %d", a.Do, a.Region, a.Epoch, a.Adapter)
		}
		return fmt.Sprintf("%v region %d epoch %d", a.Do, a.Region, a.Epoch)
	case Retire:
		return fmt.Sprintf("%v adapter %d", a.Do, a.Adapter)
	case Mark, Cut:
		return fmt.Sprintf("%v region %d epoch %d", a.Do, a.Region, a.Epoch)
	case Begin:
		return fmt.Sprintf("%v %v %d region %d epoch %d", a.Do, a.Kind, a.ID, a.Region, a.Epoch)
	case Make, Zero, Free, Stop:
		return fmt.Sprintf("%v region %d", a.Do, a.Region)
	case EndBelow:
		return fmt.Sprintf("%v %d except %v", a.Do, a.Next, a.Serials)
	case End:
		return fmt.Sprintf("%v %v", a.Do, a.Serials)
	}
	return a.Do.String()
}

// Code is the kind of an Error.
type Code uint8

const (
	Invalid      Code = iota + 1 // the command can never succeed
	NotHosted                    // the region is not here
	Conflict                     // something else is in its place
	Stale                        // a later command has been obeyed
	Served                       // not while the region is open
	NoSpace                      // above the node's capacity or limits
	Busy                         // another command for the region is under way
	NotOfCluster                 // not of this cluster, or not registered yet
	NoAdapter                    // the adapter is lost, or the last one
)

// Error says why a command has changed nothing.
type Error struct {
	Code Code
	Text string
}

func (e *Error) Error() string { return e.Text }

func errorf(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Text: fmt.Sprintf(format, args...)}
}

package state

import (
	"cmp"
	"slices"

	"github.com/quarrystore/quarry/proto"
)

// This file has State, the agent's decisions: which commands are obeyed, and what follows from
// them.

// Limits of a node. No zero values.
type Limits struct {
	CapacityBytes uint64 // of all regions together
	Persistent    bool   // its memory survives a loss of power
	Volatile      error  // if not, why
	Adapters      int    // that serve regions, each a domain of atomics; 0: one, or none
}

// Bounds on what controllers can make a node remember.
const (
	MaxRegions = 4096    // 8 TiB of 2 GiB regions
	MaxSerials = 1 << 18 // as many sessions as there are ids
	// renewAt is the length of the list of ended sessions at which the node registers again: the
	// answer says which serials have no valid ticket any more, and shortens the list.
	renewAt = 1024
)

// MaxJump bounds how far a term, a serial or an epoch may rise at once. Each of them counts
// writes of the controllers' store: ten thousand a second for fifty years do not come to it.
// Without a bound one wrong command, such as a Drop of the last epoch there is, would make a
// node refuse its controllers for ever.
const MaxJump = 1 << 44

// jumps says whether a number that only rises does so absurdly.
func jumps(from, to uint64) bool { return to > from && to-from > MaxJump }

// Phase of a replica.
type Phase uint8

const (
	Making Phase = iota + 1 // its memory is not there yet
	Closed                  // not to be served; a Cut comes before any other action, as an earlier one may have failed
	Opened                  // certainly served under Epoch
)

func (p Phase) String() string { return [...]string{"none", "making", "closed", "open"}[p] }

// Region is one replica on this node, and what commands have made of it.
type Region struct {
	Number     uint32   // in the table
	UUID       [16]byte // the same on all replicas
	Cluster    [16]byte // that it belongs to
	Kind       proto.RegionKind
	Bytes      uint64
	Persistent bool

	Epoch  uint64 // Invariant: never falls while the replica is here, nor over a restart of a node with files.
	Closed uint64 // Invariant: never falls; Closed <= Epoch. Nothing up to it is ever served again.
	Phase  Phase
	// Busy: actions are under way. Invariant: Phase is Making only while Busy.
	Busy bool

	leaving bool // the actions under way give it up
	opening bool // or serve it

	served  uint64      // newest epoch that was to be served in this incarnation
	adapter uint32      // that serves Epoch, or served the newest epoch before
	works   [kinds]work // by kind
}

// Kept is what a node with files keeps across restarts, beside its regions.
type Kept struct {
	Cluster [16]byte // zero: of none yet
	Term    uint64   // Invariant: never falls.
	Serials Serials  // of the sessions that have ended
}

// State is the agent's state. The caller takes one step at a time (n.mu in storagenode).
type State struct {
	Kept
	Limits     Limits   // never change
	Node       uint32   // 0 until registered
	Regions    []Region // Invariant: sorted by Number
	HostedSize uint64   // Invariant: the sum of Regions' Bytes
	runs       uint64   // programs begun in this incarnation
	failed     []uint32 // adapters that serve nothing new; see adapter.go
	retired    []uint32 // those of them whose access has ended
}

// New is the state of a node that has just started, from what it has kept and found.
// Preconditions: the numbers of the regions found differ.
func New(limits Limits, kept Kept, found []Region) *State {
	s := &State{Kept: kept, Limits: limits}
	for _, r := range found {
		// An epoch that it served was of another incarnation.
		r.Phase, r.Closed = Closed, r.Epoch
		s.Regions = append(s.Regions, r)
		s.HostedSize += r.Bytes
	}
	slices.SortFunc(s.Regions, func(a, b Region) int { return cmp.Compare(a.Number, b.Number) })
	return s
}

// Region is the replica of a number, or nil.
func (s *State) Region(number uint32) *Region {
	if i, ok := s.find(number); ok {
		return &s.Regions[i]
	}
	return nil
}

// find is the index of a replica, or where it belongs.
func (s *State) find(number uint32) (int, bool) {
	return slices.BinarySearchFunc(s.Regions, number, func(r Region, n uint32) int { return cmp.Compare(r.Number, n) })
}

// Step takes an event and returns what is to be done, in order. An error has
// changed nothing.
func (s *State) Step(e Event) ([]Action, error) {
	switch e := e.(type) {
	case Registered:
		return s.registered(e)
	case Host:
		return s.command(e.Term, func() ([]Action, error) { return s.host(e) })
	case Open:
		return s.command(e.Term, func() ([]Action, error) { return s.open(e) })
	case Close:
		return s.command(e.Term, func() ([]Action, error) { return s.close(e) })
	case Drop:
		return s.command(e.Term, func() ([]Action, error) { return s.drop(e) })
	case Fence:
		return s.command(e.Term, func() ([]Action, error) { return s.fence(e) })
	case Work:
		return s.command(e.Term, func() ([]Action, error) { return s.work(e) })
	case WorkEnded:
		s.workEnded(e)
		return nil, nil
	case Ended:
		s.ended(e)
		return nil, nil
	case AdapterFailed:
		return s.adapterFailed(e)
	case AdapterRetired:
		return s.adapterRetired(e)
	}
	return nil, errorf(Invalid, "unknown event %T", e)
}

// command obeys only the newest controller that the node has heard of. The term
// is kept before anything is done in its name.
func (s *State) command(term uint64, do func() ([]Action, error)) ([]Action, error) {
	switch {
	case s.Node == 0:
		return nil, errorf(NotOfCluster, "the node is not registered; until then it refuses all commands")
	case term < s.Term:
		return nil, errorf(Stale, "a command of term %d, the node obeys term %d: another controller leads", term, s.Term)
	}
	if jumps(s.Term, term) {
		return nil, errorf(Invalid, "a command of term %d, the node obeys term %d: no leadership is that far ahead", term, s.Term)
	}
	actions, err := do()
	if err != nil {
		return nil, err
	}
	if term > s.Term {
		s.Term = term
		if len(actions) == 0 || actions[0].Do != Save {
			actions = append([]Action{{Do: Save}}, actions...)
		}
	}
	return actions, nil
}

// registered takes a controller's answer to the registration: term, cluster, number, and which
// sessions have ended. All of it is saved before sessions are admitted.
func (s *State) registered(e Registered) ([]Action, error) {
	switch {
	case e.Node == 0 || e.Cluster == [16]byte{}:
		return nil, errorf(Invalid, "a registration as node %d of cluster %x", e.Node, e.Cluster)
	case s.Cluster != [16]byte{} && s.Cluster != e.Cluster:
		return nil, errorf(NotOfCluster, "the node belongs to cluster %x, the controller to %x", s.Cluster, e.Cluster)
	case s.Node != 0 && s.Node != e.Node:
		return nil, errorf(Conflict, "the node was number %d and would now be %d", s.Node, e.Node)
	case e.Term < s.Term:
		return nil, errorf(Stale, "a registration at term %d, the node obeys term %d: another controller leads", e.Term, s.Term)
	case jumps(s.Term, e.Term) || jumps(s.Serials.Next, e.Next):
		return nil, errorf(Invalid, "a registration at term %d with serials below %d, the node has heard of %d and %d: no cluster is that far ahead", e.Term, e.Next, s.Term, s.Serials.Next)
	case len(e.Live) > MaxSerials || len(e.Fenced) > MaxSerials:
		return nil, errorf(NoSpace, "%d live and %d fenced sessions, the node can remember %d", len(e.Live), len(e.Fenced), MaxSerials)
	}
	s.Node, s.Cluster, s.Term = e.Node, e.Cluster, e.Term
	s.Serials.endBelow(e.Next, e.Live)
	s.Serials.end(e.Fenced)
	return []Action{{Do: Save},
		{Do: EndBelow, Next: s.Serials.Next, Serials: slices.Clone(s.Serials.Live)},
		{Do: End, Serials: slices.Clone(s.Serials.Ended)}}, nil
}

// host makes a replica's memory, zeroes it, or confirms that it is there. It destroys nothing
// that was opened under a later epoch, so that a late or repeated call does no harm.
func (s *State) host(e Host) ([]Action, error) {
	if e.Region == 0 {
		return nil, errorf(Invalid, "region 0: regions are numbered from 1")
	}
	if e.Cluster != s.Cluster {
		return nil, errorf(NotOfCluster, "region %d is of cluster %x, the node of %x", e.Region, e.Cluster, s.Cluster)
	}
	r := s.Region(e.Region)
	if r == nil {
		return s.make(e)
	}
	switch {
	case jumps(r.Epoch, e.Epoch):
		return nil, absurd(r, e.Epoch)
	case r.Busy:
		return nil, busy(r)
	case r.UUID != e.UUID:
		return nil, errorf(Conflict, "region %d is here with uuid %x, not %x: drop it first", r.Number, r.UUID, e.UUID)
	case r.Bytes != e.Bytes:
		return nil, errorf(Conflict, "region %d is here with %d bytes, not %d: drop it first", r.Number, r.Bytes, e.Bytes)
	case r.Kind != e.Kind:
		return nil, errorf(Conflict, "region %d is here with %v, not %v: drop it first", r.Number, r.Kind, e.Kind)
	case e.Persistent && !r.Persistent:
		return nil, s.volatile(r.Number)
	case !e.Zero:
		return nil, nil
	case r.Phase == Opened:
		return nil, errorf(Served, "region %d is open under epoch %d: close it before zeroing it", r.Number, r.Epoch)
	case e.Epoch < r.Epoch || e.Epoch <= r.served:
		return nil, errorf(Stale, "region %d: zeroing what was epoch %d, the node has heard of %d and served %d", r.Number, e.Epoch, r.Epoch, r.served)
	}
	actions := r.stop()
	r.Busy = true
	// Cut: what a failed Serve or Cut has left half done is not certain to be over.
	actions = append(actions, Action{Do: Cut, Region: r.Number, Epoch: e.Epoch - 1})
	// From here on what is said in the name of an epoch before is late: also a Drop.
	r.Epoch, r.Closed = e.Epoch, max(r.Closed, e.Epoch-1)
	return append(actions, Action{Do: Zero, Region: r.Number}), nil
}

// volatile is the error for a durable region on a node whose memory does not survive a loss of
// power.
func (s *State) volatile(region uint32) error {
	if s.Limits.Volatile == nil {
		return errorf(Invalid, "region %d is to survive a loss of power, this node's memory does not", region)
	}
	return errorf(Invalid, "region %d is to survive a loss of power, this node's memory does not: %v", region, s.Limits.Volatile)
}

// make begins the memory of a new replica.
func (s *State) make(e Host) ([]Action, error) {
	if e.MustExist {
		return nil, errorf(NotHosted, "region %d is not on this node", e.Region)
	}
	if jumps(0, e.Epoch) {
		return nil, absurd(&Region{Number: e.Region}, e.Epoch)
	}
	if _, err := proto.GeometryOf(e.Kind, e.Bytes); err != nil {
		return nil, errorf(Invalid, "region %d: %v", e.Region, err)
	}
	if e.Persistent && !s.Limits.Persistent {
		return nil, s.volatile(e.Region)
	}
	if len(s.Regions) >= MaxRegions {
		return nil, errorf(NoSpace, "region %d: the node hosts %d regions, its limit", e.Region, len(s.Regions))
	}
	if s.HostedSize+e.Bytes > s.Limits.CapacityBytes {
		return nil, errorf(NoSpace, "region %d of %d bytes: the node hosts %d of at most %d bytes; raise its capacity or add a node",
			e.Region, e.Bytes, s.HostedSize, s.Limits.CapacityBytes)
	}
	for i := range s.Regions {
		if s.Regions[i].UUID == e.UUID {
			return nil, errorf(Conflict, "uuid %x is that of region %d here, not of %d", e.UUID, s.Regions[i].Number, e.Region)
		}
	}
	i, _ := s.find(e.Region)
	s.Regions = slices.Insert(s.Regions, i, Region{
		Number: e.Region, UUID: e.UUID, Cluster: e.Cluster, Kind: e.Kind, Bytes: e.Bytes,
		Persistent: s.Limits.Persistent, Phase: Making, Busy: true,
	})
	if e.Zero {
		s.Regions[i].Epoch = e.Epoch
	}
	s.HostedSize += e.Bytes
	return []Action{{Do: Make, Region: e.Region}}, nil
}

// open serves a replica under an epoch. All earlier epochs end first: when the actions are done,
// keys of those epochs are dead and none of their verbs is executing.
func (s *State) open(e Open) ([]Action, error) {
	r := s.Region(e.Region)
	switch {
	case r == nil:
		return nil, errorf(NotHosted, "region %d is not on this node", e.Region)
	case jumps(r.Epoch, e.Epoch):
		return nil, absurd(r, e.Epoch)
	case r.Busy:
		return nil, busy(r)
	case e.Epoch <= r.Closed || e.Epoch < r.Epoch:
		return nil, errorf(Stale, "region %d: opening epoch %d, the node has closed all up to %d and heard of %d",
			r.Number, e.Epoch, r.Closed, r.Epoch)
	}
	if err := s.checkAdapter(r, e); err != nil {
		return nil, err
	}
	if r.Phase == Opened && r.Epoch == e.Epoch {
		return nil, nil
	}
	// Invariant: Closed < Epoch. Earlier epochs end here.
	actions := r.stop()
	r.Epoch, r.Closed, r.served = e.Epoch, e.Epoch-1, e.Epoch
	r.Busy, r.opening, r.Phase, r.adapter = true, true, Closed, e.Adapter
	return append(actions,
		Action{Do: Cut, Region: r.Number, Epoch: r.Closed},
		Action{Do: Mark, Region: r.Number, Epoch: r.Epoch},
		Action{Do: Serve, Region: r.Number, Epoch: r.Epoch, Tenant: e.Tenant, Adapter: e.Adapter},
	), nil
}

// close ends all epochs up to e.Epoch. It cuts also where nothing is open, because an earlier Cut
// may have failed.
func (s *State) close(e Close) ([]Action, error) {
	r := s.Region(e.Region)
	switch {
	case r == nil:
		return nil, nil // nothing of it is served here
	case jumps(r.Epoch, e.Epoch):
		return nil, absurd(r, e.Epoch)
	case r.Busy:
		return nil, busy(r)
	case r.Phase == Opened && r.Epoch > e.Epoch:
		return nil, nil // late: it goes on under a later epoch
	}
	actions := append(r.stop(), Action{Do: Cut, Region: r.Number, Epoch: max(e.Epoch, r.Closed)})
	r.Closed = max(r.Closed, e.Epoch)
	if r.Epoch < r.Closed {
		r.Epoch = r.Closed
		actions = append(actions, Action{Do: Mark, Region: r.Number, Epoch: r.Epoch})
	}
	r.Busy, r.Phase = true, Closed
	return actions, nil
}

// drop gives a replica's memory back, unless it was opened under a later epoch.
func (s *State) drop(e Drop) ([]Action, error) {
	r := s.Region(e.Region)
	switch {
	case r == nil:
		return nil, nil
	case jumps(r.Epoch, e.Epoch):
		return nil, absurd(r, e.Epoch)
	case r.Busy:
		return nil, busy(r)
	case e.Epoch < r.Epoch:
		return nil, errorf(Stale, "region %d: dropping what was epoch %d, the node has heard of %d", r.Number, e.Epoch, r.Epoch)
	}
	actions := r.stop()
	r.Busy, r.leaving, r.Phase = true, true, Closed
	return append(actions, Action{Do: Cut, Region: r.Number, Epoch: r.Epoch}, Action{Do: Free, Region: r.Number}), nil
}

// fence ends sessions, and remembers them, saved before the fence is answered: a restart does not
// admit them again.
func (s *State) fence(e Fence) ([]Action, error) {
	for _, serial := range e.Serials {
		if serial == 0 {
			return nil, errorf(Invalid, "session serial 0: serials start at 1")
		}
		if jumps(s.Serials.Next, serial) {
			return nil, errorf(Invalid, "session serial %d, the controllers have numbered below %d: no cluster is that far ahead", serial, s.Serials.Next)
		}
	}
	if len(e.Serials)+len(s.Serials.Ended) > MaxSerials {
		return nil, errorf(NoSpace, "%d sessions to fence, the node remembers %d of at most %d: it registers again first",
			len(e.Serials), len(s.Serials.Ended), MaxSerials)
	}
	s.Serials.end(e.Serials)
	// Always carried out, also for sessions ended before: that fence may have failed.
	actions := []Action{{Do: Save}, {Do: End, Serials: slices.Clone(e.Serials)}}
	if len(s.Serials.Ended) >= renewAt {
		actions = append(actions, Action{Do: Renew})
	}
	return actions, nil
}

// ended takes the end of the actions on a region. After a failure the region is closed; epochs
// that it has heard of stay heard.
func (s *State) ended(e Ended) {
	i, ok := s.find(e.Region)
	if !ok || !s.Regions[i].Busy {
		return
	}
	r := &s.Regions[i]
	if r.Phase == Making && e.Failed || r.leaving && !e.Failed {
		s.HostedSize -= r.Bytes
		s.Regions = slices.Delete(s.Regions, i, i+1)
		return
	}
	r.Phase = Closed
	if r.opening && !e.Failed {
		r.Phase = Opened
	}
	r.Busy, r.leaving, r.opening = false, false, false
}

// absurd is the error for an epoch that no cluster reaches: see MaxJump.
func absurd(r *Region, epoch uint64) *Error {
	return errorf(Invalid, "region %d: epoch %d, the node has heard of %d: no region is that far ahead", r.Number, epoch, r.Epoch)
}

// busy is the error for a command while another one's actions are under way.
func busy(r *Region) *Error {
	return errorf(Busy, "region %d: another command is under way (%v); try again", r.Number, r.Phase)
}

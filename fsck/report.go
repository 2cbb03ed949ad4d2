package fsck

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Report is what a check has seen.
type Report struct {
	Regions  []RegionReport `json:"regions"`
	Findings []Finding      `json:"findings"`
	// Unchecked are the regions that the check has left out.
	Unchecked []Unchecked `json:"unchecked,omitempty"`
	// More counts findings beyond MaxFindings and MaxBad.
	More int `json:"more_findings,omitempty"`
	// Writers says that other sessions could write meanwhile.
	Writers bool `json:"writers"`

	tenants map[uint32]uint32 // region -> number of its tenant
	only    Kind              // Options.Only
	bad     int               // findings of KindBad in Findings
}

// ByTenant are the findings of each tenant, by its number: a session repairs those of its own. A check that knows
// no tenants has them under 0, the tenant default.
func (r *Report) ByTenant() map[uint32][]Finding {
	out := map[uint32][]Finding{}
	for _, f := range r.Findings {
		t := r.tenants[f.Region]
		out[t] = append(out[t], f)
	}
	return out
}

// MaxFindings bounds a report: a lost region must not fill memory. MaxBad bounds the findings of slabs that are marked, in a report of all kinds: no
// repair takes them away, and they must not hide what one mends.
const (
	MaxFindings = 1000
	MaxBad      = MaxFindings / 2
)

// OK says that every region was checked and nothing is wrong.
func (r *Report) OK() bool { return len(r.Findings) == 0 && len(r.Unchecked) == 0 }

// ErrHidden: named objects may not be met.
var ErrHidden = errors.New("objects may be hidden: run quarry fsck --repair first")

// Hidden is an error if there is a finding behind which an object cannot be seen that is there: its block or slab is taken for one without it, until a failover
// has gone by another replica. What is named by that object only would not be met then.
func (r *Report) Hidden() error {
	for i := range r.Findings {
		switch f := &r.Findings[i]; f.Kind {
		case KindHeader, KindWord, KindReplica:
			return fmt.Errorf("%w: %s", ErrHidden, f)
		}
	}
	if r.More > 0 {
		return fmt.Errorf("%w: %d findings, and not all are listed", ErrHidden, len(r.Findings)+r.More)
	}
	return nil
}

// Unchecked is a region that a check has left out.
type Unchecked struct {
	Region uint32 `json:"region"`
	State  string `json:"state"` // as quarry status shows it
	Why    string `json:"why"`
}

// String says why the region was left out.
func (u Unchecked) String() string {
	return fmt.Sprintf("region %d is %s: %s", u.Region, u.State, u.Why)
}

// RegionReport counts what one region holds.
type RegionReport struct {
	Region       uint32 `json:"region"`
	Epoch        uint64 `json:"epoch"`
	Replicas     int    `json:"replicas"` // compared with each other
	Blocks       int    `json:"blocks"`
	BlocksInUse  int    `json:"blocks_in_use"` // not FREE
	Slabs        int    `json:"slabs"`         // of blocks in use
	Live         int    `json:"live"`          // slabs
	Objects      int    `json:"objects"`       // a large one counts once
	Encrypted    int    `json:"encrypted"`     // live slabs with an encrypted payload
	PayloadBytes int64  `json:"payload_bytes"` // of all live images
	Claimed      int    `json:"claimed"`       // FREE and reserved: in a client's magazine
	Held         int    `json:"held"`          // LIVE and reserved: an operation is running, or its session is dead
	HeldByDead   int    `json:"held_by_dead"`  // of Held and Claimed, by sessions that are over
	Pending      int    `json:"pending"`       // freed and not yet given back, by clients that are alive
	Busy         int    `json:"busy"`          // kept changing until the check gave up
	AlikeBytes   int64  `json:"alike_bytes"`   // of backups that were not READ: a hash showed them to be the primary's
}

// Finding is one thing that is wrong.
type Finding struct {
	Region uint32 `json:"region"`
	Node   string `json:"node,omitempty"` // of the replica, if it is one's
	Where  string `json:"where"`          // block, slab or word
	Kind   Kind   `json:"kind"`
	What   string `json:"what"` // for people
	// Mark is the reference of the mark of a slab that is BAD.
	Mark proto.Ref `json:"mark,omitzero"`

	// For Repair.
	addr    proto.Addr
	ref     proto.Ref // of the object, if any replica tells
	block   uint32
	inBlock bool   // block is set: the fault is of the block and not of one slab
	chunk   bool   // ref is a chunk, an orphan
	version uint64 // of the object when it was found
}

// Kind of a finding.
type Kind string

const (
	KindHeader      Kind = "header"      // of a region or block
	KindMap         Kind = "map"         // disagrees with the slabs' words
	KindWord        Kind = "word"        // R or V is no such word
	KindImage       Kind = "image"       // checksum, version or born of an active image
	KindBad         Kind = "bad"         // V is BAD: no replica had a whole image, and the object is lost
	KindReplica     Kind = "replica"     // replicas differ
	KindLeak        Kind = "leak"        // taken, and no client can ever use or free it
	KindReservation Kind = "reservation" // by a session that the controller does not know
	KindChunk       Kind = "chunk"       // of a large object
	KindTree        Kind = "tree"        // a tree of the placement library is not whole
)

// String is the line that quarry fsck prints.
func (f Finding) String() string {
	at := fmt.Sprintf("region %d %s", f.Region, f.Where)
	if f.Node != "" {
		at += " on " + f.Node
	}
	return fmt.Sprintf("%s: %s: %s", at, f.Kind, f.What)
}

// Add adds what another check has found.
func (r *Report) Add(f Finding) { r.add(f) }

// add adds a finding, or counts it where there are too many.
func (r *Report) add(f Finding) {
	if r.only != "" && f.Kind != r.only { // before MaxFindings counts
		return
	}
	if len(r.Findings) >= MaxFindings || f.Kind == KindBad && r.only == "" && r.bad >= MaxBad {
		r.More++
		return
	}
	if f.Kind == KindBad {
		r.bad++
	}
	r.Findings = append(r.Findings, f)
}

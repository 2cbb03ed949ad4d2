package pulse

import (
	"net/netip"
	"time"
)

// Kind of a member.
type Kind uint8

// Kinds of members.
const (
	Storage Kind = 1 + iota
	Controller
)

func (k Kind) String() string {
	if k == Controller {
		return "controller"
	}
	return "storage"
}

// Health of a member, as it says itself.
type Health uint8

// Healths of members.
const (
	Well    Health = iota
	Cut            // a storage node to which no controller answers
	Unfit          // a storage node that cannot work
	Leads          // a controller
	Standby        // a controller
)

var healths = [...]string{"well", "cut", "unfit", "leads", "standby"}

func (h Health) String() string { return healths[h] }

// State of a member, as this one sees it.
type State string

// States of members. A member that has never answered has none.
const (
	Alive   State = "alive"
	Suspect State = "suspect" // it has not answered for some ticks
	Silent  State = "silent"  // it answers neither this member nor those it has asked, or has left
)

// Self is what a member says of itself in each tick.
type Self struct {
	Health Health
	Term   uint64 // of its leadership; 0: it does not lead
}

// Member is another process as this one sees it.
type Member struct {
	Kind        Kind
	Incarnation uint64 // random; of a storage node: its incarnation
	Node        uint32 // number of a storage node
	Address     netip.AddrPort
	Health      Health
	Term        uint64
	State       State
	Since       time.Time // when it became so, here
	Silent      []uint64  // incarnations that are silent to it
}

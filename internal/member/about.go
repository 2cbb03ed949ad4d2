package member

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Kinds of members.
const (
	Storage    = "storage"
	Controller = "controller"
)

// State of a member, as one list sees it.
type State string

const (
	Alive  State = "alive"
	Silent State = "silent" // it does not answer other members, or has said goodbye
)

// About is what a member says of itself.
type About struct {
	Kind          string   `json:"k"`
	Name          string   `json:"n"`
	Life          uint64   `json:"l"`           // random; of a storage node: its incarnation
	Node          uint32   `json:"i,omitempty"` // number of a storage node
	Domain        string   `json:"d,omitempty"` // failure domain
	Health        string   `json:"h,omitempty"` // one word
	CapacityBytes uint64   `json:"c,omitempty"`
	FreeBytes     uint64   `json:"f,omitempty"`
	Silent        []uint64 `json:"s,omitempty"` // lives that do not answer, as it sees it; of a controller
}

// Member is a member as one list sees it.
type Member struct {
	About
	Address string // of its gossip
	State   State
	Since   time.Time // when it became so, here
}

const (
	maxAbout  = 512 // bytes; what memberlist takes
	maxText   = 64  // of each text: longer ones are cut
	maxSilent = 8
)

func (a About) name() string { return fmt.Sprintf("%s/%s/%016x", a.Kind, cut(a.Name), a.Life) }

// cut shortens a text to what is sent of it.
func cut(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.ToValidUTF8(s, "")
}

// encode says what others are told, in at most maxAbout bytes.
func (a About) encode() []byte {
	a.Name, a.Domain, a.Health = cut(a.Name), cut(a.Domain), cut(a.Health)
	a.Silent = a.Silent[:min(len(a.Silent), maxSilent)]
	b, err := json.Marshal(a)
	for ; err == nil && len(b) > maxAbout && len(a.Silent) > 0; b, err = json.Marshal(a) {
		a.Silent = a.Silent[:len(a.Silent)-1]
	}
	if err != nil || len(b) > maxAbout { // texts full of what JSON has to escape
		b, _ = json.Marshal(About{Kind: a.Kind, Life: a.Life, Node: a.Node, CapacityBytes: a.CapacityBytes, FreeBytes: a.FreeBytes})
	}
	return b
}

// decode reads what a member says of itself, and refuses what none of ours says.
func decode(name string, b []byte) (a About, err error) {
	if len(b) > maxAbout {
		return a, fmt.Errorf("member %q: %d bytes about itself, at most %d", cut(name), len(b), maxAbout)
	}
	if err := json.Unmarshal(b, &a); err != nil {
		return a, fmt.Errorf("member %q: %w", cut(name), err)
	}
	for _, s := range []string{a.Name, a.Domain, a.Health} {
		if len(s) > maxText || !utf8.ValidString(s) {
			return a, fmt.Errorf("member %q: a text of %d bytes, at most %d", cut(name), len(s), maxText)
		}
	}
	if a.Kind != Storage && a.Kind != Controller || a.Life == 0 || len(a.Silent) > maxSilent {
		return a, fmt.Errorf("member %q: kind %q, life %d: want a storage node or a controller", cut(name), cut(a.Kind), a.Life)
	}
	return a, nil
}

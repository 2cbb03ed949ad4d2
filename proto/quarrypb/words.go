package quarrypb

import (
	"fmt"
	"strings"
)

// Shown is the state of a region that every surface shows to users: its condition, or,
// from a controller that sends none, what its row alone says.
func (r *Region) Shown() RegionState {
	switch {
	case r.GetCondition() != RegionState_REGION_STATE_UNSPECIFIED:
		return r.GetCondition()
	case r.GetState() == RegionState_REGION_STATE_OPEN && r.InSync() < int(r.GetWantReplicas()):
		return RegionState_REGION_STATE_DEGRADED
	}
	return r.GetState()
}

// Usable says whether clients can read and write the region.
func (r *Region) Usable() bool {
	return r.GetState() == RegionState_REGION_STATE_OPEN && r.GetCondition() != RegionState_REGION_STATE_UNAVAILABLE
}

// InSync counts the replicas of a region that are in sync.
func (r *Region) InSync() (count int) {
	for _, p := range r.GetReplicas() {
		if p.State == ReplicaState_REPLICA_STATE_IN_SYNC {
			count++
		}
	}
	return count
}

// RegionConditions are the states of a region that users see.
var RegionConditions = []RegionState{RegionState_REGION_STATE_OPEN, RegionState_REGION_STATE_DEGRADED, RegionState_REGION_STATE_RECOVERING,
	RegionState_REGION_STATE_UNAVAILABLE, RegionState_REGION_STATE_LOST}

// Word is the name of an enum value as users see it: lower case, without the type.
// A node that has been struck out is "removed".
func Word(v fmt.Stringer) string {
	if v == NodeState_NODE_STATE_DOWN {
		return "removed"
	}
	name := v.String()
	for _, prefix := range []string{"NODE_STATE_", "REGION_STATE_", "REPLICA_STATE_", "PROVIDER_", "WORK_KIND_", "DURABILITY_", "FABRIC_TLS_", "RIGHT_"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			return strings.ToLower(rest)
		}
	}
	return strings.ToLower(name)
}

// Text is what a loss of power leaves of a node's regions, how they are flushed, and how clients have that done, for people: "volatile",
// "file, msync, processor", "devdax (memory_controller), clwb, agent"; empty if the node does not say.
func (p *Persistence) Text() string {
	if p == nil || p.Flush == "none" {
		return p.GetKind()
	}
	text := p.Kind
	if p.Domain != "" {
		text += " (" + p.Domain + ")"
	}
	text += ", " + p.Flush
	if p.Method != "" {
		text += ", " + p.Method
	}
	return text
}

package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
)

// agents is the work of storage nodes' agents that this leader has asked for: single calls,
// jobs, and programs over regions.
type agents struct {
	m        *Machine
	pending  map[uint64]func(Reply) // calls without an answer, by number
	lastCall uint64                 // its number
	jobs     []*job                 // under way, in the order in which they began
	programs []*program             // that agents run over regions
	dirty    bool                   // some job may go on
}

// reply passes the outcome of a call to the function that call was given.
func (a *agents) reply(r Reply) {
	if done := a.pending[r.Call]; done != nil {
		delete(a.pending, r.Call)
		done(r)
	}
}

// advanceJobs carries on with the jobs that can.
func (a *agents) advanceJobs() {
	a.dirty = false
	for _, j := range slices.Clone(a.jobs) {
		j.advance()
	}
}

// call asks the agent of the present incarnation of a node; done gets the outcome.
func (a *agents) call(n *node, msg proto.Message, timeout time.Duration, done func(Reply)) {
	incarnation := n.rec.Incarnation
	a.callURL(Call{Node: n.rec.Id, Incarnation: incarnation, URL: n.rec.AgentUrl, Msg: msg, Timeout: int64(timeout)}, func(r Reply) {
		if r.Err != nil && !r.Refused && n.rec.Incarnation == incarnation {
			a.m.doubt(n)
		}
		done(r)
	})
}

// callURL emits a call; done gets its Reply.
func (a *agents) callURL(c Call, done func(Reply)) {
	a.lastCall++
	c.ID = a.lastCall
	a.pending[c.ID] = done
	a.m.emit(c)
}

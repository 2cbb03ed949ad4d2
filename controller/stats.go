package controller

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/internal/pulse"
	"github.com/quarrystore/quarry/internal/rpcstats"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// counted is what a controller has done since it started.
type counted struct {
	requests  rpcstats.Calls // of clients, nodes and operators
	agents    rpcstats.Calls // of agents, by us
	commits   latency.Histogram
	terms     atomic.Uint64
	failed    atomic.Uint64 // commits
	deposed   atomic.Uint64 // leaders, by us
	elections atomic.Uint64 // campaigns of our member of etcd that the pulse began
	// suspicions of nodes, by source
	suspicions [sources]atomic.Uint64
	tables     atomic.Uint64
	pushes     atomic.Uint64 // messages of WatchNames
}

// commit counts one transaction.
func (c *counted) commit(do func() state.Event) state.Event {
	start := time.Now()
	ev := do()
	if _, failed := ev.(state.Failed); failed {
		c.failed.Add(1)
	} else {
		c.commits.Observe(time.Since(start))
	}
	return ev
}

// call counts one call of an agent.
func (c *counted) call(msg proto.Message, do func() state.Event) state.Event {
	start := time.Now()
	ev := do()
	var err error
	if r, ok := ev.(state.Reply); ok {
		err = r.Err
	}
	c.agents.Observe(strings.TrimSuffix(string(msg.ProtoReflect().Descriptor().Name()), "Request"), time.Since(start), err)
	return ev
}

// Stats is what a controller has done since it started.
type Stats struct {
	Leads         bool
	Terms         uint64 // times it has led
	TableChanges  uint64
	Commits       latency.Snapshot
	FailedCommits uint64
	Requests      []rpcstats.Call
	Watches       int64
	// NameWatchers are calls of WatchNames under way, WatchedNames the names that they watch, NamePushes the messages that were sent.
	NameWatchers, WatchedNames int
	NamePushes                 uint64
	AgentCalls                 []rpcstats.Call
	// Deposed leaders, by this controller; Suspicions of storage nodes by SuspicionSources.
	Deposed    uint64
	Elections  uint64 // of etcd, in which the pulse had this controller's member campaign
	Suspicions [sources]uint64
	// Members as the pulse shows them to this controller, itself not among them, and what it has received.
	Members []pulse.Member
	Pulses  pulse.Counts
	// Store is the size of etcd; zero until it has been read.
	Store StoreSize
	// Status is the cluster's, if this controller leads and answers in time.
	Status *quarrypb.StatusResponse
}

// Stats is a snapshot. The context bounds how long the leader's machine is waited for.
func (c *Controller) Stats(ctx context.Context) Stats {
	k := &c.counted
	s := Stats{Leads: c.Leads(), Terms: k.terms.Load(), TableChanges: k.tables.Load(), Commits: k.commits.Snapshot(), FailedCommits: k.failed.Load(),
		Requests: k.requests.Snapshot(), Watches: k.requests.Streams(), AgentCalls: k.agents.Snapshot()}
	s.Deposed = k.deposed.Load()
	s.Elections = k.elections.Load()
	if size := c.upkeep.size.Load(); size != nil {
		s.Store = *size
	}
	for i := range k.suspicions {
		s.Suspicions[i] = k.suspicions[i].Load()
	}
	if l := c.pulse.list.Load(); l != nil {
		s.Members, s.Pulses = l.Members(), l.Counts()
	}
	s.NamePushes = k.pushes.Load()
	if t := c.term.Load(); t != nil {
		s.NameWatchers, s.WatchedNames = t.pushes.watched()
		if out, err := t.ask(ctx, &quarrypb.StatusRequest{}, nil); err == nil {
			s.Status, _ = out.(*quarrypb.StatusResponse)
		}
	}
	return s
}

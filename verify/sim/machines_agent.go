package sim

import (
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
	fabric "github.com/quarrystore/quarry/rdma/sim"
	nodestate "github.com/quarrystore/quarry/storagenode/state"
)

// agent is the agent half of a storage node. It does in virtual time what package storagenode
// does around the state machine. The memory of its node is served even while the agent stands
// still, and the agent runs even while no client reaches the memory.
type agent struct {
	m           *machines        // the machines it belongs to
	node        int              // its number in the fabric
	incarnation uint64           // incarnation of the node; 0: down
	run         int              // counts starts and deaths
	frozen      bool             // the CPU stands still, the adapter serves
	held        []func()         // messages that have arrived while it is frozen
	st          *nodestate.State // the shipped machine
	target      int              // controller that it calls
	beats       uint64           // heartbeats sent
	left        []uint64         // sessions whose connections here have ended, for the next heartbeat
	retired     [adapters]bool   // adapters whose access has ended

	// disk survives the death of the process, unless the node is formatted.
	kept []byte                        // the agent's own state file
	disk [lastID + 1]*nodestate.Region // by region, as its header says; nil: no memory is found

	programs [lastID + 1][5]*program // by region and kind
	busy     bool                    // false: all of programs have ended

	// Sessions that the node's access layer knows of.
	next  uint64
	live  []uint64
	ended []uint64
}

var (
	errFailed           = errors.New("the agent could not do it")
	errOtherIncarnation = errors.New("a call for another incarnation of the node")
)

const beatEvery = leaseNs / 6

func (g *agent) reset(m *machines, node int, b *boot) {
	*g = agent{m: m, node: node, run: g.run + 1}
	if node >= m.w.d.nodes {
		return
	}
	from := &b.agents[node]
	st := *from
	st.Regions = slices.Clone(from.Regions)
	st.Serials.Live, st.Serials.Ended = slices.Clone(from.Serials.Live), slices.Clone(from.Serials.Ended)
	g.st, g.incarnation = &st, m.w.fab.Nodes()[node].Incarnation
	g.kept = st.Kept.Encode()
	for i := range st.Regions {
		found := st.Regions[i]
		g.disk[found.Number] = &found
	}
	g.target = m.w.ch.choose(controllers)
	g.later(int64(1+m.w.ch.choose(10))*step, g.beat)
}

func (g *agent) fabricNode() *fabric.Node { return g.m.w.fab.Nodes()[g.node] }

// poll notices that a fault has stopped or started the node.
func (g *agent) poll() {
	if g.node >= g.m.w.d.nodes {
		return
	}
	nd := g.fabricNode()
	if g.incarnation != 0 && (!nd.Up || nd.Incarnation != g.incarnation) {
		g.die()
	}
	if g.incarnation == 0 && nd.Up {
		g.start(nd.Incarnation)
	}
	g.buryPrograms()
}

func (g *agent) die() {
	g.m.w.logf("node %d: dies", g.node+1)
	g.incarnation, g.st = 0, nil
	g.run++
	g.killPrograms()
	if !g.m.w.mirror.intact[g.node] {
		g.kept, g.disk = nil, [len(g.disk)]*nodestate.Region{} // formatted
	}
}

// start begins the next incarnation of the node, with the memory that it finds.
func (g *agent) start(incarnation uint64) {
	w := g.m.w
	var kept nodestate.Kept
	if g.kept != nil {
		var err error
		if kept, err = nodestate.DecodeKept(g.kept); err != nil {
			w.fail("what a node has kept cannot be read", err.Error())
		}
	}
	var found []nodestate.Region
	for _, r := range g.disk {
		if r != nil {
			found = append(found, nodestate.Region{Number: r.Number, UUID: r.UUID, Cluster: r.Cluster, Bytes: r.Bytes, Persistent: r.Persistent, Epoch: r.Epoch})
		}
	}
	g.incarnation, g.st, g.frozen = incarnation, nodestate.New(nodeLimits(w.opt.Adapters), kept, found), false
	g.retired = [adapters]bool{}
	g.next, g.live, g.ended, g.held, g.beats = 0, nil, nil, nil, 0
	g.run++
	w.logf("node %d: starts, incarnation %d, %d regions found", g.node+1, incarnation, len(found))
	g.later(int64(1+w.ch.choose(10))*step, g.register)
}

func (g *agent) later(d int64, f func()) {
	run := g.run
	g.m.after(d, func() { g.deliver(run, f) })
}

func (g *agent) deliver(run int, f func()) {
	switch {
	case g.run != run || g.incarnation == 0:
	case g.frozen:
		g.held = append(g.held, func() { g.deliver(run, f) })
	default:
		f()
	}
}

// thaw continues with the calls that have arrived meanwhile.
func (g *agent) thaw() {
	g.frozen = false
	for _, f := range g.held {
		g.m.after(0, f)
	}
	g.held = nil
}

// post sends a request to controller k.
func (g *agent) post(k int, msg any, answer func(state.Answer)) {
	m, n, run := g.m, g.node, g.run
	cut := func(links *[controllers][maxNodes]bool) bool { return links[k][n] || m.w.cuts[controllerRow][n] }
	if cut(&m.fromNode) || m.lose() {
		return
	}
	m.after(m.delay(), func() {
		if cut(&m.fromNode) {
			return
		}
		c := &m.ctls[k]
		back := func(a state.Answer) {
			if m.lose() {
				return
			}
			m.after(m.delay(), func() {
				if !cut(&m.toNode) {
					g.deliver(run, func() { answer(a) })
				}
			})
		}
		c.deliver(c.incarnation, func() {
			if c.term == nil {
				back(state.Answer{Err: &state.Error{Code: state.NotLeader, Text: "this controller does not lead"}})
				return
			}
			c.term.ask(msg, back)
		})
	})
}

// beat sends heartbeats, and registers again if a controller asks for that.
func (g *agent) beat() {
	m := g.m
	g.beats++
	n, target := g.beats, g.target
	g.later(m.units(beatEvery), g.beat)
	if g.st.Node == 0 {
		return
	}
	heard := false
	left := g.left
	g.left = nil
	g.post(target, &quarrypb.NodeHeartbeatRequest{Id: g.st.Node, Incarnation: g.incarnation, EndedSessions: left, Secret: secret[:]}, func(a state.Answer) {
		heard = true
		r, ok := a.Msg.(*quarrypb.NodeHeartbeatResponse)
		switch {
		case ok && a.Err == nil && r.Unknown:
			g.register()
		case a.Err != nil && a.Err.Code == state.NotLeader && g.target == target:
			g.target = (target + 1) % controllers
		}
	})
	g.later(m.units(beatEvery)*2, func() {
		if !heard && g.target == target && g.beats <= n+2 {
			g.target = m.w.ch.choose(controllers)
		}
	})
}

// register registers the node, and repeats that until a leader has accepted it.
func (g *agent) register() {
	m := g.m
	req := &quarrypb.RegisterNodeRequest{Node: nodeRecord(g.node, g.incarnation, g.st.Node, m.w.opt.Adapters), Secret: secret[:]}
	req.Node.LostAdapters = g.st.LostAdapters()
	if g.st.Cluster != [16]byte{} {
		req.Cluster = g.st.Cluster[:]
	}
	for i := range g.st.Regions {
		if r := &g.st.Regions[i]; r.Phase != nodestate.Making {
			req.Found = append(req.Found, &quarrypb.HostedRegion{Region: r.Number, Uuid: slices.Clone(r.UUID[:]), Cluster: slices.Clone(r.Cluster[:]), SizeBytes: r.Bytes, Epoch: r.Epoch})
		}
	}
	done := false
	again := func() {
		if !done {
			done = true
			g.target = (g.target + 1) % controllers
			g.later(m.units(int64(100e6)), g.register)
		}
	}
	g.later(m.units(leaseNs), again)
	g.post(g.target, req, func(a state.Answer) {
		r, ok := a.Msg.(*quarrypb.RegisterNodeResponse)
		if done || !ok || a.Err != nil {
			if a.Err != nil && a.Err.Code != state.NotLeader && a.Err.Code != state.Busy {
				m.w.logf("node %d: registration: %v", g.node+1, a.Err)
			}
			again()
			return
		}
		g.do(registered(r), func(err error) {
			if err != nil {
				again()
				return
			}
			if !done {
				done = true
				if g.beats == 0 {
					g.beat()
				}
			}
		})
	})
}

// called executes the call of a controller.
func (g *agent) called(a state.Call, reply func(msg proto.Message, err error, refused bool)) {
	g.deliver(g.run, func() {
		if a.Incarnation != 0 && a.Incarnation != g.incarnation {
			reply(nil, errOtherIncarnation, true)
			return
		}
		switch r := a.Msg.(type) {
		case *quarrypb.PingRequest:
			reply(&quarrypb.PingResponse{Id: g.st.Node, Incarnation: g.incarnation}, nil, false)
			return
		case *quarrypb.WorkRequest:
			g.work(r, reply)
			return
		}
		ev, ok := commandOf(a.Msg)
		if !ok {
			g.m.w.fail("an agent gets a call it does not know", fmt.Sprintf("%T", a.Msg))
			return
		}
		g.do(ev, func(err error) {
			if err == nil {
				reply(emptyAnswer(a.Msg), nil, false)
				return
			}
			var se *nodestate.Error
			reply(nil, err, errors.As(err, &se) && se.Code != nodestate.Busy)
		})
	})
}

// do takes a step of the state machine and executes its actions in order. Other processes run
// in between.
func (g *agent) do(ev nodestate.Event, done func(error)) {
	acts, err := g.st.Step(ev)
	if err != nil {
		done(err)
		return
	}
	region := uint32(0)
	for _, a := range acts {
		if a.Do == nodestate.Save {
			g.kept = g.st.Kept.Encode()
		}
		region = max(region, a.Region)
	}
	var next func(i int)
	finish := func(err error) {
		if region != 0 {
			_, _ = g.st.Step(nodestate.Ended{Region: region, Failed: err != nil})
		}
		done(err)
	}
	next = func(i int) {
		for ; i < len(acts); i++ {
			if acts[i].Do == nodestate.Save {
				continue
			}
			fails := g.m.rarely(50)
			if !fails || g.m.w.ch.choose(2) == 1 {
				g.act(acts[i])
			}
			if fails {
				finish(errFailed)
				return
			}
			if d := g.m.w.ch.choose(6); d > 2 && i+1 < len(acts) {
				g.later(int64(d)*step, func() { next(i + 1) })
				return
			}
		}
		finish(nil)
	}
	next(0)
}

func (g *agent) act(a nodestate.Action) {
	w := g.m.w
	if w.log != nil {
		w.logf("node %d: %v", g.node+1, a)
	}
	mem := g.fabricNode().Memory(a.Region) // nil if the action is not about a region
	switch a.Do {
	case nodestate.Make, nodestate.Zero:
		mem.Zero()
		r := *g.st.Region(a.Region)
		g.disk[a.Region] = &r
	case nodestate.Mark:
		if r := g.disk[a.Region]; r != nil {
			r.Epoch = a.Epoch
		}
	case nodestate.Serve:
		mem.OpenAt(int(a.Adapter), a.Epoch)
		if mem.Shared() {
			w.fail("two adapters of a node serve a region", fmt.Sprintf("node %d, region %d, epoch %d", g.node+1, a.Region, a.Epoch))
		}
	case nodestate.Cut:
		if mem.Epoch <= a.Epoch {
			if !g.retired[mem.Adapter()] { // else it has no access to close
				mem.Close()
			}
			g.endPrograms(a.Region)
		}
	case nodestate.Retire:
		g.fabricNode().Retire(int(a.Adapter))
	case nodestate.Free:
		mem.Zero()
		g.disk[a.Region] = nil
	case nodestate.EndBelow:
		if a.Next >= g.next {
			g.next, g.live = a.Next, slices.Clone(a.Serials)
		}
		g.revoke()
	case nodestate.End:
		g.ended = append(g.ended, a.Serials...)
		g.revoke()
	case nodestate.Renew:
		g.later(step, g.register)
	default:
		g.actWork(a)
	}
}

// endPrograms ends the connections of programs without a session to a region of the node. The
// fabric gives such programs no key that a Cut could invalidate.
func (g *agent) endPrograms(region uint32) {
	nd := g.fabricNode()
	for i := range fabric.MaxConns {
		if c := g.m.w.fab.Conn(i); c != nil && c.Session() == fabric.Agent && c.Node() == nd && c.Opened(region) {
			c.End()
		}
	}
}

// refuses reports whether the node refuses a session.
func (g *agent) refuses(serial uint64) bool {
	return slices.Contains(g.ended, serial) || serial < g.next && !slices.Contains(g.live, serial)
}

// revoke ends the sessions that the node no longer admits.
func (g *agent) revoke() {
	w, nd := g.m.w, g.fabricNode()
	for id := range w.mirror.sess {
		if s := &w.mirror.sess[id]; s.serial != 0 && !nd.Revoked(uint32(id)) && g.refuses(s.serial) {
			nd.Revoke(uint32(id))
			w.closeConns(uint32(id), nd)
		}
	}
}

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

// agent is the agent half of a storage node: what package storagenode does around
// the machine, in virtual time. Its node may serve without it, and it without its node.
type agent struct {
	m      *machines
	node   int
	life   uint64 // incarnation of the node; 0: down
	run    int    // counts lives and deaths
	frozen bool   // its CPU stands still, the adapter works on
	held   []func()
	st     *nodestate.State
	target int
	beats  uint64

	// disk survives the process, unless the node is formatted.
	kept   []byte
	region *nodestate.Region // as its header says; nil: no memory is found

	programs [5]*program // by kind

	// What the node's access layer has been told.
	next  uint64
	live  []uint64
	ended []uint64
}

var (
	errFailed    = errors.New("the agent could not do it")
	errOtherLife = errors.New("a call for another life of the node")
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
	g.st, g.life = &st, m.w.fab.Nodes()[node].Incarnation
	g.kept = st.Kept.Encode()
	if r := st.Region(regionID); r != nil {
		found := *r
		g.region = &found
	}
	g.target = m.w.ch.choose(controllers)
	g.later(int64(1+m.w.ch.choose(10))*step, g.beat)
}

func (g *agent) fabricNode() *fabric.Node { return g.m.w.fab.Nodes()[g.node] }

// poll notices what faults have done to the node.
func (g *agent) poll() {
	if g.node >= g.m.w.d.nodes {
		return
	}
	nd := g.fabricNode()
	if g.life != 0 && (!nd.Up || nd.Incarnation != g.life) {
		g.die()
	}
	if g.life == 0 && nd.Up {
		g.start(nd.Incarnation)
	}
	g.buryPrograms()
}

func (g *agent) die() {
	g.m.w.logf("node %d: dies", g.node+1)
	g.life, g.st = 0, nil
	g.run++
	g.killPrograms()
	if !g.m.w.ctl.intact[g.node] {
		g.kept, g.region = nil, nil // formatted
	}
}

// start is the node's next life, with what it finds.
func (g *agent) start(life uint64) {
	w := g.m.w
	var kept nodestate.Kept
	if g.kept != nil {
		var err error
		if kept, err = nodestate.DecodeKept(g.kept); err != nil {
			w.fail("what a node has kept cannot be read", err.Error())
		}
	}
	var found []nodestate.Region
	if g.region != nil {
		r := *g.region
		found = append(found, nodestate.Region{Number: r.Number, UUID: r.UUID, Cluster: r.Cluster, Bytes: r.Bytes, Persistent: r.Persistent, Epoch: r.Epoch})
	}
	g.life, g.st, g.frozen = life, nodestate.New(nodeLimits, kept, found), false
	g.next, g.live, g.ended, g.held, g.beats = 0, nil, nil, nil, 0
	g.run++
	w.logf("node %d: starts, life %d, %d regions found", g.node+1, life, len(found))
	g.later(int64(1+w.ch.choose(10))*step, g.register)
}

func (g *agent) later(d int64, f func()) {
	run := g.run
	g.m.after(d, func() { g.deliver(run, f) })
}

func (g *agent) deliver(run int, f func()) {
	switch {
	case g.run != run || g.life == 0:
	case g.frozen:
		g.held = append(g.held, func() { g.deliver(run, f) })
	default:
		f()
	}
}

// thaw lets it go on with what has come in meanwhile.
func (g *agent) thaw() {
	g.frozen = false
	for _, f := range g.held {
		g.m.after(0, f)
	}
	g.held = nil
}

// post asks controller k.
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
		c.deliver(c.life, func() {
			if c.term == nil {
				back(state.Answer{Err: &state.Error{Code: state.NotLeader, Text: "this controller does not lead"}})
				return
			}
			c.term.ask(msg, back)
		})
	})
}

// beat shows signs of life, and registers again when a controller asks for it.
func (g *agent) beat() {
	m := g.m
	g.beats++
	n, target := g.beats, g.target
	g.later(m.units(beatEvery), g.beat)
	if g.st.Node == 0 {
		return
	}
	heard := false
	g.post(target, &quarrypb.NodeHeartbeatRequest{Id: g.st.Node, Incarnation: g.life}, func(a state.Answer) {
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

// register tells whoever leads of the node, until one has taken it in.
func (g *agent) register() {
	m := g.m
	req := &quarrypb.RegisterNodeRequest{Node: nodeRecord(g.node, g.life, g.st.Node)}
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

// called is a controller's call.
func (g *agent) called(a state.Call, reply func(msg proto.Message, err error, refused bool)) {
	g.deliver(g.run, func() {
		if a.Incarnation != 0 && a.Incarnation != g.life {
			reply(nil, errOtherLife, true)
			return
		}
		switch r := a.Msg.(type) {
		case *quarrypb.PingRequest:
			reply(&quarrypb.PingResponse{Id: g.st.Node, Incarnation: g.life}, nil, false)
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

// do takes a step and carries its actions out, one after the other; others go on
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
	mem := w.mem(g.node)
	switch a.Do {
	case nodestate.Make, nodestate.Zero:
		mem.Zero()
		r := *g.st.Region(a.Region)
		g.region = &r
	case nodestate.Mark:
		if g.region != nil {
			g.region.Epoch = a.Epoch
		}
	case nodestate.Serve:
		mem.Open(a.Epoch)
	case nodestate.Cut:
		if mem.Epoch <= a.Epoch {
			mem.Close()
			g.endPrograms()
		}
	case nodestate.Free:
		mem.Zero()
		g.region = nil
	case nodestate.Settle:
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

// endPrograms ends what programs without a session have at the node: they have no
// key of the fabric that dies by itself.
func (g *agent) endPrograms() {
	nd := g.fabricNode()
	for i := range fabric.MaxConns {
		if c := g.m.w.fab.Conn(i); c != nil && c.Session() == fabric.Agent && c.Node() == nd {
			c.End()
		}
	}
}

// refuses says whether the node admits a session.
func (g *agent) refuses(serial uint64) bool {
	return slices.Contains(g.ended, serial) || serial < g.next && !slices.Contains(g.live, serial)
}

// revoke ends the sessions that the node admits no more.
func (g *agent) revoke() {
	w, nd := g.m.w, g.fabricNode()
	for id := range w.ctl.sess {
		if s := &w.ctl.sess[id]; s.serial != 0 && !nd.Revoked(uint32(id)) && g.refuses(s.serial) {
			nd.Revoke(uint32(id))
			w.closeConns(uint32(id), nd)
		}
	}
}

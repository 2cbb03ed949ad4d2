package sim

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	fabric "github.com/quarrystore/quarry/rdma/sim"
	"github.com/quarrystore/quarry/slab"
	nodestate "github.com/quarrystore/quarry/storagenode/state"
)

// program is a reconcile, copy or scrub that an agent runs: the slab.Port of its
// lane, as package storagenode has it, on a process of the world's.
type program struct {
	g      *agent                       // the agent that started it
	c      *client                      // the process that it runs on, from firstProgram on
	kind   nodestate.Kind               // what it does
	req    *quarrypb.WorkRequest        // of the controller
	number uint64                       // counts the programs begun
	reg    slab.Region                  // under the epoch of req; it never changes
	to     [slab.MaxListed]rdma.Target  // that reg.To points to
	conns  [slab.MaxListed]*fabric.Conn // to each replica

	cause     error    // why it has to stop; nil: it runs
	unsettled bool     // its session ends by revocation, because verbs may be under way
	ended     bool     // it has returned, with err
	err       error    // its result
	told      []func() // calls of controllers that wait for its end
}

var (
	errReplaced = errors.New("stopped: the region's access changes")
	errNoSlot   = errors.New("no process is free for a program")
)

// firstProgram is the first process that programs may use.
const firstProgram = maxClients

// work begins or joins a program.
func (g *agent) work(r *quarrypb.WorkRequest, reply func(msg proto.Message, err error, refused bool)) {
	m, kind := g.m, nodestate.Kind(r.Kind)
	acts, err := g.st.Step(nodestate.Work{Term: r.ControllerTerm, Region: r.Region, Epoch: r.Epoch, Kind: kind, ID: r.Id})
	if err != nil {
		var se *nodestate.Error
		reply(nil, err, errors.As(err, &se) && se.Code != nodestate.Busy)
		return
	}
	for _, a := range acts {
		switch a.Do {
		case nodestate.Save:
			g.kept = g.st.Kept.Encode()
		case nodestate.Begin:
			if err := g.begin(kind, r, a.Run); err != nil {
				_, _ = g.st.Step(nodestate.WorkEnded{Region: r.Region, Kind: kind, Run: a.Run, Failed: true})
				reply(nil, err, false)
				return
			}
		}
	}
	p := g.programs[r.Region][kind]
	if p == nil {
		reply(nil, errReplaced, false)
		return
	}
	answered := false
	answer := func() {
		switch {
		case answered:
		case p.ended && p.err != nil:
			reply(nil, p.err, true)
		default:
			reply(&quarrypb.WorkResponse{Done: p.ended, Blocks: m.w.geo.Blocks}, nil, false)
		}
		answered = true
	}
	if p.ended {
		answer()
		return
	}
	p.told = append(p.told, func() { g.later(0, answer) })
	g.later(m.units(int64(r.WaitMs)*1e6), answer)
}

// begin starts a program on a free process.
func (g *agent) begin(kind nodestate.Kind, r *quarrypb.WorkRequest, number uint64) error {
	w := g.m.w
	var c *client
	for i := firstProgram; i < maxProcs && c == nil; i++ {
		if p := &w.clients[i]; p.state == procIdle && p.frozen == 0 {
			c = p
		}
	}
	if c == nil {
		return errNoSlot
	}
	if old := g.programs[r.Region][kind]; old != nil {
		old.stop()
	}
	p := &program{g: g, c: c, kind: kind, req: r, number: number}
	g.programs[r.Region][kind], g.busy = p, true
	g.m.stats.Works++
	for _, id := range r.DeadSessions {
		g.m.toldFenced(id, r.Region)
	}
	w.logf("node %d: %v %d of epoch %d of region %d begins", g.node+1, kind, r.Id, r.Epoch, r.Region)
	c.start(func() { p.run() })
	return nil
}

// actWork executes the actions about programs.
func (g *agent) actWork(a nodestate.Action) {
	if a.Do != nodestate.Stop {
		g.m.w.fail("an agent does not know an action", a.String())
		return
	}
	for i, p := range g.programs[a.Region] {
		if p != nil {
			p.stop()
			g.programs[a.Region][i] = nil
		}
	}
}

// stop asks a program to end. The program ends at its next check.
func (p *program) stop() {
	if p.cause == nil {
		p.cause = errReplaced
	}
}

// killPrograms ends all programs at the death of the agent.
func (g *agent) killPrograms() {
	for i := firstProgram; i < maxProcs; i++ {
		if p := g.m.seats[i].program; p != nil && p.g == g && !p.ended {
			p.ended = true
			p.detach()
			p.c.die()
		}
	}
	g.programs = [len(g.programs)][5]*program{}
}

// runningProgram is a process that runs a program, or the first one that would.
func (m *machines) runningProgram() int {
	for i := firstProgram; i < maxProcs; i++ {
		if p := m.seats[i].program; p != nil && !p.ended {
			return i
		}
	}
	return firstProgram
}

// buryPrograms notices programs whose process a fault has killed. For the agent they have
// failed.
func (g *agent) buryPrograms() {
	if !g.busy {
		return
	}
	g.busy = false // what finish begins makes it true
	for r := range g.m.orders.highest + 1 {
		for _, p := range g.programs[r] {
			switch {
			case p == nil || p.ended:
			case p.c.state == procIdle:
				p.unsettled = true
				p.finish(errors.New("killed"))
			default:
				g.busy = true
			}
		}
	}
}

func (p *program) run() {
	seat := &p.g.m.seats[p.c.id]
	seat.program = p
	p.c.deadline = never
	err := p.work()
	p.detach()
	p.finish(err)
}

func (p *program) finish(err error) {
	g := p.g
	p.ended, p.err = true, err
	p.closeSession()
	g.m.w.logf("node %d: %v %d of epoch %d: %v", g.node+1, p.kind, p.req.Id, p.req.Epoch, err)
	if g.st != nil {
		_, _ = g.st.Step(nodestate.WorkEnded{Region: p.req.Region, Kind: p.kind, Run: p.number, Failed: err != nil})
	}
	for _, f := range p.told {
		f()
	}
	p.told = nil
}

// work is the program. A reconcile has no session, because it reserves nothing and no client
// has a key.
func (p *program) work() error {
	c, m := p.c, p.g.m
	if p.kind != nodestate.Reconcile {
		m.openSession(c)
		if p.over() != nil {
			return p.over()
		}
	}
	seat := &m.seats[c.id]
	if seat.lane == nil {
		var err error
		if seat.lane, err = slab.NewLane(&programPort{m: m, id: c.id}); err != nil {
			return err
		}
	}
	seat.lane.NewSession()
	if err := p.open(); err != nil {
		return err
	}
	c.inOp = true
	defer c.leave()
	blocks := func(one func(b uint32) error) (err error) {
		for b := uint32(0); b < m.w.geo.Blocks && err == nil; b++ {
			p.Free()
			err = one(b)
		}
		return err
	}
	var err error
	switch p.kind {
	case nodestate.Reconcile:
		// Not when an epoch is served: a late call of an abandoned change may open the epoch
		// number that the next change takes. Only agents have keys of it.
		if t := m.w.tableOf(p.req.Region); p.req.Epoch == t.epoch && !t.open {
			m.noSessionHasAnEarlierTable(p.req.Region, t.epoch)
		}
		var st slab.Reconciled
		err = blocks(func(b uint32) error { return seat.lane.ReconcileBlock(&p.reg, b, &st) })
		m.w.stats.Alike[0] += uint64(st.Alike)
		m.w.logf("reconcile of epoch %d: %+v %v", p.req.Epoch, st, err)
	case nodestate.Copy:
		var st slab.Copied
		err = blocks(func(b uint32) error { return seat.lane.CopyBlock(&p.reg, b, &st) })
		if err == nil && p.over() == nil {
			p.whole()
		}
		m.w.stats.Alike[1] += uint64(st.Alike)
		m.w.logf("copy in epoch %d: %+v %v", p.req.Epoch, st, err)
	case nodestate.Scrub:
		if held := m.scrubsHeld - m.w.now; held > 0 && !m.w.healed {
			c.sleep(held)
		}
		var st slab.Scrubbed
		err = blocks(func(b uint32) error { return seat.lane.ScrubBlock(&p.reg, b, p.dead, &st) })
		if err == nil {
			err = seat.lane.ScrubClaims(&p.reg, &st)
		}
		m.w.logf("scrub in epoch %d: %+v %v", p.req.Epoch, st, err)
		m.w.mirror.scrubbed++
	case nodestate.Reclaim:
		err = p.reclaim(seat.lane)
	}
	if err == nil {
		err = p.over()
	}
	return err
}

// whole notes that the rebuilding replicas are complete. A controller may learn of it when
// their nodes are dead already, so from here on the budget of faults counts their memory.
func (p *program) whole() {
	for _, peer := range p.req.Peers {
		if nd := p.g.m.w.fab.Nodes()[peer.Node-1]; p.req.Region == regionID && peer.Rebuilding && nd.Up && nd.Incarnation == peer.Incarnation {
			p.g.m.w.mirror.intact[peer.Node-1] = true
		}
	}
}

func (p *program) dead(id uint32) bool {
	for _, d := range p.req.DeadSessions {
		if d == id {
			return true
		}
	}
	return false
}

// over returns why the program has to end, or nil.
func (p *program) over() error {
	if p.cause == nil && p.kind != nodestate.Reconcile && p.c.ended {
		p.cause, p.unsettled = errEnded, true
	}
	return p.cause
}

// open connects to every replica, in the incarnation that the controller names.
func (p *program) open() error {
	c, w, r := p.c, p.g.m.w, p.req
	p.reg = slab.Region{ID: r.Region, Epoch: r.Epoch, Seed: wire.RegionSeed([16]byte(r.Uuid)), Geometry: w.geo, Durable: w.opt.Durable && r.Region == regionID, OpenWords: w.opt.Open, Headers: slab.NewHeaders(w.geo.Blocks)}
	session := uint32(fabric.Agent)
	if p.kind != nodestate.Reconcile {
		session = c.session
	}
	for i, peer := range r.Peers {
		nd := w.fab.Nodes()[peer.Node-1]
		if nd.Incarnation != peer.Incarnation {
			return fmt.Errorf("node %d has another incarnation", peer.Node)
		}
		if session != fabric.Agent && p.g.m.refuses(int(peer.Node)-1, c.serial) {
			return rdma.ErrRevoked
		}
		conn, err := w.fab.Dial(session, nd)
		if err != nil {
			return err
		}
		conn.Owner = c.id
		p.conns[i] = conn
		if !p.keyWorks(i) {
			return rdma.ErrKey
		}
		win, err := conn.Open(context.Background(), r.Region, r.Epoch)
		if err != nil {
			return err
		}
		p.to[i] = rdma.Target{Conn: conn, Window: win}
		p.reg.To[i], p.reg.Rebuilding[i], p.reg.Fresh[i] = &p.to[i], peer.Rebuilding, peer.Rebuilding && peer.Fresh
		p.reg.Compares[i] = w.opt.Compare
		p.reg.N++
	}
	return nil
}

// keyWorks reports whether the program's epoch is open at the replica. The fabric itself does
// not check the keys of programs without a session.
func (p *program) keyWorks(i int) bool {
	mem := p.g.m.w.fab.Nodes()[p.req.Peers[i].Node-1].Memory(p.req.Region)
	return mem.IsOpen() && mem.Epoch == p.req.Epoch
}

func (p *program) detach() {
	for i, conn := range p.conns {
		if conn != nil {
			conn.Owner = -1
			conn.Break()
			if p.c.session == 0 {
				conn.Close()
			}
			p.conns[i] = nil
		}
	}
}

// closeSession ends the program's session: with a close if it has left nothing.
func (p *program) closeSession() {
	c, m := p.c, p.g.m
	if p.kind == nodestate.Reconcile || c.session == 0 {
		c.ended = false // of a session whose process was killed: the next program may have none
		return
	}
	var msg any = &quarrypb.CloseSessionRequest{Serial: c.serial, Proof: c.proof}
	if p.unsettled || c.ended {
		msg = &quarrypb.RevokeSessionRequest{Serial: c.serial, Reason: "a program could not settle", Proof: c.proof}
	}
	if p.g.incarnation != 0 {
		m.post(c.id, m.seats[c.id].target, msg, func(state.Answer) {})
	}
	c.session, c.ended = 0, false
}

// programPort is the port of a process's lane. It belongs to the program that runs on it.
type programPort struct {
	m  *machines // where the program is found
	id int       // of the process
}

func (t *programPort) p() *program { return t.m.seats[t.id].program }

func (t *programPort) Do(r *rdma.Round) { t.p().c.Do(r) }

func (t *programPort) Region(id uint32) (*slab.Region, error) {
	p := t.p()
	if err := p.over(); err != nil {
		return nil, err
	}
	if id != p.req.Region {
		return nil, slab.ErrNoRegion
	}
	return &p.reg, nil
}

// Settle ends the program if a replica refuses it. It repeats rounds to a replica that does
// not answer until the program is stopped.
func (t *programPort) Settle(_ *slab.Region, r *rdma.Round) error {
	p := t.p()
	c := p.c
	for i := range r.Len() {
		ch := r.At(i)
		if ch.Err == nil {
			continue
		}
		if errors.Is(ch.Err, rdma.ErrRefused) {
			return ch.Err
		}
		for {
			if err := p.over(); err != nil {
				return err
			}
			conn := ch.To.Conn.(*fabric.Conn)
			err := conn.Reset(context.Background())
			if err == nil {
				break
			}
			if errors.Is(err, rdma.ErrRefused) || conn.Node().Incarnation != p.incarnationOf(conn) {
				return err
			}
			c.sleep(int64(1+c.w.ch.choose(6)) * step)
		}
		if !p.keyWorks(p.indexOf(ch.To.Conn)) {
			return rdma.ErrKey
		}
		ch.Err = nil
	}
	return nil
}

func (p *program) indexOf(conn rdma.Conn) int {
	for i := range p.conns {
		if p.conns[i] != nil && rdma.Conn(p.conns[i]) == conn {
			return i
		}
	}
	return 0
}

func (p *program) incarnationOf(conn *fabric.Conn) uint64 {
	return p.req.Peers[p.indexOf(conn)].Incarnation
}

func (t *programPort) Pause(attempt int) error {
	p := t.p()
	if err := p.over(); err != nil || attempt == 0 {
		return err
	}
	p.c.sleep(int64(1+p.c.w.ch.choose(1<<min(attempt, 6))) * step)
	return p.over()
}

func (t *programPort) HolderFenced(_, holder uint32, attempt int) bool {
	p := t.p()
	switch {
	case p.dead(holder):
		return true
	case p.kind == nodestate.Reconcile || attempt < askAfter || p.over() != nil || holder == p.c.session:
		return false
	}
	return t.m.certified(p.c, holder)
}

func (t *programPort) LeaseValid() bool { return t.p().over() == nil }

func (t *programPort) Reservation() wire.R { return t.p().c.Reservation() }

func (t *programPort) EndSession(reason error) {
	p := t.p()
	if reason != nil && isAlarm(reason) {
		t.m.w.fail("alarm in a program", reason.Error())
	}
	p.unsettled = true
	if p.cause == nil {
		p.cause = reason
	}
}

func (t *programPort) Buffer(n int) ([]byte, error) { return t.p().c.Buffer(n) }

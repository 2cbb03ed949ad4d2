package state

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/keyring"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/slab"
)

// rig drives a machine by hand: it is the store, the clock and the agents. Nothing
// is answered unless the test says so.
type rig struct {
	t          testing.TB
	m          *Machine
	term       uint64
	now        int64
	rev        uint64
	records    map[string]Record
	commit     *Commit // the one that is out
	calls      []Call  // the ones that are out
	answers    map[uint64]Answer
	waiter     uint64
	notes      []string
	tables     []uint64 // revisions of TableChanged
	stepped    []Action // of the last step
	active     int      // steps that are Active
	down       error
	beats      []*quarrypb.Node // nodes that keep sending heartbeats
	deposed    bool             // no more Lead
	scrubEvery time.Duration
	calm       time.Duration // CalmHeartbeat
	ids        uint32        // SessionIDs
	// Probes are answered as time passes: by nodes that are not dead, as the machine knows them.
	probes   []Call
	dead     map[uint32]bool
	unfit    map[uint32]string // what nodes say of themselves with a probe
	stopping map[uint32]bool   // nodes whose heartbeats say that they stop
	beat     uint64            // waiter of the last heartbeat of a node

	pendingBeats []*quarrypb.Node // of a transcript: nodes that wait to be let in
}

const testLease = 3 * time.Second

func newRig(t testing.TB) *rig {
	r := &rig{t: t, records: map[string]Record{}, answers: map[uint64]Answer{}, beat: 1 << 32, dead: map[uint32]bool{}, unfit: map[uint32]string{}, stopping: map[uint32]bool{}}
	r.start()
	return r
}

// start makes the machine of the next leader from the records.
func (r *rig) start() {
	var all []Record
	for _, rec := range r.records {
		all = append(all, rec)
	}
	slices.SortFunc(all, func(a, b Record) int { return cmp.Compare(a.Key, b.Key) })
	r.term += 10
	r.probes = nil
	r.commit, r.calls, r.down, r.beats, r.deposed = nil, nil, nil, nil, false
	random := make([]byte, RandomBytes)
	for i := range random {
		random[i] = byte(i)
	}
	m, acts, err := New(Config{Lease: testLease, NodeHeartbeat: time.Second, CalmHeartbeat: r.calm, RegionBytes: 16 << 20, Version: "test", ReplaceAfter: 10 * time.Second, ScrubEvery: r.scrubEvery, SessionIDs: r.ids}, r.term, r.now, all, random)
	require.NoError(r.t, err)
	r.m = m
	r.take(acts)
	r.step(Lead{Until: r.now + int64(time.Hour)})
}

func (r *rig) step(ev Event) []Action {
	r.stepped = r.m.Step(r.now, ev)
	if Active(ev, r.stepped) {
		r.active++
	}
	r.take(r.stepped)
	r.conditionsHold()
	return r.stepped
}

// conditionsHold checks after every step of every test that each region's record shows
// what its record and the health of its nodes say, and lists no more replicas than clients
// and nodes take.
func (r *rig) conditionsHold() {
	for _, g := range r.m.regions[:min(len(r.m.regions), 64)] {
		if !g.changing && !r.m.down {
			require.Equal(r.t, condition(g.rec, r.m.reach(g.rec)), g.rec.Condition, "region %d: %v", g.rec.Id, g.rec)
		}
		require.LessOrEqual(r.t, len(g.rec.Replicas), slab.MaxListed, "clients refuse a table with region %d: %v", g.rec.Id, g.rec)
	}
}

func (r *rig) take(acts []Action) {
	for _, a := range acts {
		switch a := a.(type) {
		case Commit:
			require.Nil(r.t, r.commit, "two transactions at once")
			require.LessOrEqual(r.t, len(a.Ops), maxOps)
			r.commit = &a
		case Call:
			if _, ping := a.Msg.(*quarrypb.PingRequest); ping && a.Timeout == int64(DefaultProbeTimeout) {
				r.probes = append(r.probes, a)
				break
			}
			r.calls = append(r.calls, a)
		case Answer:
			_, twice := r.answers[a.Waiter]
			require.False(r.t, twice, "waiter %d is answered twice", a.Waiter)
			r.answers[a.Waiter] = a
		case TableChanged:
			r.tables = append(r.tables, a.Revision)
		case Note:
			r.notes = append(r.notes, a.Text)
		case StepDown:
			r.down = a.Err
		}
	}
}

// publicKey is that of every node and session, and secret that of every registration.
var publicKey, secret = keyring.NewSigner([keyring.SeedBytes]byte{1}).Public(), [32]byte{2}

// proved is a request as its rightful sender makes it: with the keys and proofs that the test
// has not filled in.
func (r *rig) proved(msg any) any {
	proof := func(serial uint64, p *[]byte) {
		if *p == nil && serial != 0 {
			*p = r.m.Credentials().proof(serial)
		}
	}
	fill := func(p *[]byte, with []byte) {
		if *p == nil {
			*p = with
		}
	}
	switch q := msg.(type) {
	case *quarrypb.OpenSessionRequest:
		fill(&q.Key, publicKey[:])
	case *quarrypb.HeartbeatRequest:
		proof(q.Serial, &q.Proof)
	case *quarrypb.CloseSessionRequest:
		proof(q.Serial, &q.Proof)
	case *quarrypb.RevokeSessionRequest:
		proof(q.Serial, &q.Proof)
	case *quarrypb.CertifyFenceRequest:
		proof(q.Serial, &q.Proof)
	case *quarrypb.PassRequest:
		proof(q.Serial, &q.Proof)
	case *quarrypb.RegisterNodeRequest:
		fill(&q.Secret, secret[:])
		if q.Node != nil {
			fill(&q.Node.Key, publicKey[:])
		}
	case *quarrypb.NodeHeartbeatRequest:
		fill(&q.Secret, secret[:])
	case Pulsed:
		fill(&q.Secret, secret[:])
	}
	return msg
}

// ask puts a request and returns its waiter.
func (r *rig) ask(msg any) uint64 {
	r.waiter++
	random := make([]byte, 16*MaxCount)
	for i := range random {
		random[i] = byte(r.waiter)
	}
	r.step(Ask{Waiter: r.waiter, Msg: r.proved(msg), Random: random})
	return r.waiter
}

// settle commits whatever there is to commit.
func (r *rig) settle() {
	for r.commit != nil {
		r.commitOne()
	}
}

// commitOne carries the transaction out as etcd would.
func (r *rig) commitOne() {
	c := r.commit
	r.commit = nil
	for _, op := range c.Ops {
		require.Equal(r.t, r.records[op.Key].Revision, op.Prev, "guard of %s", op.Key)
	}
	r.rev++
	for _, op := range c.Ops {
		if op.Value == nil {
			delete(r.records, op.Key)
		} else {
			r.records[op.Key] = Record{Key: op.Key, Value: op.Value, Revision: r.rev}
		}
	}
	r.step(Committed{Revision: r.rev})
}

// reply answers the call with an id: err "" is success.
func (r *rig) reply(id uint64, err string, refused bool) {
	i := slices.IndexFunc(r.calls, func(c Call) bool { return c.ID == id })
	require.GreaterOrEqual(r.t, i, 0, "call %d is not out", id)
	c := r.calls[i]
	r.calls = slices.Delete(r.calls, i, i+1)
	ev := Reply{Call: id, Refused: refused}
	if err != "" {
		ev.Err = errors.New(err)
	} else {
		ev.Msg = goodReply(c.Msg)
	}
	r.step(ev)
}

func goodReply(msg proto.Message) proto.Message {
	switch msg.(type) {
	case *quarrypb.HostRegionRequest:
		return &quarrypb.HostRegionResponse{}
	case *quarrypb.OpenRegionRequest:
		return &quarrypb.OpenRegionResponse{}
	case *quarrypb.CloseRegionRequest:
		return &quarrypb.CloseRegionResponse{}
	case *quarrypb.DropRegionRequest:
		return &quarrypb.DropRegionResponse{}
	case *quarrypb.FenceRequest:
		return &quarrypb.FenceResponse{}
	case *quarrypb.WorkRequest:
		return &quarrypb.WorkResponse{Done: true}
	}
	return &quarrypb.PingResponse{}
}

// run answers everything with success until nothing is out.
func (r *rig) run() {
	for r.commit != nil || len(r.calls) > 0 || r.probed() {
		r.settle()
		if len(r.calls) > 0 {
			r.reply(r.calls[0].ID, "", false)
		}
		r.answerProbe()
	}
}

// advance lets time pass, with ticks and the heartbeats of the nodes that send them.
func (r *rig) advance(d time.Duration) {
	for end := r.now + int64(d); r.now < end; {
		r.now = min(end, r.now+int64(100*time.Millisecond))
		if !r.deposed {
			r.step(Lead{Until: r.now + int64(time.Hour)})
		}
		for _, n := range r.beats {
			r.beat++
			r.step(Ask{Waiter: r.beat, Msg: &quarrypb.NodeHeartbeatRequest{Id: n.Id, Incarnation: n.Incarnation, Stopping: r.stopping[n.Id], Secret: secret[:]}})
		}
		r.step(Tick{})
		r.answerProbes()
	}
}

// probed says whether a node that is not dead is being probed.
func (r *rig) probed() bool {
	return slices.ContainsFunc(r.probes, func(c Call) bool { return !r.dead[c.Node] })
}

// answerProbe answers the oldest probe of such a node: those of the dead take time.
func (r *rig) answerProbe() {
	r.stepped = nil
	i := slices.IndexFunc(r.probes, func(c Call) bool { return !r.dead[c.Node] })
	if i < 0 {
		return
	}
	c := r.probes[i]
	r.probes = slices.Delete(r.probes, i, i+1)
	n := r.m.node(c.Node)
	r.step(Reply{Call: c.ID, Msg: &quarrypb.PingResponse{Id: n.rec.Id, Incarnation: n.rec.Incarnation, Unfit: r.unfit[n.rec.Id]}})
}

// answerProbes answers for every node that is not dead. What follows shows as stepped.
func (r *rig) answerProbes() {
	all := r.stepped
	for len(r.probes) > 0 {
		c := r.probes[0]
		r.probes = r.probes[1:]
		ev := Reply{Call: c.ID}
		if n := r.m.node(c.Node); r.dead[c.Node] {
			ev.Err = errors.New("connection refused")
		} else {
			ev.Msg = &quarrypb.PingResponse{Id: n.rec.Id, Incarnation: n.rec.Incarnation, Unfit: r.unfit[n.rec.Id]}
		}
		all = append(all, r.step(ev)...)
	}
	r.stepped = all
}

func testNode(name, domain string, incarnation uint64) *quarrypb.Node {
	return &quarrypb.Node{
		Name: name, FailureDomain: domain, Incarnation: incarnation, AgentUrl: "http://" + name + ":1",
		CapacityBytes: 1 << 30, Persistent: true, Domain: 1, Fabric: wire.FabricVersion,
		Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: name + ":2"}},
	}
}

// join registers a node and lets it send heartbeats.
func (r *rig) join(n *quarrypb.Node, found ...*quarrypb.HostedRegion) uint64 {
	r.beats = slices.DeleteFunc(r.beats, func(o *quarrypb.Node) bool { return o.Name == n.Name })
	return r.ask(&quarrypb.RegisterNodeRequest{Node: n, Found: found})
}

// joined lets a registered node send heartbeats from now on.
func (r *rig) joined(waiter uint64, n *quarrypb.Node) *quarrypb.RegisterNodeResponse {
	resp := answerOf[*quarrypb.RegisterNodeResponse](r, waiter)
	n = proto.CloneOf(n)
	n.Id = resp.Id
	r.beats = append(r.beats, n)
	return resp
}

// up registers a node and carries out all that follows.
func (r *rig) up(n *quarrypb.Node, found ...*quarrypb.HostedRegion) {
	w := r.join(n, found...)
	r.settle()
	r.joined(w, n)
	r.run()
}

func answerOf[M any](r *rig, waiter uint64) M {
	r.t.Helper()
	a, ok := r.answers[waiter]
	require.True(r.t, ok, "waiter %d is not answered", waiter)
	require.Nil(r.t, a.Err, "waiter %d: %v", waiter, a.Err)
	require.IsType(r.t, *new(M), a.Msg)
	return a.Msg.(M)
}

func (r *rig) answered(waiter uint64) bool { _, ok := r.answers[waiter]; return ok }

func (r *rig) refusal(waiter uint64) *Error {
	r.t.Helper()
	require.True(r.t, r.answered(waiter))
	require.NotNil(r.t, r.answers[waiter].Err)
	return r.answers[waiter].Err
}

// open opens a session.
func (r *rig) open(name string) *quarrypb.Ticket {
	w := r.ask(&quarrypb.OpenSessionRequest{Name: name})
	r.settle()
	return answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket
}

func (r *rig) table() *quarrypb.Table {
	return answerOf[*quarrypb.Table](r, r.ask(&quarrypb.ReadTableRequest{}))
}

// show is an action in one line.
func show(a Action) string {
	switch a := a.(type) {
	case Commit:
		var keys []string
		for _, op := range a.Ops {
			sign := "+"
			if op.Value == nil {
				sign = "-"
			}
			keys = append(keys, sign+strings.TrimLeft(op.Key, "0"))
		}
		return "commit " + strings.Join(keys, " ")
	case Call:
		return fmt.Sprintf("call %d node %d %s", a.ID, a.Node, showMsg(a.Msg))
	case Answer:
		if a.Err != nil {
			return fmt.Sprintf("answer %d error: %s", a.Waiter, a.Err.Text)
		}
		return fmt.Sprintf("answer %d %s", a.Waiter, showMsg(a.Msg))
	case TableChanged:
		return fmt.Sprintf("table at %d", a.Revision)
	case Note:
		return "note " + a.Text
	case StepDown:
		return "step down: " + a.Err.Error()
	}
	return fmt.Sprintf("%T", a)
}

func showMsg(msg any) string {
	switch m := msg.(type) {
	case *quarrypb.HostRegionRequest:
		if m.Zero {
			return fmt.Sprintf("HostRegion %d zeroed for epoch %d", m.Region, m.Epoch)
		}
		return fmt.Sprintf("HostRegion %d, must exist %v", m.Region, m.MustExist)
	case *quarrypb.WorkRequest:
		out := fmt.Sprintf("%s region %d epoch %d", strings.ToLower(strings.TrimPrefix(m.Kind.String(), "WORK_KIND_")), m.Region, m.Epoch)
		for _, p := range m.Peers {
			out += fmt.Sprintf(" n%d.%d", p.Node, p.Incarnation)
			if p.Rebuilding {
				out += ":REBUILDING"
			}
			if p.Fresh {
				out += ":fresh"
			}
		}
		if len(m.DeadSessions) > 0 {
			out += fmt.Sprintf(" dead %v", m.DeadSessions)
		}
		return out
	case *quarrypb.OpenRegionRequest:
		return fmt.Sprintf("OpenRegion %d epoch %d term %d", m.Region, m.Epoch, m.ControllerTerm)
	case *quarrypb.CloseRegionRequest:
		return fmt.Sprintf("CloseRegion %d up to epoch %d term %d", m.Region, m.Epoch, m.ControllerTerm)
	case *quarrypb.DropRegionRequest:
		return fmt.Sprintf("DropRegion %d", m.Region)
	case *quarrypb.FenceRequest:
		return fmt.Sprintf("Fence %v term %d", m.Serials, m.ControllerTerm)
	case *quarrypb.PingRequest:
		return "Ping"
	case *quarrypb.OpenSessionResponse:
		return fmt.Sprintf("session %d serial %d, table %s", m.Ticket.Session, m.Ticket.Serial, showTable(m.Table))
	case *quarrypb.HeartbeatResponse:
		return fmt.Sprintf("lease %d ms, reclaim %d, table %s", m.LeaseMs, m.ReclaimEpoch, showTable(m.Table))
	case *quarrypb.Table:
		return "table " + showTable(m)
	case *quarrypb.RegisterNodeResponse:
		return fmt.Sprintf("node %d, live %v, fenced %v, next %d", m.Id, m.LiveSerials, m.FencedSerials, m.NextSerial)
	case *quarrypb.NodeHeartbeatResponse:
		return fmt.Sprintf("heard, unknown %v", m.Unknown)
	case *quarrypb.Node:
		return fmt.Sprintf("node %d is %s", m.Id, strings.TrimPrefix(m.State.String(), "NODE_STATE_"))
	case *quarrypb.DrainNodeResponse:
		return fmt.Sprintf("draining, %d replicas left", m.Replicas)
	case *quarrypb.Region:
		return showRegion(m)
	case *quarrypb.RebalanceResponse:
		out := "moves"
		for _, mv := range m.Moves {
			out += fmt.Sprintf(" r%d:n%d->n%d", mv.Region, mv.From, mv.To)
		}
		return out
	case *quarrypb.CertifyFenceResponse:
		return fmt.Sprintf("fenced %v, retry in %d ms", m.Fenced, m.RetryMs)
	case *quarrypb.PassResponse:
		return fmt.Sprintf("pass of %d: %v", m.Epoch, m.Passed)
	case *quarrypb.RevokeSessionResponse:
		return "revoked"
	case *quarrypb.CloseSessionResponse:
		return "closed"
	case *quarrypb.CreateRegionResponse:
		var out []string
		for _, g := range m.Regions {
			out = append(out, showRegion(g))
		}
		return "made " + strings.Join(out, ", ")
	case *quarrypb.ListSessionsResponse:
		var out []string
		for _, s := range m.Sessions {
			out = append(out, fmt.Sprintf("%d:%s", s.Session, s.State))
		}
		return "sessions " + strings.Join(out, " ")
	}
	return fmt.Sprintf("%T%+v", msg, msg)
}

func showTable(t *quarrypb.Table) string {
	if t == nil {
		return "none"
	}
	out := fmt.Sprintf("%d since %d:", t.Revision, t.SinceRevision)
	for _, n := range t.Nodes {
		out += fmt.Sprintf(" n%d", n.Id)
	}
	for _, g := range t.Regions {
		out += " " + showRegion(g)
	}
	for _, id := range t.DroppedRegions {
		out += fmt.Sprintf(" -r%d", id)
	}
	return out
}

func showRegion(g *quarrypb.Region) string {
	out := fmt.Sprintf("r%d@%d %s(", g.Id, g.Epoch, strings.TrimPrefix(g.State.String(), "REGION_STATE_"))
	for i, r := range g.Replicas {
		if i > 0 {
			out += " "
		}
		out += fmt.Sprintf("n%d.%d", r.Node, r.Incarnation)
		if r.Leaving {
			out += ":LEAVING"
		}
		if r.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC {
			out += ":" + strings.TrimPrefix(r.State.String(), "REPLICA_STATE_")
		}
	}
	out += ")"
	if g.Shown() == unavailable {
		out += " UNAVAILABLE"
	}
	return out
}

package state

import (
	"cmp"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// This file has Machine: its parts, its start from stored records, and the dispatch of events.

// TickEvery is how often the machine has to be stepped, and CalmTick how often while Active has
// said false for a time.
const (
	TickEvery = 25 * time.Millisecond
	CalmTick  = clock.Grain
)

// Active says whether a step shows that something is going on, so that the caller has to step
// often. Not counted are time and the leadership, heartbeats that are answered as usual,
// questions, and reclaims, which begin every few seconds and for which nothing waits. The answer
// to a program counts by the actions that follow from it.
func Active(ev Event, actions []Action) bool {
	switch ev := ev.(type) {
	case Tick, Lead:
	case Reply:
		if _, ok := ev.Msg.(*quarrypb.WorkResponse); !ok {
			return true
		}
	case Ask:
		switch ev.Msg.(type) {
		case *quarrypb.NodeHeartbeatRequest, Pulsed, *quarrypb.HeartbeatRequest, *quarrypb.ReadTableRequest, *quarrypb.StatusRequest, *quarrypb.ListSessionsRequest:
		default:
			return true
		}
	default:
		return true
	}
	return slices.ContainsFunc(actions, func(a Action) bool {
		switch a := a.(type) {
		case Answer:
			return false
		case Call:
			w, ok := a.Msg.(*quarrypb.WorkRequest)
			return !ok || w.Kind != quarrypb.WorkKind_WORK_KIND_RECLAIM
		}
		return true
	})
}

// Config of a machine. No zero values: the controller fills them in.
type Config struct {
	Lease         time.Duration // of sessions
	NodeHeartbeat time.Duration // what nodes are told; they send two in that time
	// CalmHeartbeat is the time between the heartbeats of a node whose pulse is heard; not more than
	// NodeHeartbeat: the pulse changes nothing.
	CalmHeartbeat time.Duration
	RegionBytes   uint64 // of the largest region that is made for requests without a size
	Version       string // for Status
	// ReplaceAfter is how long a replica that is out may come back before a spare node is taken.
	ReplaceAfter time.Duration
	// ProbeTimeout is how long a suspected node has for the answer to one probe; 0: DefaultProbeTimeout.
	ProbeTimeout time.Duration
	// ScrubEvery is the time between two scrubs for fenced sessions; 0: none; the caller gives Scrubbed itself.
	ScrubEvery time.Duration
	// ReclaimEvery is the time between two looks for empty blocks to take back; 0: none are.
	ReclaimEvery time.Duration
	// RebuildBytesPerSecond bounds the copying to one rebuilding replica; 0: as fast as it goes.
	RebuildBytesPerSecond uint64
	// SessionIDs is the highest id of a session; 0: wire.MaxSession. Simulations set it, so that ids are used again soon.
	SessionIDs uint32
	// Sign signs a ticket with the controllers' current key; nil: Ticket.Sign. Simulations, in which no node
	// verifies tickets, leave out the Ed25519 signature: it takes more time than the rest of a request.
	Sign func(*rdma.Ticket, *keyring.Signer)
}

// Fixed intervals.
const (
	driftPercent   = 1                      // the two clocks of a lease may drift apart by as much
	retryAfter     = 200 * time.Millisecond // between two calls to an agent that did not answer
	callTimeout    = 2 * time.Second
	hostTimeout    = 10 * time.Second // memory is made and perhaps zeroed
	pingTimeout    = time.Second
	createPatience = 3 * time.Second // with an agent that cannot be reached
	certifyLeases  = 2               // a certificate is waited for at most so many leases
	workWait       = time.Second     // an agent that runs a program answers by then, done or not
	workTimeout    = 4 * time.Second
)

// Machine is a controller's state. The goroutine that calls Step owns it and everything that it
// leads to; there is no lock.
//
// Machine itself keeps the records, the store and the table log. It hands events to its
// components, each of which owns its state and its next deadline. See the package comment for
// what the machine promises.
type Machine struct {
	cfg Config // never changes
	leadership
	records
	store store    // changes on their way to the records, and actions that wait for them
	keys  keys     // signing keys of tickets and commands
	log   tableLog // which row of the table changed at which revision

	agents   agents     // calls to storage nodes that have no answer yet
	ids      sessionIDs // numbers of sessions: in use, resting, free
	fences   fences     // fences under way, certificates waited for
	waits    waits      // waits for sessions to acknowledge a table or a reclaim epoch
	reconfig reconfig   // changes of regions' configurations
	scrubs   scrubs     // scrubs for dead sessions
	reclaims reclaims   // reclaims of empty blocks
	balance  balance    // planned moves of replicas and primaries
}

// leadership is when this machine leads, and what it has told of that. Times are those of the
// caller's clock, which nothing outside of this process knows.
type leadership struct {
	term  uint64 // sent to agents; rises with every leader
	now   int64  // ns, of the last step. Invariant: never falls
	began int64  // ns, when this leader began
	lead  int64  // ns; no other controller leads before. Invariant: never falls
	down  bool   // the machine has said StepDown
}

// records are the cluster's records as they are staged: with the changes that are not committed
// yet. The maps are indexes of the slices.
type records struct {
	cluster  *quarrypb.Cluster // replaced by a new message for each change, never edited
	nodes    []*node           // Invariant: sorted by id
	regions  []*region         // Invariant: sorted by id
	sessions []*session        // Invariant: sorted by serial
	live     int               // sessions in state live
	tenants  tenants

	// Never ranged over: the order of a map is random.
	nodeByName map[string]*node
	byID       map[uint32]*session
}

// Record is one record as it was read from the store.
type Record struct {
	Key      string
	Value    []byte
	Revision uint64
}

// New makes the machine of a leader from all the records, in any order. random is
// RandomBytes for the uuid and the keys of a cluster that has no records yet.
// The actions carry on with what the records show half done.
func New(cfg Config, term uint64, now int64, stored []Record, random []byte) (*Machine, []Action, error) {
	if cfg.ProbeTimeout == 0 {
		cfg.ProbeTimeout = DefaultProbeTimeout
	}
	if cfg.Sign == nil {
		cfg.Sign = (*rdma.Ticket).Sign
	}
	m := &Machine{cfg: cfg, leadership: leadership{term: term, now: now, began: now}}
	m.nodeByName, m.byID = map[string]*node{}, map[uint32]*session{}
	m.agents = agents{m: m, pending: map[uint64]func(Reply){}}
	m.ids.m, m.fences.m, m.waits.m = m, m, m
	m.reconfig.m, m.scrubs.m, m.reclaims.m, m.balance.m = m, m, m, m
	m.ids.reserve(cfg.SessionIDs)
	m.store.revs = map[string]uint64{}
	for _, r := range stored {
		if err := m.load(r); err != nil {
			return nil, nil, err
		}
	}
	if m.cluster == nil {
		if len(m.nodes)+len(m.regions)+len(m.sessions) > 0 {
			return nil, nil, errorf(Internal, "records without a cluster record: the store is damaged, restore it from a backup")
		}
		m.putCluster(&quarrypb.Cluster{Uuid: slices.Clone(random[:16]), NextNode: 1, NextRegion: 1, NextSerial: 1})
	}
	if m.keys.rec == nil {
		m.stage(m.keys.change(newKeys(slices.Clone(random[16:RandomBytes]))))
	}
	m.resume()
	m.work()
	return m, m.release(), nil
}

// resume sorts what load has read, makes the indexes, and continues what the leader before has
// left half done. Health of nodes is not known then: it comes with registrations and probes.
func (m *Machine) resume() {
	slices.SortFunc(m.nodes, func(a, b *node) int { return cmp.Compare(a.rec.Id, b.rec.Id) })
	slices.SortFunc(m.regions, func(a, b *region) int { return cmp.Compare(a.rec.Id, b.rec.Id) })
	slices.SortFunc(m.sessions, func(a, b *session) int { return cmp.Compare(a.rec.Serial, b.rec.Serial) })
	for i, n := range m.nodes {
		n.at = i
	}
	m.log.rebuild(m)
	for _, g := range m.regions {
		m.account(g.rec, +1)
		m.reconfig.updateLacks(g)
	}
	for _, g := range m.regions {
		// A leader before may have staged no more than the first half of a change.
		if g.rec.State == recovering || slices.ContainsFunc(g.rec.Replicas, func(r *quarrypb.Replica) bool {
			return r.State != out && m.health(r) == stale
		}) {
			m.fences.expose(g)
		}
	}
	for _, s := range m.sessions {
		if s.rec.State == stateClosing || s.rec.State == stateFencing {
			m.fences.owe(s)
		}
	}
	for _, g := range m.regions {
		switch g.rec.State {
		case quarrypb.RegionState_REGION_STATE_CREATING:
			m.reconfig.undo([]*region{g}, func() {}) // its request was answered with: unknown
		case recovering:
			m.reconfig.reassess(g)
		case removed:
			m.reconfig.bury(g, g.rev)
		}
	}
	m.balance.resumeMoves()
	m.balance.nextBalance = m.now + int64(balanceAfter)
	m.fences.dirty = true
}

// Cluster is the cluster's uuid.
func (m *Machine) Cluster() []byte { return m.cluster.Uuid }

// Step takes an event and returns the actions that follow from it, in order. After StepDown it
// returns nothing any more.
// Preconditions: now is not before that of the step before.
func (m *Machine) Step(now int64, ev Event) []Action {
	m.now = max(m.now, now)
	if m.down {
		return nil
	}
	switch ev := ev.(type) {
	case Ask:
		m.ask(ev)
	case Cancel:
		m.fences.cancel(ev.Waiter)
	case Reply:
		m.agents.reply(ev)
	case Committed:
		m.committed(ev.Revision)
	case Failed:
		m.down = true
		return []Action{StepDown(ev)}
	case Suspect:
		if n := m.node(ev.Node); n != nil && n.rec.Incarnation == ev.Incarnation {
			m.doubt(n)
		}
	case PulseLate:
		m.pulseLate(ev)
	case HeartbeatsLost:
		if s := m.session(ev.Serial); s != nil {
			s.unheard = true
			m.fences.maybeBegin(s)
		}
	case Lead:
		m.lead = max(m.lead, ev.Until)
	case Tick:
		m.tick()
	}
	m.work()
	return m.release()
}

// work looks at everything that the step may have completed, until nothing is left. It runs
// at the end of a step: in the middle of a change half of it would be seen.
func (m *Machine) work() {
	for m.fences.dirty || m.fences.certsDirty || m.waits.dirty || m.agents.dirty {
		if m.fences.dirty {
			m.fences.check()
		}
		if m.fences.certsDirty {
			m.fences.checkCertificates()
		}
		if m.waits.dirty {
			m.waits.check()
		}
		if m.agents.dirty {
			m.agents.advanceJobs()
		}
	}
}

// ask carries out a request, unless this leader may have been deposed: a successor may
// already count a lease as over that an answer would extend.
func (m *Machine) ask(a Ask) {
	switch {
	case m.now >= m.lead:
		m.fail(a.Waiter, errorf(NotLeader, "this controller cannot show that it still leads; ask again"))
	case m.askSession(a), m.askNode(a), m.askRegion(a):
	default:
		m.fail(a.Waiter, errorf(Invalid, "unknown request %T", a.Msg))
	}
}

// askSession carries out the requests of clients, and those about sessions.
func (m *Machine) askSession(a Ask) (known bool) {
	switch r := a.Msg.(type) {
	case *quarrypb.OpenSessionRequest:
		m.openSession(a.Waiter, r)
	case *quarrypb.HeartbeatRequest:
		m.heartbeat(a.Waiter, r)
	case *quarrypb.CloseSessionRequest:
		m.closeSession(a.Waiter, r)
	case *quarrypb.RevokeSessionRequest:
		m.fences.revokeSession(a.Waiter, r)
	case *quarrypb.CertifyFenceRequest:
		m.fences.certify(a.Waiter, r)
	case *quarrypb.ListSessionsRequest:
		m.listSessions(a.Waiter)
	case *quarrypb.PassRequest:
		m.waits.pass(a.Waiter, r)
	case Scrubbed:
		m.scrubbed(a.Waiter, r.Serials)
	default:
		return false
	}
	return true
}

// askNode carries out the requests of storage nodes, and those of operators about nodes.
func (m *Machine) askNode(a Ask) (known bool) {
	switch r := a.Msg.(type) {
	case *quarrypb.RegisterNodeRequest:
		m.registerNode(a.Waiter, r)
	case *quarrypb.NodeHeartbeatRequest:
		m.nodeHeartbeat(a.Waiter, r, false)
	case Pulsed:
		m.nodeHeartbeat(a.Waiter, r.NodeHeartbeatRequest, true)
	case *quarrypb.AddNodeRequest:
		m.addNode(a.Waiter, r)
	case *quarrypb.DrainNodeRequest:
		m.drainNode(a.Waiter, r)
	case *quarrypb.RemoveNodeRequest:
		m.removeNode(a.Waiter, r)
	case *quarrypb.ForgetNodeRequest:
		m.forgetNode(a.Waiter, r)
	default:
		return false
	}
	return true
}

// askRegion carries out the requests about regions, the table and the cluster.
func (m *Machine) askRegion(a Ask) (known bool) {
	switch r := a.Msg.(type) {
	case *quarrypb.CreateRegionRequest:
		m.reconfig.createRegion(a.Waiter, r, a.Random)
	case *quarrypb.RemoveRegionRequest:
		m.reconfig.removeRegion(a.Waiter, r)
	case *quarrypb.DeleteSpaceRequest:
		m.reconfig.deleteSpace(a.Waiter, r)
	case *quarrypb.MoveRegionRequest:
		m.reconfig.moveRegion(a.Waiter, r)
	case *quarrypb.RebalanceRequest:
		m.balance.rebalance(a.Waiter, r)
	case *quarrypb.SetDefaultsRequest:
		m.setDefaults(a.Waiter, r)
	case *quarrypb.ReadTableRequest:
		m.answerTable(a.Waiter, &quarrypb.Table{}, r.SinceRevision)
	case *quarrypb.CreateTenantRequest:
		m.createTenant(a.Waiter, r)
	case *quarrypb.SetTenantRequest:
		m.setTenant(a.Waiter, r)
	case *quarrypb.DeleteTenantRequest:
		m.deleteTenant(a.Waiter, r)
	case *quarrypb.GrantRequest:
		m.grant(a.Waiter, r)
	case *quarrypb.RevokeGrantRequest:
		m.revokeGrant(a.Waiter, r)
	case *quarrypb.ListTenantsRequest:
		m.listTenants(a.Waiter)
	case *quarrypb.StatusRequest:
		m.status(a.Waiter)
	case *quarrypb.RotateKeyRequest:
		m.rotateKey(a.Waiter, a.Random)
	case *quarrypb.ListKeysRequest:
		m.listKeys(a.Waiter)
	default:
		return false
	}
	return true
}

// tick does what is due by now: it repeats fence calls, ends leases, watches nodes, improves
// regions, and continues scrubs, reclaims and programs.
func (m *Machine) tick() {
	for _, n := range m.nodes {
		m.fences.pump(n)
	}
	// Leases and the patience of certificates, waits and jobs end as time passes.
	m.fences.certsDirty, m.waits.dirty, m.agents.dirty = true, true, true
	if m.now >= m.fences.next() {
		m.fences.sweep()
	}
	m.watch()
	if m.now >= m.reconfig.next() {
		m.reconfig.improve()
	}
	m.rotate()
	m.emptyTenants()
	m.scrubs.act()
	if m.now >= m.reclaims.next() {
		m.reclaims.act()
	}
	for _, t := range slices.Clone(m.agents.programs) {
		m.agents.pump(t)
	}
}

// emit appends an action. It is carried out when all changes staged before it are committed.
func (m *Machine) emit(a Action) { m.store.actions = append(m.store.actions, a) }
func (m *Machine) note(format string, args ...any) {
	m.emit(Note{Text: errorf(0, format, args...).Text})
}
func (m *Machine) answer(waiter uint64, msg any)  { m.emit(Answer{Waiter: waiter, Msg: msg}) }
func (m *Machine) fail(waiter uint64, err *Error) { m.emit(Answer{Waiter: waiter, Err: err}) }

func (m *Machine) answerTable(waiter uint64, msg proto.Message, since uint64) {
	m.emit(Answer{Waiter: waiter, Msg: msg, since: since})
}

package state

import (
	"cmp"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TickEvery is how often the machine wants to see time pass.
const TickEvery = 25 * time.Millisecond

// Config of a machine. No zero values: the controller fills them in.
type Config struct {
	Lease         time.Duration // of sessions
	NodeHeartbeat time.Duration // what nodes are told; they send two in that time
	RegionBytes   uint64        // of a region whose size nobody names
	Version       string        // for Status
	// ReplaceAfter is how long a replica that is out may come back before a spare node is taken.
	ReplaceAfter time.Duration
	// ScrubEvery is the time between two scrubs for fenced sessions; 0: none, somebody else says Scrubbed.
	ScrubEvery time.Duration
	// ReclaimEvery is the time between two looks for empty blocks to take back; 0: none are.
	ReclaimEvery time.Duration
	// RebuildBytesPerSecond bounds the copying to one joiner; 0: as fast as it goes.
	RebuildBytesPerSecond uint64
}

// Intervals that no option is worth.
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

// Machine is a controller's state. See the package comment for its rules.
type Machine struct {
	cfg   Config
	term  uint64 // of the leader, sent to agents; rises with every leader
	now   int64
	lead  int64 // nobody else leads before
	began int64 // when this leader began
	down  bool

	cluster  *quarrypb.Cluster
	nodes    []*node    // Invariant: sorted by id
	regions  []*region  // Invariant: sorted by id
	sessions []*session // Invariant: sorted by serial

	// Indexes; never ranged over.
	nodeByName map[string]*node
	byID       map[uint32]*session
	idUsed     [idWords]uint64
	live       int

	jobs    []*job
	tasks   []*task
	moves   []*move // of a rebalance, not done yet
	scrub   *scrub
	retired []retired // the first of them have raised the reclaim epoch; see retire
	calls   map[uint64]func(Reply)
	lastID  uint64 // of a call
	joins   []*join
	waits   []*wait
	certs   []*certificate
	fencing []*session // in the states closing and fencing, in the order they got there

	store  store
	log    tableLog
	ready  []Action // of this step, waiting for no transaction
	out    []Action // of this step
	sweeps int64    // when expired sessions are looked for next
	// When regions that lack something, and fenced sessions to scrub, are looked for next.
	improves, scrubs int64
	lacks            int   // regions that lack something
	balances         int64 // when primaries are looked at next
	lastScrub        uint64
	// Reclaims: when the next round begins, the region looked at last, and whether one is being looked at.
	reclaims    int64
	presses     int64 // when clients may be asked again to give claims back
	reclaimed   uint32
	lastReclaim uint64
	reclaiming  bool

	// What work has to look at before the step is over. Nothing is looked at in the
	// middle of a change: that would look at half of it.
	fencesDirty, certsDirty, waitsDirty, jobsDirty bool
}

// Record is one record as it was read from the store.
type Record struct {
	Key      string
	Value    []byte
	Revision uint64
}

// New makes the machine of a leader from all the records, in any order. random is
// 48 bytes for the uuid and ticket key of a cluster that has no records yet.
// The actions carry on with what the records show half done.
func New(cfg Config, term uint64, now int64, records []Record, random []byte) (*Machine, []Action, error) {
	m := &Machine{
		cfg: cfg, term: term, now: now, began: now,
		nodeByName: map[string]*node{}, byID: map[uint32]*session{},
		calls: map[uint64]func(Reply){},
	}
	m.idUsed[0] = 1 // id 0 means nobody
	m.store.revs = map[string]uint64{}
	for _, r := range records {
		if err := m.load(r); err != nil {
			return nil, nil, err
		}
	}
	if m.cluster == nil {
		if len(m.nodes)+len(m.regions)+len(m.sessions) > 0 {
			return nil, nil, errorf(Internal, "records without a cluster record: the store is damaged, restore it from a backup")
		}
		m.putCluster(&quarrypb.Cluster{
			Uuid: slices.Clone(random[:16]), TicketKey: slices.Clone(random[16:48]),
			NextNode: 1, NextRegion: 1, NextSerial: 1,
		})
	}
	m.resume()
	m.work()
	return m, m.release(), nil
}

// resume sorts what load has read and carries on with what is half done.
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
		m.look(g)
	}
	for _, s := range m.sessions {
		if s.rec.State == stateClosing || s.rec.State == stateFencing {
			m.owe(s)
		}
	}
	for _, g := range m.regions {
		switch g.rec.State {
		case quarrypb.RegionState_REGION_STATE_CREATING:
			m.undo([]*region{g}) // whoever asked for it has been told that nobody knows
		case recovering:
			m.settle(g)
		}
	}
	m.resumeMoves()
	m.balances = m.now + int64(balanceAfter)
	m.fencesDirty = true
}

// TicketKey is the key of tickets' marks, and of what agents obey.
func (m *Machine) TicketKey() []byte { return m.cluster.TicketKey }

// Cluster is the cluster's uuid.
func (m *Machine) Cluster() []byte { return m.cluster.Uuid }

// Step takes an event and returns what is to be done, in order.
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
		m.cancel(ev.Waiter)
	case Reply:
		if done := m.calls[ev.Call]; done != nil {
			delete(m.calls, ev.Call)
			done(ev)
		}
	case Committed:
		m.committed(ev.Revision)
	case Failed:
		m.down = true
		return []Action{StepDown(ev)}
	case Suspect:
		if n := m.node(ev.Node); n != nil && n.rec.Incarnation == ev.Incarnation {
			m.doubt(n)
		}
	case Lead:
		m.lead = max(m.lead, ev.Until)
	case Tick:
		m.tick()
	}
	m.work()
	return m.release()
}

// work carries on with everything that the step has made ready.
func (m *Machine) work() {
	for m.fencesDirty || m.certsDirty || m.waitsDirty || m.jobsDirty {
		if m.fencesDirty {
			m.fencesDirty = false
			m.checkFences()
		}
		if m.certsDirty {
			m.certsDirty = false
			m.checkCertificates()
		}
		if m.waitsDirty {
			m.waitsDirty = false
			m.checkWaits()
		}
		if m.jobsDirty {
			m.jobsDirty = false
			for _, j := range slices.Clone(m.jobs) {
				j.advance()
			}
		}
	}
}

func (m *Machine) ask(a Ask) {
	// What a deposed leader says may be old: a lease that it extends, the new leader
	// may already count as over.
	if m.now >= m.lead {
		m.fail(a.Waiter, errorf(NotLeader, "this controller cannot show that it still leads; ask again"))
		return
	}
	switch r := a.Msg.(type) {
	case *quarrypb.OpenSessionRequest:
		m.openSession(a.Waiter, r)
	case *quarrypb.HeartbeatRequest:
		m.heartbeat(a.Waiter, r)
	case *quarrypb.CloseSessionRequest:
		m.closeSession(a.Waiter, r)
	case *quarrypb.RevokeSessionRequest:
		m.revokeSession(a.Waiter, r)
	case *quarrypb.CertifyFenceRequest:
		m.certify(a.Waiter, r)
	case *quarrypb.ListSessionsRequest:
		m.listSessions(a.Waiter)
	case *quarrypb.ReadTableRequest:
		m.answerTable(a.Waiter, &quarrypb.Table{}, r.SinceRevision)
	case *quarrypb.CreateRegionRequest:
		m.createRegion(a.Waiter, r, a.Random)
	case *quarrypb.RegisterNodeRequest:
		m.registerNode(a.Waiter, r)
	case *quarrypb.NodeHeartbeatRequest:
		m.nodeHeartbeat(a.Waiter, r)
	case *quarrypb.AddNodeRequest:
		m.addNode(a.Waiter, r)
	case *quarrypb.DrainNodeRequest:
		m.drainNode(a.Waiter, r)
	case *quarrypb.RemoveNodeRequest:
		m.removeNode(a.Waiter, r)
	case *quarrypb.MoveRegionRequest:
		m.moveRegion(a.Waiter, r)
	case *quarrypb.RebalanceRequest:
		m.rebalance(a.Waiter, r)
	case *quarrypb.StatusRequest:
		m.status(a.Waiter)
	case *quarrypb.PassRequest:
		m.pass(a.Waiter, r)
	case Scrubbed:
		m.scrubbed(a.Waiter, r.Serials)
	default:
		m.fail(a.Waiter, errorf(Invalid, "unknown request %T", a.Msg))
	}
}

// cancel forgets who waits. Answers to the forgotten are dropped by the caller.
func (m *Machine) cancel(waiter uint64) {
	m.certs = slices.DeleteFunc(m.certs, func(c *certificate) bool { return c.waiter == waiter })
}

func (m *Machine) tick() {
	for _, n := range m.nodes {
		m.pumpFences(n)
	}
	m.certsDirty, m.waitsDirty, m.jobsDirty = true, true, true
	m.sweep()
	m.watch()
	m.improve()
	m.scrubNext()
	m.reclaimNext()
	for _, t := range slices.Clone(m.tasks) {
		m.pump(t)
	}
}

func (m *Machine) emit(a Action) { m.out = append(m.out, a) }
func (m *Machine) note(format string, args ...any) {
	m.emit(Note{Text: errorf(0, format, args...).Text})
}
func (m *Machine) answer(waiter uint64, msg any)  { m.emit(Answer{Waiter: waiter, Msg: msg}) }
func (m *Machine) fail(waiter uint64, err *Error) { m.emit(Answer{Waiter: waiter, Err: err}) }

func (m *Machine) answerTable(waiter uint64, msg proto.Message, since uint64) {
	m.emit(Answer{Waiter: waiter, Msg: msg, since: since})
}

// call asks the agent of the present life of a node; done gets the outcome.
func (m *Machine) call(n *node, msg proto.Message, timeout time.Duration, done func(Reply)) {
	life := n.rec.Incarnation
	m.callURL(Call{Node: n.rec.Id, Incarnation: life, URL: n.rec.AgentUrl, Msg: msg, Timeout: int64(timeout)}, func(r Reply) {
		if r.Err != nil && !r.Refused && n.rec.Incarnation == life {
			m.doubt(n)
		}
		done(r)
	})
}

func (m *Machine) callURL(c Call, done func(Reply)) {
	m.lastID++
	c.ID = m.lastID
	m.calls[c.ID] = done
	m.emit(c)
}

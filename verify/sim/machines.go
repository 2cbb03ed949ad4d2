package sim

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	tables "github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// machines are the controllers and agents: the state machines of controller/state and
// storagenode/state, over a model of etcd. Messages between them are delayed, lost and
// duplicated. The mirror gets every transaction that etcd commits, so the checks see committed
// decisions, not the state of one controller.
type machines struct {
	w     *world            // the world whose clients and fabric they serve
	boots map[bootKey]*boot // clusters that have started, to copy: see machines_boot.go

	unit  int64  // ns of one unit of virtual time
	queue events // messages in flight and timers
	seq   uint64 // of the last event

	etcd   etcd                    // atomic; see etcd.go
	ctls   [controllers]controller // any of them may lead
	agents [maxNodes]agent         // by node
	seats  [maxProcs]seat          // of each client: its view of the controllers
	plan   []machineFault          // faults of this schedule, by time
	// directed, if set, plans the faults of a scenario instead of planFaults.
	directed func()

	// Links that are cut, by direction. Messages in flight are lost.
	toNode, fromNode [controllers][maxNodes]bool
	toCtl, fromCtl   [controllers][maxProcs]bool
	noEtcd           [controllers]bool
	// Until when the budget counts a node as failed, because a leader may be removing it.
	doubted [maxNodes]int64

	keys      map[string]uint32 // record of a session -> its id
	announced uint64            // revision at which the configuration last changed
	outer     [lastID + 1]outer // by region
	orders    orders            // the operator's part of the schedule
	shut      int64             // when the region left the state OPEN
	shutUnder uint64            // stats.Leaders then
	swept     bool              // the last scrub has run
	// scrubsHeld is until when scrubs stand still. Other programs run.
	scrubsHeld int64
	stats      machineStats // of all schedules of the world
}

// controllers is the number of controllers; one leads.
const controllers = 2

// machineStats has the counts of all schedules of a world.
type machineStats struct {
	Leaders, Commits, Calls, Lost, Doubled, Certificates, Epochs, Works uint64
	Far, FarCertificates                                                uint64 // changes of the far region's record, certificates for it
	Hints                                                               uint64 // that a client may have died
	Blind                                                               uint64 // rounds of lanes that have not noticed the end of their session
	Moved                                                               uint64 // replicas that another adapter of their node serves in the next epoch
	Created, Undone, Unavailable, LostRegions, Removed                  uint64 // regions, by what became of them; see orders.go
	Faults                                                              [allMachineFaults]uint64
	// LongestGap is the longest time, in hundredths of a lease, for which the region was not
	// OPEN under one leader.
	LongestGap int64
}

func (s *machineStats) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "leaders %d, commits %d, calls %d, lost %d, doubled %d, certificates %d, epochs %d, works %d; far region: changes %d, certificates %d\n",
		s.Leaders, s.Commits, s.Calls, s.Lost, s.Doubled, s.Certificates, s.Epochs, s.Works, s.Far, s.FarCertificates)
	if s.Created > 0 {
		fmt.Fprintf(&b, "regions: created %d, creations given up %d; unavailable until an operator decided %d, lost %d, removed %d\n",
			s.Created, s.Undone, s.Unavailable, s.LostRegions, s.Removed)
	}
	for i, n := range s.Faults {
		fmt.Fprintf(&b, "%v %d  ", machineFaultKind(i), n)
	}
	return b.String()
}

// timedEvent is a function to be called at a moment of virtual time. Events of one moment run in
// the order in which they were added.
type timedEvent struct {
	due int64  // virtual time
	seq uint64 // order among events of one moment
	run func() // in the world's goroutine
}

// events is a heap. It is not package container/heap, which allocates for every event.
type events []timedEvent

func (q events) less(i, j int) bool {
	return q[i].due < q[j].due || q[i].due == q[j].due && q[i].seq < q[j].seq
}

func (q *events) push(e timedEvent) {
	*q = append(*q, e)
	h := *q
	for i := len(h) - 1; i > 0 && h.less(i, (i-1)/2); i = (i - 1) / 2 {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
	}
}

// Removes the root of the binary heap. container/heap would box each event, and this is called for every message.
func (q *events) pop() timedEvent {
	h := *q
	e, last := h[0], len(h)-1
	h[0], h[last] = h[last], timedEvent{}
	h = h[:last]
	for i := 0; ; {
		c := 2*i + 1
		if c+1 < last && h.less(c+1, c) {
			c++
		}
		if c >= last || !h.less(c, i) {
			break
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
	*q = h
	return e
}

// reset prepares controllers and agents for a schedule.
// Preconditions: the mirror has been reset, the memory of the replicas is open.
func (m *machines) reset() {
	w := m.w
	m.unit = leaseNs / w.d.lease
	for i := range m.queue {
		m.queue[i] = timedEvent{}
	}
	m.queue, m.seq = m.queue[:0], 0
	m.toNode, m.fromNode = [controllers][maxNodes]bool{}, [controllers][maxNodes]bool{}
	m.toCtl, m.fromCtl = [controllers][maxProcs]bool{}, [controllers][maxProcs]bool{}
	m.noEtcd, m.doubted = [controllers]bool{}, [maxNodes]int64{}
	m.scrubsHeld = 0
	m.keys, m.announced, m.swept, m.shut, m.shutUnder = map[string]uint32{}, 0, false, m.w.now, m.stats.Leaders
	for i := range m.seats {
		m.seats[i] = seat{} // with its lane, because the memory of lanes belongs to the schedule
	}
	b := m.boot()
	m.etcd = b.etcd.clone()
	m.resetFar(b)
	m.resetOrders(b)
	w.mirror.table.rev = m.etcd.rev
	w.mirror.table.reclaim = 0
	for i := range m.agents {
		m.agents[i].reset(m, i, b)
	}
	for i := range m.ctls {
		m.ctls[i].reset(m, i)
	}
	m.planFaults()
	w.at(w.now)
}

func (m *machines) at(due int64, run func()) {
	m.seq++
	m.queue.push(timedEvent{max(due, m.w.now), m.seq, run})
	m.w.at(due)
}

func (m *machines) after(d int64, run func()) { m.at(m.w.now+d, run) }

// tick runs the events that are due.
func (m *machines) tick() {
	w := m.w
	for i := range m.agents {
		m.agents[i].poll()
	}
	m.fireFaults()
	m.sweep()
	for len(m.queue) > 0 && m.queue[0].due <= w.now && w.failed == nil {
		e := m.queue.pop()
		w.mix(e.seq)
		e.run()
	}
	if len(m.queue) > 0 {
		w.at(m.queue[0].due)
	}
}

// units converts ns to virtual time.
func (m *machines) units(ns int64) int64 { return max(1, ns/m.unit) }

// delay is the time that a message takes: some steps, and sometimes more than the receiver
// waits.
func (m *machines) delay() int64 {
	c := &m.w.ch
	if !m.w.healed && c.choose(24) == 23 {
		return m.w.d.lease / 8 * int64(1+c.choose(12))
	}
	return int64(1+c.choose(8)) * step
}

// lose reports whether a message is lost.
func (m *machines) lose() bool {
	if m.w.healed || m.w.opt.Faults == 0 || m.w.ch.choose(40) != 39 {
		return false
	}
	m.stats.Lost++
	return true
}

// rarely is true in one of n choices, while faults are planned.
func (m *machines) rarely(n int) bool {
	return !m.w.healed && m.w.opt.Faults != 0 && m.w.ch.choose(n) == n-1
}

// committed mirrors a transaction and checks what it decides.
func (m *machines) committed(rev uint64, key string, value []byte) {
	k := &m.w.mirror
	switch kind, _, _ := strings.Cut(key, "/"); kind {
	case "cluster":
		var c quarrypb.Cluster
		if m.decode(key, value, &c) && c.ReclaimEpoch > k.table.reclaim {
			k.table.reclaim = c.ReclaimEpoch
			k.table.rev = rev
		}
	case "sessions":
		m.sessionCommitted(key, value)
	case "regions":
		var r quarrypb.Region
		switch {
		case value == nil:
			m.regionDeleted(key)
		case !m.decode(key, value, &r):
		case r.Id == regionID:
			m.regionCommitted(rev, &r)
			m.orders.rec = &r
		case r.Id <= lastID:
			m.outerCommitted(rev, &r)
		default:
			m.w.fail("region number out of range", key)
		}
	}
}

func (m *machines) decode(key string, value []byte, msg proto.Message) bool {
	if err := proto.Unmarshal(value, msg); err != nil {
		m.w.fail("a record cannot be read", fmt.Sprintf("%s: %v", key, err))
		return false
	}
	return true
}

func (m *machines) sessionCommitted(key string, value []byte) {
	k := &m.w.mirror
	if value == nil {
		id := m.keys[key]
		delete(m.keys, key)
		m.w.check.forgotten(id)
		k.sess[id].state = sessionFree
		return
	}
	var r quarrypb.Session
	if !m.decode(key, value, &r) {
		return
	}
	if r.Session == 0 || r.Session >= maxSessions {
		m.w.fail("session id out of range", fmt.Sprintf("%d", r.Session))
		return
	}
	s := &k.sess[r.Session]
	if m.keys[key] == 0 {
		if s.state != sessionFree {
			m.w.fail("an id is given out twice", fmt.Sprintf("session %d: serial %d while serial %d is in state %d", r.Session, r.Serial, s.serial, s.state))
			return
		}
		m.keys[key] = r.Session
		m.newSession(r.Session)
		*s = session{serial: r.Serial, client: clientOf(r.Name)}
		k.serials = max(k.serials, r.Serial)
	}
	was := s.state
	switch r.State {
	case "live":
		s.state = sessionLive
	case "closing", "fencing":
		s.state, s.closing = sessionFencing, r.State == "closing"
	case "fenced":
		if s.state != sessionFenced {
			m.w.check.certified(r.Session, 0)
		}
		s.state = sessionFenced
	default:
		m.w.fail("unknown state of a session", r.State)
	}
	if was != sessionFree && s.state < was {
		m.w.fail("a session comes back", fmt.Sprintf("session %d serial %d: from state %d to %d", r.Session, r.Serial, was, s.state))
	}
	if s.serial != r.Serial {
		m.w.fail("a session changes its serial", fmt.Sprintf("session %d: %d to %d", r.Session, s.serial, r.Serial))
	}
}

// newSession resets the fabric's state of an id that another session may have had: nodes
// identify sessions by serial, the fabric by id.
func (m *machines) newSession(id uint32) {
	f := m.w.fab
	for i := range fabric.MaxConns {
		if conn := f.Conn(i); conn != nil && conn.Session() == id {
			conn.End()
		}
	}
	for _, n := range f.Nodes() {
		n.Forgive(id)
	}
}

// regionCommitted mirrors the region's record.
func (m *machines) regionCommitted(rev uint64, r *quarrypb.Region) {
	w, k := m.w, &m.w.mirror
	was := k.table
	t := rowOf(r)
	t.rev, t.reclaim = rev, was.reclaim
	m.follows(&was, &t, r)
	if t.epoch > was.epoch {
		m.stats.Moved += movedAdapters(&was, &t)
		k.epochs++
		m.stats.Epochs++
		if !t.open {
			m.announced = rev
			w.trigger(onRecover)
		}
	}
	switch {
	case t.open && !was.open:
		m.noSessionHasAnEarlierTable(regionID, t.epoch)
		if m.stats.Leaders == m.shutUnder {
			m.stats.LongestGap = max(m.stats.LongestGap, 100*(w.now-m.shut)/w.d.lease)
		}
	case !t.open && was.open:
		m.shut, m.shutUnder = w.now, m.stats.Leaders
	}
	k.table = t
	w.excuse()
	m.regionServes(&was, &t)
	if w.log != nil {
		w.logf("etcd: %v, %s", r.State, tableString(&t))
	}
}

// follows checks that the configuration t, of record r, may come behind was.
func (m *machines) follows(was, t *table, r *quarrypb.Region) {
	w := m.w
	switch {
	case t.epoch < was.epoch:
		w.fail("the epoch falls", fmt.Sprintf("%d to %d", was.epoch, t.epoch))
	case t.epoch == was.epoch && !sameMembers(was, t):
		w.fail("one epoch, two configurations", fmt.Sprintf("%s and %s", tableString(was), tableString(t)))
	case r.State == quarrypb.RegionState_REGION_STATE_LOST:
		m.lostCommitted(r)
	case r.State == removedRegion:
	case t.n > 0 && t.rebuilding[0]:
		w.fail("the primary is being rebuilt", tableString(t))
	}
	if t.epoch > was.epoch && t.open && !sameMembers(was, t) {
		w.fail("a configuration opens that was not announced", fmt.Sprintf("%s after %s", tableString(t), tableString(was)))
	}
}

// regionServes is called when the mirror has a new configuration of the clients' region.
func (m *machines) regionServes(was, t *table) {
	w, k := m.w, &m.w.mirror
	if t.open && !was.open {
		w.check.opened()
	}
	for i := range t.n {
		if t.open && t.rebuilding[i] {
			w.trigger(onJoin)
		}
	}
	switch {
	case t.open && !was.open:
		k.lit()
		w.check.opened()
		w.check.stillCertified(regionID)
	case t.open:
		k.served, _ = k.inSync()
	}
	for i := range t.n {
		if nd := w.fab.Nodes()[t.node[i]]; !t.rebuilding[i] && nd.Up && nd.Incarnation == t.incarnation[i] {
			k.intact[t.node[i]] = true
		}
	}
}

// noSessionHasAnEarlierTable checks, before replicas are made alike and before clients are
// served, that every session with a lease knows of the epoch and has finished the operations
// that it began with an earlier table (docs/DESIGN.md#failover, step wait).
func (m *machines) noSessionHasAnEarlierTable(region uint32, epoch uint64) {
	since := m.announced
	if region != regionID {
		since = m.outer[region].announced
	}
	for i := range maxClients {
		c := &m.w.clients[i]
		works := c.view.rev
		if c.inOp {
			works = min(works, c.began)
		}
		open := c.view.open
		if r := c.tab.Region(region); region != regionID {
			open = r != nil && rowOf(r).open
		}
		if works == c.view.rev && !open {
			continue // no client reads with that table
		}
		if c.session != 0 && !c.ended && works < since && c.clock() < c.leaseUntil {
			m.w.fail("an epoch opens under an earlier one's reader", fmt.Sprintf(
				"epoch %d of region %d, announced at revision %d: client %d (session %d) works by revision %d and its lease is good for %d steps more",
				epoch, region, since, i, c.session, works, (c.leaseUntil-c.clock())/step))
		}
	}
}

// sameMembers reports whether two configurations differ at most in rebuilding replicas that are in
// sync in the later one.
func sameMembers(a, b *table) bool {
	if a.n != b.n {
		return false
	}
	for i := range a.n {
		if a.node[i] != b.node[i] || a.incarnation[i] != b.incarnation[i] || a.adapter[i] != b.adapter[i] || b.rebuilding[i] && !a.rebuilding[i] {
			return false
		}
	}
	return true
}

// rowOf is the region's row as the simulated clients hold it. It leaves replicas out that are
// OUT.
func rowOf(r *quarrypb.Region) (t table) {
	t.epoch = r.Epoch
	t.open = r.State == quarrypb.RegionState_REGION_STATE_OPEN
	t.lost = r.State == quarrypb.RegionState_REGION_STATE_LOST
	for _, p := range r.Replicas {
		if p.State == quarrypb.ReplicaState_REPLICA_STATE_OUT || t.n == maxNodes {
			continue
		}
		t.node[t.n], t.incarnation[t.n] = int(p.Node)-1, p.Incarnation
		t.rebuilding[t.n] = p.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
		t.adapter[t.n] = int(p.Adapter)
		t.n++
	}
	return t
}

// viewOf is the table as a client holds it.
func viewOf(t *tables.Table) (v table) {
	if r := t.Region(regionID); r != nil {
		v = rowOf(r)
	}
	v.rev, v.reclaim = t.Revision(), t.ReclaimEpoch()
	return v
}

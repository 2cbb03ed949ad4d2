package sim

import (
	"container/heap"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	tables "github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// machines are the real controllers and agents in place of the model in
// control.go: the state machines of controller/state and storagenode/state, driven
// by messages that are late, lost and doubled, over the model of etcd.
//
// What is committed in etcd is mirrored into the model's table and sessions, so
// that the same checks watch the same cluster: they see what has been decided, not
// what some controller believes.
type machines struct {
	w     *world
	boots map[bootKey]*boot

	unit  int64 // ns of one unit of virtual time
	queue events
	seq   uint64

	etcd   etcd
	ctls   [controllers]controller
	agents [maxNodes]agent
	seats  [maxProcs]seat
	plan   []machineFault
	// directed, if set, plans the faults of a scenario in place of planFaults.
	directed func()

	// Links that are cut, by direction: what was on its way is lost.
	toNode, fromNode [controllers][maxNodes]bool
	toCtl, fromCtl   [controllers][maxProcs]bool
	noEtcd           [controllers]bool
	// Until when a node counts as failed for the budget: some leader may be giving it up.
	doubted [maxNodes]int64

	keys      map[string]uint32 // record of a session -> its id
	announced uint64            // revision at which the configuration last changed
	swept     bool              // the last scrub has been made
	stats     machineStats
}

// controllers is how many there are: one leads.
const controllers = 2

// machineStats counts over all schedules of a world.
type machineStats struct {
	Leaders, Commits, Calls, Lost, Doubled, Certificates, Epochs, Works uint64
	Faults                                                              [machineFaults]uint64
}

func (s *machineStats) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "leaders %d, commits %d, calls %d, lost %d, doubled %d, certificates %d, epochs %d, works %d\n",
		s.Leaders, s.Commits, s.Calls, s.Lost, s.Doubled, s.Certificates, s.Epochs, s.Works)
	for i, n := range s.Faults {
		fmt.Fprintf(&b, "%v %d  ", machineFaultKind(i), n)
	}
	return b.String()
}

// event is something that happens at a moment of virtual time. Those of one moment
// happen in the order in which they were asked for.
type timedEvent struct {
	due int64
	seq uint64
	run func()
}

type events []timedEvent

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].due < q[j].due || q[i].due == q[j].due && q[i].seq < q[j].seq
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(timedEvent)) }
func (q *events) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = timedEvent{}
	*q = old[:len(old)-1]
	return e
}

// useMachines makes the world's controllers and agents real ones for this schedule.
// Preconditions: the model has been reset, the memory of the replicas is open.
func (w *world) useMachines() {
	m := w.machines
	if m == nil {
		m = &machines{w: w, boots: map[bootKey]*boot{}}
		w.machines = m
	}
	w.mach = m
	m.unit = leaseNs / w.d.lease
	for i := range m.queue {
		m.queue[i] = timedEvent{}
	}
	m.queue, m.seq = m.queue[:0], 0
	m.toNode, m.fromNode = [controllers][maxNodes]bool{}, [controllers][maxNodes]bool{}
	m.toCtl, m.fromCtl = [controllers][maxProcs]bool{}, [controllers][maxProcs]bool{}
	m.noEtcd, m.doubted = [controllers]bool{}, [maxNodes]int64{}
	m.keys, m.announced, m.swept = map[string]uint32{}, 0, false
	for i := range m.seats {
		m.seats[i] = seat{} // its lane too: the memory of lanes is the schedule's
	}
	b := m.boot()
	m.etcd = b.etcd.clone()
	w.ctl.table.rev = m.etcd.rev
	w.ctl.table.reclaim = 0
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
	heap.Push(&m.queue, timedEvent{max(due, m.w.now), m.seq, run})
	m.w.at(due)
}

func (m *machines) after(d int64, run func()) { m.at(m.w.now+d, run) }

// tick lets everything happen whose time has come.
func (m *machines) tick() {
	w := m.w
	for i := range m.agents {
		m.agents[i].poll()
	}
	m.fireFaults()
	m.sweep()
	w.ctl.phase = phaseRotating
	if w.ctl.table.open && m.swept {
		w.ctl.phase = phaseOpen
	}
	for len(m.queue) > 0 && m.queue[0].due <= w.now && w.failed == nil {
		e := heap.Pop(&m.queue).(timedEvent)
		w.mix(e.seq)
		e.run()
	}
	if len(m.queue) > 0 {
		w.at(m.queue[0].due)
	}
}

// units is so many ns in virtual time.
func (m *machines) units(ns int64) int64 { return max(1, ns/m.unit) }

// delay is how long a message is on its way: some steps, and now and then so long
// that whoever waits has given up.
func (m *machines) delay() int64 {
	c := &m.w.ch
	if !m.w.healed && c.choose(24) == 23 {
		return m.w.d.lease / 8 * int64(1+c.choose(12))
	}
	return int64(1+c.choose(8)) * step
}

// lose says whether a message is lost.
func (m *machines) lose() bool {
	if m.w.healed || m.w.opt.Faults == 0 || m.w.ch.choose(40) != 39 {
		return false
	}
	m.stats.Lost++
	return true
}

// rarely is true once in n choices, while faults happen.
func (m *machines) rarely(n int) bool {
	return !m.w.healed && m.w.opt.Faults != 0 && m.w.ch.choose(n) == n-1
}

// committed mirrors a transaction and checks what it decides.
func (m *machines) committed(rev uint64, key string, value []byte) {
	k := &m.w.ctl
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
		if value == nil {
			m.w.fail("a region's record is deleted", key)
		} else if m.decode(key, value, &r) {
			m.regionCommitted(rev, &r)
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
	k := &m.w.ctl
	if value == nil {
		id := m.keys[key]
		delete(m.keys, key)
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
	}
	was := s.state
	switch r.State {
	case "live":
		s.state = sessionLive
	case "closing", "fencing":
		s.state = sessionFencing
	case "fenced":
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

// newSession makes room for a session under an id that may have been another's:
// nodes know sessions by their serials, the fabric by their ids.
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
	w, k := m.w, &m.w.ctl
	was := k.table
	t := rowOf(r)
	t.rev, t.reclaim = rev, was.reclaim
	switch {
	case t.epoch < was.epoch:
		w.fail("the epoch falls", fmt.Sprintf("%d to %d", was.epoch, t.epoch))
	case t.epoch == was.epoch && !sameMembers(&was, &t):
		w.fail("one epoch, two configurations", fmt.Sprintf("%s and %s", tableString(&was), tableString(&t)))
	case r.State == quarrypb.RegionState_REGION_STATE_LOST:
		// The budget of faults leaves one replica that was in sync its memory.
		w.fail("a region is lost", tableString(&t))
	case t.n > 0 && t.rebuilding[0]:
		w.fail("the primary is being rebuilt", tableString(&t))
	}
	if t.epoch > was.epoch {
		k.epochs++
		m.stats.Epochs++
		if !t.open {
			m.announced = rev
			w.trigger(onRecover)
		} else if !sameMembers(&was, &t) {
			w.fail("a configuration opens that was not announced", fmt.Sprintf("%s after %s", tableString(&t), tableString(&was)))
		}
	}
	if t.open && !was.open {
		m.nobodyWorksByAnEarlierTable(t.epoch)
	}
	k.table = t
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
	case t.open:
		k.served, _ = k.inSync()
	}
	for i := range t.n {
		if !t.rebuilding[i] && w.fab.Nodes()[t.node[i]].Incarnation == t.life[i] {
			k.intact[t.node[i]] = true
		}
	}
	if w.log != nil {
		w.logf("etcd: %v, %s", r.State, tableString(&t))
	}
}

// nobodyWorksByAnEarlierTable: before replicas are made alike, and before clients are
// served, every session whose lease is not over has heard of the epoch, and has
// finished what it began by an earlier table (DESIGN 8, step 3).
func (m *machines) nobodyWorksByAnEarlierTable(epoch uint64) {
	since := m.announced
	for i := range maxClients {
		c := &m.w.clients[i]
		works := c.view.rev
		if c.inOp {
			works = min(works, c.began)
		}
		if works == c.view.rev && !c.view.open {
			continue // by that table nobody reads anything
		}
		if c.session != 0 && !c.ended && works < since && c.clock() < c.leaseUntil {
			m.w.fail("an epoch opens under an earlier one's reader", fmt.Sprintf(
				"epoch %d, announced at revision %d: client %d (session %d) works by revision %d and its lease is good for %d steps more",
				epoch, since, i, c.session, works, (c.leaseUntil-c.clock())/step))
		}
	}
}

// sameMembers: a joiner may have come in sync, nothing else has changed.
func sameMembers(a, b *table) bool {
	if a.n != b.n {
		return false
	}
	for i := range a.n {
		if a.node[i] != b.node[i] || a.life[i] != b.life[i] || b.rebuilding[i] && !a.rebuilding[i] {
			return false
		}
	}
	return true
}

// rowOf is the region's row as the simulated clients hold it. Replicas that are out
// are no replicas.
func rowOf(r *quarrypb.Region) (t table) {
	t.epoch = r.Epoch
	t.open = r.State == quarrypb.RegionState_REGION_STATE_OPEN
	for _, p := range r.Replicas {
		if p.State == quarrypb.ReplicaState_REPLICA_STATE_OUT || t.n == maxNodes {
			continue
		}
		t.node[t.n], t.life[t.n] = int(p.Node)-1, p.Incarnation
		t.rebuilding[t.n] = p.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
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

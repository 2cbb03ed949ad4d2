package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// task is a program that an agent runs over an open region while clients work. It
// ends with the region's epoch.
type task struct {
	g     *region
	n     *node
	msg   *quarrypb.WorkRequest
	out   bool
	next  int64 // no call before
	last  *quarrypb.WorkResponse
	over  bool
	once  bool            // it is not begun again where it has failed
	ended func(done bool) // done: in the region's present epoch
}

// begin has the primary's agent run a program.
func (m *Machine) begin(g *region, msg *quarrypb.WorkRequest, ended func(done bool)) *task {
	t := &task{g: g, n: m.node(g.rec.Replicas[0].Node), msg: msg, ended: ended}
	m.tasks = append(m.tasks, t)
	m.pump(t)
	return t
}

func (m *Machine) finish(t *task, done bool) {
	if t.over {
		return
	}
	t.over = true
	m.tasks = slices.DeleteFunc(m.tasks, func(o *task) bool { return o == t })
	t.ended(done)
}

// pump calls the agent again where it is time.
func (m *Machine) pump(t *task) {
	if t.over || t.out || m.now < t.next {
		return
	}
	t.out = true
	m.call(t.n, t.msg, workTimeout, func(r Reply) {
		t.out = false
		if t.over {
			return
		}
		w, _ := r.Msg.(*quarrypb.WorkResponse)
		switch {
		case w == nil && t.once && r.Refused:
			m.finish(t, false)
		case w == nil:
			t.next = m.now + int64(retryAfter)
		case w.Done:
			m.finish(t, true)
		default:
			t.last = w
			m.pump(t)
		}
	})
}

// endTasks ends the programs of a region whose epoch ends.
func (m *Machine) endTasks(g *region) {
	for _, t := range slices.Clone(m.tasks) {
		if t.g == g {
			m.finish(t, false)
		}
	}
	g.progress = nil
}

// rebuild has the joiners of a region brought up to date.
func (m *Machine) rebuild(g *region) {
	if g.copier != nil {
		return
	}
	msg := m.program(g, quarrypb.WorkKind_WORK_KIND_COPY, g.rec.Epoch)
	msg.BytesPerSecond = m.cfg.RebuildBytesPerSecond
	g.copier = m.begin(g, msg, func(done bool) {
		g.copier = nil
		if !done || g.rec.Epoch != msg.Epoch || g.rec.State != open {
			return
		}
		// Without another epoch: who still takes it for a joiner does no harm.
		rec := proto.CloneOf(g.rec)
		for _, r := range rec.Replicas {
			if r.State == rebuilding {
				r.State = inSync
				m.note("region %d is in sync on node %d", rec.Id, r.Node)
			}
		}
		m.stage(m.regionChange(g, rec, nil))
	})
}

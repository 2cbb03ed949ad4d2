package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Hazards 4 and 11: the primary is removed while it owes the fence of a session whose last CAS
// is in flight to it. Client 0 is revoked and does not learn of it; its connection to the
// primary stands still. The primary hears no controller, so it owes the fence when it is lost.
// The backup may hear of the new epoch late. A client with the old table that takes over from
// client 0 must not get its certificate before the backup has closed the epoch in which
// client 0 can still commit at the primary.
func TestHazard04_11_FenceOfARemovedNode(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	o := removedNode(r)
	o.Schedules = schedules(t, 400)
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Fatal(rep.Failure.String())
	}
	require.NotZero(t, r.w.mach.stats.Certificates)
	require.NotZero(t, rep.Coverage.Epochs)
}

// removedNode directs a runner's machines at the schedule, and returns its options.
func removedNode(r *Runner) Options {
	o := Options{Seed: 1, Schedules: 1, Replicas: 2, Clients: 3, Ops: 24, Slabs: 1, Faults: Break, MaxFaults: 1}
	w := r.w
	m := w.mach
	var at int64
	m.directed = func() {
		lease := w.d.lease
		at = int64(60+w.ch.choose(120)) * step
		add := func(f machineFault) {
			f.ctl = controllers
			m.plan = append(m.plan, f)
			w.at(f.at)
		}
		add(machineFault{kind: revokeSession, at: at, lasts: step})
		add(machineFault{kind: deafNode, at: at + int64(w.ch.choose(10))*step, lasts: 6 * lease})
		for _, who := range []int{0, 2} {
			add(machineFault{kind: deafClient, at: at, lasts: 3 * lease, who: who})
		}
		if w.ch.choose(4) > 0 {
			add(machineFault{kind: deafNode, node: 1, at: at + lease/100*int64(30+w.ch.choose(45)), lasts: lease / 100 * int64(2+w.ch.choose(14))})
		}
	}
	o.Script = &Script{Name: "removed-node", Start: func(w *world) {
		w.d.patience = 20 * w.d.lease
		w.faults = append(w.faults, faultPlan{kind: Stall, at: max(1, at-int64(w.ch.choose(12))*step), lasts: w.d.lease / 100 * int64(45+w.ch.choose(50)), node: w.mirror.table.node[0]})
		w.at(at)
		for i := range 3 {
			c := &w.clients[i]
			c.left = 60
			c.start(func() {
				c.openSession()
				for c.left--; c.left > 0; c.left-- {
					if c.ended || c.session == 0 {
						c.openSession()
					}
					c.operateOn([]int{whatUpdate, whatUpdate, whatRead}[i], 0)
					if i > 0 {
						c.sleep(int64(1+w.ch.choose(30)) * step)
					}
				}
				if !c.ended {
					c.end("closed")
				}
			})
		}
	}}
	return o
}

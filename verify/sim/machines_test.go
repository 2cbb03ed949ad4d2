package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Hazard 12: a session that is fenced while its lease still runs is waited for too: it
// may read from the node that nobody reaches, and not know that it is fenced.
func TestHazard12_AFencedSessionIsWaitedFor(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	o := Options{Seed: 1, Schedules: 1, Replicas: 2, Clients: 2, Ops: 24, Faults: Break, MaxFaults: 1}
	w := r.w
	m := w.mach
	m.directed = func() {
		lease := w.d.lease
		at := func(kind machineFaultKind, at, lasts int64) {
			m.plan = append(m.plan, machineFault{kind: kind, at: at, lasts: lasts, ctl: controllers})
			w.at(at)
		}
		at(deafNode, 100*step, 4*lease) // node 0, the primary; clients reach it
		noticed := 100*step + lease/20*int64(10+w.ch.choose(20))
		at(revokeSession, noticed, step) // client 0 ...
		at(deafClient, noticed, 2*lease) // ... which does not hear of it
	}
	o.Schedules = schedules(t, 400)
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Fatal(rep.Failure.String())
	}
	require.NotZero(t, m.stats.Faults[revokeSession])
	require.NotZero(t, rep.Coverage.Epochs)
}

// TestSilentSessionHoldsUpNoFailover: a client renews its lease and acknowledges nothing,
// as one did whose callback did not come back; a node that hosts the region fails. The
// region opens again within bounded time: the session is fenced.
func TestSilentSessionHoldsUpNoFailover(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	o := Options{Seed: 1, Schedules: 1, Replicas: 2, Clients: 2, Ops: 24}
	w := r.w
	m := w.mach
	m.directed = func() {
		for i, f := range []machineFault{{kind: withholdAck, lasts: step}, {kind: deafNode, lasts: 40 * w.d.lease, node: w.ch.choose(2)}} {
			f.at, f.ctl = int64(50+100*i)*step, controllers
			m.plan = append(m.plan, f)
			w.at(f.at)
		}
	}
	m.stats.LongestGap = 0
	o.Schedules = schedules(t, 400)
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Fatal(rep.Failure.String())
	}
	require.NotZero(t, m.stats.Faults[withholdAck])
	require.NotZero(t, rep.Coverage.Epochs)
	t.Logf("longest gap: %d hundredths of a lease", m.stats.LongestGap)
	require.Less(t, m.stats.LongestGap, int64(1000), "two leases of patience, one until its lease is over, and messages that get lost; the node is away for 40")
}

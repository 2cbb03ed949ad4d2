package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// machineRuns are the faults of schedules with real machines. Not Rot: its budget
// counts on the model's faults being all there are.
const machineRuns = AllFaults &^ Rot

// passMachines runs schedules over real controllers and agents.
func passMachines(t *testing.T, o Options) *Report {
	t.Helper()
	o.Machines, o.AnyScheduler = true, true
	r := NewRunner()
	defer r.Close()
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Fatal(rep.Failure.String())
	}
	t.Logf("%d schedules, %.0f/s, %d steps each\n%v%v", rep.Schedules, rep.Rate(), rep.Steps/uint64(rep.Schedules), &rep.Coverage, &r.w.mach.stats)
	return rep
}

func TestMachines_Quiet(t *testing.T) {
	passMachines(t, Options{Seed: 1, Schedules: schedules(t, 300), Porcupine: 1})
}

func TestMachines_ClientsDie(t *testing.T) {
	passMachines(t, Options{Seed: 1, Schedules: schedules(t, 600), Faults: Kill | Pause | Break | CutSession, Porcupine: 8})
}

// Hazards 4, 11, 12, 14, 15, 16, 17: nodes, controllers, agents and links fail.
func TestHazard04_11_12_14_15_16_17_Machines(t *testing.T) {
	passMachines(t, Options{Seed: 1, Schedules: schedules(t, 2000), Faults: machineRuns &^ Power, Porcupine: 8})
}

func TestMachines_Durable(t *testing.T) {
	passMachines(t, Options{Seed: 1, Schedules: schedules(t, 1500), Faults: machineRuns, Durable: true, Porcupine: 8})
}

// Hazard 20: agents take blocks back under all faults, in turns.
func TestMachines_Allocator(t *testing.T) {
	rep := passMachines(t, Options{Seed: 1, Schedules: schedules(t, 400), Faults: machineRuns &^ Power, Grow: true, Porcupine: 8})
	require.NotZero(t, rep.Coverage.Reclaims)
}

func TestMachines_DurableAllocator(t *testing.T) {
	rep := passMachines(t, Options{Seed: 1, Schedules: schedules(t, 400), Faults: machineRuns, Grow: true, Durable: true, Porcupine: 8})
	require.NotZero(t, rep.Coverage.Reclaims)
}

// TestMachines_SameSeedSameDigest: nothing in the machines depends on the order of a
// map, the wall clock or Go's scheduler.
func TestMachines_SameSeedSameDigest(t *testing.T) {
	o := Options{Seed: 7, Schedules: 40, AnyScheduler: true, Faults: machineRuns, Machines: true}
	r := NewRunner()
	defer r.Close()
	a := r.Run(o, nil)
	b := r.Run(o, nil) // in a world that has been used
	c := Run(o, nil)
	require.Nil(t, a.Failure)
	require.Equal(t, a.Digest, b.Digest)
	require.Equal(t, a.Digest, c.Digest)
	require.Equal(t, a.Steps, c.Steps)
	o.Seed++
	require.NotEqual(t, a.Digest, Run(o, nil).Digest)
}

// Hazard 12: a session that is fenced while its lease still runs is waited for too: it
// may read from the node that nobody reaches, and not know that it is fenced.
func TestHazard12_AFencedSessionIsWaitedFor(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	o := Options{Seed: 1, Schedules: 1, Machines: true, Replicas: 2, Clients: 2, Ops: 24, Faults: Break, MaxFaults: 1}
	r.Run(o, nil) // so that there are machines
	w := r.w
	m := w.machines
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

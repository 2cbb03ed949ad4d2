package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHazard23_ReadGoneWithPowerAndBackup: what a reader saw between the CAS of V
// and its FLUSH is lost when all power and a backup are lost together, and only
// then. A checker that asks for more finds such a schedule; the promise as it is
// written holds in it, for writers always.
func TestHazard23_ReadGoneWithPowerAndBackup(t *testing.T) {
	t.Parallel()
	r := NewRunner()
	defer r.Close()
	schedules := 0
	for _, at := range []int{13, 10, 12, 11, 14} { // the CAS of V at the primary is one of these verbs
		s := CrashAt(whatUpdate, at, Power, 0)
		s.Linger = 40
		s.also = func(w *world) { // the backup goes too, and comes back without its memory
			w.faults = append(w.faults, faultPlan{kind: NodeDown, at: w.now + int64(w.ch.choose(40))*step, lasts: 2 * w.d.lease, node: w.mirror.table.node[w.mirror.table.n-1]})
			w.at(w.now)
		}
		o := Options{Seed: 1, Schedules: 1000, Script: s, Clients: 3, Slabs: 1, Replicas: 2, Durable: true, StrictReads: true}
		rep := r.Run(o, nil)
		schedules += rep.Schedules
		if rep.Failure == nil {
			continue
		}
		// Its writer, who had no answer, may have written it again since.
		require.Contains(t, []string{"not linearizable", "saw a value under another version"}, rep.Failure.What)
		t.Logf("found in schedule %d: %v", schedules, rep.Failure)
		o = rep.Failure.Options
		o.StrictReads, o.Porcupine = false, 1
		rep = r.Run(o, nil)
		require.Nil(t, rep.Failure)
		require.NotZero(t, rep.Coverage.Gone)
		return
	}
	t.Fatalf("no such schedule among %d", schedules)
}

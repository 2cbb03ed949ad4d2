package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// lossy are runs in which a durable read can be lost: the power goes, and a backup
// with it.
var lossy = Options{Seed: 6000, AnyScheduler: true, Faults: Break | NodeDown | Power, Clients: 4, Ops: 40, Replicas: 2, Slabs: 1, MaxFaults: 8, Durable: true}

// TestHazard23_ReadGoneWithPowerAndBackup: what a reader saw between the CAS of V
// and its FLUSH is lost when all power and a backup are lost together, and only
// then. A checker that asks for more finds such a schedule; the promise as it is
// written holds in it, for writers always.
func TestHazard23_ReadGoneWithPowerAndBackup(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	o := lossy
	o.Schedules, o.StrictReads = 40_000, true
	rep := r.Run(o, nil)
	require.NotNil(t, rep.Failure, "no such schedule among %d", rep.Schedules)
	require.Equal(t, "not linearizable", rep.Failure.What)
	t.Logf("found in schedule %d: %s", rep.Schedules, rep.Failure.Detail)
	o = rep.Failure.Options
	o.StrictReads, o.Porcupine = false, 1
	rep = r.Run(o, nil)
	require.Nil(t, rep.Failure)
	require.NotZero(t, rep.Coverage.Gone)
}

package sim

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// kinds are the options of runs, by name.
var kinds = map[string]Options{
	"quiet":      {},
	"clients":    {Faults: Kill | Pause | Break | CutClient | CutSession | Revoke | Stall | Rot},
	"failover":   {Faults: AllFaults &^ Power},
	"durable":    {Faults: AllFaults, Durable: true, MaxFaults: 8},
	"compare":    {Faults: AllFaults, Durable: true, Compare: true, MaxFaults: 8},
	"grow":       {Faults: AllFaults &^ Power, Grow: true, Clients: 4, Ops: 32},
	"reclaim":    {Faults: AllFaults, Grow: true, Durable: true, Clients: 3, Ops: 32, MaxFaults: 6},
	"batches":    {Faults: AllFaults, Batches: true, MaxFaults: 8},
	"flushed":    {Faults: AllFaults, Batches: true, Durable: true, MaxFaults: 8},
	"staged":     {Faults: AllFaults &^ (Power | Rot), Staged: true, MaxFaults: 8},
	"settled":    {Faults: AllFaults &^ Rot, Staged: true, Batches: true, Durable: true, MaxFaults: 8},
	"shadows":    {Faults: AllFaults &^ (Power | Rot), Staged: true, Grow: true, Clients: 4, Ops: 32, MaxFaults: 8},
	"full":       {Faults: AllFaults &^ Rot, Staged: true, Full: true, MaxFaults: 8},
	"nodes":      {Faults: AllFaults &^ (Power | Rot), Staged: true, Tree: true, Clients: 4, Ops: 60, MaxFaults: 6},
	"open":       {Faults: AllFaults &^ (Power | Rot), Open: true, MaxFaults: 6},
	"opensealed": {Faults: AllFaults &^ Rot, Open: true, Durable: true, StrictReads: true, MaxFaults: 8},
	"opened":     {Faults: AllFaults &^ (Power | Rot), Open: true, Batches: true, MaxFaults: 8},
	"openhot":    {Faults: AllFaults &^ (Power | Rot), Open: true, Clients: 4, Ops: 40, Slabs: 1, MaxFaults: 8},
	"opengrow":   {Faults: AllFaults &^ (Power | Rot), Open: true, Grow: true, Clients: 4, Ops: 32, MaxFaults: 6},
	"opentree":   {Faults: AllFaults &^ (Power | Rot), Open: true, Tree: true, Clients: 4, Ops: 60, MaxFaults: 6},
	"openrot":    {Faults: AllFaults &^ Power, Open: true, MaxFaults: 6},
	"bad":        {Faults: AllFaults &^ (Power | Rot), Bad: true, Clients: 4, Ops: 40, MaxFaults: 6},
	"badkept":    {Faults: AllFaults &^ Rot, Bad: true, Durable: true, Clients: 4, Ops: 40, MaxFaults: 8},
	"badopen":    {Faults: AllFaults &^ (Power | Rot), Bad: true, Open: true, Clients: 4, Ops: 40, MaxFaults: 6},
	"badgrow":    {Faults: AllFaults &^ (Power | Rot), Bad: true, Grow: true, Clients: 4, Ops: 40, MaxFaults: 6},
	"badonce":    {Faults: AllFaults &^ (Power | Rot), Bad: true, Grow: true, Open: true, Clients: 4, Ops: 40, MaxFaults: 6},
	"badstaged":  {Faults: AllFaults &^ Rot, Bad: true, Staged: true, Durable: true, Clients: 4, Ops: 40, MaxFaults: 6},
	"sets":       {Sets: true, Clients: 4, Ops: 32, Slabs: 4},
	"setfaults":  {Faults: AllFaults &^ Power, Sets: true, Clients: 4, Ops: 32, Slabs: 4, MaxFaults: 8},
	"setlanes":   {Faults: AllFaults &^ (Power | Rot), Sets: true, Lanes: 2, Clients: 4, Ops: 32, Slabs: 4, MaxFaults: 6},
	"setsealed":  {Faults: AllFaults &^ Rot, Sets: true, Durable: true, Clients: 3, Ops: 24, Slabs: 3, MaxFaults: 8},
	"setopen":    {Faults: AllFaults &^ Rot, Sets: true, Open: true, Durable: true, Clients: 4, Ops: 32, Slabs: 4, MaxFaults: 8},
	"setstaged":  {Faults: AllFaults &^ (Power | Rot), Sets: true, Staged: true, Clients: 4, Ops: 32, Slabs: 4, MaxFaults: 8},
	"setfull":    {Faults: AllFaults &^ Rot, Sets: true, Staged: true, Full: true, Clients: 3, Slabs: 3, MaxFaults: 8},
	"hot":        {Faults: AllFaults &^ (Power | Rot), Clients: 4, Ops: 40, Slabs: 1, MaxFaults: 8},
}

// TestLong runs new seeds for as long as SIM_LONG says, such as 10m; SIM_KIND, a
// name from kinds, runs only those.
func TestLong(t *testing.T) {
	if os.Getenv("SIM_LONG") == "" {
		t.Skip("SIM_LONG is not set")
	}
	d, err := time.ParseDuration(os.Getenv("SIM_LONG"))
	require.NoError(t, err)
	end := time.Now().Add(d)
	r := NewRunner()
	defer r.Close()
	var all Coverage
	n := 0
	for seed := uint64(time.Now().UnixNano()); time.Now().Before(end); seed += 500 {
		for name, o := range kinds {
			if only := os.Getenv("SIM_KIND"); only != "" && only != name {
				continue
			}
			o.Seed, o.Schedules, o.AnyScheduler, o.Porcupine = seed, 500, true, 16
			rep := r.Run(o, func() bool { return time.Now().After(end) })
			if rep.Failure != nil {
				t.Fatal(name, rep.Failure.String(), r.Shrink(rep.Failure, 3000).String())
			}
			n += rep.Schedules
			all.Add(&rep.Coverage)
		}
	}
	t.Logf("%d schedules\n%v", n, &all)
}

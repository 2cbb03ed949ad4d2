package sim

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/slab"
)

// TestScrubAsksForItsLease: a scrub whose lease is over has no answer, because its replicas may
// have left the region. Hazard 43. Controllers do not take such an answer either: it names an
// epoch that is over.
func TestScrubAsksForItsLease(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	scrubbed := 0
	s := &Script{Name: "scrub", Start: func(w *world) {
		c := &w.clients[0]
		c.start(func() {
			c.openSession()
			reg, err := c.Region(regionID)
			require.NoError(t, err)
			var st slab.Scrubbed
			nobody := func(uint32) bool { return false }
			c.enter()
			require.NoError(t, c.lane.ScrubBlock(reg, 0, nobody, &st))
			w.away[0], c.leaseUntil = true, 0
			require.ErrorIs(t, c.lane.ScrubBlock(reg, 0, nobody, &st), slab.ErrLease)
			w.away[0] = false
			c.leave()
			c.end("closed")
			scrubbed++
		})
	}}
	rep := r.Run(Options{Seed: 1, Schedules: 3, Clients: 1, Script: s}, nil)
	require.Nil(t, rep.Failure)
	require.Equal(t, 3, scrubbed)
}

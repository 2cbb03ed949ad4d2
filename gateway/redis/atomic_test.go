package redis

import (
	"flag"
	"testing"
	"time"

	"github.com/quarrystore/quarry/verify/redismodel"
)

var (
	scheduleSeed  = flag.Uint64("schedule-seed", 1, "first seed of the schedules")
	scheduleCount = flag.Int("schedules", 0, "schedules of each family; 0 means 300, 60 with -short")
)

// schedules is how many schedules of each family a test plays.
func schedules(t *testing.T) int {
	switch {
	case *scheduleCount != 0:
		return *scheduleCount
	case testing.Short():
		t.Log("-short: fewer schedules")
		return 60
	}
	return 300
}

// TestSchedules plays schedules of several gateways, with sweeps, suspensions beyond the
// orphan age and kills, and compares what clients saw with what docs/REDIS.md promises.
func TestSchedules(t *testing.T) {
	n := schedules(t)
	for name := range redismodel.Families {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			began := time.Now()
			failed, exceptions := 0, 0
			for i := range uint64(n) {
				seed := *scheduleSeed + i
				sc, bad := r.play(t, seed, name)
				if bad == "" {
					var exception bool
					if bad, exception = sc.judge(); exception && bad == "" {
						exceptions++
					}
				}
				if bad != "" {
					failed++
					t.Errorf("seed %d: %s: failed after %d schedules\n%s", seed, bad, i+1, sc.history())
					if failed == 3 {
						break
					}
				}
			}
			t.Logf("%d schedules in %v, %d with the exception", n, time.Since(began), exceptions)
		})
	}
}

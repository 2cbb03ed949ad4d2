package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

var (
	start     = time.Now()
	startBoot = drift(boottime, Now)
	startRaw  = rawtime()
	simulated bool // time is not the kernel's
)

// Now is the time in nanoseconds since the process started. Monotonic.
func Now() int64 { return int64(time.Since(start)) }

// StartAt moves the origin of Now, for a simulation whose time lies elsewhere: a bubble
// of testing/synctest begins in the year 2000, and Now must not be negative.
// Preconditions: nothing has called Now.
func StartAt(t time.Time) { start, simulated = t, true }

// Look is Now, and the wall clock at the same moment in nanoseconds. Their difference
// changes when the wall clock is set or the host was suspended, and never else.
func Look() (now, wall int64) {
	t := time.Now()
	return int64(t.Sub(start)), t.UnixNano()
}

// MaxSlewPercent is by how much the kernel lets the rate of Now differ from Raw at most:
// a tenth by the tick, and 500 ppm by the frequency.
const MaxSlewPercent = 11

// Raw is the time in nanoseconds since the process started, by a clock whose
// rate is never adjusted. It counts the time for which the host was suspended.
func Raw() int64 {
	if simulated {
		return Now()
	}
	return rawtime() - startRaw + int64(Suspended())
}

// In is the point in time d from now.
func In(d time.Duration) int64 { return Now() + int64(d) }

// Grain is the unit of intervals that are waited for with Aligned.
const Grain = 80 * time.Millisecond

// Aligned is how long to wait for the next of the moments that are a multiple of every after the
// process started. Timers that wait for multiples of Grain expire together, so that a process
// that is idle wakes once for all of them.
func Aligned(every time.Duration) time.Duration {
	return every - time.Duration(Now())%every
}

// Suspended is how long the host has been suspended since the process started.
func Suspended() time.Duration {
	if simulated {
		return 0 // the kernel's clocks say nothing of that time
	}
	return time.Duration(drift(boottime, Now) - startBoot)
}

const (
	maxSkew     = int64(time.Millisecond)
	driftChecks = 100
)

// drift is by how much the clock boot is ahead of mono. A thread that loses its processor
// between two readings would see that time as drift, so the reading of boot counts if mono
// has hardly moved around it, or else the best of many.
func drift(boot, mono func() int64) (ahead int64) {
	best := int64(1) << 62
	for range driftChecks {
		before, b, after := mono(), boot(), mono()
		if d := after - before; d < best {
			best, ahead = d, b-before
		}
		if best <= maxSkew {
			break
		}
	}
	return ahead
}

func boottime() int64 { return read(unix.CLOCK_BOOTTIME) }
func rawtime() int64  { return read(unix.CLOCK_MONOTONIC_RAW) }

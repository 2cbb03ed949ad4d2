// Package clock is the one place where Quarry reads time for leases and
// deadlines: nanoseconds of the monotonic clock since the process started.
//
// CLOCK_BOOTTIME, which also counts suspension of the host, costs a system call
// (263 ns on the machine of docs/BENCHMARKS.md) where the monotonic clock costs
// 25 ns from the vDSO. Now uses the latter; Suspended tells by how much the two
// have drifted apart, and heartbeats end a lease when they have.
package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

var (
	start     = time.Now()
	startBoot = boottime() - nanotime()
)

// Now is the time in nanoseconds since the process started. Monotonic.
func Now() int64 { return int64(time.Since(start)) }

// In is the point in time d from now.
func In(d time.Duration) int64 { return Now() + int64(d) }

// Suspended is how long the host has been suspended since the process started.
func Suspended() time.Duration { return time.Duration(boottime() - nanotime() - startBoot) }

func boottime() int64 { return read(unix.CLOCK_BOOTTIME) }
func nanotime() int64 { return read(unix.CLOCK_MONOTONIC) }

func read(id int32) int64 {
	var ts unix.Timespec
	if unix.ClockGettime(id, &ts) != nil {
		return 0
	}
	return ts.Nano()
}

package procs

import (
	"context"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
)

const (
	lookEvery = 6 * clock.Grain
	// A process is idle after calmLooks in a row in which it has used less than idlePercent of a
	// processor, until it uses busyPercent in one.
	idlePercent = 4
	busyPercent = 8
	calmLooks   = 10
)

// Follow gives the process one processor while it is idle, and all that it may use otherwise, until the
// context ends. With GOMAXPROCS in the environment it does nothing.
func Follow(ctx context.Context) {
	if os.Getenv("GOMAXPROCS") != "" || runtime.GOMAXPROCS(0) == 1 {
		return
	}
	var f follower
	at, used := time.Now(), cpuTime()
	for {
		select {
		case <-ctx.Done():
			runtime.SetDefaultGOMAXPROCS()
			return
		case <-time.After(clock.Aligned(lookEvery)):
		}
		now, u := time.Now(), cpuTime()
		was := f.idle
		f.look(u-used, now.Sub(at))
		switch {
		case f.idle && !was:
			runtime.GOMAXPROCS(1)
		case was && !f.idle:
			runtime.SetDefaultGOMAXPROCS()
		}
		at, used = now, u
	}
}

// follower decides whether a process is idle.
type follower struct {
	idle bool
	calm int // looks in a row, at most calmLooks
}

// look takes what the process has used since the last look, in processor time.
func (f *follower) look(used, passed time.Duration) {
	percent := 100 * used / max(1, passed)
	switch {
	case percent >= busyPercent:
		f.idle, f.calm = false, 0
	case percent >= idlePercent:
		f.calm = 0
	default:
		f.calm = min(f.calm+1, calmLooks)
		f.idle = f.idle || f.calm == calmLooks
	}
}

// cpuTime is what all threads of the process have used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

package futex

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of linux/futex.h.
const (
	opWait = 0
	opWake = 1

	sizeU32 = 2   // flag of a word in Waitv
	private = 128 // flag of a word that only this process has
)

// Wait sleeps while the word is seen, until a Wake of the word or for so long, whichever comes first. It may end earlier.
func Wait(word *uint32, seen uint32, longest time.Duration) {
	ts := unix.NsecToTimespec(int64(longest))
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), opWait, uintptr(seen), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// Wake ends the sleep of all threads that sleep on the word, whose owner has stored another value before.
func Wake(word *uint32) { wake(word, opWake) }

// wake does not tell the scheduler of its system call, which never waits: the scheduler would wake its thread sysmon first.
func wake(word *uint32, op uintptr) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), op, 1<<31-1, 0, 0, 0)
}

// Bell ends sleeps of one goroutine from others of this process, while that goroutine sleeps on a word that it shares with another process
// too. The goroutine that sleeps alone calls Seen and Wait.
type Bell struct {
	word    atomic.Uint32
	asleep  atomic.Bool
	waiters [2]waiter // of the sleep
	limit   unix.Timespec
}

// waiter is struct futex_waitv.
type waiter struct {
	value uint64
	at    uint64
	flags uint32
	_     uint32
}

// Ring ends the present sleep, or the one that begins with a Seen from before.
func (b *Bell) Ring() {
	b.word.Add(1)
	if b.asleep.Load() {
		wake((*uint32)(unsafe.Pointer(&b.word)), opWake|private)
	}
}

// Seen is to be given to Wait: what is rung from now on ends that sleep.
func (b *Bell) Seen() uint32 { return b.word.Load() }

// Wait sleeps while shared is sharedSeen and nothing was rung since Seen returned seen, for so long at most. It may end earlier.
//
// No Ring is lost: Ring changes the word before it loads asleep, Wait sets asleep before the kernel compares the word.
//
// Preconditions: Supported.
func (b *Bell) Wait(seen uint32, shared *uint32, sharedSeen uint32, longest time.Duration) {
	b.waiters = [2]waiter{
		{value: uint64(sharedSeen), at: uint64(uintptr(unsafe.Pointer(shared))), flags: sizeU32},
		{value: uint64(seen), at: uint64(uintptr(unsafe.Pointer(&b.word))), flags: sizeU32 | private},
	}
	b.limit = unix.NsecToTimespec(epoch.kernel + int64(time.Since(epoch.here)+longest))
	b.asleep.Store(true)
	unix.Syscall6(unix.SYS_FUTEX_WAITV, uintptr(unsafe.Pointer(&b.waiters)), uintptr(len(b.waiters)), 0, uintptr(unsafe.Pointer(&b.limit)), unix.CLOCK_MONOTONIC, 0)
	b.asleep.Store(false)
	runtime.KeepAlive(b)
}

// epoch is one moment on the clock that limits sleeps, and on that of package time, which run alike.
var epoch = func() (e struct {
	here   time.Time
	kernel int64
}) {
	var ts unix.Timespec
	e.here = time.Now()
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // 0 makes sleeps end at once
	e.kernel = ts.Nano()
	return e
}()

// Supported says whether the kernel has what Bell.Wait needs (Linux 5.16), and a sandbox does not withhold it.
var Supported = sync.OnceValue(func() bool {
	_, _, err := unix.Syscall6(unix.SYS_FUTEX_WAITV, 0, 0, 0, 0, 0, 0)
	return err == unix.EINVAL // no words; without the call ENOSYS or EPERM
})

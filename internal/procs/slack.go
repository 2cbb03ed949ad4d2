package procs

import (
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Slack is how late the kernel may expire a timer of a thread, so that timers that are near each
// other cost one interrupt. The kernel's default is 50 us. It is a tenth of the pulse's tick, the shortest
// interval that an idle controller waits for.
const slack = 4 * time.Millisecond

// Slack executes the program again, with the same arguments, environment and process id, so that all
// timers of all its threads have that slack. It returns nil if they have it, and an error if
// the program cannot be executed again: then it goes on; the main thread and those that it creates have the slack.
//
// Threads inherit the slack of the thread that creates them. The runtime's monitor thread, which has
// most of the wakes of an idle process, exists before any code of the program runs.
//
// Preconditions: main has just begun. Nothing has been read from standard input or a pipe, and no
// goroutine runs.
func Slack() error {
	runtime.LockOSThread() // Exec makes a process of the thread that calls it
	defer runtime.UnlockOSThread()
	now, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return os.NewSyscallError("prctl", err)
	}
	if time.Duration(now) >= slack {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack), 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	// Where the kernel takes the slack and does not keep it, the program would be executed for ever.
	if now, err = unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); err != nil || time.Duration(now) != slack {
		return os.NewSyscallError("prctl", unix.ENOTSUP)
	}
	return os.NewSyscallError("execve", syscall.Exec(exe, os.Args, os.Environ()))
}

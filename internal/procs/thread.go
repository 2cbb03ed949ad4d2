package procs

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnOtherThread starts a goroutine that is locked to a thread which ends with it, and runs f there: any thread but the main one.
// While the goroutine has the main one, it holds it until another one has started elsewhere.
//
// A child with a signal for its parent's death gets it when the thread that has made it ends: f stays until the child has ended.
func OnOtherThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return // locked: the thread ends
		}
		defer runtime.UnlockOSThread()
		began := make(chan struct{})
		OnOtherThread(func() {
			close(began)
			f()
		})
		<-began
	}()
}

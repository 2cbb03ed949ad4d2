// Package teststop stops processes for tests.
package teststop

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// patience bounds the wait for threads that a starved machine does not run.
const patience = 3 * time.Minute

// Stop sends SIGSTOP to a process and returns when all its threads have stopped. The kernel hands the signal to one thread, and the others run on until
// that one has run.
func Stop(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if stopped(pid) {
			return nil
		}
	}
	return fmt.Errorf("process %d has not stopped within %v", pid, patience)
}

// stopped says whether all threads of a process have stopped.
func stopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, stat := range threads {
		b, err := os.ReadFile(stat)
		// The state is behind the name, which may have parentheses.
		if i := bytes.LastIndexByte(b, ')'); err != nil || i < 0 || i+2 >= len(b) || b[i+2] != 'T' {
			return false
		}
	}
	return len(threads) > 0
}

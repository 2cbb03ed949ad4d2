package main

import (
	"fmt"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/procs"
)

// runConfined runs a process that ends with this one, without capabilities and without a way to gain some:
// workers run code of users, and a storage node may have capabilities for shm clients of other users. With
// lockMemory the process keeps CAP_IPC_LOCK, if this one has it: an adapter needs locked memory.
//
// Linux gives a child the capabilities of the thread that makes it, and ends the child with that thread. So the thread
// drops its own and stays until the child has ended. It ends with its goroutine, which stays locked to it:
// no other goroutine runs on it. The main thread does not end with its goroutine, and its capabilities are what
// /proc/PID/status shows of the process: it keeps them.
func runConfined(cmd *exec.Cmd, lockMemory bool) error {
	ended := make(chan error, 1)
	procs.OnOtherThread(func() {
		var keep uint64
		if lockMemory {
			keep = 1 << unix.CAP_IPC_LOCK
		}
		if err := dropCapabilities(keep); err != nil {
			ended <- fmt.Errorf("drop the worker's capabilities: %w", err)
			return
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		ended <- cmd.Run()
	})
	return <-ended
}

// dropCapabilities takes all capabilities from the calling thread but those of keep that it has, bit by number, and forbids
// its children to gain others by executing a file. The goroutine must be locked to the thread.
func dropCapabilities(keep uint64) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // words of 32 capabilities
	if err := unix.Capget(&hdr, &sets[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("ambient capabilities: %w", err)
	}
	for c := uintptr(0); unix.Prctl(unix.PR_CAPBSET_READ, c, 0, 0, 0) == nil; c++ { // an error past the last one of this kernel
		// EPERM: without CAP_SETPCAP the bounding set stays. It gives nothing to a process with no_new_privs.
		if keep>>c&1 != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && err != unix.EPERM {
			return fmt.Errorf("bounding set: %w", err)
		}
	}
	for i := range sets {
		left := sets[i].Permitted & uint32(keep>>(32*i))
		sets[i] = unix.CapUserData{Effective: left, Permitted: left, Inheritable: left}
	}
	if err := unix.Capset(&hdr, &sets[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	for c := range uintptr(64) {
		if sets[c/32].Permitted>>(c%32)&1 != 0 {
			if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, c, 0, 0); err != nil {
				return fmt.Errorf("ambient capability %d: %w", c, err)
			}
		}
	}
	return nil
}

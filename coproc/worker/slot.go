package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/coproc/job"
)

// slotEnv makes a process a slot of the worker that has started it; its value is a Slot.
const slotEnv = "QUARRY_SLOT_OF_WORKER"

// Files that a slot inherits.
const (
	fdReady  = 3 // a pipe: the slot says there that it is ready
	fdPlaces = 4 // locks on it are places for parts of a job, see Slot.Take
)

// Slot is one slot of a worker in a process of its own.
type Slot struct {
	Number int    `json:"number"` // from 1
	Name   string `json:"name"`   // that of the worker, and the number
	// Life is a number that no other process of this slot has, and Before says why those have ended that were this slot before, by their lives.
	Life   uint64            `json:"life"`
	Before map[uint64]string `json:"before,omitempty"`
	// Parent is the worker's process.
	Parent int `json:"parent"`
	// Memory is what the runtime keeps to by collecting garbage, in bytes.
	Memory int64 `json:"memory"`

	places string // path of the file that the slots share
}

// ThisSlot is the slot that this process is; nil if it is none. The runtime collects garbage so that its memory stays below the slot's, where that is enough.
func ThisSlot() (*Slot, error) {
	text, ok := os.LookupEnv(slotEnv)
	if !ok {
		return nil, nil
	}
	os.Unsetenv(slotEnv) // programs that a plugin starts are none
	s := &Slot{places: fmt.Sprintf("/proc/self/fd/%d", fdPlaces)}
	if err := json.Unmarshal([]byte(text), s); err != nil || s.Number < 1 || s.Name == "" {
		return nil, fmt.Errorf("%s=%q: a worker with --isolate sets it, and no one else", slotEnv, text)
	}
	for _, fd := range []int{fdReady, fdPlaces} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return nil, fmt.Errorf("slot %s: inherited file %d: %w", s.Name, fd, err)
		}
	}
	if err := endsWith(s.Parent); err != nil {
		return nil, fmt.Errorf("slot %s: %w", s.Name, err)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(s.Memory)
	}
	return s, nil
}

// endsWith has the kernel kill this process when its parent ends. The parent has asked for that when it made this process, but the kernel forgets it when
// the program's file has capabilities, as in a container image.
func endsWith(parent int) error {
	set := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the kernel keeps this for a thread
		err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
		set <- err
		if err == nil {
			select {} // as long as the process
		}
	}()
	if err := <-set; err != nil {
		return fmt.Errorf("signal at the worker's end: %w", err)
	}
	if is := unix.Getppid(); is != parent { // before the kernel knew
		return fmt.Errorf("its worker, process %d, has ended", parent)
	}
	return nil
}

// Apply makes the configuration of a worker that of this slot.
func (s *Slot) Apply(cfg *job.Config) {
	cfg.Name, cfg.Slots, cfg.Life, cfg.Before, cfg.Places = s.Name, 1, s.Life, s.Before, s
}

// Listen is the address of this slot's metrics, by that of the worker.
func (s *Slot) Listen(address string) (string, error) { return portOf(address, s.Number) }

// readySlot is what a slot says when it accepts parts.
type readySlot struct {
	Metrics string `json:"metrics,omitempty"` // where its metrics are
}

// Ready tells the worker that the slot accepts parts.
func (s *Slot) Ready(metrics string) error {
	f := os.NewFile(fdReady, "ready")
	return errors.Join(json.NewEncoder(f).Encode(readySlot{metrics}), f.Close())
}

// Take implements job.Places by a lock of a range of the shared file: the first one of the job's that no other process has. The kernel
// gives it up when the process ends.
func (s *Slot) Take(tenant uint32, id uint64, most int) (release func()) {
	f, err := os.OpenFile(s.places, os.O_RDWR, 0) // a file description of its own, which has the lock
	if err != nil {
		return nil // such as too many open files: the part runs elsewhere, or later
	}
	h := fnv.New64a()
	fmt.Fprint(h, tenant, "/", id)
	const places = job.MaxSlots
	first := int64(h.Sum64() >> 1 &^ (places - 1))
	for i := range int64(min(most, places)) {
		if unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: first + i, Len: 1}) == nil {
			return func() { f.Close() }
		}
	}
	f.Close()
	return nil
}

package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/procs"
)

// Slots runs each slot of a worker as a process of this program, with the same arguments. A slot is a worker of jobs with a session and a
// record of its own: what it may change is fenced as that of any worker is, and when it ends nothing else does.
type Slots struct {
	Name    string        // of the worker; default host and process
	Count   int           // of slots
	Memory  int           // live memory of each slot in bytes, above which it gives up its part
	Metrics string        // address of the first slot's metrics; "": none
	Drain   time.Duration // parts that run have so long to end when the worker is to end
	Err     io.Writer     // standard error of the slots
	Logger  *slog.Logger

	cg     *cgroups // nil: there is none, and RLIMIT_DATA limits the slots
	places *os.File // see Slot.Take
}

const (
	// restartMin and restartMax are how long a slot that has ended is waited for. One that was ready is waited for no longer than restartReady, less
	// than a lease: the next one records how it has ended before others take its part over.
	restartMin   = 100 * time.Millisecond
	restartMax   = 10 * time.Second
	restartReady = 2 * time.Second
	// killAfter is how long a slot has, after Drain, to end its parts and to sign off.
	killAfter = 5 * time.Second
)

// Run runs the slots until ctx ends. Then each has Drain to end its part. ready is called when all of them accept parts, with the
// addresses of their metrics. The error is that of a slot that ends before it was ever ready. The slots end with this process, however it ends.
func (s Slots) Run(ctx context.Context, ready func(metrics []string) error) error {
	if s.Name == "" {
		host, _ := os.Hostname()
		s.Name = fmt.Sprintf("%s.%d", host, os.Getpid())
	}
	for n := range s.Count { // before anything is begun
		if _, err := portOf(s.Metrics, n+1); err != nil {
			return err
		}
	}
	fd, err := unix.MemfdCreate("quarry-places", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("worker: memfd: %w", err)
	}
	s.places = os.NewFile(uintptr(fd), "places")
	defer s.places.Close()
	var why error
	if s.cg, why = newCgroups(); s.cg != nil {
		defer s.cg.close()
		s.Logger.Info("each slot is a process, limited by its cgroup", "slots", s.Count, "memory_mib", hardLimit(s.Memory)>>20, "cgroup", s.cg.dir, "threads", slotPids)
	} else {
		s.Logger.Info("each slot is a process whose memory the worker watches; its threads and its share of processors have no limit", "slots", s.Count, "memory_mib", hardLimit(s.Memory)>>20, "cgroup", why)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	begun := make(chan string, s.Count)
	for n := range s.Count {
		wg.Go(func() {
			if err := s.keep(ctx, n+1, begun); err != nil {
				stop(err)
			}
		})
	}
	err = s.await(ctx, begun, ready)
	if err != nil {
		stop(err)
	}
	wg.Wait()
	return err
}

// SlotError is why a worker ends by itself: a slot of it was never ready.
type SlotError struct {
	Slot, How string // its name, and how its process has ended
	Code      int    // exit code of the process; -1 if there was none, or a signal has ended it
}

func (e *SlotError) Error() string {
	return fmt.Sprintf("slot %s has ended before it was ready: %s", e.Slot, e.How)
}

// await calls ready when all slots are, and returns when ctx has ended.
func (s *Slots) await(ctx context.Context, begun <-chan string, ready func([]string) error) error {
	var metrics []string
	for range s.Count {
		select {
		case at := <-begun:
			metrics = append(metrics, at)
			continue
		case <-ctx.Done():
		}
		if slot := (*SlotError)(nil); errors.As(context.Cause(ctx), &slot) {
			return slot
		}
		return nil
	}
	if err := ready(metrics); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// keep runs one slot until ctx ends, and starts it again when it ends, each time after a longer pause; one that has lived for a minute begins with
// the shortest anew. The error is of one that was never ready.
func (s *Slots) keep(ctx context.Context, n int, begun chan<- string) error {
	pause, before, ever := restartMin, "", false
	for {
		began := time.Now()
		said, how, code := s.once(ctx, n, before, begun, !ever)
		switch {
		case ctx.Err() != nil:
			return nil
		case !said && !ever:
			return &SlotError{s.named(n), how, code}
		case said:
			ever, before = true, how
		}
		if time.Since(began) > time.Minute {
			pause = restartMin
		}
		s.Logger.Warn("slot has ended and is started again", "slot", s.named(n), "reason", how, "after", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if pause = min(2*pause, restartMax); said {
			pause = min(pause, restartReady)
		}
	}
}

// named is the name of a slot as a worker of jobs.
func (s *Slots) named(n int) string { return fmt.Sprintf("%s/%d", s.Name, n) }

// once runs a slot once. said: it was ready; how and code: the way it ended.
func (s *Slots) once(ctx context.Context, n int, before string, begun chan<- string, tell bool) (said bool, how string, code int) {
	slot := Slot{Number: n, Name: s.named(n), Before: before, Memory: int64(s.Memory)}
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true} // the terminal interrupts the worker alone, which tells its slots
	var dir string
	if s.cg != nil {
		var err error
		if dir, err = s.cg.slot(n, hardLimit(s.Memory)); err != nil {
			return false, err.Error(), -1
		}
		defer s.cg.end(dir)
		f, err := os.Open(dir)
		if err != nil {
			return false, err.Error(), -1
		}
		defer f.Close()
		attr.UseCgroupFD, attr.CgroupFD = true, int(f.Fd())
	}
	r, w, err := os.Pipe()
	if err != nil {
		return false, err.Error(), -1
	}
	text, err := json.Marshal(slot)
	if err != nil {
		return false, err.Error(), -1
	}
	errs := &lastWords{to: s.Err}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...) // also after the file was replaced
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), slotEnv+"="+string(text))
	cmd.ExtraFiles = []*os.File{w, s.places}
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdout, errs, attr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = s.Drain + killAfter
	over := make(chan bool, 1)
	ended := make(chan error, 1)
	procs.OnOtherThread(func() {
		err := cmd.Start()
		w.Close()
		if err == nil {
			gone := make(chan struct{})
			go func() { over <- dir == "" && watch(cmd.Process, hardLimit(s.Memory), gone) }()
			err = cmd.Wait()
			close(gone)
		} else {
			over <- false
		}
		ended <- err
	})
	var first readySlot
	said = json.NewDecoder(r).Decode(&first) == nil // or it has ended
	r.Close()
	if said && tell {
		begun <- first.Metrics
	}
	err = <-ended
	e := ending{err: err, words: errs.words(), over: <-over || dir != "" && kills(dir) > 0, limit: hardLimit(s.Memory) >> 20, by: "which the worker watches"}
	if dir != "" {
		e.by = "memory.max of its cgroup"
	}
	return said, e.String(), cmd.ProcessState.ExitCode()
}

// ending is how a slot's process has ended.
type ending struct {
	err   error
	words string // the last that it has written
	over  bool   // it was ended because of its limit
	limit uint64 // MiB
	by    string // whose limit it is
}

// String names the limit.
func (e ending) String() string {
	limit := fmt.Sprintf("%d MiB, %s", e.limit, e.by)
	var exit *exec.ExitError
	switch {
	case e.over:
		return fmt.Sprintf("the slot's process was ended: it has taken more memory than its limit (%s)", limit)
	case errors.As(e.err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
		return fmt.Sprintf("the slot's process was killed (SIGKILL), by an operator, or by the kernel because the host had no memory left; it was within its own limit (%s)", limit)
	case e.err == nil:
		return "the slot's process has ended by itself"
	case e.words != "":
		return fmt.Sprintf("the slot's process has ended: %v: %s", e.err, e.words)
	}
	return fmt.Sprintf("the slot's process has ended: %v", e.err)
}

// lastWords passes on what a process writes to its standard error, and keeps the line that says why it ends.
type lastWords struct {
	to   io.Writer
	mu   sync.Mutex
	line []byte // not complete yet, or the first bytes of a long one
	kept string
}

// maxWords bounds a line.
const maxWords = 500

// Write implements io.Writer.
func (l *lastWords) Write(b []byte) (int, error) {
	l.mu.Lock()
	for rest := b; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		l.line = append(l.line, part[:min(len(part), maxWords-len(l.line))]...)
		if rest = after; whole {
			l.note()
			l.line = l.line[:0]
		}
	}
	l.mu.Unlock()
	return l.to.Write(b)
}

// note keeps a line that a process ends with: the runtime's, that of a panic, or the program's own.
func (l *lastWords) note() {
	for _, prefix := range []string{"fatal error: ", "panic: ", "runtime: out of memory", "quarry: ", "worker: "} {
		if strings.HasPrefix(string(l.line), prefix) && !strings.Contains(l.kept, "out of memory") {
			l.kept = string(l.line)
		}
	}
}

// words are the line.
func (l *lastWords) words() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.kept
}

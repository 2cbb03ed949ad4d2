package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/procs"
)

// lastRead is how long what a process has written is read after its end: others that it has started, and that are no longer of its group, may hold its
// standard error open.
const lastRead = time.Second

// process is one process of a slot, from its start to its end.
type process struct {
	*Slots
	Slot
	dir   string    // of its cgroup; "": it has none
	words lastWords // what it writes to its standard error
	limit uint64    // of its memory
}

// once runs a slot once. begun, if not nil, receives the address of its metrics when it is ready. said: it was; how and code: the way it ended.
func (s *Slots) once(ctx context.Context, slot Slot, begun chan<- string) (said bool, how string, code int) {
	p := &process{Slots: s, Slot: slot, words: lastWords{to: s.Err}, limit: hardLimit(s.Memory)}
	fail := func(err error) (bool, string, int) { return false, err.Error(), -1 }
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true} // the terminal interrupts the worker alone, which tells its slots
	if s.cg != nil {
		var err error
		if p.dir, err = s.cg.slot(p.limit); err != nil {
			return fail(err)
		}
		defer s.cg.end(p.dir)
		f, err := os.Open(p.dir)
		if err != nil {
			return fail(err)
		}
		defer f.Close()
		attr.UseCgroupFD, attr.CgroupFD = true, int(f.Fd())
	}
	text, err := json.Marshal(slot)
	if err != nil {
		return fail(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fail(err)
	}
	defer r.Close()
	errs, errsW, err := os.Pipe()
	if err != nil {
		w.Close()
		return fail(err)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...) // also after the file was replaced
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), slotEnv+"="+string(text))
	cmd.ExtraFiles = []*os.File{w, s.places}
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdout, errsW, attr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = s.Drain + killAfter
	ended := make(chan ending, 1)
	procs.OnOtherThread(func() {
		err := cmd.Start()
		w.Close()
		errsW.Close()
		if err != nil {
			ended <- ending{err: err}
			return
		}
		ended <- p.await(cmd)
	})
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(&p.words, errs)
	}()
	var first readySlot
	said = json.NewDecoder(r).Decode(&first) == nil // or it has ended
	if said && begun != nil {
		begun <- first.Metrics
	}
	e := <-ended
	_ = errs.SetReadDeadline(time.Now().Add(lastRead))
	<-copied
	errs.Close()
	e.words, e.limit, e.by = p.words.words(), p.limit>>20, "which the worker watches"
	if p.dir != "" {
		e.by = "memory.max of its cgroup"
	}
	return said, e.String(), cmd.ProcessState.ExitCode()
}

// await waits for the end of the process, and ends the processes of its group then: those that it has started.
func (p *process) await(cmd *exec.Cmd) (e ending) {
	gone, over := make(chan struct{}), make(chan bool, 1)
	go func() { over <- p.dir == "" && watch(cmd.Process, p.limit, gone) }()
	for unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // no other group has this number before Wait
	close(gone)
	e.err = cmd.Wait()
	e.over = <-over || p.dir != "" && kills(p.dir) > 0
	return e
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

package local

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Command is what to run, and where.
type Command struct {
	Name string
	Run  []string // goes before it, so that it runs elsewhere
	Path string
	Args []string
	Env  []string // beside this process's own
	Log  string   // file that standard error is appended to; "" for none
}

// Process is one process of a cluster.
type Process struct {
	Name  string
	Ready map[string]string // what it said when it was ready
	cmd   *exec.Cmd
	errs  *tail
	out   sync.WaitGroup
	ended chan struct{}
}

// Spawn starts a service of the binary and waits for its ready line.
func Spawn(ctx context.Context, binary string, args ...string) (*Process, error) {
	return Run(ctx, Command{Name: args[0], Path: binary, Args: append(args, "--json")})
}

// Run starts a command and waits until it has written a line of JSON that says
// that it is ready.
func Run(ctx context.Context, c Command) (*Process, error) {
	p := &Process{Name: c.Name, errs: &tail{}, ended: make(chan struct{})}
	all := append(append(slices.Clone(c.Run), c.Path), c.Args...)
	p.cmd = exec.Command(all[0], all[1:]...)
	p.cmd.Env = append(os.Environ(), c.Env...)
	p.cmd.Stderr = p.errs
	if c.Log != "" {
		f, err := os.OpenFile(c.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		defer func() { p.logged(f) }()
		p.cmd.Stderr = io.MultiWriter(p.errs, f)
	}
	// A service must not outlive the one that started it, however that one ends.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	lines := make(chan string, 1)
	p.out.Go(func() {
		r := bufio.NewReader(out)
		line, _ := r.ReadString('\n')
		lines <- line
		_, _ = io.Copy(io.Discard, r)
	})
	go func() {
		p.out.Wait()
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	t := time.NewTimer(startTimeout)
	defer t.Stop()
	select {
	case line := <-lines:
		if json.Unmarshal([]byte(line), &p.Ready) == nil {
			return p, nil
		}
		// It may still be about to say why.
		p.await(stopTimeout)
		_ = p.Stop()
		return nil, fmt.Errorf("%s ended before it was ready: %s", c.Name, p.errs)
	case <-t.C:
		err = fmt.Errorf("%s was not ready within %v: %s", c.Name, startTimeout, p.errs)
	case <-ctx.Done():
		err = ctx.Err()
	}
	_ = p.Stop()
	return nil, err
}

// logged closes the log file of a process that has ended.
func (p *Process) logged(f *os.File) {
	go func() {
		<-p.ended
		f.Close()
	}()
}

// Ended says whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// Kill ends the process as a crash would, and waits until it is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// PID of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends it a signal.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Log is the end of what it wrote to standard error.
func (p *Process) Log() string { return p.errs.String() }

// Wait returns when the process has ended.
func (p *Process) Wait() *os.ProcessState {
	<-p.ended
	return p.cmd.ProcessState
}

// Stop ends the process with SIGTERM. One that does not end writes its goroutines to its
// log (SIGQUIT) and is killed.
func (p *Process) Stop() error { return p.stop(stopTimeout) }

func (p *Process) stop(within time.Duration) error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if p.await(within) {
		return nil
	}
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	p.await(quitTimeout)
	p.Kill()
	return fmt.Errorf("%s did not end within %v and was killed: %s", p.Name, within, p.errs)
}

// await says whether the process ended within a time. What it wrote is then known.
func (p *Process) await(within time.Duration) bool {
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case <-p.ended:
		return true
	case <-t.C:
		return false
	}
}

// Memory is what a process has resident, in bytes.
type Memory struct {
	Private int64 `json:"private_bytes"` // its own, and its program
	Shared  int64 `json:"shared_bytes"`  // regions and other shared memory
}

// MemoryOf reads the resident memory of a process.
func MemoryOf(pid int) (m Memory, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "RssAnon:", "RssFile:":
			m.Private += n << 10
		case "RssShmem:":
			m.Shared += n << 10
		}
	}
	return m, nil
}

// tail keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailBytes = 16 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if n := len(t.b) - tailBytes; n > 0 {
		t.b = t.b[n:]
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}

package local

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Config of a cluster. Binary is needed.
type Config struct {
	Binary string // a quarry executable
	Nodes  int    // storage nodes; 0 means 3
	// Dir keeps data and logs; empty means a temporary folder that Stop removes.
	Dir string
	// RegionBytes of a region, as text such as 64MiB; empty means 2 GiB.
	RegionBytes string
	// Capacity of each node, as text; empty means the default.
	Capacity string
	// Lease of sessions, as text such as 1s; empty means the controller's default.
	Lease string
}

const (
	startTimeout = 30 * time.Second
	stopTimeout  = 5 * time.Second
)

// Cluster is a running cluster.
type Cluster struct {
	URL        string // of the controller
	Controller *Process
	Nodes      []*Process
	cfg        Config
	temp       string
}

// Start starts the processes and waits until each says that it is ready.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	c := &Cluster{cfg: cfg}
	if cfg.Dir == "" {
		dir, err := os.MkdirTemp("", "quarry-local-")
		if err != nil {
			return nil, err
		}
		c.temp, c.cfg.Dir = dir, dir
	}
	if err := c.start(ctx); err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) (err error) {
	args := []string{"controller", "--listen", "127.0.0.1:0", "--data", filepath.Join(c.cfg.Dir, "controller")}
	if c.cfg.RegionBytes != "" {
		args = append(args, "--region-bytes", c.cfg.RegionBytes)
	}
	if c.cfg.Lease != "" {
		args = append(args, "--lease", c.cfg.Lease)
	}
	if c.Controller, err = Spawn(ctx, c.cfg.Binary, args...); err != nil {
		return err
	}
	c.URL = c.Controller.Ready["url"]
	for i := range c.cfg.Nodes {
		if err := c.AddNode(ctx, "n"+strconv.Itoa(i+1)); err != nil {
			return err
		}
	}
	return nil
}

// AddNode starts another storage node, in a failure domain of its own.
func (c *Cluster) AddNode(ctx context.Context, name string, more ...string) error {
	args := append([]string{"storage", "--controller", c.URL, "--name", name, "--domain", "/local/" + name + "/" + name, "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0"}, more...)
	if c.cfg.Capacity != "" {
		args = append(args, "--capacity", c.cfg.Capacity)
	}
	p, err := Spawn(ctx, c.cfg.Binary, args...)
	if err == nil {
		c.Nodes = append(c.Nodes, p)
	}
	return err
}

// Stop ends all processes, storage nodes first, and removes what was temporary.
func (c *Cluster) Stop() error {
	var errs []error
	for _, p := range c.Nodes {
		errs = append(errs, p.Stop())
	}
	if c.Controller != nil {
		errs = append(errs, c.Controller.Stop())
	}
	if c.temp != "" {
		errs = append(errs, os.RemoveAll(c.temp))
	}
	return errors.Join(errs...)
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
	p := &Process{Name: args[0], errs: &tail{}, ended: make(chan struct{})}
	p.cmd = exec.Command(binary, append(args, "--json")...)
	p.cmd.Stderr = p.errs
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
		if err = json.Unmarshal([]byte(line), &p.Ready); err == nil {
			return p, nil
		}
		err = fmt.Errorf("quarry %s ended before it was ready: %s", args[0], p.errs)
	case <-t.C:
		err = fmt.Errorf("quarry %s was not ready within %v: %s", args[0], startTimeout, p.errs)
	case <-ctx.Done():
		err = ctx.Err()
	}
	_ = p.Stop()
	return nil, err
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

// Stop ends the process: SIGTERM, and SIGKILL for one that does not listen.
func (p *Process) Stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	t := time.NewTimer(stopTimeout)
	defer t.Stop()
	select {
	case <-p.ended:
		return nil
	case <-t.C:
		_ = p.cmd.Process.Kill()
		<-p.ended
		return fmt.Errorf("quarry %s did not end within %v and was killed", p.Name, stopTimeout)
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

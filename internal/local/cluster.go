package local

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/internal/identity"
)

// Config of a cluster. Binary is needed.
type Config struct {
	Binary string // a quarry executable
	Nodes  int    // storage nodes, n1 and up; 0 means 3
	// Controllers, c1 and up; 0 means one. More than one are members of one etcd.
	Controllers int
	// Dir keeps data and logs; empty means a temporary folder that Stop removes.
	Dir string
	// Keep lets storage nodes keep regions as files in Dir, across restarts.
	Keep bool
	// RegionBytes of a region, as text such as 64MiB; empty means 2 GiB.
	RegionBytes string
	// Capacity of each node, as text; empty means the default.
	Capacity string
	// TLS has every process show a certificate of an authority that is made in Dir.
	TLS bool
	// NodeArgs are further arguments of each node.
	NodeArgs []string
	// NodeEnv are variables of each node, beside this process's own.
	NodeEnv []string
	// Lease of sessions, as text such as 1s; empty means the controller's default.
	Lease string
	// Host says where a member runs; nil means on this host's loopback.
	Host func(member string) Host
	// LogLevel of the services; empty means warn. Logs go to Dir too.
	LogLevel string
}

// Host is where a member of a cluster runs.
type Host struct {
	Address string   // others reach it there
	Run     []string // what to put before a command so that it runs there
}

const (
	startTimeout = 2 * time.Minute  // emulated processors take most of a minute
	stopTimeout  = 20 * time.Second // longer than a service waits for what it has under way
	quitTimeout  = 2 * time.Second  // to write the goroutines

	// Ports of members that have an address of their own.
	controllerPort = 7420
	fabricPort     = 7421
	agentPort      = 7422
	peerPort       = 7424
)

// Cluster is a running cluster.
type Cluster struct {
	URL         string   // of the first controller
	URLs        []string // of all controllers
	Controller  *Process // the first
	Controllers []*Process
	Nodes       []*Process
	cfg         Config
	temp        string
	pki         *pki       // with Config.TLS
	mu          sync.Mutex // of Restart
	members     map[string]*member
}

// member is what it takes to start a process again.
type member struct {
	command Command
	process *Process
}

// Start starts the processes and waits until each says that it is ready.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.Controllers == 0 {
		cfg.Controllers = 1
	}
	c := &Cluster{cfg: cfg, members: map[string]*member{}}
	if cfg.Dir == "" {
		dir, err := os.MkdirTemp("", "quarry-local-")
		if err != nil {
			return nil, err
		}
		c.temp, c.cfg.Dir = dir, dir
	}
	if cfg.TLS {
		var err error
		if c.pki, err = newPKI(filepath.Join(c.cfg.Dir, "pki")); err != nil {
			return nil, errors.Join(err, c.Stop())
		}
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	if err := c.startControllers(ctx); err != nil {
		return err
	}
	for i := range c.cfg.Nodes {
		if err := c.AddNode(ctx, "n"+strconv.Itoa(i+1)); err != nil {
			return err
		}
	}
	return nil
}

// startControllers starts them side by side: none is ready before most of them run.
func (c *Cluster) startControllers(ctx context.Context) error {
	n := c.cfg.Controllers
	listen, peers, initial := make([]string, n), make([]string, n), make([]string, n)
	free, err := freePorts(2 * n)
	if err != nil {
		return err
	}
	for i := range n {
		listen[i] = "127.0.0.1:0"
		if n == 1 && c.cfg.Host == nil {
			break
		}
		if c.cfg.Host != nil {
			at := c.cfg.Host(controllerName(i)).Address
			listen[i], peers[i] = join(at, controllerPort), join(at, peerPort)
		} else {
			listen[i], peers[i] = free[2*i], free[2*i+1]
		}
		initial[i] = controllerName(i) + "=" + c.scheme() + peers[i]
	}
	for i := range n {
		name := controllerName(i)
		args := []string{"controller", "--name", name, "--listen", listen[i], "--data", filepath.Join(c.cfg.Dir, name)}
		if n > 1 {
			args = append(args, "--etcd-peer", c.scheme()+peers[i], "--initial-cluster", strings.Join(initial, ","))
		}
		if c.cfg.RegionBytes != "" {
			args = append(args, "--region-bytes", c.cfg.RegionBytes)
		}
		if c.cfg.Lease != "" {
			args = append(args, "--lease", c.cfg.Lease)
		}
		trust, err := c.trust(identity.Controller, name)
		if err != nil {
			return err
		}
		c.members[name] = &member{command: c.command(name, append(args, trust...))}
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			m := c.members[controllerName(i)]
			m.process, errs[i] = Run(ctx, m.command)
		})
	}
	wg.Wait()
	for i := range n {
		if m := c.members[controllerName(i)]; m.process != nil {
			c.Controllers = append(c.Controllers, m.process)
			c.URLs = append(c.URLs, m.process.Ready["url"])
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.URL, c.Controller = c.URLs[0], c.Controllers[0]
	return nil
}

func controllerName(i int) string { return "c" + strconv.Itoa(i+1) }

func join(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// The range from which the kernel takes ports of connections begins above these: a port that is
// free is not taken by a connection before its listener starts.
const (
	lowPort  = 12000
	highPort = 32000
)

// freePorts finds n different ports of the loopback that are free at this moment.
func freePorts(n int) ([]string, error) {
	var out []string
	for range 100 * n {
		if len(out) == n {
			break
		}
		l, err := net.Listen("tcp", join("127.0.0.1", lowPort+rand.IntN(highPort-lowPort)))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, err
		}
		defer l.Close()
		out = append(out, l.Addr().String())
	}
	if len(out) < n {
		return nil, fmt.Errorf("found only %d of %d free TCP ports between %d and %d of 127.0.0.1", len(out), n, lowPort, highPort)
	}
	return out, nil
}

// command is how a service of the cluster is started.
func (c *Cluster) command(name string, args []string) Command {
	if c.cfg.LogLevel != "" {
		args = append(args, "--log-level", c.cfg.LogLevel)
	}
	cmd := Command{Name: name, Path: c.cfg.Binary, Args: append(args, "--json"), Log: filepath.Join(c.cfg.Dir, name+".log")}
	if c.cfg.Host != nil {
		if c.pki == nil {
			cmd.Args = append(cmd.Args, "--insecure") // the hosts are this test's alone
		}
		cmd.Run = c.cfg.Host(name).Run
	}
	return cmd
}

// AddNode starts another storage node, in a failure domain of its own.
func (c *Cluster) AddNode(ctx context.Context, name string, more ...string) error {
	listen, agent := "127.0.0.1:0", "127.0.0.1:0"
	if c.cfg.Host != nil {
		at := c.cfg.Host(name).Address
		listen, agent = join(at, fabricPort), join(at, agentPort)
	}
	args := append([]string{"storage", "--controller", strings.Join(c.URLs, ","), "--name", name, "--domain", "/local/" + name + "/" + name,
		"--listen", listen, "--agent", agent, "--stop-timeout", "0s"}, more...)
	args = append(args, c.cfg.NodeArgs...)
	if c.cfg.Keep {
		args = append(args, "--data", c.NodeDir(name))
	}
	if c.cfg.Capacity != "" {
		args = append(args, "--capacity", c.cfg.Capacity)
	}
	trust, err := c.trust(identity.Node, name)
	if err != nil {
		return err
	}
	m := &member{command: c.command(name, append(args, trust...))}
	m.command.Env = c.cfg.NodeEnv
	p, err := Run(ctx, m.command)
	if err == nil {
		m.process = p
		c.members[name] = m
		c.Nodes = append(c.Nodes, p)
	}
	return err
}

// NodeDir is where a node of a cluster with Keep has its regions.
func (c *Cluster) NodeDir(name string) string { return filepath.Join(c.cfg.Dir, name) }

// Process is the present process of a member; nil if there is no such member.
func (c *Cluster) Process(name string) *Process {
	if m := c.members[name]; m != nil {
		return m.process
	}
	return nil
}

// Restart starts a member that has ended again, as it was started before.
func (c *Cluster) Restart(ctx context.Context, name string) error {
	m := c.members[name]
	if m == nil {
		return fmt.Errorf("no member %s in this cluster", name)
	}
	m.process.Wait()
	p, err := Run(ctx, m.command)
	if err != nil {
		return err
	}
	c.mu.Lock() // members may be started side by side
	defer c.mu.Unlock()
	for _, list := range [][]*Process{c.Controllers, c.Nodes} {
		if i := slices.Index(list, m.process); i >= 0 {
			list[i] = p
		}
	}
	m.process, c.Controller = p, c.Controllers[0]
	return nil
}

// Stop ends all processes, storage nodes first, and removes what was temporary.
func (c *Cluster) Stop() error {
	var errs []error
	for _, list := range [][]*Process{c.Nodes, c.Controllers} {
		ends := make([]error, len(list))
		var wg sync.WaitGroup
		for i, p := range list {
			wg.Go(func() { ends[i] = p.Stop() })
		}
		wg.Wait()
		errs = append(errs, ends...)
	}
	if c.temp != "" {
		errs = append(errs, os.RemoveAll(c.temp))
	}
	return errors.Join(errs...)
}

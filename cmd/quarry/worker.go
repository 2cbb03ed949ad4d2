package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/worker"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/rdma/tcp"

	// Plugins that every worker has.
	_ "github.com/quarrystore/quarry/coproc/plugins/add"
	_ "github.com/quarrystore/quarry/coproc/plugins/nearest"
	_ "github.com/quarrystore/quarry/coproc/plugins/search"
	_ "github.com/quarrystore/quarry/coproc/plugins/words"
)

type workerCmd struct {
	metricsFlags
	Node   string   `help:"Storage node beside which it runs, whose memory it prefers."`
	Name   string   `placeholder:"NAME" help:"Name among the workers; default host and process."`
	Slots  int      `default:"1" help:"Parts that run at the same time."`
	Most   int      `name:"max-parts" help:"Parts of one job that run at the same time, at most; 0 means as many as there are slots."`
	Memory sizeFlag `default:"2GiB" help:"Live memory at which the worker, or a slot that is a process, gives up its part and ends."`
	Module sizeFlag `default:"256MiB" help:"Memory of one instance of a WASM module; a job may ask for less."`

	Isolate string        `enum:"auto,none,process" default:"auto" help:"${isolate_help}"`
	Drain   time.Duration `default:"${drain}" help:"${drain_help}"`

	CompileTimeout time.Duration `default:"2m" help:"Longest time to compile a WASM module; a job may ask for less."`
	PartTimeout    time.Duration `default:"24h" help:"Longest time for one attempt of one part that a job may ask for."`

	Replicas int  `short:"r" placeholder:"N" help:"Replicas of what it makes: the jobs' own tree, outputs, intermediate results; default is the cluster's."`
	Durable  bool `help:"Acknowledged objects survive a power failure of all nodes. Uses only regions of nodes with persistent memory or disks."`
}

func (c *workerCmd) Run(ctx context.Context, a *app) error {
	if c.CompileTimeout <= 0 || c.PartTimeout <= 0 || c.PartTimeout > job.MaxPartTimeout {
		return usagef("--compile-timeout %v, --part-timeout %v: want more than 0, and at most %v for a part", c.CompileTimeout, c.PartTimeout, job.MaxPartTimeout)
	}
	if c.Drain < 0 || c.Slots < 1 || c.Slots > job.MaxSlots {
		return usagef("--drain %v, --slots %d: want 0 or more, and 1 to %d slots", c.Drain, c.Slots, job.MaxSlots)
	}
	slot, err := worker.ThisSlot()
	if err != nil {
		return usageError{err}
	}
	apart, why, err := worker.Isolates(c.Isolate, c.Slots, int(c.Memory), c.MetricsListen)
	switch {
	case err != nil:
		return usageError{err}
	case slot != nil:
		if c.MetricsListen, err = slot.Listen(c.MetricsListen); err != nil {
			return usageError{err}
		}
	case apart:
		return c.runSlots(ctx, a)
	case why != "":
		a.log.Info("slots share a process", "why", why)
	}
	port, err := c.metricsFlags.open(ctx, a, "worker")
	if err != nil {
		return err
	}
	defer port.close()
	control := a.clientConfig()
	control.Replicas, control.Durability = c.Replicas, durability(c.Durable)
	worker.StandBack()
	tally := &job.Tally{}
	cfg := job.Config{Name: c.Name, Node: c.Node, Slots: c.Slots, MaxOfJob: c.Most, ModuleBytes: int(c.Module), ProcessBytes: int(c.Memory),
		CompileTimeout: c.CompileTimeout, PartTimeout: c.PartTimeout, Drain: c.Drain, Tally: tally, Logger: a.log}
	if slot != nil {
		slot.Apply(&cfg)
	}
	return job.Serve(ctx, cfg, control, func(own *client.Client) error {
		if own != nil {
			port.watch(prom.NewCollector(own))
		}
		port.watch(worker.NewCollector(tally))
		if slot != nil {
			return slot.Ready(port.tell(map[string]string{})["metrics"])
		}
		return a.ready(port.tell(map[string]string{"ready": "worker", "node": c.Node}), func(w io.Writer) {
			fmt.Fprintln(w, "worker ready")
			port.text(w)
		})
	})
}

// runSlots runs each slot as a process of this program, with the flags of this one.
func (c *workerCmd) runSlots(ctx context.Context, a *app) error {
	if c.MetricsListen == "" && (c.Pprof || c.MetricsTLS != metrics.TLSOff) {
		return usagef("--pprof and --metrics-tls need --metrics-listen")
	}
	s := worker.Slots{Name: c.Name, Count: c.Slots, Memory: int(c.Memory), Metrics: c.MetricsListen, Drain: c.Drain, Err: a.errOut, Logger: a.log}
	return s.Run(ctx, func(metrics []string) error {
		ready := worker.ReadySlots(c.Node, metrics)
		return a.ready(ready, func(w io.Writer) {
			fmt.Fprintf(w, "worker ready: %s slots, each a process\n", ready["slots"])
			if at := ready["metrics"]; at != "" {
				fmt.Fprintf(w, "metrics at %s\n", at)
			}
		})
	})
}

// workerFlags start workers beside a storage node, as processes of their own: a
// plugin that takes its process down takes nothing else with it.
type workerFlags struct {
	Workers          int    `default:"0" help:"Worker processes to run beside each storage node, for jobs."`
	WorkerReplicas   int    `placeholder:"N" help:"Replicas of what workers make; with 2 or more, jobs outlive a node and its memory. Default is the cluster's."`
	WorkerDurable    bool   `help:"What workers make survives a power failure of all nodes."`
	WorkerCommand    string `placeholder:"COMMAND" help:"Program to run as worker, with plugins of its own; default this one."`
	WorkerCert       string `name:"worker-tls-cert" placeholder:"FILE" help:"Certificate of the workers, of role worker; a node's own does not do."`
	WorkerKey        string `name:"worker-tls-key" placeholder:"FILE" help:"Key of the workers' certificate."`
	WorkerToken      string `placeholder:"TOKEN" help:"Token of the workers, of role worker; default the node's."`
	WorkerMetricsTLS string `name:"worker-metrics-tls" enum:"off,on,required" default:"off" help:"TLS on these ports, with --worker-tls-cert and --worker-tls-key; as --metrics-tls."`
	WorkerMetrics    string `name:"worker-metrics-listen" placeholder:"HOST:PORT" help:"Serve the first worker's Prometheus metrics there, and those of the others at the ports above."`

	begun int // workers of this process's nodes so far
}

const (
	maxWorkers = 64
	// restartMin and restartMax are how long a worker that has ended is waited for.
	restartMin = 100 * time.Millisecond
	restartMax = 10 * time.Second
)

// start keeps workers running until the context ends; wait returns when they have.
func (f *workerFlags) start(ctx context.Context, a *app, node string, controllers []string) (wait func(), err error) {
	if f.Workers < 0 || f.Workers > maxWorkers {
		return nil, usagef("--workers %d: want 0 to %d", f.Workers, maxWorkers)
	}
	if f.WorkerReplicas < 0 || f.WorkerReplicas > client.MaxReplicas {
		return nil, usagef("--worker-replicas %d: want 1 to %d", f.WorkerReplicas, client.MaxReplicas)
	}
	if f.Workers > 0 && a.trust != nil && a.trust.ID().Role == identity.Node && f.WorkerCert == "" && f.WorkerToken == "" {
		return nil, usagef("--workers %d: a node's certificate does not do for workers: give --worker-tls-cert and --worker-tls-key, see quarry cert worker", f.Workers)
	}
	exe := f.WorkerCommand
	if exe == "" {
		if exe, err = os.Executable(); err != nil {
			return nil, err
		}
	} else if exe, err = exec.LookPath(exe); err != nil {
		return nil, usagef("--worker-command: %w", err)
	}
	more := make([][]string, f.Workers)
	for i := range more {
		if more[i], err = f.metrics(f.begun + i); err != nil {
			return nil, err
		}
	}
	f.begun += f.Workers
	var wg sync.WaitGroup
	for i := range f.Workers {
		name := fmt.Sprintf("%s-%d", node, i+1)
		wg.Go(func() { f.keep(ctx, a, exe, name, node, controllers, more[i]) })
	}
	return wg.Wait, nil
}

// metrics are the flags that make worker number i serve its metrics.
func (f *workerFlags) metrics(i int) ([]string, error) {
	if f.WorkerMetrics == "" {
		if f.WorkerMetricsTLS != "off" {
			return nil, usagef("--worker-metrics-tls %s needs --worker-metrics-listen", f.WorkerMetricsTLS)
		}
		return nil, nil
	}
	host, port, err := net.SplitHostPort(f.WorkerMetrics)
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil || n == 0 || int(n)+i > 65535 {
		return nil, usagef("--worker-metrics-listen %q: want HOST:PORT with a port above 0, and one more for each further worker", f.WorkerMetrics)
	}
	out := []string{"--metrics-listen", net.JoinHostPort(host, strconv.Itoa(int(n)+i))}
	if f.WorkerMetricsTLS != "off" { // programs of one's own may be of a version that lacks it
		out = append(out, "--metrics-tls", f.WorkerMetricsTLS)
	}
	return out, nil
}

// keep runs one worker until ctx ends, and starts it again when it ends: after restartMin, twice
// as long after each start, up to restartMax; a worker that has lived for a minute begins with
// restartMin anew. Secrets go by the environment, which other users cannot read, and not by
// arguments.
func (f *workerFlags) keep(ctx context.Context, a *app, exe, name, node string, controllers, more []string) {
	pause := restartMin
	for ctx.Err() == nil {
		began := time.Now()
		cmd := exec.CommandContext(ctx, exe, "worker", "--controller", strings.Join(controllers, ","), "--node", node, "--name", name, "--fabric", a.cli.Transport,
			"--replicas", strconv.Itoa(f.WorkerReplicas))
		if f.WorkerDurable {
			cmd.Args = append(cmd.Args, "--durable")
		}
		if a.cli.RDMA {
			cmd.Args = append(cmd.Args, "--require-rdma")
		}
		if device := a.cli.RDMADevice.String(); device != "" {
			cmd.Args = append(cmd.Args, "--rdma-device", device)
		}
		cmd.Args = append(cmd.Args, more...)
		cert, key := f.WorkerCert, f.WorkerKey
		if a.trust != nil && a.trust.ID().Role != identity.Node && cert == "" {
			cert, key = a.cli.TLSCert, a.cli.TLSKey
		}
		encryption := a.cli.FabricTLS
		if cert == "" && encryption == tcp.TLSOn {
			encryption = "" // workers with a token have nothing to show
		}
		cmd.Env = append(os.Environ(), "QUARRY_TOKEN="+cmp.Or(f.WorkerToken, a.cli.Token), "QUARRY_TLS_CERT="+cert, "QUARRY_TLS_KEY="+key, "QUARRY_TLS_CA="+a.cli.TLSCA, "QUARRY_FABRIC_TLS="+encryption,
			"QUARRY_TENANT="+a.cli.Tenant, "QUARRY_KEY_FILE="+a.cli.KeyFile, "QUARRY_ALLOW_CLEAR="+strconv.FormatBool(a.cli.AllowClear), "QUARRY_CONFIG=", "QUARRY_RAIL="+strings.Join(a.cli.Rail, ","), "QUARRY_RAILS="+a.cli.Rails)
		cmd.Stderr = a.errOut
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = worker.DefaultDrain + 7*time.Second // its slots end after Drain, and have 5 s more
		err := runConfined(cmd, a.cli.RDMA || a.cli.Transport == client.TransportVerbs)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			pause = restartMin
		}
		a.log.Warn("worker has ended and is started again", slog.String("worker", name), slog.Duration("after", pause), slog.Any("error", err))
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, restartMax)
	}
}

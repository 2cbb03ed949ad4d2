package worker

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// Exit codes, as those of the command.
const (
	exitFailed = 1
	exitUsage  = 2
)

// Main runs a worker with the plugins of this program until it is interrupted, and
// does not return. It prints {"ready": "worker", ...} when it accepts parts.
func Main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// options are the flags of quarry worker that such a program has.
type options struct {
	client  client.Config
	tls     identity.Files
	listen  string
	secured *tls.Config // of the port of metrics; nil: plain
	work    job.Config
	memory  int
	module  int
	version string
	isolate string
	errOut  io.Writer
}

func parse(args []string, env func(string) string, errOut io.Writer) (*options, error) {
	o := &options{errOut: errOut}
	f := flag.NewFlagSet("worker", flag.ContinueOnError)
	f.SetOutput(errOut)
	text := func(p *string, name, variable, missing, help string) {
		if v := env(variable); v != "" {
			missing = v
		}
		f.StringVar(p, name, missing, help)
	}
	var controllers, encryption, keyFile string
	text(&controllers, "controller", "QUARRY_CONTROLLER", "http://127.0.0.1:7420", "controllers, comma separated")
	text(&o.client.Tenant, "tenant", "QUARRY_TENANT", "", "tenant whose jobs it runs")
	text(&o.client.Token, "token", "QUARRY_TOKEN", "", "token that the cluster asks for")
	text(&keyFile, "key-file", "QUARRY_KEY_FILE", "", "keys that payloads are encrypted with, as quarry key payload create makes it")
	allowClear, _ := strconv.ParseBool(env("QUARRY_ALLOW_CLEAR"))
	f.BoolVar(&o.client.AllowClear, "allow-clear", allowClear, "with --key-file: read objects that are not encrypted, too")
	text(&o.tls.Cert, "tls-cert", "QUARRY_TLS_CERT", "", "certificate of this process, PEM")
	text(&o.tls.Key, "tls-key", "QUARRY_TLS_KEY", "", "key of the certificate, PEM")
	text(&o.tls.CA, "tls-ca", "QUARRY_TLS_CA", "", "certificate authorities of controllers, PEM")
	f.StringVar(&o.client.Transport, "fabric", client.TransportAuto, "way to the memory: auto, verbs, shm or tcp")
	text(&encryption, "fabric-tls", "QUARRY_FABRIC_TLS", "", "encrypt the tcp fabric: off, on or required; default on with a certificate, else off")
	f.BoolVar(&o.client.RequireRDMA, "require-rdma", false, "refuse what does not go through an RDMA adapter")
	f.StringVar(&o.client.RDMADevice, "rdma-device", "", "RDMA device as NAME[/PORT][@ADDRESS][,OPTION=VALUE...]")
	f.IntVar(&o.client.Replicas, "replicas", 0, "replicas of what it makes: the jobs' own tree, outputs, intermediate results; 0 is the cluster's default")
	durable := f.Bool("durable", false, "what it makes survives the loss of all power: only in regions of nodes with persistent memory or disks")
	f.StringVar(&o.work.Name, "name", "", "name among the workers; default host and process")
	f.StringVar(&o.work.Node, "node", "", "storage node beside which it runs, whose memory it prefers")
	f.IntVar(&o.work.Slots, "slots", 1, "parts that run at the same time")
	f.IntVar(&o.work.MaxOfJob, "max-parts", 0, "parts of one job that run at the same time, at most; 0 means as many as there are slots")
	f.StringVar(&o.isolate, "isolate", IsolateAuto, IsolateHelp)
	f.DurationVar(&o.work.Drain, "drain", DefaultDrain, DrainHelp)
	f.IntVar(&o.memory, "memory-mib", 2048, "live memory at which the worker, or a slot that is a process, gives up its part and ends")
	f.IntVar(&o.module, "module-mib", job.DefaultMemoryBytes>>20, "memory of one instance of a WASM module; a job may ask for less")
	f.DurationVar(&o.work.CompileTimeout, "compile-timeout", job.DefaultCompileTimeout, "longest time to compile a WASM module; a job may ask for less")
	f.DurationVar(&o.work.PartTimeout, "part-timeout", job.MaxPartTimeout, "longest time for one attempt of one part that a job may ask for")
	f.StringVar(&o.listen, "metrics-listen", "", "serve Prometheus metrics there, HOST:PORT")
	metricsTLS := f.String("metrics-tls", metrics.TLSOff, "TLS on that port, with --tls-cert and --tls-key: off, on, or required: only clients with a certificate of the cluster")
	if len(args) > 0 && args[0] == "worker" { // as storage nodes say it
		args = args[1:]
	}
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("%q: want flags alone; --help lists them", f.Arg(0))
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	if *durable {
		o.client.Durability = client.Durable
	}
	if keyFile != "" {
		o.client.Keys = client.KeyFile(keyFile)
	}
	o.client.Controllers = strings.Split(controllers, ",")
	o.work.ProcessBytes, o.work.ModuleBytes = o.memory<<20, o.module<<20
	var trust *identity.Source
	if o.tls != (identity.Files{}) {
		src, err := identity.Open(o.tls, slog.Default())
		if err != nil {
			return nil, err
		}
		o.client.TLS = src.Client(identity.Controller)
		trust = src
	}
	var err error
	if o.secured, err = metrics.TLS(*metricsTLS, trust); err != nil {
		return nil, fmt.Errorf("--metrics-tls: %w", err)
	}
	if o.client.FabricTLS, err = tcp.NewTLS(encryption, trust); err != nil {
		return nil, fmt.Errorf("--fabric-tls: %w", err)
	}
	o.version = "unknown"
	if b, ok := debug.ReadBuildInfo(); ok {
		o.version = b.Main.Version
	}
	return o, nil
}

// check refuses flags outside their bounds.
func (o *options) check() error {
	if _, _, err := Isolates(o.isolate, o.work.Slots, o.memory, o.listen); err != nil {
		return err
	}
	if o.memory < 1 || o.module < 1 || o.memory > 1<<30 || o.module > 4<<10 {
		return fmt.Errorf("--memory-mib %d, --module-mib %d: want 1 or more, and at most 4096 for a module", o.memory, o.module)
	}
	if o.work.Drain < 0 {
		return fmt.Errorf("--drain %v: want 0 or more", o.work.Drain)
	}
	if o.work.CompileTimeout <= 0 || o.work.PartTimeout <= 0 || o.work.PartTimeout > job.MaxPartTimeout {
		return fmt.Errorf("--compile-timeout %v, --part-timeout %v: want more than 0, and at most %v for a part", o.work.CompileTimeout, o.work.PartTimeout, job.MaxPartTimeout)
	}
	if o.client.Replicas < 0 || o.client.Replicas > client.MaxReplicas {
		return fmt.Errorf("--replicas %d: want 1 to %d", o.client.Replicas, client.MaxReplicas)
	}
	return nil
}

func run(ctx context.Context, args []string, env func(string) string, out, errOut io.Writer) int {
	o, err := parse(args, env, errOut)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(errOut, "worker:", err)
		return exitUsage
	}
	if err := o.run(ctx, out, slog.New(slog.NewTextHandler(errOut, nil))); err != nil {
		fmt.Fprintln(errOut, "worker:", err)
		return exitFailed
	}
	return 0
}

func (o *options) run(ctx context.Context, out io.Writer, log *slog.Logger) error {
	slot, err := ThisSlot()
	if err != nil {
		return err
	}
	if slot == nil {
		apart, why, err := Isolates(o.isolate, o.work.Slots, o.memory, o.listen)
		if err != nil {
			return err
		}
		if apart {
			return o.runSlots(ctx, out, log)
		}
		if why != "" {
			log.Info("slots share a process", "why", why)
		}
	} else {
		slot.Apply(&o.work)
		if o.listen, err = slot.Listen(o.listen); err != nil {
			return err
		}
	}
	registry := metrics.NewRegistry(o.version, "worker")
	ready := map[string]string{"ready": "worker", "node": o.work.Node}
	if o.listen != "" { // first: a port that is taken is found while nothing has to be undone
		s, err := metrics.Serve(ctx, o.listen, registry, false, o.secured)
		if err != nil {
			return err
		}
		defer s.Close()
		ready["metrics"] = s.URL() + "/metrics"
	}
	StandBack()
	o.client.Logger, o.work.Logger = log, log
	o.work.Tally = &job.Tally{}
	return job.Serve(ctx, o.work, o.client, func(own *client.Client) error {
		if own != nil {
			registry.MustRegister(prom.NewCollector(own))
		}
		registry.MustRegister(NewCollector(o.work.Tally))
		if slot != nil {
			return slot.Ready(ready["metrics"])
		}
		return json.NewEncoder(out).Encode(ready)
	})
}

// runSlots runs each slot as a process.
func (o *options) runSlots(ctx context.Context, out io.Writer, log *slog.Logger) error {
	s := Slots{Name: o.work.Name, Count: max(1, o.work.Slots), Memory: o.work.ProcessBytes, Metrics: o.listen, Drain: o.work.Drain, Err: o.errOut, Logger: log}
	return s.Run(ctx, func(metrics []string) error {
		return json.NewEncoder(out).Encode(ReadySlots(o.work.Node, metrics))
	})
}

// ReadySlots is what a worker says when all its slots are ready.
func ReadySlots(node string, metrics []string) map[string]string {
	ready := map[string]string{"ready": "worker", "node": node, "slots": strconv.Itoa(len(metrics))}
	if all := strings.Join(metrics, ","); strings.Trim(all, ",") != "" {
		ready["metrics"] = all
	}
	return ready
}

// StandBack makes this process the first that the kernel ends when memory runs out. That frees the
// memory of a plugin, and keeps the storage node beside it, whose regions would be lost. A node that systemd has started is protected, and its workers would be.
func StandBack() {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0) // where that is not allowed, nothing is lost
}

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/bench"
)

type benchCmd struct {
	Ops        []string      `default:"read,update,alloc,free,readmany" help:"What to measure: read, update, alloc, free, readmany, writemany, mix (9 reads to 1 update), echo (a message that the first node answers); of a tree: kv-insert, kv-load, kv-get, kv-put, kv-mix, kv-scan; its memory a key by the order of the keys, beside that of Redis: kv-fill; of a Redis gateway beside Redis: gateway, and ycsb (workloads A to F)."`
	Sizes      []sizeFlag    `default:"128" short:"s" help:"Payload bytes, comma separated."`
	Clients    int           `default:"1" short:"n" help:"Goroutines that work at the same time, of each process."`
	Processes  int           `default:"0" help:"Client processes; 0 means goroutines of this one."`
	Duration   time.Duration `default:"2s" short:"D" help:"Of each measurement."`
	Replicas   int           `default:"1" short:"r" help:"Replicas of the objects."`
	Durable    bool          `help:"Measure durable objects, which survive a power failure of all nodes."`
	Slab       string        `enum:"pair,staged" default:"pair" help:"Slabs of objects, and of the nodes of trees; staged with one replica only."`
	NodeBytes  sizeFlag      `default:"4KiB" help:"Size of the nodes of trees, a power of two from 1KiB to 64KiB."`
	Batch      int           `default:"64" help:"Objects of one readmany or writemany, and commands of one Redis pipeline."`
	Objects    int           `placeholder:"N" help:"Objects of each client; 0 means 48 MiB of all clients together, at most 400000 each. Keys of a tree; 0 means a million."`
	Rate       float64       `placeholder:"N" help:"Operations a second of each client; 0 means as fast as it goes."`
	Yardsticks bool          `default:"true" negatable:"" help:"Also measure a memory copy, a TCP ping-pong and Redis."`
	Flush      bool          `help:"Measure instead what it costs to make a WRITE of the first of --sizes durable: each flush method that can run here beside an empty round of its provider, and why another cannot. Needs no cluster."`
	FlushOn    string        `name:"flush-on" type:"path" placeholder:"PATH" help:"With --flush: a folder, or a device DAX whose content is overwritten from its middle on; default the folder of temporary files."`
	Self       bool          `help:"Start a cluster of separate processes for the measurement."`
	Role       string        `hidden:"" enum:"main,worker,pingpong,idle" default:"main"`
}

// Run measures in a process of its own for each load, so that clients do not share a Go runtime. With --role this
// process is such a load.
func (b *benchCmd) Run(ctx context.Context, a *app) (err error) {
	for _, op := range b.Ops {
		if all := append(slices.Clone(bench.Ops), bench.Gateway, bench.YCSB); !slices.Contains(all, op) {
			return usagef("--ops %s: want one of %s", op, strings.Join(all, ", "))
		}
	}
	switch b.Role {
	case "worker":
		return bench.Work(ctx, a.clientConfig(), a.in, a.out)
	case "pingpong":
		return bench.PingPong(a.out)
	case "idle":
		return a.idle(ctx)
	}
	if b.Flush {
		return b.flush(ctx, a)
	}
	if b.FlushOn != "" {
		return usagef("--flush-on goes with --flush")
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	return b.measure(ctx, a, exe)
}

// measure runs the benchmark, on a cluster of its own with --self, and prints its rows.
func (b *benchCmd) measure(ctx context.Context, a *app, exe string) (err error) {
	var cluster *local.Cluster
	if b.Self {
		if cluster, err = local.Start(ctx, local.Config{Binary: exe, Nodes: max(3, b.Replicas)}); err != nil {
			return err
		}
		defer cluster.Stop()
		a.cli.Controller = []string{cluster.URL}
	}
	transports := []string{a.cli.Transport}
	if a.cli.Transport == client.TransportAuto {
		if transports, err = a.measured(ctx); err != nil {
			return err
		}
	}
	cfg := b.config(a, exe, transports)
	if !a.cli.JSON {
		fmt.Fprintf(a.out, "%s\n%s\n", machine(), benchHead)
		cfg.Row = func(r bench.Row) { printRow(a.out, r) }
	}
	rows, err := bench.Run(ctx, cfg)
	if err != nil {
		return err
	}
	mem := map[string]local.Memory{}
	if cluster != nil {
		if mem, err = memoryOf(ctx, cluster, exe); err != nil {
			return err
		}
	}
	if a.cli.JSON {
		return a.print(map[string]any{"machine": machine(), "rows": rows, "memory": mem}, nil)
	}
	for _, who := range []string{"storage node", "controller", "idle client"} {
		if m, ok := mem[who]; ok {
			fmt.Fprintf(a.out, "memory of %s: %s of its own, %s of shared memory touched\n", map[bool]string{true: "an ", false: "a "}[who == "idle client"]+who, bytesText(uint64(m.Private)), bytesText(uint64(m.Shared)))
		}
	}
	fmt.Fprintln(a.out, "latency of a batch is that of the whole call; rounds are a call's, verbs and fences an object's")
	return nil
}

// config says how the measurement starts its processes: this program again, with --role or as a gateway.
func (b *benchCmd) config(a *app, exe string, transports []string) bench.Config {
	keys := a.keyArgs()
	cfg := bench.Config{Client: a.clientConfig(), Transports: transports, Ops: b.Ops, Processes: b.Processes, Yardsticks: b.Yardsticks, Used: a.usedBytes,
		Job: bench.Job{Clients: b.Clients, Duration: b.Duration, Replicas: b.Replicas, Durable: b.Durable, Slab: slabKind(b.Slab), NodeBytes: int(b.NodeBytes), Batch: b.Batch, Objects: b.Objects, Rate: b.Rate},
		Command: func(role string) []string {
			if role == "pingpong" {
				return []string{exe, "bench", "--role", "pingpong"}
			}
			if role == bench.Gateway {
				return []string{exe, "gateway", "redis", "-C", strings.Join(a.cli.Controller, ","), "--token=" + a.cli.Token, "--tenant=" + a.cli.Tenant, "--listen", "127.0.0.1:0", "--create", "--slab", b.Slab, "--json", keys[0], keys[1]}
			}
			return []string{exe, "bench", "--role", "worker", "--transport", role, "-C", strings.Join(a.cli.Controller, ","), "--token=" + a.cli.Token, "--tenant=" + a.cli.Tenant, keys[0], keys[1]}
		}}
	for _, s := range b.Sizes {
		cfg.Sizes = append(cfg.Sizes, int(s))
	}
	return cfg
}

// usedBytes is the size of the blocks that are in use on all nodes. It waits until no node has reported
// another number for longer than nodes take to count.
func (a *app) usedBytes(ctx context.Context) (int64, error) {
	const step, settled = 250 * time.Millisecond, 4 * time.Second
	tick := time.NewTicker(step)
	defer tick.Stop()
	last, since := int64(-1), time.Duration(0)
	for since < settled {
		s, err := a.status(ctx)
		if err != nil {
			return 0, err
		}
		sum := int64(0)
		for _, n := range s.Nodes {
			sum += int64(n.Used)
		}
		if since += step; sum != last {
			last, since = sum, 0
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return last, nil
}

// memoryOf is the memory of a process of each kind.
func memoryOf(ctx context.Context, cluster *local.Cluster, exe string) (mem map[string]local.Memory, err error) {
	mem = map[string]local.Memory{}
	if mem["storage node"], err = local.MemoryOf(cluster.Nodes[0].PID()); err != nil {
		return nil, err
	}
	if mem["controller"], err = local.MemoryOf(cluster.Controller.PID()); err != nil {
		return nil, err
	}
	mem["idle client"], err = idleMemory(ctx, exe, cluster.URL)
	return mem, err
}

// clientConfig is the configuration of a client by the global flags.
func (a *app) clientConfig() client.Config {
	cfg := client.Config{Controllers: a.cli.Controller, Transport: a.cli.Transport, RequireRDMA: a.cli.RDMA, RDMADevice: a.cli.RDMADevice.String(), Token: a.cli.Token, Tenant: a.cli.Tenant, TLS: a.tls, FabricTLS: a.fabric, Logger: a.log, AllowClear: a.cli.AllowClear, Rails: a.cli.Rail, RailPolicy: a.cli.Rails}
	if a.cli.KeyFile != "" {
		cfg.Keys = client.KeyFile(a.cli.KeyFile)
	}
	return cfg
}

// keyArgs has another process of this program encrypt as this one does.
func (a *app) keyArgs() []string {
	return []string{"--key-file=" + a.cli.KeyFile, "--allow-clear=" + strconv.FormatBool(a.cli.AllowClear)}
}

// idle is a client that does one thing of each kind and then nothing; it prints
// its memory.
func (a *app) idle(ctx context.Context) error {
	return a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		ref, err := c.Alloc(ctx, []byte("idle"), client.AllocOptions{})
		if err != nil {
			return err
		}
		if err := c.Free(ctx, ref); err != nil {
			return err
		}
		m, err := local.MemoryOf(os.Getpid())
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.out, "%d %d\n", m.Private, m.Shared)
		return err
	})
}

// idleMemory is the memory of a client that is connected and does nothing, as its own process reports it.
func idleMemory(ctx context.Context, exe, url string) (m local.Memory, err error) {
	out, err := output(ctx, exe, "bench", "--role", "idle", "-C", url)
	if err != nil {
		return m, err
	}
	_, err = fmt.Sscan(out, &m.Private, &m.Shared)
	return m, err
}

const benchHead = "what        op          bytes  batch  clients       ops/s      MB/s      min  typical      p99    p99.9  rounds   verbs  fences  allocs  errors"

// printRow prints one figure in the columns of the table's head.
func printRow(w io.Writer, r bench.Row) {
	batch := "-"
	if r.Batch > 0 {
		batch = strconv.Itoa(r.Batch)
	}
	what := r.What
	if r.Replicas > 1 {
		what += fmt.Sprintf(" R=%d", r.Replicas)
	}
	clients := strconv.Itoa(r.Clients)
	if r.Processes > 1 {
		clients = fmt.Sprintf("%dx%d", r.Processes, r.Clients)
	}
	fmt.Fprintf(w, "%-11s %-10s %6d %6s %8s %11.0f %9.1f %8s %8s %8s %8s %7.3f %7.3f %7.3f %7.2f %7d\n", what, r.Op, r.Bytes, batch, clients, r.OpsPerS, r.MBPerS,
		ns(r.MinNS), ns(r.TypicalNS), ns(r.P99NS), ns(r.P999NS), r.Rounds, r.Verbs, r.Fences, r.Allocs, r.Errors)
	if r.Note != "" {
		fmt.Fprintf(w, "            %s\n", r.Note)
	}
}

// ns is a time to three digits.
func ns(n int64) string {
	switch {
	case n < 1000:
		return fmt.Sprintf("%dns", n)
	case n < 1e6:
		return fmt.Sprintf("%.3gus", float64(n)/1e3)
	case n < 1e9:
		return fmt.Sprintf("%.3gms", float64(n)/1e6)
	}
	return fmt.Sprintf("%.3gs", float64(n)/1e9)
}

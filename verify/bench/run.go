package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/quarrystore/quarry/client"
)

// Config of a run.
type Config struct {
	Client     client.Config
	Transports []string // measured one after the other
	Ops        []string
	Sizes      []int
	Job        Job // what all jobs share
	Processes  int // client processes; 0: goroutines of this one
	// Command starts a client process (Work) for a transport, or a ping-pong
	// server (PingPong) for "pingpong".
	Command    func(role string) []string
	Yardsticks bool
	// Used is the size in bytes of the blocks of regions that are in use on all nodes. KVFill needs it.
	Used func(context.Context) (int64, error)
	// Row is told each figure as it comes.
	Row func(Row)
}

// Run measures, and returns all figures.
func Run(ctx context.Context, cfg Config) ([]Row, error) {
	var rows []Row
	tell := func(r Row) {
		rows = append(rows, r)
		if cfg.Row != nil {
			cfg.Row(r)
		}
	}
	if cfg.Yardsticks {
		if err := yardsticks(ctx, cfg, tell); err != nil {
			return rows, err
		}
	}
	objects, trees := splitOps(cfg.Ops)
	if len(trees) > 0 && cfg.Yardsticks {
		if err := kvRedis(ctx, cfg, tell); err != nil {
			return rows, err
		}
	}
	for _, transport := range cfg.Transports {
		cc := cfg.Client
		cc.Transport = transport
		for _, size := range cfg.Sizes {
			if err := kvRun(ctx, cfg, cc, size, trees, tell); err != nil {
				return rows, fmt.Errorf("tree with values of %d bytes over %s: %w", size, transport, err)
			}
		}
		if slices.Contains(objects, YCSB) {
			if err := ycsbRun(ctx, cfg, cc, tell); err != nil {
				return rows, fmt.Errorf("YCSB over %s: %w", transport, err)
			}
		}
		for _, size := range cfg.Sizes {
			for _, op := range objects {
				if op == YCSB {
					continue // its records have a size of their own
				}
				if op == Gateway {
					if err := gatewayRun(ctx, cfg, cc, size, tell); err != nil {
						return rows, fmt.Errorf("gateway with values of %d bytes over %s: %w", size, transport, err)
					}
					continue
				}
				j := cfg.Job
				j.Op, j.Bytes = op, size
				r, err := one(ctx, cfg, cc, j)
				if err != nil {
					return rows, fmt.Errorf("%s of %d bytes over %s: %w", op, size, transport, err)
				}
				tell(r)
			}
		}
	}
	return rows, nil
}

func one(ctx context.Context, cfg Config, cc client.Config, j Job) (Row, error) {
	r := Row{What: cc.Transport, Op: j.Op, Bytes: j.Bytes, Clients: j.Clients, Processes: max(1, cfg.Processes), Replicas: j.Replicas}
	var o *outcome
	var err error
	if cfg.Processes > 0 {
		o, err = workInProcesses(ctx, cfg.Command(cc.Transport), cfg.Processes, j)
	} else {
		o, err = session(ctx, cc, j, func() error { return nil })
	}
	if err != nil {
		return r, err
	}
	if j.Op == "readmany" || j.Op == "writemany" {
		r.Batch = j.Batch
	}
	r.quantiles(o.hist)
	r.rate(o.Ops, o.Elapsed)
	r.Errors = o.Errors
	if o.Ops == 0 {
		return r, fmt.Errorf("nothing was done in %v: %s", o.Elapsed.Round(time.Millisecond), o.First)
	}
	r.setCost(o.cost, o.Calls, o.Ops)
	return r, nil
}

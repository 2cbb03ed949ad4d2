// Command chaos hurts clusters of real processes and prints what that showed.
// See package chaos; make chaos runs it.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/verify/chaos"
)

func main() {
	if chaos.IsWorker() {
		os.Exit(chaos.Worker())
	}
	var cfg chaos.Config
	var names, slab string
	var asJSON bool
	flag.StringVar(&cfg.Binary, "binary", "bin/quarry", "quarry executable")
	flag.StringVar(&names, "faults", "", "faults, comma separated, of "+strings.Join(chaos.FaultNames(), ", ")+"; all by default")
	flag.DurationVar(&cfg.Duration, "duration", 0, "begin no other run after so long; 0: one run of each fault")
	flag.IntVar(&cfg.Repeats, "repeats", 0, "times that each run injects its fault (default 3)")
	flag.IntVar(&cfg.Nodes, "nodes", 0, "storage nodes (default 4)")
	flag.IntVar(&cfg.Replicas, "replicas", 0, "replicas of each object (default 2)")
	flag.StringVar(&slab, "slab", "pair", "slabs of objects and of nodes of the tree: pair, or staged with -replicas 1")
	flag.BoolVar(&cfg.OpenWords, "open-words", false, "regions with open words, and clients that read at all replicas")
	flag.DurationVar(&cfg.Lease, "lease", 0, "lease of sessions (default 3s)")
	flag.DurationVar(&cfg.Pace, "pace", 0, "mean time between operations of a thread (default 2ms)")
	flag.BoolVar(&cfg.Durable, "durable", false, "durable objects in all runs, not only in those of the fault power")
	flag.BoolVar(&cfg.Loopback, "loopback", false, "no network namespaces")
	flag.BoolVar(&cfg.Plain, "plain", false, "no TLS; by default every process shows a certificate and requires one")
	flag.StringVar(&cfg.Dir, "dir", "", "where to keep what runs that went wrong leave")
	flag.BoolVar(&asJSON, "json", false, "print JSON")
	flag.Parse()
	if names != "" {
		cfg.Faults = strings.Split(names, ",")
	}
	if err := cfg.Slab.UnmarshalText([]byte(strings.ToUpper(slab))); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(2)
	}
	start := time.Now()
	cfg.Say = func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%6.1f  "+format+"\n", append([]any{time.Since(start).Seconds()}, args...)...)
	}
	os.Exit(run(cfg, asJSON))
}

func run(cfg chaos.Config, asJSON bool) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if cfg.Self, err = os.Executable(); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 1
	}
	rep, err := chaos.Run(ctx, cfg)
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 1
	}
	if asJSON {
		err = json.NewEncoder(os.Stdout).Encode(rep)
	} else {
		rep.Text(os.Stdout)
	}
	if err != nil || !rep.OK() {
		return 1
	}
	return 0
}

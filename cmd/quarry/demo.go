package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/cmd/quarry/demo"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/internal/local"
)

type demoCmd struct {
	Dir      string `arg:"" optional:"" help:"Directory to keep; default the Go toolchain's own src."`
	Replicas int    `default:"2" short:"r" help:"Replicas of each object."`
	Nodes    int    `default:"3" help:"Storage nodes, each a process."`
	Workers  int    `default:"4" help:"Goroutines of each client."`
	Query    string `default:"garbage collector" placeholder:"WORDS" help:"What to ask the search index at the end."`
	Role     string `hidden:"" enum:"main,read,read-less" default:"main"`
}

// demoReport is what the demo found.
type demoReport struct {
	Machine string        `json:"machine"`
	Dir     string        `json:"dir"`
	Parts   []demo.Result `json:"parts"`
	Killed  *demoKill     `json:"killed,omitempty"` // nil with one replica: its node is needed
	Index   *demo.Found   `json:"index"`
	NoRedis string        `json:"no_redis,omitempty"` // why redis-cli was not asked
	Fsck    *fsck.Report  `json:"fsck"`
	Seconds float64       `json:"seconds"`
	OK      bool          `json:"ok"`
}

// demoKill is what became of a storage node in the middle.
type demoKill struct {
	Node      string  `json:"node"`
	Primaries int     `json:"primaries"`  // regions that had it as their primary
	Regions   int     `json:"regions"`    // that it had a replica of
	GapS      float64 `json:"gap_s"`      // from the kill until every region could be read and written again
	RejoinedS float64 `json:"rejoined_s"` // from its new start until all replicas were in sync
}

func (d *demoCmd) Run(ctx context.Context, a *app) error {
	if d.Dir == "" {
		root, err := output(ctx, "go", "env", "GOROOT")
		if err != nil {
			return usagef("no Go toolchain found whose source could be kept: name a directory, quarry demo DIR")
		}
		d.Dir = filepath.Join(strings.TrimSpace(root), "src")
	}
	// A link is followed: the directory is what it points to.
	dir, err := filepath.EvalSymlinks(d.Dir)
	if err != nil {
		return usagef("directory to keep: %w", err)
	}
	d.Dir = dir
	if d.Role != "main" {
		return d.readBack(ctx, a)
	}
	if d.Nodes < d.Replicas {
		return usagef("%d replicas need as many nodes, there are %d", d.Replicas, d.Nodes)
	}
	start := time.Now()
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	a.say("starting a controller and %d storage nodes, each a process", d.Nodes)
	cluster, err := local.Start(ctx, local.Config{Binary: exe, Nodes: d.Nodes, NodeArgs: append(a.keyArgs(), "--workers", "1", "--worker-replicas", fmt.Sprint(d.Replicas))})
	if err != nil {
		return err
	}
	defer cluster.Stop()
	rep := demoReport{Machine: machine(), Dir: d.Dir}
	if err := d.work(ctx, a, cluster, exe, &rep); err != nil {
		return err
	}
	if err := cluster.Stop(); err != nil {
		return err
	}
	a.say("all processes ended, nothing left behind")
	rep.Seconds = time.Since(start).Seconds()
	var wrong []string
	for _, p := range rep.Parts {
		wrong = append(wrong, p.Mismatches...)
	}
	wrong = append(wrong, rep.Index.Wrong...)
	rep.OK = len(wrong) == 0 && rep.Fsck.OK()
	if err := a.print(rep, rep.text); err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %d files are not what they were, the first: %s", client.ErrCorrupt, len(wrong), wrong[0])
	}
	if !rep.Fsck.OK() {
		return fmt.Errorf("%d %w, the first: %s", len(rep.Fsck.Findings), errFindings, rep.Fsck.Findings[0])
	}
	return nil
}

// work loads over shm, kills a storage node, reads back in another process over tcp
// and through a Redis gateway, scans a folder, deletes a third, reads back again,
// starts the node again, builds a search index and asks it, and checks.
func (d *demoCmd) work(ctx context.Context, a *app, cluster *local.Cluster, exe string, rep *demoReport) error {
	cfg := a.clientConfig()
	cfg.Controllers, cfg.Transport, cfg.Replicas = []string{cluster.URL}, "shm", d.Replicas
	cctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	c, err := client.Connect(cctx, cfg)
	if err != nil {
		return err
	}
	part := func(what string, f func(demo.Options) (demo.Result, error)) func() error {
		return func() error {
			a.say("%s", what)
			bar := a.progress(what)
			r, err := f(demo.Options{Workers: d.Workers, Progress: bar.set})
			bar.end()
			if err == nil {
				rep.Parts = append(rep.Parts, r)
			}
			return err
		}
	}
	reader := func(role string) func(demo.Options) (demo.Result, error) {
		return func(demo.Options) (r demo.Result, err error) {
			out, err := output(ctx, exe, append(a.keyArgs(), "demo", "--role", role, "--json", "--transport", "tcp", "-C", cluster.URL, "--workers", fmt.Sprint(d.Workers), d.Dir)...)
			if err == nil {
				err = json.Unmarshal([]byte(out), &r)
			}
			return r, err
		}
	}
	steps := []func() error{
		part("loading every file of "+d.Dir+" into a tree, over shm", func(o demo.Options) (demo.Result, error) { return demo.Load(ctx, c, d.Dir, o) }),
		func() (err error) {
			if d.Replicas > 1 {
				rep.Killed, err = d.kill(ctx, a, cluster, c)
			}
			return err
		},
		part("reading every byte back in another process over tcp", reader("read")),
		func() error {
			err := part("asking redis-cli for some, through a gateway", func(demo.Options) (demo.Result, error) { return demo.AskRedis(ctx, c, d.Dir) })()
			if errors.Is(err, redis.ErrNoCLI) {
				rep.NoRedis = err.Error()
				return nil
			}
			return err
		},
		part("scanning a folder", func(o demo.Options) (demo.Result, error) { return demo.Scan(ctx, c, d.Dir, o) }),
		part("deleting a third", func(o demo.Options) (demo.Result, error) { return demo.DeleteThird(ctx, c, d.Dir, o) }),
		part("reading back what is left, and that the rest is gone", reader("read-less")),
		func() error {
			if rep.Killed == nil {
				return nil
			}
			return d.rejoin(ctx, a, cluster, rep.Killed)
		},
		func() error {
			a.say("building a search index in the cluster")
			found, err := demo.Index(ctx, c, d.Dir, d.Query)
			rep.Index = &found
			return err
		},
	}
	for _, step := range steps {
		if err = step(); err != nil {
			break
		}
	}
	// The client gives back what it holds: what is found afterwards is really there.
	if err := errors.Join(err, c.Close()); err != nil {
		return err
	}
	a.say("checking the whole structure")
	bar := a.progress("checking")
	rep.Fsck, err = fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.URL}, Progress: bar.set})
	bar.end()
	return err
}

// kill kills the storage node that is the primary of the most regions, as a crash
// would, and measures until every region serves again.
func (d *demoCmd) kill(ctx context.Context, a *app, cluster *local.Cluster, c *client.Client) (*demoKill, error) {
	a.cli.Controller = cluster.URLs
	s, err := a.status(ctx)
	if err != nil {
		return nil, err
	}
	primaries, hosted := map[string]int{}, map[string]int{}
	for _, r := range s.Regions {
		for i, p := range r.Replicas {
			hosted[p.Name]++
			if i == 0 {
				primaries[p.Name]++
			}
		}
	}
	sample, err := demo.TakeSample(ctx, c)
	if err != nil {
		return nil, err
	}
	k := &demoKill{}
	for _, n := range s.Nodes { // the first of equals
		if k.Node == "" || primaries[n.Name] > k.Primaries {
			k.Node, k.Primaries, k.Regions = n.Name, primaries[n.Name], hosted[n.Name]
		}
	}
	p := cluster.Process(k.Node)
	a.say("killing storage node %s (process %d): primary of %d regions, a replica of %d", k.Node, p.PID(), k.Primaries, k.Regions)
	start := time.Now()
	p.Kill()
	if err := demo.Touch(ctx, c, sample); err != nil {
		return k, fmt.Errorf("after the kill of %s: %w", k.Node, err)
	}
	k.GapS = time.Since(start).Seconds()
	a.say("every region could be read and written again after %.2f s", k.GapS)
	return k, nil
}

// rejoinTimeout is far above what copying a few regions takes.
const rejoinTimeout = 90 * time.Second

// rejoin starts the killed node again, with nothing, and waits until it has copies
// of what it had.
func (d *demoCmd) rejoin(ctx context.Context, a *app, cluster *local.Cluster, k *demoKill) error {
	a.say("starting storage node %s again, with empty memory", k.Node)
	start := time.Now()
	if err := cluster.Restart(ctx, k.Node); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, rejoinTimeout)
	defer cancel()
	for {
		s, err := a.status(ctx)
		if err != nil {
			return err
		}
		short := slices.ContainsFunc(s.Regions, func(r regionView) bool {
			inSync := 0
			for _, p := range r.Replicas {
				if p.State == "in_sync" {
					inSync++
				}
			}
			return r.State != "open" || inSync < d.Replicas
		})
		if !short {
			k.RejoinedS = time.Since(start).Seconds()
			a.say("all replicas are in sync again after %.2f s", k.RejoinedS)
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("storage node %s: replicas are not in sync after %v: see quarry status", k.Node, rejoinTimeout)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// readBack is the second client process.
func (d *demoCmd) readBack(ctx context.Context, a *app) error {
	c, err := a.connect(ctx, readOnly)
	if err != nil {
		return err
	}
	r, err := demo.ReadBack(ctx, c, d.Dir, d.Role == "read-less", demo.Options{Workers: d.Workers})
	if err := errors.Join(err, c.Close()); err != nil {
		return err
	}
	return json.NewEncoder(a.out).Encode(r)
}

// say prints what is going on, unless the output is JSON.
func (a *app) say(format string, args ...any) {
	if !a.cli.JSON {
		fmt.Fprintf(a.out, format+"\n", args...)
	}
}

func (r *demoReport) text(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n\nPART\tPROVIDER\tFILES\tBYTES\tMB/s\tp50\tp99\tROUNDS/FILE\tVERBS/FILE\n", r.Machine)
	for _, p := range r.Parts {
		rate := "-"
		if p.MBPerS > 0 {
			rate = fmt.Sprintf("%.1f", p.MBPerS)
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\t%s\t%.3f\t%.3f\n", p.What, p.Provider, p.Files, p.Bytes, rate, ns(p.P50NS), ns(p.P99NS), p.Rounds, p.Verbs)
	}
	if r.NoRedis != "" {
		fmt.Fprintf(w, "\nno look through the Redis gateway: %s\n", r.NoRedis)
	}
	if k := r.Killed; k != nil {
		fmt.Fprintf(w, "\nstorage node %s was killed after the load (primary of %d regions, a replica of %d): all could be read and written again after %.2f s\n"+
			"(a worker died with it, and what it might have read counts until its lease is over)\n"+
			"started again with empty memory at the end: all replicas in sync after %.2f s\n", k.Node, k.Primaries, k.Regions, k.GapS, k.RejoinedS)
	}
	fmt.Fprintln(w)
	printReport(w, r.Fsck)
	x := r.Index
	fmt.Fprintf(w, "\n%d workers beside the memory indexed %d files in %.2f s; %q was answered in %.1f ms:\n\n", x.Workers, x.Files, x.BuiltS, x.Query, x.AskedMS)
	for _, h := range x.Hits {
		fmt.Fprintf(w, "%.5f\t%s\t%s\n", h.Score, h.Name, strings.Join(h.Words, " "))
	}
	if len(x.Hits) == 0 {
		fmt.Fprintln(w, "no file has one of these words")
	}
	verdict := "every byte came back"
	if !r.OK {
		verdict = "NOT ALL IS RIGHT"
	}
	fmt.Fprintf(w, "\n%s; %.1f s in all\n", verdict, r.Seconds)
}

package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
)

// Config of a number of runs. Binary and Self are needed.
type Config struct {
	Binary string // a quarry executable
	Self   string // an executable that calls Worker when IsWorker says so
	// Faults by name; none means all.
	Faults []string
	// Duration after which no other run is begun; 0 means one run of each fault.
	Duration time.Duration
	// Repeats of the fault in a run; 0 means 3.
	Repeats int
	// Nodes and Replicas; 0 means 4 and 2.
	Nodes, Replicas int
	// Slab of objects and of nodes of the tree, as client.Config.Slab says. StagedSlab is for one replica.
	Slab client.SlabKind
	// OpenWords has regions with open words, and clients that read at all replicas; see docs/LAYOUT2.md.
	OpenWords bool
	// Controllers; 0 means 3.
	Controllers int
	// Lease of sessions; 0 means 3 s, the default of a controller.
	Lease time.Duration
	// Pace is the mean time between two operations of a thread; 0 means 2 ms.
	Pace time.Duration
	// Loopback forbids network namespaces.
	Loopback bool
	// Durable has every run keep durable objects, in files whose flushes go to ledgers; without it the runs of faults
	// that are about durable objects do.
	Durable bool
	// Plain has processes talk without TLS; else each shows a certificate.
	Plain bool
	// Dir keeps what runs that went wrong have left; empty means a temporary folder.
	Dir string
	// Say receives lines of progress. May be nil.
	Say func(format string, args ...any)
}

// readFrom is where clients read.
func (c Config) readFrom() string {
	if c.OpenWords {
		return client.ReadSpread
	}
	return client.ReadNear
}

func (c Config) withDefaults() Config {
	if len(c.Faults) == 0 {
		c.Faults = FaultNames()
	}
	if c.Repeats == 0 {
		c.Repeats = 3
	}
	if c.Nodes == 0 {
		c.Nodes = 4
	}
	if c.Replicas == 0 {
		c.Replicas = 2
	}
	if c.Controllers == 0 {
		c.Controllers = 3
	}
	if c.Lease == 0 {
		c.Lease = 3 * time.Second
	}
	if c.Pace == 0 {
		c.Pace = 2 * time.Millisecond
	}
	if c.Say == nil {
		c.Say = func(string, ...any) {}
	}
	return c
}

const (
	threads       = 4 // of each client; the first reads only
	sharedObjects = 8
	opTimeout     = 10 * time.Second
	calm          = time.Second // of undisturbed work before a fault and after it
	// healTimeout is how long a cluster may take to be whole again, and fsck to be clean.
	healTimeout = 60 * time.Second
	pollEvery   = 200 * time.Millisecond
	regionBytes = "32MiB"
	// capacityRegions is how many regions a node has room for.
	capacityRegions = 4
)

// Run runs faults one after the other, each against a cluster of its own, and
// reports. An error is one of the harness; what is wrong with the cluster is in
// the report.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	cfg = cfg.withDefaults()
	rep := &Report{Nodes: cfg.Nodes, Replicas: cfg.Replicas, Slab: cfg.Slab, OpenWords: cfg.OpenWords, Controllers: cfg.Controllers, Lease: cfg.Lease.String(), Trust: map[bool]string{true: "none", false: "mutual TLS"}[cfg.Plain]}
	var net *network
	if cfg.Loopback {
		rep.Network = "loopback, as asked"
	} else if n, err := newNetwork(); err != nil {
		rep.Network = "loopback: " + err.Error()
	} else {
		n.close()
		rep.Network = "namespaces"
	}
	cfg.Say("network: %s", rep.Network)
	start := time.Now()
	for lap := 0; ; lap++ {
		for _, name := range cfg.Faults {
			f, err := faultNamed(name)
			if err != nil {
				return nil, err
			}
			if why := f.needs(cfg, rep); why != "" {
				if lap == 0 {
					rep.Skipped = append(rep.Skipped, name+": needs "+why)
				}
				continue
			}
			if cfg.Duration > 0 && time.Since(start) > cfg.Duration {
				rep.Seconds = time.Since(start).Seconds()
				return rep, ctx.Err()
			}
			if rep.Network == "namespaces" {
				if net, err = newNetwork(); err != nil {
					return nil, err
				}
			}
			row, err := oneRun(ctx, cfg, f, net)
			net.close()
			if err != nil {
				return nil, err
			}
			rep.add(row)
		}
		if cfg.Duration == 0 || ctx.Err() != nil {
			rep.Seconds = time.Since(start).Seconds()
			return rep, ctx.Err()
		}
	}
}

// run is one cluster and the clients that work on it.
type run struct {
	cfg     Config
	net     *network       // nil: all processes on the loopback
	dir     string         // of journals, logs and the members' data
	durable bool           // objects are durable, and flushed to ledgers
	cluster *local.Cluster // controllers and storage nodes
	workers []*clientProcess
	nextID  int      // of a client process; never used twice
	objects []string // shared ones, by reference or key

	ledgers []string // variable of nodes and clients that names the folder of the ledgers; none where objects are not durable
	// Variables that name the certificates of clients, and of commands; none without TLS.
	asWorker, asOperator []string

	// Of the present fault, for its heal.
	target  string           // member that it strikes
	targets []string         // or several
	turn    int              // picks the next member
	worker  *clientProcess   // client that it strikes
	off     []*clientProcess // clients that lost power with the nodes
	cuts    powerCuts
	filler  *clientProcess // client that fills the cluster
}

// clientProcess is a client that was started.
type clientProcess struct {
	cfg      workerConfig
	place    string
	process  *local.Process
	expected bool // its end is the fault's doing
}

// oneRun starts a cluster, injects one fault several times, and checks the histories.
func oneRun(ctx context.Context, cfg Config, f fault, net *network) (row *Row, err error) {
	cfg.Say("%s: %s", f.name, f.what)
	durable := cfg.Durable || f.durable
	parent := cfg.Dir
	if parent == "" {
		if parent = "/dev/shm"; durable || !isDir(parent) { // etcd writes to disk with every change
			parent = os.TempDir()
		}
	}
	dir, err := os.MkdirTemp(parent, "quarry-chaos-")
	if err != nil {
		return nil, err
	}
	r := &run{cfg: cfg, net: net, dir: dir, durable: durable}
	row = &Row{Fault: f.name}
	defer func() {
		if err == nil && row.OK() {
			err = os.RemoveAll(dir)
		} else {
			cfg.Say("%s: what is left is in %s", f.name, dir)
		}
	}()
	defer r.stopAll()
	if err := r.start(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	windows := r.hurt(ctx, f, row)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	r.finish(ctx, row)
	events, err := readJournals(dir)
	if err != nil {
		return nil, err
	}
	commands, err := readCommands(dir)
	if err != nil {
		return nil, err
	}
	row.LinesLost = r.cuts.lines
	v := judge(events)
	v.judgeCommands(commands)
	row.Operations, row.Succeeded, row.Unknown = v.ops, v.succeeded, v.unknown
	row.Lost, row.Illegal, row.Undecided = v.lost, v.illegal, v.undecided
	for _, w := range windows {
		all, changes := gaps(events, r.objects, w[0], w[1])
		row.Gaps = append(row.Gaps, all.Seconds())
		row.ChangeGaps = append(row.ChangeGaps, changes.Seconds())
	}
	cfg.Say("%s", row)
	return row, nil
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// start starts the cluster, makes the objects and sets clients to work.
func (r *run) start(ctx context.Context) error {
	var hostErr error
	var err error
	cfg := local.Config{
		Binary: r.cfg.Binary, Nodes: r.cfg.Nodes, Controllers: r.cfg.Controllers, Dir: r.dir, Keep: true, RegionBytes: regionBytes,
		Capacity: strconv.Itoa(capacityRegions*32) + "MiB", Lease: r.cfg.Lease.String(), LogLevel: "info", TLS: !r.cfg.Plain,
	}
	if r.durable {
		ledgers, err := r.makeLedgers()
		if err != nil {
			return err
		}
		cfg.NodeEnv = ledgers
	}
	if r.net != nil {
		cfg.Host = func(member string) local.Host {
			h, err := r.net.host(member)
			hostErr = errors.Join(hostErr, err)
			return h
		}
	}
	r.cluster, err = local.Start(ctx, cfg)
	if err := errors.Join(err, hostErr); err != nil {
		return err
	}
	if !r.cfg.Plain {
		// Workers are gateways, too: each has one inside.
		r.asWorker, err = r.cluster.Env(identity.Gateway, "worker")
		if err == nil {
			r.asOperator, err = r.cluster.Env(identity.Operator, "ops")
		}
		if err != nil {
			return err
		}
	}
	// More regions than one, with different primaries.
	create := []string{"region", "create", "--replicas", strconv.Itoa(r.cfg.Replicas), "--count", "3"}
	if r.durable {
		create = append(create, "--durable")
	}
	if r.cfg.OpenWords {
		create = append(create, "--open-words")
	}
	if _, err := r.quarry(ctx, nil, create...); err != nil {
		return err
	}
	setup, err := r.spawn(ctx, "k0", workerConfig{Role: roleSetup, Transport: "tcp", Count: sharedObjects})
	if err != nil {
		return err
	}
	setup.process.Wait()
	r.workers = nil
	r.objects = strings.Split(setup.process.Ready["objects"], ",")
	for i, transport := range []string{"tcp", "shm", "tcp"} {
		if _, err := r.spawn(ctx, "k"+strconv.Itoa(i+1), workerConfig{Role: roleLoad, Transport: transport}); err != nil {
			return err
		}
	}
	return nil
}

// spawn starts a client process.
func (r *run) spawn(ctx context.Context, place string, w workerConfig) (*clientProcess, error) {
	r.nextID++
	w.ID = r.nextID
	w.Controllers, w.Replicas, w.Durable, w.Slab, w.ReadFrom, w.Threads, w.Pace, w.Timeout = r.cluster.URLs, r.cfg.Replicas, r.durable, r.cfg.Slab, r.cfg.readFrom(), threads, r.cfg.Pace, opTimeout
	if w.Objects == nil {
		w.Objects = r.objects
	}
	name := "worker-" + strconv.Itoa(w.ID)
	w.Journal = filepath.Join(r.dir, name+".log")
	file := filepath.Join(r.dir, name+".json")
	b, err := json.Marshal(w)
	if err == nil {
		err = os.WriteFile(file, b, 0o600)
	}
	if err != nil {
		return nil, err
	}
	h, err := r.net.host(place)
	if err != nil {
		return nil, err
	}
	p, err := local.Run(ctx, local.Command{Name: name, Run: h.Run, Path: r.cfg.Self, Env: slices.Concat([]string{workerEnv + "=" + file}, r.asWorker, r.ledgers), Log: filepath.Join(r.dir, name+".err")})
	if err != nil {
		return nil, err
	}
	c := &clientProcess{cfg: w, place: place, process: p}
	if w.Role == roleLoad {
		r.workers = append(r.workers, c)
	}
	return c, nil
}

// hurt injects the fault again and again and returns when each began and when the
// cluster was whole again.
func (r *run) hurt(ctx context.Context, f fault, row *Row) (windows [][2]int64) {
	for range r.cfg.Repeats {
		r.sleep(ctx, calm)
		from := now()
		err := f.inject(ctx, r)
		if err != nil {
			row.problem("%s could not be injected: %v", f.name, err)
			return windows
		}
		r.sleep(ctx, f.hold(r.cfg.Lease))
		if err := f.heal(ctx, r); err != nil {
			row.problem("after %s of %s: %v", f.name, r.target, err)
			return windows
		}
		row.Runs++
		if err := r.whole(ctx); err != nil {
			row.problem("after %s of %s: %v", f.name, r.target, err)
			return append(windows, [2]int64{from, now()})
		}
		r.sleep(ctx, calm)
		windows = append(windows, [2]int64{from, now()})
		if ctx.Err() != nil {
			return windows
		}
	}
	return windows
}

// finish lets the clients end, reads everything once more, and checks.
func (r *run) finish(ctx context.Context, row *Row) {
	for _, w := range r.workers {
		if !w.process.Ended() {
			if err := w.process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				row.problem("%s: %v", w.process.Name, err)
			}
		}
	}
	for _, w := range r.workers {
		if st := r.waitFor(ctx, w.process, 3*opTimeout); st == nil {
			row.problem("%s does not end", w.process.Name)
		} else if !st.Success() && !w.expected {
			row.problem("%s: %v: %s", w.process.Name, st, lastLine(w.process.Log()))
		}
	}
	events, err := readJournals(r.dir)
	if err != nil {
		row.problem("%v", err)
		return
	}
	final := workerConfig{Role: roleFinal, Transport: "tcp", Objects: []string{}}
	for _, e := range events {
		if e.kind == opBirth && e.result == okResult {
			final.Objects = append(final.Objects, e.object)
		}
	}
	commands, err := readCommands(r.dir)
	if err != nil {
		row.problem("%v", err)
		return
	}
	for group := range commands {
		final.Groups = append(final.Groups, group)
	}
	slices.Sort(final.Groups)
	w, err := r.spawn(ctx, "k0", final)
	if err != nil {
		row.problem("reading everything in the end: %v", err)
		return
	}
	if st := r.waitFor(ctx, w.process, healTimeout); st == nil || !st.Success() {
		row.problem("the last reader: %v: %s", st, lastLine(w.process.Log()))
	}
	if err := r.clean(ctx, row); err != nil {
		row.problem("%v", err)
	}
}

// waitFor waits for a process to end; nil if it does not.
func (r *run) waitFor(ctx context.Context, p *local.Process, d time.Duration) *os.ProcessState {
	for until := time.Now().Add(d); time.Now().Before(until) && ctx.Err() == nil; r.sleep(ctx, pollEvery/10) {
		if p.Ended() {
			return p.Wait()
		}
	}
	return nil
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

func (r *run) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Exit codes of the command that matter here.
const (
	exitUnreachable = 6
	exitDamaged     = 8
)

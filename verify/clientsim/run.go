package clientsim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

const treeName = "tree"

// run is one schedule: clients at work, faults, and what is true at the end.
type run struct {
	*Cluster
	h          *history        // all operations, checked after the schedule
	ctx        context.Context // of the work
	workers    []*worker
	background sync.WaitGroup // goroutines beside the workers: connects, closes, revocations
	objects    *objectSet     // the objects that workers share
	space      spaceWork      // with Options.Spaces
	pool       poolWork       // with Options.Pools
	counter    counterWork    // with Options.Help
	watchers   []*watcher     // with Options.Watch
	names      nameWork       // with Options.Names

	mu       sync.Mutex     // guards the fields below
	callback time.Duration  // the longest so far
	hurt     bool           // a session may have ended otherwise than by its client's close
	loads    []*load        // Loads of trees under way
	extras   []*incarnation // processes beside the workers that faults may strike
}

// hurtSessions notes that a session may have to be fenced.
func (r *run) hurtSessions() {
	r.mu.Lock()
	r.hurt = true
	r.mu.Unlock()
}

// slept is how long callbacks and standing processes may have held up a call.
func (r *run) slept(began time.Time) time.Duration {
	r.mu.Lock()
	d := r.callback
	r.mu.Unlock()
	if r.opt.Faults {
		d += max(0, r.cured().Sub(began))
	}
	return d
}

// Result of a schedule.
type Result struct {
	Seed     uint64
	Options  Options
	Problems []string
	Log      []string
	Counts   Counts
	Digest   uint64
	history  *history
}

// Check checks the histories of a schedule. It is called outside of the bubble, where
// time does not stand still while something is computed.
func (r *Result) Check() { r.Problems = append(r.Problems, r.history.check()...) }

// A theme makes a rare company of options likely.
const (
	anyTheme      = -1
	collectTheme  = iota - 1     // clients stand still beside collections
	repairTheme                  // the only writer stands still beside repairs
	deadlineTheme                // nothing is hurt but by deadlines
	callbackTheme                // callbacks beside failovers
	nodeTheme                    // nodes lose the controllers, clients stand still
	loadTheme                    // sessions end under a Load, beside collections
	leaveTheme                   // clients are closed while their callbacks block
	stuckTheme                   // calls that allocate are over before a node answers
	endTheme                     // sessions end under rounds that are slow, and fences are late
	themes        = endTheme + 3 // the others have none
)

// OptionsOf draws a schedule's options from its seed, and its theme unless one is given.
func OptionsOf(seed uint64, theme int) Options {
	rng := rand.New(rand.NewPCG(seed, 2))
	o := Options{Regions: 1 + rng.IntN(2), Clients: 1 + rng.IntN(3), Lanes: 2 + rng.IntN(3), Length: time.Duration(6+rng.IntN(14)) * time.Second,
		Objects: 3 + rng.IntN(5), Keys: 12 + rng.IntN(30), Tree: rng.IntN(2) == 0, PerByte: []time.Duration{1, 10, 100}[rng.IntN(3)]}
	o.Workers = 1 + rng.IntN(o.Lanes)
	o.Faults = rng.IntN(4) != 0
	o.Deadline = rng.IntN(3) == 0
	o.Callback = rng.IntN(3) == 0
	o.Collect = rng.IntN(2) == 0
	o.Repair = rng.IntN(3) == 0
	if n := rng.IntN(themes); theme == anyTheme {
		theme = n
	}
	switch theme {
	case collectTheme:
		o.Tree, o.Faults, o.Collect, o.Well, o.Eager = true, true, true, true, true
	case repairTheme:
		o.Tree, o.Faults, o.Repair, o.Well, o.Eager, o.Clients, o.Workers = false, true, true, true, true, 1, 1
	case deadlineTheme:
		o.Faults, o.Deadline = false, true
	case callbackTheme:
		o.Faults, o.Callback, o.Tree, o.Spare, o.Deadline = true, true, false, true, false
	case nodeTheme:
		o.Faults, o.Tree, o.Mute, o.Objects, o.Clients = true, false, true, 2, 3
	case loadTheme:
		o.Tree, o.Faults, o.Collect, o.Well, o.Eager, o.Loads, o.Clients = true, true, true, true, true, true, 1
		o.Length = max(o.Length, 20*time.Second)
	case leaveTheme:
		o.Tree, o.Faults, o.Callback, o.Well, o.Leave, o.Deadline = false, true, true, true, true, false
	case endTheme:
		o.Tree, o.Faults, o.Well, o.End, o.Deadline, o.Clients = false, true, true, true, false, 2+rng.IntN(2)
	case stuckTheme:
		o.Tree, o.Faults, o.Deadline, o.Well, o.Stuck, o.Callback, o.Collect, o.Repair = false, true, true, true, true, false, false, false
		o.Clients, o.Objects = 1+rng.IntN(2), 12
		o.Length = max(o.Length, 15*time.Second)
	}
	if o.Faults {
		o.Late, o.Torn = rng.IntN(4), 8
		o.LoseAnswer, o.ResetRPC = []int{0, 500, 2000}[rng.IntN(3)], []int{0, 50, 500}[rng.IntN(3)]
	}
	if o.End {
		o.Late = 100 + rng.IntN(200)
	}
	if o.Spare || o.Stuck {
		o.Late, o.LoseAnswer, o.ResetRPC = 0, 0, 0
	}
	o.Encrypt = rng.IntN(2) == 0
	return o
}

// Play plays one schedule. It is called in a bubble.
func Play(seed uint64, o Options) *Result {
	c, err := Start(seed, o)
	res := &Result{Seed: seed, Options: o}
	r := &run{Cluster: c, h: newHistory(), objects: &objectSet{}}
	res.history = r.h
	if err != nil {
		c.fail("start: %v", err)
	} else {
		r.play()
	}
	if r.now() >= longest {
		c.fail("something has waited for %v of virtual time", longest)
	}
	c.close()
	r.background.Wait()
	res.Problems, res.Counts, res.Log = c.problems, c.Counts, c.record.lines
	return res
}

func (r *run) play() {
	var cancel context.CancelFunc
	r.ctx, cancel = context.WithTimeout(r.Cluster.ctx, r.opt.Length)
	defer cancel()
	if !r.prepare() {
		return
	}
	var work sync.WaitGroup
	r.World.mu.Lock()
	r.lastCure = time.Now()
	r.wild.Store(&r.opt.wildness)
	r.World.mu.Unlock()
	r.hurt = r.opt.Faults
	for i := range r.opt.Clients {
		w := &worker{c: r.Cluster, r: r, id: i + 1, ready: make(chan struct{})}
		r.workers = append(r.workers, w)
		w.connect(r.ctx)
	}
	for _, w := range r.workers {
		for g := range r.opt.Workers {
			work.Go(func() { r.work(w, g) })
		}
	}
	if r.opt.Faults {
		if !r.opt.Spare {
			work.Go(func() { r.hurtClients(r.ctx) })
		}
		work.Go(func() { r.hurtServers(r.ctx) })
	}
	if r.opt.Collect && r.opt.Tree {
		work.Go(func() { r.maintain(r.ctx, r.collect) })
	}
	if r.opt.Repair {
		work.Go(func() { r.maintain(r.ctx, r.repair) })
	}
	if r.opt.Tree {
		loaders := 1
		if r.opt.Loads {
			loaders = 4
		}
		for i := range loaders {
			work.Go(func() { r.loader(r.ctx, i) })
		}
	}
	unfollow := func() {}
	if r.opt.Watch {
		var fctx context.Context
		fctx, unfollow = context.WithCancel(r.Cluster.ctx)
		r.startWatches(fctx)
	}
	watched := make(chan struct{})
	wctx, unwatch := context.WithCancel(r.Cluster.ctx)
	go func() { defer close(watched); r.watchRegions(wctx) }()
	work.Wait()
	unwatch()
	<-watched
	r.finish(unfollow)
}

func (r *run) prepare() bool {
	ctx, cancel := context.WithTimeout(r.Cluster.ctx, 30*time.Second)
	defer cancel()
	if r.opt.Spaces {
		if err := r.makeSpace(ctx); err != nil {
			r.fail("prepare: %v", err)
			return false
		}
	}
	if r.opt.Pools {
		if err := r.makePool(ctx); err != nil {
			r.fail("prepare: %v", err)
			return false
		}
	}
	if r.opt.Help {
		if err := r.makeCounter(ctx); err != nil {
			r.fail("prepare: %v", err)
			return false
		}
	}
	if !r.opt.Tree {
		return true
	}
	p, cl, err := r.Client(ctx, "prepare", client.Config{Lanes: 1, Replicas: r.opt.replicas(), Slab: r.opt.slab()})
	if err == nil {
		_, err = kv.Create(ctx, cl, treeName, btree.Config{NodeBytes: 1 << 10})
		err = errors.Join(err, cl.Close())
	}
	if err != nil {
		r.fail("prepare: %v", err)
		return false
	}
	p.cancel()
	return true
}

// work is one goroutine of a client.
func (r *run) work(w *worker, g int) {
	for r.ctx.Err() == nil && !r.failed() {
		l, ok := w.incarnation(r.ctx)
		if !ok {
			return
		}
		switch {
		case r.opt.Spaces:
			r.spaceOp(w, l, g)
		case r.opt.Pools:
			r.poolOp(w, l)
		case r.opt.Names:
			r.nameOp(w, l)
		case r.opt.Help && !r.chance(20):
			r.countOp(w, l)
		case r.opt.Tree:
			r.treeOp(w, l)
		default:
			r.objectOp(w, l)
		}
		_ = r.pause(r.ctx, r.rest())
	}
}

// maintain runs a command now and then, each time in a process of its own.
func (r *run) maintain(ctx context.Context, command func(context.Context, *Proc) error) {
	most := 4 * time.Second
	if r.opt.Eager {
		most = time.Second
	}
	for i := 0; r.pause(ctx, r.between(100*time.Millisecond, most)) == nil; i++ {
		p := r.proc(fmt.Sprintf("command%d", i))
		cctx, cancel := context.WithTimeout(r.Cluster.ctx, time.Minute)
		err := command(cctx, p)
		cancel()
		p.cancel()
		if err != nil {
			r.log.Info("command", "error", err)
		}
	}
}

// collect is quarry kv collect.
func (r *run) collect(ctx context.Context, p *Proc) error {
	r.count(&r.Counts.Collects)
	cl, err := r.connectAs(ctx, p)
	if err != nil {
		return err
	}
	_, err = r.collectWith(ctx, p, cl, false)
	return errors.Join(err, cl.Close())
}

func (r *run) connectAs(ctx context.Context, p *Proc) (*client.Client, error) {
	return client.Connect(ctx, r.config(p, client.Config{Lanes: 2, Replicas: r.opt.replicas(), Slab: r.opt.slab(), Keys: r.keys()}))
}

// connectKeyless is connectAs of a program that has no keys.
func (r *run) connectKeyless(ctx context.Context, p *Proc) (*client.Client, error) {
	return client.Connect(ctx, r.config(p, client.Config{Lanes: 2, Replicas: r.opt.replicas(), Slab: r.opt.slab()}))
}

func (r *run) collectWith(ctx context.Context, p *Proc, cl *client.Client, dry bool) (kv.Collected, error) {
	return kv.Collect(ctx, cl, dry, func(ctx context.Context, found func(kv.Stray)) error {
		rep, err := fsck.Cluster(ctx, r.fsckConfig(p, found))
		if err != nil {
			return err
		}
		return rep.Hidden()
	})
}

// repair is quarry fsck --repair.
func (r *run) repair(ctx context.Context, p *Proc) error {
	r.count(&r.Counts.Repairs)
	_, err := r.repairAs(ctx, p)
	return err
}

func (r *run) repairAs(ctx context.Context, p *Proc) (*fsck.Report, error) {
	rep, err := fsck.Cluster(ctx, r.fsckConfig(p, nil))
	for n := 1; err == nil && !rep.OK() && n <= 10; n++ {
		var cl *client.Client
		if cl, err = r.connectKeyless(ctx, p); err != nil {
			break
		}
		_, err = fsck.Repair(ctx, cl, rep.Findings)
		if err = errors.Join(err, cl.Close()); err != nil {
			break
		}
		left := len(rep.Findings) + rep.More
		if rep, err = fsck.Cluster(ctx, r.fsckConfig(p, nil)); err != nil || len(rep.Findings)+rep.More >= left {
			break
		}
	}
	return rep, err
}

// failoverBound is how long a region may be without service when no process stands
// still and no link is cut: detection, the leases of those that do not answer, fences,
// and another leader.
const failoverBound = 12 * time.Second

// watchRegions checks that a region which cannot be used is open again within the bound.
func (r *run) watchRegions(ctx context.Context) {
	since := map[uint32]time.Time{}
	for r.pause(ctx, 250*time.Millisecond) == nil {
		s := r.status()
		if s == nil {
			clear(since)
			continue
		}
		cured := r.cured()
		for _, g := range s.Table.GetRegions() {
			if g.State == quarrypb.RegionState_REGION_STATE_OPEN || time.Now().Before(cured) {
				delete(since, g.Id)
				continue
			}
			from, ok := since[g.Id]
			if !ok {
				since[g.Id] = time.Now()
			} else if time.Since(from) > failoverBound {
				r.fail("a region has been without service for %v after the last fault: %s", time.Since(from), describe(s))
				return
			}
		}
	}
}

// finish ends all faults, watches and sessions and checks what is left.
func (r *run) finish(unfollow context.CancelFunc) {
	r.heal()
	ctx, cancel := context.WithTimeout(r.Cluster.ctx, 5*time.Minute)
	defer cancel()
	_ = r.pause(ctx, time.Until(r.cured()))
	r.background.Wait()
	for i := range r.nodes {
		r.restart(i)
	}
	if r.opt.Watch {
		r.settleWatches(ctx, unfollow)
	}
	if r.opt.Names {
		r.settleNames(ctx)
	}
	for _, w := range r.workers {
		if w.cl != nil {
			if (!r.opt.Faults || r.opt.Spare) && w.cl.SessionID() != w.first {
				r.fail("%s: its session has ended, and it was not hurt", w.p.Name)
			}
			if err := w.cl.Close(); err != nil && !r.opt.Faults {
				r.fail("%s: close: %v", w.p.Name, err)
			}
			w.p.cancel()
		}
	}
	for !whole(r.status()) {
		if r.pause(ctx, 200*time.Millisecond) != nil {
			r.fail("replicas are not in sync: %s", describe(r.status()))
			return
		}
	}
	if !r.sessionsEnd(ctx) {
		return
	}
	p := r.proc("last")
	var rep *fsck.Report
	err := r.again(ctx, func() (err error) {
		rep, err = fsck.Cluster(ctx, r.fsckConfig(p, nil))
		return err
	})
	if err != nil {
		r.fail("fsck: %v", err)
		return
	}
	r.count(&r.Counts.Checks)
	r.judge(rep)
	cl, err := r.connectAs(ctx, p)
	if err != nil {
		r.fail("connect at the end: %v", err)
		return
	}
	if r.opt.Spaces {
		r.checkSpace(ctx, cl)
	}
	if r.opt.Help {
		r.checkCounter(ctx, cl)
	}
	switch {
	case r.opt.Tree:
		r.checkTrees(ctx, p, cl)
	case r.opt.Names: // what replacements that were cut off have left, kv collect frees
	case r.opt.Pools: // the only object is the pool's
		r.checkPool(ctx, cl)
	default:
		r.checkObjects(ctx, p, cl)
	}
	if err := cl.Close(); err != nil {
		r.fail("close at the end: %v", err)
	}
	if r.failed() || !r.sessionsEnd(ctx) {
		return
	}
	if err = r.again(ctx, func() (err error) { rep, err = r.repairAs(ctx, p); return err }); err != nil {
		r.fail("fsck --repair: %v", err)
	} else if !rep.OK() {
		r.fail("fsck after a repair: %d findings, the first: %v", len(rep.Findings)+rep.More, rep.Findings[0])
	}
}

// again repeats a command of the end until it has an answer: a region may still move.
func (r *run) again(ctx context.Context, f func() error) error {
	for {
		err := f()
		if err == nil || r.pause(ctx, 200*time.Millisecond) != nil {
			return err
		}
	}
}

// judge looks at what a check found when every session has ended. A client that was
// killed may have left chunks that no object names; one that was not killed has left nothing.
func (r *run) judge(rep *fsck.Report) {
	for _, f := range rep.Findings {
		if f.Kind == fsck.KindLeak && strings.Contains(f.What, "chunk") && r.hurt {
			r.count(&r.Counts.Leftovers)
			continue
		}
		r.fail("fsck: %v", f)
	}
}

// sessionsEnd waits until no session is left that has ended, or that will end: all but those that nodes keep. A scrub that ends its session leaves a
// block that it was freeing to the scrub for that session.
func (r *run) sessionsEnd(ctx context.Context) bool {
	for {
		res, err := ask(r.Cluster, ctx, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions)
		left := 0
		var last string
		if err == nil {
			for _, s := range res.Sessions {
				if s.State != "live" || !strings.HasPrefix(s.Name, "procedures of") {
					left++
					last = fmt.Sprintf("%s %s", s.Name, s.State)
				}
			}
			if left == 0 {
				return true
			}
		}
		if r.pause(ctx, 500*time.Millisecond) != nil {
			r.fail("%d sessions do not end, one is %s (%v)", left, last, err)
			return false
		}
	}
}

// everything lists every object of the cluster.
func (r *run) everything(ctx context.Context, p *Proc) (map[proto.Ref]fsck.Object, error) {
	out := map[proto.Ref]fsck.Object{}
	err := r.again(ctx, func() error {
		clear(out)
		_, err := fsck.Cluster(ctx, r.fsckConfig(p, func(o fsck.Object) { out[o.Ref] = o }))
		return err
	})
	return out, err
}

package chaos

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// fault is a way to hurt a cluster, and what heals it.
type fault struct {
	name    string
	what    string
	network bool // needs namespaces
	loses   bool // what a node has is lost: needs another replica
	durable bool // objects are durable
	// inject hurts; heal undoes it, after the time held. hold is that time, from the lease.
	inject func(context.Context, *run) error
	hold   func(lease time.Duration) time.Duration
	heal   func(context.Context, *run) error
}

// needs says what a run lacks for the fault; "" where nothing.
func (f *fault) needs(cfg Config, rep *Report) string {
	switch {
	case f.network && rep.Network != "namespaces":
		return "network namespaces"
	case f.loses && cfg.Replicas == 1:
		return "more than one replica"
	case f.durable || cfg.Durable:
		return needsLedgers(cfg)
	}
	return ""
}

// beyond is long enough for a lease to run out, as all sides count it.
func beyond(lease time.Duration) time.Duration { return lease + lease/2 + time.Second }

func short(time.Duration) time.Duration { return 2 * time.Second }

// faults, in the order in which they are tried.
var faults = []fault{
	{name: "node-kill", what: "a storage node is killed, and started again with its files", hold: short,
		inject: func(_ context.Context, r *run) error { return r.kill(r.pickNode()) },
		heal:   func(ctx context.Context, r *run) error { return r.cluster.Restart(ctx, r.target) }},
	{name: "node-reformat", what: "a storage node is killed, and started again with nothing", hold: short, loses: true,
		inject: func(_ context.Context, r *run) error { return r.kill(r.pickNode()) },
		heal: func(ctx context.Context, r *run) error {
			if err := os.RemoveAll(r.cluster.NodeDir(r.target)); err != nil {
				return err
			}
			return r.cluster.Restart(ctx, r.target)
		}},
	{name: "node-stop", what: "a storage node is stopped beyond its lease, and goes on", hold: beyond,
		inject: func(_ context.Context, r *run) error { return r.stop(r.pickNode()) },
		heal:   func(_ context.Context, r *run) error { return r.resume() }},
	{name: "link-down", what: "a storage node's link goes down beyond its lease", hold: beyond, network: true,
		inject: func(_ context.Context, r *run) error { return r.net.cut(r.pickNode()) },
		heal:   func(_ context.Context, r *run) error { return r.net.join(r.target) }},
	{name: "node-mute", what: "a storage node receives packets, and those that it sends are lost", hold: beyond, network: true,
		inject: func(_ context.Context, r *run) error { return r.net.mute(r.pickNode()) },
		heal:   func(_ context.Context, r *run) error { return r.net.unmute(r.target) }},
	{name: "node-deaf", what: "a storage node's packets arrive, and it receives none", hold: beyond, network: true,
		inject: func(_ context.Context, r *run) error { return r.net.deafen(r.pickNode()) },
		heal:   func(_ context.Context, r *run) error { return r.net.undeafen(r.target) }},
	{name: "leader-kill", what: "the leading controller is killed, and started again", hold: beyond,
		inject: func(ctx context.Context, r *run) error {
			leader, err := r.pickLeader(ctx)
			if err != nil {
				return err
			}
			return r.kill(leader)
		},
		heal: func(ctx context.Context, r *run) error { return r.cluster.Restart(ctx, r.target) }},
	{name: "leader-stop", what: "the leading controller is stopped until another leads, and goes on", hold: beyond,
		inject: func(ctx context.Context, r *run) error {
			leader, err := r.pickLeader(ctx)
			if err != nil {
				return err
			}
			return r.stop(leader)
		},
		heal: func(_ context.Context, r *run) error { return r.resume() }},
	{name: "leader-cut", what: "the leading controller's link goes down until another leads", hold: beyond, network: true,
		inject: func(ctx context.Context, r *run) error {
			leader, err := r.pickLeader(ctx)
			if err != nil {
				return err
			}
			return r.net.cut(leader)
		},
		heal: func(_ context.Context, r *run) error { return r.net.join(r.target) }},
	{name: "node-twice", what: "a storage node is killed, started again, and killed while it is rebuilt", hold: short,
		inject: func(ctx context.Context, r *run) error {
			if err := r.kill(r.pickNode()); err != nil {
				return err
			}
			r.sleep(ctx, time.Second+r.random(time.Second)) // until after it has been missed
			if err := r.cluster.Restart(ctx, r.target); err != nil {
				return err
			}
			r.sleep(ctx, r.random(3*time.Second))
			return r.kill(r.target)
		},
		heal: func(ctx context.Context, r *run) error { return r.cluster.Restart(ctx, r.target) }},
	{name: "node-and-leader", what: "a storage node is killed, and the leading controller in the middle of the failover", hold: beyond,
		inject: func(ctx context.Context, r *run) error {
			leader, err := r.pickLeader(ctx)
			if err != nil {
				return err
			}
			node := r.pickNode()
			if err := r.kill(node); err != nil {
				return err
			}
			r.sleep(ctx, r.random(1200*time.Millisecond))
			r.targets = []string{leader, node}
			return r.kill(leader)
		},
		heal: restartTargets},
	{name: "all-nodes", what: "all storage nodes are killed at once, and started again with their files", hold: short,
		inject: func(_ context.Context, r *run) error {
			r.targets = nil
			for i := range r.cfg.Nodes {
				r.targets = append(r.targets, nodeName(i))
			}
			return r.killTargets()
		},
		heal: restartTargets},
	{name: "power", what: "the power of all storage nodes and of the clients that map their memory fails, and they start again with what was durable",
		hold: short, loses: true, durable: true, inject: powerOff, heal: powerOn},
	{name: "all-controllers", what: "all controllers are killed at once beyond all leases, and started again", hold: beyond,
		inject: func(_ context.Context, r *run) error {
			r.targets = nil
			for i := range r.cfg.Controllers {
				r.targets = append(r.targets, controllerName(i))
			}
			return r.killTargets()
		},
		heal: restartTargets},
	{name: "node-drain", what: "a storage node is drained, which moves what it has, and taken back", hold: short,
		inject: func(ctx context.Context, r *run) error {
			_, err := r.quarry(ctx, nil, "node", "drain", r.pickNode(), "--wait")
			return err
		},
		heal: func(ctx context.Context, r *run) error {
			_, err := r.quarry(ctx, nil, "node", "add", r.target)
			return err
		}},
	{name: "client-kill", what: "a client process is killed, and another started", hold: short,
		inject: func(_ context.Context, r *run) error {
			w := r.pickWorker()
			w.expected = true
			w.process.Kill()
			return nil
		},
		heal: func(ctx context.Context, r *run) error { return r.replaceWorker(ctx) }},
	{name: "client-stop", what: "a client process is stopped beyond its lease, and goes on", hold: beyond,
		inject: func(_ context.Context, r *run) error {
			w := r.pickWorker()
			w.expected = true // an agent kills an shm client that it has to fence
			return w.process.Signal(syscall.SIGSTOP)
		},
		heal: func(ctx context.Context, r *run) error {
			if err := r.worker.process.Signal(syscall.SIGCONT); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return err
			}
			return r.replaceWorker(ctx)
		}},
	{name: "rot", what: "bits of a storage node's memory flip, and fsck repairs the images that no reader has repaired", hold: short, loses: true, inject: rot, heal: repair},
	{name: "node-disk", what: "writes to a storage node's data folder do not end, while a client has to be fenced", hold: beyond,
		inject: func(_ context.Context, r *run) error {
			r.targets = []string{r.pickNode()}
			if err := syscall.Mkfifo(stateFile(r), 0o600); err != nil {
				return err
			}
			w := r.pickWorker()
			w.expected = true
			w.process.Kill()
			return nil
		},
		heal: func(ctx context.Context, r *run) error {
			// A reader lets the write that hangs end, with an error; the next one succeeds.
			f, err := os.OpenFile(stateFile(r), os.O_RDONLY|syscall.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			err = os.Remove(stateFile(r))
			if errors.Is(err, fs.ErrNotExist) {
				err = nil // the node was faster: it removes what it could not write
			}
			return errors.Join(err, f.Close(), r.replaceWorker(ctx))
		}},
	{name: "full", what: "regions are filled until nothing is left, and emptied", hold: short,
		inject: func(ctx context.Context, r *run) error { return r.fill(ctx) },
		heal: func(_ context.Context, r *run) error {
			defer func() { r.filler = nil }()
			return r.filler.process.Stop()
		}},
}

// stateFile is where the node in targets writes its state before it takes the place of the former one.
func stateFile(r *run) string {
	return filepath.Join(r.cluster.NodeDir(r.targets[0]), "node.state.new")
}

// restartTargets starts all that were killed, side by side: controllers wait for
// each other.
func restartTargets(ctx context.Context, r *run) error {
	errs := make([]error, len(r.targets))
	var wg sync.WaitGroup
	for i, name := range r.targets {
		wg.Go(func() { errs[i] = r.cluster.Restart(ctx, name) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// FaultNames lists what can be asked for.
func FaultNames() []string {
	var out []string
	for _, f := range faults {
		out = append(out, f.name)
	}
	return out
}

func faultNamed(name string) (fault, error) {
	for _, f := range faults {
		if f.name == name {
			return f, nil
		}
	}
	return fault{}, fmt.Errorf("fault %q: want one of %v", name, FaultNames())
}

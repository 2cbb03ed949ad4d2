package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// Names of members, as package local gives them.
func nodeName(i int) string { return "n" + strconv.Itoa(i+1) }

func controllerName(i int) string { return "c" + strconv.Itoa(i+1) }

// random is a time up to most.
func (r *run) random(most time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(most)))
}

// pickNode takes the next storage node in turn as the target.
func (r *run) pickNode() string {
	r.turn++
	r.target = nodeName(r.turn % r.cfg.Nodes)
	return r.target
}

// pickLeader takes the leading controller as the target.
func (r *run) pickLeader(ctx context.Context) (string, error) {
	var s status
	if _, err := r.quarry(ctx, &s, "status"); err != nil {
		return "", err
	}
	for _, c := range s.Controllers {
		if i := slices.Index(r.cluster.URLs, c.URL); c.Leader && i >= 0 {
			r.target = controllerName(i)
			return r.target, nil
		}
	}
	return "", errors.New("no controller leads")
}

// pickWorker takes a client as the target.
func (r *run) pickWorker() *clientProcess {
	r.worker = r.workers[rand.IntN(len(r.workers))]
	r.target = r.worker.process.Name
	return r.worker
}

// replaceWorker starts a client in the place of one that is gone.
func (r *run) replaceWorker(ctx context.Context) error {
	for until := time.Now().Add(calm); !r.worker.process.Ended(); r.sleep(ctx, pollEvery) {
		if time.Now().After(until) {
			r.worker.expected = false
			return nil // it goes on
		}
	}
	for i, w := range r.workers {
		if w == r.worker {
			r.workers = append(r.workers[:i], r.workers[i+1:]...)
			break
		}
	}
	_, err := r.spawn(ctx, r.worker.place, workerConfig{Role: roleLoad, Transport: r.worker.cfg.Transport})
	return err
}

// fill fills the cluster.
func (r *run) fill(ctx context.Context) error {
	r.target = "all regions"
	w, err := r.spawn(ctx, "k0", workerConfig{Role: roleFill, Transport: "tcp", Objects: []string{}})
	r.filler = w
	return err
}

func (r *run) kill(member string) error {
	p := r.cluster.Process(member)
	if p == nil {
		return fmt.Errorf("no member %s", member)
	}
	p.Kill()
	return nil
}

// killTargets kills them all before it waits for any.
func (r *run) killTargets() error {
	for _, name := range r.targets {
		if err := r.cluster.Process(name).Signal(syscall.SIGKILL); err != nil {
			return err
		}
	}
	for _, name := range r.targets {
		r.cluster.Process(name).Wait()
	}
	return nil
}

func (r *run) stop(member string) error { return r.cluster.Process(member).Signal(syscall.SIGSTOP) }

// resume lets the stopped target go on. It may have ended by itself.
func (r *run) resume() error {
	err := r.cluster.Process(r.target).Signal(syscall.SIGCONT)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// stopAll ends what still runs.
func (r *run) stopAll() {
	if r.filler != nil {
		r.filler.process.Kill()
	}
	for _, w := range r.workers {
		if !w.process.Ended() {
			w.process.Kill()
		}
	}
	if r.cluster != nil {
		// The etcds would wait for each other.
		for _, p := range slices.Concat(r.cluster.Nodes, r.cluster.Controllers) {
			if !p.Ended() {
				p.Kill()
			}
		}
	}
}

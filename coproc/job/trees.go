package job

import (
	"context"
	"sync"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// trees are the open trees of a worker, by job: to open one takes a call of a controller, which
// takes longer than a short part.
type trees struct {
	c     *client.Client       // opens the trees
	state *kv.Tree             // StateTree
	mu    sync.Mutex           // guards open and past
	open  map[opened]*kv.Tree  // at most maxOpen
	past  map[string]*kv.Stats // counters of closed trees, by name
}

// opened is a tree in one job. Another job opens it again: between them it may have
// been dropped, and another one been made under its name.
type opened struct {
	job      uint64 // its number
	name     string // of the tree
	writable bool   // read-only trees are opened apart
	staged   bool   // by the job, to replace the tree with that name
}

// opened is a tree of a job: its output is the one that it has staged, if it replaces the output.
func (j *Job) opened(name string, writable bool) opened {
	return opened{j.ID, name, writable, j.Spec.Replace && name == j.Spec.Output}
}

const (
	// maxOpen trees are kept; a job names at most a few.
	maxOpen = 64
	// maxPast names have counters of their own; all others share one.
	maxPast = 64
	others  = "(others)"
)

// newTrees begins without open trees.
func newTrees(c *client.Client, state *kv.Tree) *trees {
	return &trees{c: c, state: state, open: map[opened]*kv.Tree{}, past: map[string]*kv.Stats{}}
}

// tree finds a tree for a job.
func (t *trees) tree(ctx context.Context, key opened) (*kv.Tree, error) {
	t.mu.Lock()
	have := t.open[key]
	t.mu.Unlock()
	if have != nil {
		return have, nil
	}
	var fresh *kv.Tree
	var err error
	if key.staged {
		fresh, err = kv.OpenStaged(ctx, t.c, key.name, owner(key.job))
	} else {
		fresh, err = kv.Open(ctx, t.c, key.name, btree.Config{ReadOnly: !key.writable})
	}
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if have := t.open[key]; have != nil {
		return have, nil
	}
	if len(t.open) >= maxOpen {
		t.close(func(opened) bool { return true })
	}
	t.open[key] = fresh
	return fresh, nil
}

// forget closes a job's trees: it has ended, or one of them may be gone.
func (t *trees) forget(job uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.close(func(o opened) bool { return o.job == job })
}

// close closes trees and keeps their counters. Parts that still use them may go on.
// Preconditions: t.mu is held.
func (t *trees) close(which func(opened) bool) {
	for key, tree := range t.open {
		if which(key) {
			delete(t.open, key)
			sum(t.past, tree.Stats())
		}
	}
}

// sum adds counters to those of the same name.
func sum(all map[string]*kv.Stats, s kv.Stats) {
	if all[s.Name] == nil && len(all) >= maxPast {
		s.Name = others
	}
	have := all[s.Name]
	if have == nil {
		have = &kv.Stats{Name: s.Name, Changes: map[string]uint64{}}
		all[s.Name] = have
	}
	have.Cache.Hits += s.Cache.Hits
	have.Cache.Misses += s.Cache.Misses
	have.Shared += s.Shared
	for change, n := range s.Changes {
		have.Changes[change] += n
	}
}

// sumLive is sum of a tree that is open: it has a cache.
func sumLive(all map[string]*kv.Stats, s kv.Stats) {
	sum(all, s)
	if have := all[s.Name]; have != nil {
		have.Cache.Nodes += s.Cache.Nodes
		have.Cache.Bytes += s.Cache.Bytes
		have.Cache.MaxBytes += s.Cache.MaxBytes
		have.Cache.Levels = max(have.Cache.Levels, s.Cache.Levels)
	}
}

// stats of all trees that are or were open: caches of those that are, counters of all.
func (t *trees) stats() (out []kv.Stats) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]*kv.Stats{}
	for _, s := range t.past {
		sum(all, *s)
	}
	live := []*kv.Tree{t.state}
	for _, tree := range t.open {
		live = append(live, tree)
	}
	for _, tree := range live {
		sumLive(all, tree.Stats())
	}
	for _, s := range all {
		out = append(out, *s)
	}
	return out
}

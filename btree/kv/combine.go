package kv

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/btree"
)

// Writers of one process that want the same leaf share its reservation: the first
// makes the writes of all who came meanwhile with its own, in one Update. Without
// that they would take it from each other by CAS, with pauses.
//
// Bounded: a leader makes one group of at most btree.MaxGroup writes and then hands
// over to whoever has waited longest. The leaf is free between two groups, so other
// processes get their turn as well.

// gates of a tree: leaves share them, which costs a wait and nothing else.
const gates = 64

// gate is where the writers of some leaves meet.
type gate struct {
	mu      sync.Mutex
	busy    bool
	waiting atomic.Int32 // len(queue)
	queue   []*program   // longest wait first
	_       [16]byte
}

// change makes a write, in a group if it can be part of one.
func (t *Tree) change(ctx context.Context, w btree.Write) (version uint64, err error) {
	p := t.program(ctx)
	defer t.done(p)
	p.write = w
	alone := true
	if leaf, ok := p.Leaf(&p.write); ok {
		alone = t.combine(ctx, p, leaf)
		version, err = p.write.Version, p.write.Err
	}
	p.write = btree.Write{}
	switch {
	case !alone:
		return version, err
	case w.Remove:
		return 0, p.Delete(w.Key, w.Cond)
	}
	return p.Put(w.Key, w.Value, w.Cond)
}

// combine makes p.write with those of others; alone says that it could not be made so.
func (t *Tree) combine(ctx context.Context, p *program, leaf btree.Ref) (alone bool) {
	h := uint64(leaf.Addr) * 0x9e3779b97f4a7c15
	g := &t.gates[h>>58%gates]
	p.gate, p.leaf = g, leaf
	g.mu.Lock()
	if g.busy {
		g.queue = append(g.queue, p)
		g.waiting.Store(int32(len(g.queue)))
		g.mu.Unlock()
		lead, ok := t.wait(ctx, p)
		if !ok {
			return true // not taken by anybody: the long way meets the context's end
		}
		if !lead {
			return p.write.Alone
		}
	} else {
		g.busy = true
		g.mu.Unlock()
	}
	p.begun, p.given = false, p.given[:0]
	p.WriteGroup(leaf, p.next)
	if n := len(p.given); n > 0 {
		t.shared.Add(uint64(n))
	}
	for i, other := range p.given {
		p.given[i] = nil
		other.wake <- false
	}
	g.mu.Lock()
	if len(g.queue) > 0 {
		heir := g.take(0)
		g.mu.Unlock()
		heir.wake <- true
	} else {
		g.busy = false
		g.mu.Unlock()
	}
	return p.write.Alone
}

// wait waits until a leader has made p.write, or p is to lead. Not ok if the context
// ended and nobody had taken the write.
func (t *Tree) wait(ctx context.Context, p *program) (lead, ok bool) {
	select {
	case lead = <-p.wake:
		return lead, true
	case <-ctx.Done():
	}
	g := p.gate
	g.mu.Lock()
	for i, x := range g.queue {
		if x == p {
			g.take(i)
			g.mu.Unlock()
			return false, false
		}
	}
	g.mu.Unlock()
	return <-p.wake, true // taken: the leader's own deadline bounds the wait
}

// take takes a program out of the queue. The caller holds the lock.
func (g *gate) take(i int) *program {
	p := g.queue[i]
	copy(g.queue[i:], g.queue[i+1:])
	g.queue[len(g.queue)-1] = nil
	g.queue = g.queue[:len(g.queue)-1]
	g.waiting.Store(int32(len(g.queue)))
	return p
}

// nextWrite is the next write of the leader's group: its own, then those that wait
// for the same leaf.
func (p *program) nextWrite() *btree.Write {
	if !p.begun {
		p.begun = true
		return &p.write
	}
	g := p.gate
	if g.waiting.Load() == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, x := range g.queue {
		if x.leaf == p.leaf {
			p.given = append(p.given, g.take(i))
			return &x.write
		}
	}
	return nil
}

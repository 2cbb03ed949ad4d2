package kv

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/btree"
)

// Writers of one process that want to change the same leaf share its reservation: the first
// one, the leader, makes the writes of all that wait together with its own, in one Update.
// Without that they would contend for the reservation by CAS, with pauses.
//
// A leader makes one group of at most btree.MaxGroup writes; then the writer that has waited
// longest leads. The leaf is not reserved between two groups, so other processes can write
// to it.

// gates of a tree: leaves share them, which costs a wait and nothing else.
const gates = 1 << gateBits

const gateBits = 10

// gate is where the writers of some leaves meet.
type gate struct {
	mu      sync.Mutex   // guards busy and queue
	busy    bool         // a program is writing for all that wait
	owner   *program     // of busy, if it writes to several leaves; else nil
	waiting atomic.Int32 // len(queue)
	queue   []*program   // longest wait first
	_       [8]byte
}

// gateOf is the gate of a leaf.
func (t *Tree) gateOf(leaf btree.Ref) *gate {
	return &t.gates[uint64(leaf.Addr)*0x9e3779b97f4a7c15>>(64-gateBits)]
}

// change makes a write, in a group if it can be part of one.
func (t *Tree) change(ctx context.Context, w btree.Write) (version uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p := t.program(ctx)
	defer t.done(p)
	return t.one(ctx, p, w)
}

// one is change with a given program.
func (t *Tree) one(ctx context.Context, p *program, w btree.Write) (version uint64, err error) {
	p.single[0] = w
	alone := true
	if leaf, ok := p.Leaf(&p.single[0]); ok {
		p.writes = p.single[:]
		t.combine(ctx, p, leaf)
		x := &p.single[0]
		alone = p.at == 0 || x.Alone
		version, err = x.Version, x.Err
		p.writes = nil
	}
	p.single[0] = btree.Write{}
	switch {
	case !alone:
		return version, err
	case w.Remove:
		return 0, p.remove(w.Key, w.Cond)
	}
	return p.put(w.Key, w.Value, w.Cond)
}

// combine makes the first p.at of p.writes, all for one leaf, together with those of others. On
// return they have their answers. At least one is made unless the context ends.
func (t *Tree) combine(ctx context.Context, p *program, leaf btree.Ref) {
	g := t.gateOf(leaf)
	p.gate, p.leaf, p.at = g, leaf, 0
	g.mu.Lock()
	if g.busy {
		g.queue = append(g.queue, p)
		g.waiting.Store(int32(len(g.queue)))
		g.mu.Unlock()
		if !t.wait(ctx, p) {
			return
		}
	} else {
		g.busy = true
		g.mu.Unlock()
	}
	p.giver = p
	p.WriteGroup(leaf, p.next)
	p.giver = nil
	t.wakeGiven(p)
	g.leave()
}

// wakeGiven tells the others whose writes p has made.
func (t *Tree) wakeGiven(p *program) {
	for i, other := range p.given {
		p.given[i] = nil
		t.shared.Add(uint64(other.at))
		other.wake <- false
	}
	p.given = p.given[:0]
}

// leave ends the leader's turn: who has waited longest leads now.
func (g *gate) leave() {
	g.mu.Lock()
	g.owner = nil
	if len(g.queue) > 0 {
		heir := g.take(0)
		g.mu.Unlock()
		heir.wake <- true
	} else {
		g.busy = false
		g.mu.Unlock()
	}
}

// wait waits until a leader has made some of p.writes, or p is to lead. It returns false too
// if the context ended before a leader had taken any of them.
func (t *Tree) wait(ctx context.Context, p *program) (lead bool) {
	select {
	case lead = <-p.wake:
		return lead
	case <-ctx.Done():
	}
	g := p.gate
	g.mu.Lock()
	for i, x := range g.queue {
		if x == p {
			g.take(i)
			g.mu.Unlock()
			return false
		}
	}
	g.mu.Unlock()
	return <-p.wake // taken: the leader's own deadline bounds the wait
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
// for the same leaf. Behind one that has to be made in another way its owner makes
// none, so that writes of one key keep their order.
func (p *program) nextWrite() *btree.Write {
	for x := p.giver; ; p.giver = x {
		if x.at < len(x.writes) && (x.at == 0 || !x.writes[x.at-1].Alone) {
			x.at++
			return &x.writes[x.at-1]
		}
		if x = p.another(p.gate, p.leaf); x == nil {
			return nil
		}
	}
}

// another is a program that waits for a leaf; the leader p owes it an answer.
func (p *program) another(g *gate, leaf btree.Ref) *program {
	if g.waiting.Load() == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, x := range g.queue {
		if x.leaf == leaf {
			p.given = append(p.given, g.take(i))
			return x
		}
	}
	return nil
}

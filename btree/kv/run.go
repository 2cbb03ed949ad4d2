package kv

import (
	"context"
	"errors"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// WriteRun makes the first n of some writes, at least one: those that stand in one leaf, by one Update,
// which others may share. The caller calls it again with the rest, so that all are made in their order.
// err is why none was made: the context has ended.
//
// Each of the n has its answer in Err: nil, or that its condition does not hold, what its Edit has refused, or why it
// failed. Those behind a condition that does not hold, or behind a failure, are not made by this call. Where the
// outcome of one is unknown, so is that of those before it. After ErrNoEdit, for a write with Edit, use
// GetVersion and PutIf before the rest is written.
//
// Linearizes like as many Puts and Deletes in that order; the n writes at one instant.
func (t *Tree) WriteRun(ctx context.Context, writes []btree.Write) (n int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p := t.program(ctx)
	defer t.done(p)
	leaf, ok := p.Leaf(&writes[0])
	if !ok {
		p.writeAlone(&writes[0])
		return 1, nil
	}
	writes = writes[:min(len(writes), btree.MaxGroup)]
	writes[0].Behind = false
	for i := 1; i < len(writes); i++ {
		if next, ok := p.Leaf(&writes[i]); !ok || next != leaf {
			writes = writes[:i]
			break
		}
		writes[i].Behind = true
	}
	p.writes = writes
	t.combine(ctx, p, leaf)
	p.writes = nil
	if p.at == 0 {
		return 0, ctx.Err()
	}
	if n := spreadUnknown(writes[:p.at]); n > 0 {
		return n, nil
	}
	for n < p.at && !writes[n].Alone {
		n++
	}
	if n == 0 { // the leaf is full, or not what it was
		p.writeAlone(&writes[0])
		n = 1
	}
	return n, nil
}

// spreadUnknown gives an unknown outcome to the writes of a group before the last one that has it, and returns
// how many have it then. A write between them that Edit has refused was refused for what the others may have left.
func spreadUnknown(writes []btree.Write) int {
	for n := len(writes); n > 0; n-- {
		err := writes[n-1].Err
		if !errors.Is(err, client.ErrUnknown) {
			continue
		}
		for i := range writes[:n] {
			writes[i].Err, writes[i].Alone = err, false
		}
		return n
	}
	return 0
}

// writeAlone makes a write that is not part of a group.
func (p *program) writeAlone(w *btree.Write) {
	w.Alone = false
	switch {
	case w.Edit != nil:
		w.Err = ErrNoEdit
	case w.Remove:
		w.Err = p.remove(w.Key, w.Cond)
	default:
		w.Version, w.Err = p.put(w.Key, w.Value, w.Cond)
		w.Base = p.Base()
	}
}

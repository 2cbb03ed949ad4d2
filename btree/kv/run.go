package kv

import (
	"context"
	"errors"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// WriteRun makes the first n of some writes, at least one unless it fails: those that stand in one
// leaf, by one Update, which others may share. The caller calls it again with the rest, so that all
// are made in their order.
//
// A write whose condition does not hold, or that its Edit refuses, has that error in Err and counts
// as one of the n; those behind a condition that does not hold are not made by this call. err is the failure of
// writes[n]; those behind it are not made, or, where the outcome is unknown, have an unknown outcome too.
// After ErrNoEdit, for a write with Edit, use GetVersion and PutIf.
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
		return p.writeAlone(&writes[0])
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
	for i := range writes[:p.at] {
		if err := writes[i].Err; errors.Is(err, client.ErrUnknown) {
			return 0, err
		}
	}
	for n < p.at && !writes[n].Alone {
		n++
	}
	if n == 0 { // the leaf is full, or not what it was
		return p.writeAlone(&writes[0])
	}
	return n, nil
}

// writeAlone makes a write that is not part of a group.
func (p *program) writeAlone(w *btree.Write) (n int, err error) {
	switch {
	case w.Edit != nil:
		return 0, ErrNoEdit
	case w.Remove:
		err = p.remove(w.Key, w.Cond)
	default:
		w.Version, err = p.put(w.Key, w.Value, w.Cond)
		w.Base = p.Base()
	}
	if w.Alone, w.Err = false, err; err == nil || failed(err) {
		return 1, nil
	}
	return 0, err
}

// failed says whether a write was not made because its condition does not hold.
func failed(err error) bool {
	return !errors.Is(err, client.ErrUnknown) &&
		(errors.Is(err, btree.ErrConflict) || errors.Is(err, btree.ErrKeyExists) || errors.Is(err, btree.ErrNoKey))
}

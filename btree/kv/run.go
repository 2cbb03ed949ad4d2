package kv

import (
	"context"
	"errors"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// WriteRun makes the first n of the writes, n >= 1, with one Update of the leaf that all n keys belong to. The caller
// calls it again with the other writes. err is not nil only if the context ended before any write was made.
//
// Err of each of the n writes is nil, what its Edit returned, that its condition does not hold, or why it failed. The
// last two end the run: that write is the last of the n. All n are one change of the leaf: if its outcome is unknown,
// Err of each of them is client.ErrUnknown. ErrNoEdit says that this write cannot be made in its leaf: the caller
// makes it with GetVersion and PutIf, and only then calls WriteRun with the writes behind it.
//
// Linearizes like n Puts and Deletes in their order, all at one instant.
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
	if n < p.at && len(writes) > 1 { // a leaf that is full is split for all that follow
		n += p.SplitRun(leaf, writes[n:])
	}
	if n == 0 { // the leaf is full, or not what it was
		p.writeAlone(&writes[0])
		n = 1
	}
	return n, nil
}

// spreadUnknown marks every write up to the last unknown one as unknown, and returns how many those are. A write that
// Edit has refused between them is included: it was refused because of values that may not have been committed.
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

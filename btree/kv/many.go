package kv

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"github.com/quarrystore/quarry/btree"
)

// window is how many writes of one PutMany are looked at together: as many as share
// a reservation.
const window = btree.MaxGroup

// many is a program's room for PutMany and WriteEach.
type many struct {
	leaf   [window]btree.Ref
	order  [window]uint8
	table  [4 * window]uint8 // of leaves: 1 + the first write to it
	writes [window]btree.Write
	cond   btree.Cond // of all writes
	shares shares     // of the leaves
	parts  [window][]uint8
}

// PutMany sets keys, each by itself: errs[i] is the answer for keys[i]. Keys of one
// leaf share an Update, with those of other callers. Of equal keys the last one stays.
//
// Linearizes like as many Puts, those of one key in their order.
func (t *Tree) PutMany(ctx context.Context, keys, values [][]byte) []error {
	return t.PutManyIf(ctx, keys, values, btree.Cond{})
}

// PutManyIf is PutMany of writes that all have the same condition.
func (t *Tree) PutManyIf(ctx context.Context, keys, values [][]byte, cond btree.Cond) []error {
	errs := make([]error, len(keys))
	if len(values) != len(keys) {
		for i := range errs {
			errs[i] = errors.New("kv: as many values as keys, please")
		}
		return errs
	}
	p := t.program(ctx)
	defer t.done(p)
	p.manyOf().cond = cond
	for at := 0; at < len(keys); {
		if err := ctx.Err(); err != nil {
			for i := at; i < len(keys); i++ {
				errs[i] = err
			}
			return errs
		}
		at += t.putWindow(ctx, p, keys[at:], values[at:], errs[at:])
	}
	return errs
}

// manyOf is the program's room for calls with many keys.
func (p *program) manyOf() *many {
	if p.many == nil {
		p.many = new(many)
		p.many.shares.init(p)
	}
	return p.many
}

// putWindow puts some of the first keys, at least one.
func (t *Tree) putWindow(ctx context.Context, p *program, keys, values [][]byte, errs []error) int {
	m := p.many
	n, leaves := 0, 0
	clear(m.table[:])
	for ; n < min(len(keys), window); n++ {
		leaf, ok := p.Leaf(&btree.Write{Key: keys[n], Value: values[n]})
		if !ok {
			break // by itself, after what comes before
		}
		m.leaf[n], m.order[n] = leaf, uint8(n)
		at := uint64(leaf.Addr) * 0x9e3779b97f4a7c15 >> 56 // len(m.table) is 256
		for m.table[at] != 0 && m.leaf[m.table[at]-1] != leaf {
			at = (at + 1) % uint64(len(m.table))
		}
		if m.table[at] == 0 {
			m.table[at], leaves = uint8(n+1), leaves+1
		}
	}
	if n == 0 {
		_, errs[0] = p.put(keys[0], values[0], m.cond)
		return 1
	}
	order := m.order[:n]
	if leaves > 1 {
		m.arrange(order, keys)
		t.putLeaves(ctx, p, order, keys, values, errs)
	} else {
		t.putLeaf(ctx, p, order, keys, values, errs)
	}
	return n
}

// arrange puts keys, whose leaves are in m, into the order of their leaves. Equal keys stay in their order, and get one leaf: the cache may have
// given different ones, where another call has changed it meanwhile.
func (m *many) arrange(order []uint8, keys [][]byte) {
	slices.SortStableFunc(order, func(a, b uint8) int { return bytes.Compare(keys[a], keys[b]) })
	for i := 1; i < len(order); i++ {
		if a, b := order[i-1], order[i]; bytes.Equal(keys[a], keys[b]) {
			m.leaf[b] = m.leaf[a]
		}
	}
}

// putLeaves puts keys that are in the order of their leaves.
func (t *Tree) putLeaves(ctx context.Context, p *program, order []uint8, keys, values [][]byte, errs []error) {
	m := p.many
	writes := m.writes[:len(order)]
	m.fill(writes, order, keys, values)
	n := 0
	for from, to := 0, 0; from < len(order); from = to {
		leaf := m.leaf[order[from]]
		for to = from + 1; to < len(order) && m.leaf[order[to]] == leaf; to++ {
		}
		m.parts[n], m.shares.of[n].leaf, m.shares.of[n].writes = order[from:to], leaf, writes[from:to]
		n++
	}
	t.combineMany(p, n)
	for i := range n {
		if x := &m.shares.of[i]; x.at > 0 {
			m.parts[i] = t.answered(ctx, p, m.parts[i], x.writes[:x.at], keys, values, errs)
		}
	}
	clear(writes)
	for i, rest := range m.parts[:n] {
		m.shares.of[i].writes, m.parts[i] = nil, nil
		t.putLeaf(ctx, p, rest, keys, values, errs)
	}
}

// fill makes the writes of some keys.
func (m *many) fill(writes []btree.Write, order []uint8, keys, values [][]byte) {
	for k, i := range order {
		writes[k] = btree.Write{Key: keys[i], Value: values[i], Cond: m.cond}
	}
}

// putLeaf puts keys that should be in one leaf.
func (t *Tree) putLeaf(ctx context.Context, p *program, order []uint8, keys, values [][]byte, errs []error) {
	m := p.many
	for len(order) > 0 {
		writes := m.writes[:len(order)]
		m.fill(writes, order, keys, values)
		p.writes = writes
		t.combine(ctx, p, m.leaf[order[0]])
		p.writes = nil
		order = t.answered(ctx, p, order, writes[:p.at], keys, values, errs)
		clear(writes)
	}
}

// answered notes the answers of the writes of a leaf's first keys, and returns the keys behind them. Where the leaf is not what it was,
// it puts all of them, one by one; so it does where the context has ended, and nothing was made.
func (t *Tree) answered(ctx context.Context, p *program, order []uint8, writes []btree.Write, keys, values [][]byte, errs []error) (rest []uint8) {
	m := p.many
	alone := len(writes) == 0
	for k := range writes {
		w := &writes[k]
		if alone = alone || w.Alone; w.Alone {
			w.Err = t.putLate(p, writes[k:])
		}
		errs[order[k]] = w.Err
	}
	if order = order[len(writes):]; !alone {
		return order
	}
	for _, i := range order {
		_, errs[i] = t.one(ctx, p, btree.Write{Key: keys[i], Value: values[i], Cond: m.cond})
	}
	return nil
}

// putLate puts the first of some writes of a group, which was not part of it. If one
// behind it has overwritten the key in the same instant there is nothing to do: its
// answer is good for both.
func (t *Tree) putLate(p *program, writes []btree.Write) error {
	for i := len(writes) - 1; i > 0; i-- {
		if w := &writes[i]; !w.Alone && bytes.Equal(w.Key, writes[0].Key) {
			return w.Err
		}
	}
	_, err := p.put(writes[0].Key, writes[0].Value, writes[0].Cond)
	return err
}

package kv

import (
	"context"

	"github.com/quarrystore/quarry/btree"
)

// Leaves calls fn with the leaves of a range and the keys they begin at, in order,
// until it returns false; see btree.Program.Leaves.
func (t *Tree) Leaves(ctx context.Context, r btree.Range, fn func(low []byte, leaf btree.Ref) bool) error {
	p := t.program(ctx)
	err := p.Leaves(r, fn)
	t.done(p)
	return err
}

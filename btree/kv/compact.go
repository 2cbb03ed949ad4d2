package kv

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// DefaultCompactFill is the share of a leaf, in percent, that a Compact without another one fills: some puts of new keys find room before leaves are split.
const DefaultCompactFill = 92

// Compact fills the leaves of the tree up to fill percent, from 50 to 100, where it takes fewer of them then. It goes through the tree once, from left
// to right; other clients read and write meanwhile, and see no change of keys, values or versions. After each inner node progress is called with
// the counts so far, if it is not nil. Layers of long keys stay as they are.
//
// All clients of the tree must run this build or a later one: writes of earlier ones to a leaf fail while its entries are moved.
//
// Errors: a fill out of range; those of the store, of memory for a leaf among them. The counts say what was done before; calling it again goes on.
func (t *Tree) Compact(ctx context.Context, fill int, progress func(btree.Compacted)) (all btree.Compacted, err error) {
	for from, more := []byte(nil), true; more; {
		if err := ctx.Err(); err != nil {
			return all, fmt.Errorf("%v: %w", t, err)
		}
		var next []byte
		var c btree.Compacted
		p := t.program(ctx)
		for range sessionTries {
			// A step of unknown outcome has left the tree whole: the leaves are looked at again.
			next, c, err = p.Compact(from, fill)
			again := p.lapsed(err) || errors.Is(err, client.ErrUnknown)
			if again {
				c.Leaves = 0 // counted once
			}
			if all.Add(c); !again {
				break
			}
		}
		t.done(p)
		if err != nil {
			return all, fmt.Errorf("%v: %w", t, err)
		}
		if progress != nil {
			progress(all)
		}
		from, more = next, next != nil
	}
	return all, nil
}

package kv

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// DefaultCompactFill is the share of a leaf, in percent, that a Compact without another one fills: some puts of new keys find room before leaves are split.
const DefaultCompactFill = 92

// Compaction says how Compact works. The zero value is DefaultCompactFill without rests.
type Compaction struct {
	// Fill is the share of a leaf that is filled, in percent, from 50 to 100; 0: DefaultCompactFill.
	Fill int
	// Share is the share of the time in which Compact works, in percent, from 1 to 100; 0: all of it. Behind each inner node it rests, and holds nothing
	// meanwhile. Where others use the same nodes and processors its steps take longer, and so do its rests.
	Share int
	// Progress is called after each inner node with the counts so far, if it is not nil.
	Progress func(btree.Compacted)

	sleep func(time.Duration) // in place of restFor
}

// Compact fills the leaves of the tree where it takes fewer of them then. It goes through the tree once, from left
// to right; other clients read and write meanwhile, and see no change of keys, values or versions. Layers of long keys stay as they are.
//
// All clients of the tree must run this build or a later one: writes of earlier ones to a leaf fail while its entries are moved.
//
// Errors: a fill or share out of range; those of the store, of memory for a leaf among them. The counts say what was done before; calling it again goes on.
func (t *Tree) Compact(ctx context.Context, how Compaction) (all btree.Compacted, err error) {
	if how.Fill == 0 {
		how.Fill = DefaultCompactFill
	}
	if how.Share < 0 || how.Share > 100 {
		return all, fmt.Errorf("%w: %v: share %d %% of the time: want 1 to 100", client.ErrArgument, t, how.Share)
	}
	if how.sleep == nil {
		how.sleep = func(d time.Duration) { restFor(ctx, d) }
	}
	pace := newPace(how.Share, time.Now, how.sleep)
	for from, more := []byte(nil), true; more; {
		if err := ctx.Err(); err != nil {
			return all, fmt.Errorf("%v: %w", t, err)
		}
		var next []byte
		var c btree.Compacted
		p := t.program(ctx)
		for range sessionTries {
			// A step of unknown outcome has left the tree whole: the leaves are looked at again.
			next, c, err = p.Compact(from, how.Fill)
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
		if how.Progress != nil {
			how.Progress(all)
		}
		if from, more = next, next != nil; more {
			pace.rest()
		}
	}
	return all, nil
}

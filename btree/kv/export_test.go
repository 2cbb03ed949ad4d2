package kv

import (
	"context"
	"time"

	"github.com/quarrystore/quarry/btree"
)

// FeedVoids is how many spans of positions the head of a feed's state has.
const FeedVoids = feedVoids

// StoreOf is the Store of a Watch, through which it repairs what dead clients have left.
func StoreOf(ctx context.Context, w *Watch) btree.Store {
	w.objects.ctx = ctx
	return watching{w}
}

// Claim makes the state of a feed the Client's, and gives it up.
func Claim(ctx context.Context, state *Tree) error {
	k, err := claimState(ctx, state, "tree")
	if err != nil {
		return err
	}
	return k.release()
}

// ArrangedLeaves are the leaves that a PutMany of keys goes by, from those that the cache has given for them, and the order in
// which it puts the keys.
func ArrangedLeaves(keys [][]byte, leaves []btree.Ref) ([]btree.Ref, []uint8) {
	m := new(many)
	order := m.order[:len(keys)]
	for i := range keys {
		m.leaf[i], order[i] = leaves[i], uint8(i)
	}
	m.arrange(order, keys)
	return m.leaf[:len(keys)], order
}

// StopWatching has a Named learn nothing by itself any more, as if its goroutine did not run.
func StopWatching(n *Named) {
	n.end()
	<-n.ended
}

// SleepBy has a compaction call f in place of its rests.
func (c *Compaction) SleepBy(f func(time.Duration)) { c.sleep = f }

package kv

import (
	"context"
	"fmt"

	"github.com/quarrystore/quarry/btree"
)

// Split is a range of a tree's keys: one of those that Splits cuts it into.
type Split struct {
	From, To []byte // From <= key < To; nil: no bound
	// Node has the primary copy of most of the leaves that were looked at: its number, 0 for none.
	Node uint32
	// Leaves, Keys and Bytes of keys and values, the large ones included, are estimates.
	Leaves, Keys, Bytes int64
}

const (
	// MaxSplits of one call.
	MaxSplits = 4096
	// stretchesEach is how many stretches a split is put together from, at least, where the tree has as many leaves.
	stretchesEach = 16
)

// Splits cuts a range of keys, all of them by default, into at most n ranges of about as many bytes each. Together they hold each key
// of the range exactly once, also those that are put later. It reads inner nodes and some leaves, in few rounds, so the sizes are estimates:
// see btree.Program.Stretches. There are fewer ranges than n if there are fewer leaves.
//
// Errors: an n below 1 or above MaxSplits; btree.ErrNoTree; those of reading.
func (t *Tree) Splits(ctx context.Context, r btree.Range, n int) ([]Split, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%v: %w", t, err)
	}
	if n < 1 || n > MaxSplits {
		return nil, fmt.Errorf("%v: %d splits, want 1 to %d", t, n, MaxSplits)
	}
	p := t.program(ctx)
	all, err := p.Stretches(r, stretchesEach*n)
	t.done(p)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", t, err)
	}
	sizes, left := estimates(all)
	var out []Split
	for at := 0; at < len(all); {
		s := Split{From: r.From, To: r.To}
		if len(out) > 0 {
			s.From = all[at].Low
			out[len(out)-1].To = s.From
		}
		share := left / float64(n-len(out))
		var leaves, keys, size float64
		nodes := map[uint32]float64{}
		for first := at; at < len(all); at++ {
			// The last split takes what is left. A stretch belongs to the split that it fits better.
			if at > first && len(out) < n-1 && size+sizes[at].bytes/2 > share {
				break
			}
			leaves, keys, size = leaves+all[at].Leaves, keys+sizes[at].keys, size+sizes[at].bytes
			if node, ok := t.c.Where(all[at].Leaf); ok && !all[at].Leaf.IsZero() {
				if nodes[node] += all[at].Leaves; nodes[node] > nodes[s.Node] {
					s.Node = node
				}
			}
		}
		left -= size
		s.Leaves, s.Keys, s.Bytes = int64(leaves+0.5), int64(keys+0.5), int64(size+0.5)
		out = append(out, s)
	}
	return out, nil
}

// estimate of a stretch.
type estimate struct{ keys, bytes float64 }

// estimates takes the leaves of a stretch that no leaf was read of for those of the one before that one was read of. total is of
// the bytes.
func estimates(all []btree.Stretch) (out []estimate, total float64) {
	var like btree.Stretch
	for _, s := range all {
		if s.Read {
			like = s
			break
		}
	}
	for _, s := range all {
		if s.Read {
			like = s
		}
		e := estimate{s.Leaves * float64(like.Keys), s.Leaves * float64(like.Bytes)}
		out, total = append(out, e), total+e.bytes
	}
	return out, total
}

// NodeName is the name of the storage node with a number, as Split has it; "" for one that is not there.
func (t *Tree) NodeName(node uint32) string { return t.c.NodeName(node) }

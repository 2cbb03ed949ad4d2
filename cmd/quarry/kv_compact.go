package main

import (
	"context"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

type kvCompactCmd struct {
	Name  string `arg:"" complete:"tree" optional:"" help:"Name of the tree; the same as --tree."`
	Fill  int    `default:"92" placeholder:"PERCENT" help:"Share of a leaf that is filled, 50 to 100. With 100 the next new keys split leaves again."`
	Share int    `default:"100" placeholder:"PERCENT" help:"Share of the time in which it works, 1 to 100; it rests in between, so that other clients wait less for the tree's memory and nodes."`
}

// kvCompactView is what kv compact has done.
type kvCompactView struct {
	Tree string `json:"tree"`
	Fill int    `json:"fill"`
	btree.Compacted
	FreedBytes int64 `json:"freed_bytes"` // of slabs
}

func (x *kvCompactCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	if x.Name != "" {
		k.Tree = x.Name
	}
	if x.Fill < btree.MinCompactFill || x.Fill > 100 {
		return usagef("--fill %d: want %d to 100", x.Fill, btree.MinCompactFill)
	}
	if x.Share < 1 || x.Share > 100 {
		return usagef("--share %d: want 1 to 100", x.Share)
	}
	return k.tree(ctx, a, nil, func(ctx context.Context, t *kv.Tree) error {
		bar := a.progress("looking at leaves")
		done, err := t.Compact(ctx, kv.Compaction{Fill: x.Fill, Share: x.Share, Progress: func(c btree.Compacted) { bar.set(c.Leaves, c.Leaves+1) }})
		bar.end()
		if err != nil {
			return ifInterrupted(ctx, err, "%d leaves of %s are freed; the next compact goes on", done.Freed, t)
		}
		v := kvCompactView{Tree: t.Name(), Fill: x.Fill, Compacted: done, FreedBytes: int64(done.Freed) * int64(t.Limits().SlabBytes)}
		return a.print(v, func(w io.Writer) {
			fmt.Fprintf(w, "%d leaves; freed: %d, %s\n", v.Leaves, v.Freed, bytesText(uint64(v.FreedBytes)))
		})
	})
}

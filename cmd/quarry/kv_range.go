package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// rangeFlags name keys from, up to and without, or all with a prefix.
type rangeFlags struct {
	From   string `placeholder:"KEY" help:"First key."`
	To     string `placeholder:"KEY" help:"End of the range, not included."`
	Prefix string `placeholder:"KEY" help:"Only keys with this prefix."`
}

// The range of keys from --prefix, or from --from (included) and --to (excluded). No flag is all keys.
func (r *rangeFlags) get(k *kvCmd) (out btree.Range, err error) {
	if r.Prefix != "" && (r.From != "" || r.To != "") {
		return out, usagef("--prefix and a range are given: want one of them")
	}
	if r.Prefix != "" {
		if out.From, err = k.key(r.Prefix); err == nil {
			out.To = after(out.From)
		}
		return out, err
	}
	if out.From, err = k.key(r.From); err == nil && r.To != "" {
		out.To, err = k.key(r.To)
	}
	return out, err
}

// after is the first key behind all with a prefix; nil if there is none.
func after(prefix []byte) []byte {
	for n := len(prefix); n > 0; n-- {
		if prefix[n-1] < 0xff {
			b := append([]byte(nil), prefix[:n]...)
			b[n-1]++
			return b
		}
	}
	return nil
}

type kvScanCmd struct {
	rangeFlags
	Limit    int  `short:"n" placeholder:"N" help:"Most entries; 0 means all."`
	Reverse  bool `help:"From the last to the first."`
	KeysOnly bool `help:"Without the values."`
}

func (x *kvScanCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	r, err := x.get(k)
	if err != nil {
		return err
	}
	if x.Limit < 0 {
		return usagef("--limit %d: want 0 or more", x.Limit)
	}
	r.Limit, r.Reverse = x.Limit, x.Reverse
	return k.tree(ctx, a, readOnly, func(ctx context.Context, t *kv.Tree) error {
		out := bufio.NewWriterSize(a.out, 64<<10)
		j := json.NewEncoder(out)
		var failed error
		err := t.Scan(ctx, r, func(key, value []byte, version uint64) bool {
			switch {
			case a.cli.JSON:
				failed = j.Encode(newKVEntry(key, value, version, x.KeysOnly)) // a line each: a scan may be long
			case x.KeysOnly:
				_, failed = fmt.Fprintln(out, k.text(key))
			default:
				_, failed = fmt.Fprintf(out, "%s\t%s\n", k.text(key), k.text(value))
			}
			return failed == nil && ctx.Err() == nil
		})
		if err == nil {
			err = ctx.Err()
		}
		return errors.Join(err, failed, out.Flush())
	})
}

type kvCountCmd struct{ rangeFlags }

func (x *kvCountCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	r, err := x.get(k)
	if err != nil {
		return err
	}
	return k.tree(ctx, a, readOnly, func(ctx context.Context, t *kv.Tree) error {
		n, err := t.Count(ctx, r)
		if err != nil {
			return err
		}
		return a.print(map[string]any{"keys": n}, func(w io.Writer) { fmt.Fprintln(w, n) })
	})
}

type kvSplitsCmd struct {
	Name string `arg:"" complete:"tree" optional:"" help:"Name of the tree; the same as --tree."`
	rangeFlags
	Parts int `short:"n" default:"16" placeholder:"N" help:"Ranges at most, up to 4096; a small tree has fewer. One range is at least one leaf."`
}

// kvSplit is a kv.Split as JSON: keys as text where they are, else base64. No key means no bound.
type kvSplit struct {
	Index      int     `json:"index"`
	From       *string `json:"from,omitempty"`
	FromBase64 []byte  `json:"from_base64,omitempty"`
	To         *string `json:"to,omitempty"`
	ToBase64   []byte  `json:"to_base64,omitempty"`
	Node       string  `json:"node,omitempty"`
	Leaves     int64   `json:"leaves"`
	Keys       int64   `json:"keys"`
	Bytes      int64   `json:"bytes"`
}

func newKVSplit(i int, s kv.Split, node string) kvSplit {
	text := func(key []byte) (*string, []byte) {
		if s := string(key); len(key) > 0 && utf8.Valid(key) {
			return &s, nil
		}
		return nil, key
	}
	v := kvSplit{Index: i, Node: node, Leaves: s.Leaves, Keys: s.Keys, Bytes: s.Bytes}
	v.From, v.FromBase64 = text(s.From)
	v.To, v.ToBase64 = text(s.To)
	return v
}

func (x *kvSplitsCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	if x.Name != "" {
		k.Tree = x.Name
	}
	r, err := x.get(k)
	if err != nil {
		return err
	}
	if x.Parts < 1 || x.Parts > kv.MaxSplits {
		return usagef("--parts %d: want 1 to %d", x.Parts, kv.MaxSplits)
	}
	return k.tree(ctx, a, readOnly, func(ctx context.Context, t *kv.Tree) error {
		splits, err := t.Splits(ctx, r, x.Parts)
		if err != nil {
			return err
		}
		out := []kvSplit{}
		for i, s := range splits {
			out = append(out, newKVSplit(i, s, t.NodeName(s.Node)))
		}
		bound := func(key []byte) string {
			if len(key) == 0 {
				return "-"
			}
			return k.text(key)
		}
		return a.print(out, func(w io.Writer) {
			fmt.Fprintln(w, "INDEX\tNODE\tLEAVES\tKEYS\tBYTES\tFROM\tTO")
			for i, s := range splits {
				fmt.Fprintf(w, "%d\t%s\t%d\t%d\t%s\t%s\t%s\n", i, out[i].Node, s.Leaves, s.Keys, bytesText(uint64(s.Bytes)), bound(s.From), bound(s.To))
			}
		})
	})
}

type kvStatsCmd struct{}

type kvStatsView struct {
	Name    string       `json:"name"`
	Kind    string       `json:"kind"`
	Owner   string       `json:"owner,omitempty"`
	Created time.Time    `json:"created"`
	Root    btree.Ref    `json:"root"`
	Limits  btree.Limits `json:"limits"`
	Survey  kv.Survey    `json:"survey"`
	Seconds float64      `json:"seconds"`
}

func (*kvStatsCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	return k.tree(ctx, a, readOnly, func(ctx context.Context, t *kv.Tree) error {
		start := time.Now()
		s, err := t.Survey(ctx)
		if err != nil {
			return err
		}
		n := t.Entry()
		v := kvStatsView{n.Name, n.Kind, n.Owner, n.Created, n.Ref, t.Limits(), s, time.Since(start).Seconds()}
		return a.print(v, func(w io.Writer) {
			fmt.Fprintf(w, "name\t%s\nowner\t%s\ncreated\t%s\nroot\t%v\n", v.Name, v.Owner, v.Created.Format(time.RFC3339), v.Root)
			fmt.Fprintf(w, "keys\t%d\nlevels\t%d\nnodes\t%d inner, %d leaves, of %s, %s\n", s.Keys, s.Levels, s.Inner, s.Leaves, bytesText(uint64(v.Limits.NodeBytes)), v.Limits.Slab)
			fmt.Fprintf(w, "layers of long keys\t%d\nlarge values\t%d, %s\n", s.Layers, s.Values, bytesText(uint64(s.ValueBytes)))
			fmt.Fprintf(w, "in nodes\t%s, %.0f%% full\nnodes take\t%s\n", bytesText(uint64(s.UsedBytes)),
				100*float64(s.UsedBytes)/float64(max(1, (s.Inner+s.Leaves)*v.Limits.Room)), bytesText(uint64(s.SlabBytes)))
		})
	})
}

type kvDropCmd struct{}

func (*kvDropCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	return k.tree(ctx, a, nil, func(ctx context.Context, t *kv.Tree) error {
		if err := t.Drop(ctx); err != nil {
			return err
		}
		return a.print(map[string]any{"dropped": k.Tree}, func(io.Writer) {})
	})
}

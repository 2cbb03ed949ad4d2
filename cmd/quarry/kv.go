package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/cmd/quarry/kvfile"
)

type kvCmd struct {
	Tree   string `complete:"tree" short:"t" default:"default" placeholder:"NAME" help:"Name of the tree."`
	Hex    bool   `xor:"encoding" help:"Keys and values on the command line, and those printed, are hexadecimal."`
	Base64 bool   `xor:"encoding" name:"base64" help:"The same in base64."`

	Create  kvCreateCmd  `cmd:"" help:"Make an empty tree. Example: quarry kv create -t users"`
	List    kvListCmd    `cmd:"" help:"List trees. Example: quarry kv list"`
	Get     kvGetCmd     `cmd:"" help:"Print a key's value. Example: quarry kv get -t users ada"`
	Put     kvPutCmd     `cmd:"" help:"Set a key's value. Example: quarry kv put -t users ada -d lovelace"`
	Del     kvDelCmd     `cmd:"" help:"Remove keys. Example: quarry kv del -t users ada grace"`
	Scan    kvScanCmd    `cmd:"" help:"Print keys and values in order. Example: quarry kv scan -t users --prefix a"`
	Count   kvCountCmd   `cmd:"" help:"Count keys. Example: quarry kv count -t users --from a --to b"`
	Splits  kvSplitsCmd  `cmd:"" help:"Cut a tree into ranges of about the same size, with the node that holds each. Example: quarry kv splits users --parts 16"`
	Watch   kvWatchCmd   `cmd:"" help:"Print keys and values, and then each change of them as it is committed. Example: quarry kv watch users --prefix a"`
	Follow  kvFollowCmd  `cmd:"" help:"Print the changes since the last time, and then each as it is committed, for a receiver that may be killed. Example: quarry kv follow users --state users.copy"`
	Load    kvLoadCmd    `cmd:"" help:"Read keys and values from a file. Example: quarry kv load -t users users.csv"`
	Dump    kvDumpCmd    `cmd:"" help:"Write all keys and values to a file. Example: quarry kv dump -t users users.jsonl"`
	Stats   kvStatsCmd   `cmd:"" help:"Describe a tree. Example: quarry kv stats -t users"`
	Drop    kvDropCmd    `cmd:"" help:"Delete a tree and everything in it. Example: quarry kv drop -t users"`
	Compact kvCompactCmd `cmd:"" help:"Fill the leaves of a tree, so that it takes less memory. Example: quarry kv compact users --fill 92"`
	Collect kvCollectCmd `cmd:"" help:"Free nodes and values that dead clients left outside of any tree. Example: quarry kv collect --dry-run"`
}

func (k *kvCmd) encoding() kvfile.Encoding {
	switch {
	case k.Hex:
		return kvfile.Hex
	case k.Base64:
		return kvfile.Base64
	}
	return kvfile.Text
}

// key is a key from the command line.
func (k *kvCmd) key(s string) ([]byte, error) {
	b, err := k.encoding().Decode(s)
	if err != nil {
		return nil, usagef("key %q: %w", s, err)
	}
	return b, nil
}

// text is how a key or value is printed: as it is if it is text without control
// characters, else quoted, unless a flag says how.
func (k *kvCmd) text(b []byte) string {
	if e := k.encoding(); e != kvfile.Text {
		return e.Encode(b)
	}
	s := string(b)
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) || strings.HasPrefix(s, `"`) {
		return strconv.Quote(s)
	}
	return s
}

// tree runs f with the tree. Each operation has a deadline of its own, so what
// reads a whole tree may take its time.
func (k *kvCmd) tree(ctx context.Context, a *app, change func(*client.Config), f func(context.Context, *kv.Tree) error) error {
	return k.treeWith(ctx, a, change, btree.Config{}, f)
}

// Treats the tree named by --tree: connects, opens it within --timeout, and runs f without that bound. What
// f does may take longer than one operation; see app.one. A client that reads alone opens a tree that refuses writes.
func (k *kvCmd) treeWith(ctx context.Context, a *app, change func(*client.Config), tc btree.Config, f func(context.Context, *kv.Tree) error) error {
	c, err := a.connect(ctx, change)
	if err != nil {
		return err
	}
	octx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	var cfg client.Config
	if change != nil {
		change(&cfg)
	}
	tc.ReadOnly = cfg.ReadOnly
	t, err := kv.Open(octx, c, k.Tree, tc)
	cancel()
	if err == nil {
		err = f(ctx, t)
	}
	return errors.Join(err, c.Close())
}

// one bounds one operation.
func (a *app) one(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.cli.Timeout)
}

type kvCreateCmd struct {
	NodeBytes sizeFlag `default:"4KiB" help:"Size of a node, a power of two from 1KiB to 64KiB; its slab has 64 B more."`
	Replicas  int      `short:"r" placeholder:"N" help:"Replicas of the tree's regions; default is the cluster's."`
	Durable   bool     `help:"Acknowledged changes survive a power failure of all nodes. Uses only regions of nodes with persistent memory or disks."`
	Slab      string   `enum:"pair,staged" default:"pair" help:"Slabs of the nodes: pair, or staged, which have one image instead of two: about half the memory for each key, somewhat slower puts. With one replica, and nodes of up to 16KiB."`
}

func (x *kvCreateCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	return a.with(ctx, func(c *client.Config) {
		c.Replicas, c.Durability, c.Slab = x.Replicas, durability(x.Durable), slabKind(x.Slab)
	}, func(ctx context.Context, c *client.Client) error {
		t, err := kv.Create(ctx, c, k.Tree, btree.Config{NodeBytes: int(x.NodeBytes)})
		if err != nil {
			return err
		}
		return a.print(map[string]any{"name": k.Tree, "root": t.Root(), "limits": t.Limits()}, func(w io.Writer) { fmt.Fprintln(w, t.Root()) })
	})
}

type kvListCmd struct {
	Prefix string `arg:"" complete:"tree" optional:"" help:"Only trees whose names have this prefix."`
}

// treeEntry is a tree in the placement library.
type treeEntry struct {
	Name     string     `json:"name"`
	Root     client.Ref `json:"root"`
	Replicas int        `json:"replicas"`
	Owner    string     `json:"owner,omitempty"`
	Created  time.Time  `json:"created"`
}

func (x *kvListCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		list := []treeEntry{}
		err := c.Names().List(ctx, x.Prefix, kv.NameKind, func(n client.Name) error {
			list = append(list, treeEntry{n.Name, n.Ref, c.Replicas(n.Ref), n.Owner, n.Created})
			return nil
		})
		if err != nil {
			return err
		}
		return a.print(list, func(w io.Writer) {
			fmt.Fprintln(w, "TREE\tROOT\tREPLICAS\tOWNER\tCREATED")
			for _, t := range list {
				fmt.Fprintf(w, "%s\t%v\t%d\t%s\t%s\n", t.Name, t.Root, t.Replicas, t.Owner, t.Created.Format(time.RFC3339))
			}
		})
	})
}

// kvEntry is an entry as JSON: key and value as text where they are, else base64.
type kvEntry struct {
	Key         *string `json:"key,omitempty"`
	KeyBase64   []byte  `json:"key_base64,omitempty"`
	Value       *string `json:"value,omitempty"`
	ValueBase64 []byte  `json:"value_base64,omitempty"`
	Version     uint64  `json:"version"`
}

// Keys and values that are UTF-8 are printed as text, and others as base64 in a field of another name:
// JSON has no bytes.
func newKVEntry(key, value []byte, version uint64, keysOnly bool) kvEntry {
	e := kvEntry{Version: version}
	if s := string(key); utf8.Valid(key) {
		e.Key = &s
	} else {
		e.KeyBase64 = key
	}
	if s := string(value); keysOnly {
		return e
	} else if utf8.Valid(value) {
		e.Value = &s
	} else {
		e.ValueBase64 = value
	}
	return e
}

type kvGetCmd struct {
	Key string `arg:"" help:"The key."`
	Out string `short:"o" placeholder:"FILE" help:"Write the value there."`
}

func (x *kvGetCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	key, err := k.key(x.Key)
	if err != nil {
		return err
	}
	return k.tree(ctx, a, readOnly, func(ctx context.Context, t *kv.Tree) error {
		ctx, cancel := a.one(ctx)
		defer cancel()
		v, version, err := t.GetVersion(ctx, key, nil)
		if err != nil {
			return fmt.Errorf("%s: %q: %w", t, key, err)
		}
		switch {
		case x.Out != "":
			if err := os.WriteFile(x.Out, v, 0o600); err != nil {
				return err
			}
			return a.print(newKVEntry(key, nil, version, true), func(w io.Writer) { fmt.Fprintf(w, "%d bytes in %s\n", len(v), x.Out) })
		case a.cli.JSON:
			return a.print(newKVEntry(key, v, version, false), nil)
		case k.encoding() != kvfile.Text:
			_, err = fmt.Fprintln(a.out, k.encoding().Encode(v))
			return err
		}
		_, err = a.out.Write(v)
		return err
	})
}

type kvPutCmd struct {
	Key string `arg:"" help:"The key."`
	payloadFlags
	IfAbsent  bool    `xor:"cond" help:"Only if the tree does not have the key."`
	IfVersion uint64  `xor:"cond" placeholder:"N" help:"Only if the key is at this version; see kv get --json."`
	IfValue   *string `xor:"cond" placeholder:"TEXT" help:"Only if the key has this value."`
}

func (x *kvPutCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	key, err := k.key(x.Key)
	if err != nil {
		return err
	}
	value, err := x.read(a)
	if err == nil && x.Data != nil {
		if value, err = k.encoding().Decode(*x.Data); err != nil {
			err = usagef("--data: %w", err)
		}
	}
	if err != nil {
		return err
	}
	var cond btree.Cond
	switch {
	case x.IfAbsent:
		cond = btree.IfAbsent()
	case x.IfVersion != 0:
		cond = btree.IfVersion(x.IfVersion)
	case x.IfValue != nil:
		old, err := k.encoding().Decode(*x.IfValue)
		if err != nil {
			return usagef("--if-value: %w", err)
		}
		cond = btree.IfValue(old)
	}
	return k.tree(ctx, a, nil, func(ctx context.Context, t *kv.Tree) error {
		ctx, cancel := a.one(ctx)
		defer cancel()
		version, err := t.PutIf(ctx, key, value, cond)
		if err != nil {
			return fmt.Errorf("%s: %w", t, err)
		}
		return a.print(map[string]any{"version": version, "bytes": len(value)}, func(io.Writer) {})
	})
}

type kvDelCmd struct {
	Keys      []string `arg:"" name:"key" help:"The keys."`
	IfVersion uint64   `placeholder:"N" help:"Only if the key is at this version."`
	Missing   bool     `help:"Do not fail where a key is missing."`
}

func (x *kvDelCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	var keys [][]byte
	for _, s := range x.Keys {
		key, err := k.key(s)
		if err != nil {
			return err
		}
		keys = append(keys, key)
	}
	if x.IfVersion != 0 && len(keys) > 1 {
		return usagef("--if-version with %d keys: want one", len(keys))
	}
	var cond btree.Cond
	if x.IfVersion != 0 {
		cond = btree.IfVersion(x.IfVersion)
	}
	return k.tree(ctx, a, nil, func(ctx context.Context, t *kv.Tree) error {
		n := 0
		for _, key := range keys {
			octx, cancel := a.one(ctx)
			err := t.DeleteIf(octx, key, cond)
			cancel()
			switch {
			case err == nil:
				n++
			case !x.Missing || !errors.Is(err, btree.ErrNoKey):
				return fmt.Errorf("%s: %w (%d keys before it are deleted)", t, err, n)
			}
		}
		return a.print(map[string]any{"deleted": n}, func(io.Writer) {})
	})
}

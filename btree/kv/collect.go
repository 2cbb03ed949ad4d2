package kv

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// Stray is an object with a tag of a tree whose last writer is no session any more.
type Stray struct {
	Ref   btree.Ref
	Tag   uint32
	Bytes int
}

// Collected is what Collect did.
type Collected struct {
	Trees   int   `json:"trees"`
	Reached int   `json:"reached"` // objects of the trees
	Strays  int   `json:"strays"`
	Bytes   int64 `json:"bytes"` // payload of the strays
}

// ErrNamesChange: names came, went or moved all the time.
var ErrNamesChange = errors.New("names of trees keep changing: collect again later")

// Collect frees nodes and values that no tree has: what clients left that died
// between making an object and linking it, or between unlinking and freeing. objects
// tells every object whose last writer was no session any more when it was told.
//
// Safe beside clients at work: who links an object has made it, so what a dead
// session wrote last and no tree has now, no tree will ever have. A tree is what a
// name of its kind leads to; names are compared before and after, so that a tree
// which is renamed meanwhile is not taken for one without a name.
func Collect(ctx context.Context, c *client.Client, dryRun bool, objects func(ctx context.Context, found func(Stray)) error) (out Collected, err error) {
	for range collectTries {
		before, err := trees(ctx, c)
		if err != nil {
			return out, err
		}
		strays := map[btree.Ref]Stray{}
		err = objects(ctx, func(s Stray) {
			if s.Tag >= btree.TagRoot && s.Tag <= btree.TagLayer {
				strays[s.Ref] = s
			}
		})
		if err != nil {
			return out, err
		}
		out = Collected{Trees: len(before)}
		for name := range before {
			t, err := Open(ctx, c, name, btree.Config{CacheBytes: -1})
			if err == nil {
				err = t.Walk(ctx, func(o btree.Object) error {
					out.Reached++
					delete(strays, o.Ref)
					return nil
				})
			}
			if errors.Is(err, client.ErrNoName) || errors.Is(err, btree.ErrNoTree) {
				continue // dropped meanwhile: the names have changed
			} else if err != nil {
				return out, fmt.Errorf("tree %q: %w", name, err)
			}
		}
		after, err := trees(ctx, c)
		if err != nil {
			return out, err
		}
		if !maps.Equal(before, after) {
			continue
		}
		for _, ref := range slices.SortedFunc(maps.Keys(strays), func(a, b btree.Ref) int { return int(int64(a.Addr) - int64(b.Addr)) }) {
			if !dryRun {
				if err := c.Free(ctx, ref); errors.Is(err, client.ErrFreed) {
					continue
				} else if err != nil {
					return out, err
				}
			}
			out.Strays++
			out.Bytes += int64(strays[ref].Bytes)
		}
		return out, nil
	}
	return out, ErrNamesChange
}

// collectTries bounds how often Collect starts again because names have changed.
const collectTries = 5

// trees are the names of trees and what they lead to. Two names may lead to one tree.
func trees(ctx context.Context, c *client.Client) (map[string]btree.Ref, error) {
	out := map[string]btree.Ref{}
	err := c.Names().List(ctx, "", NameKind, func(n client.Name) error {
		out[n.Name] = n.Ref
		return nil
	})
	return out, err
}

package kv

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/slab"
)

// Stray is an object that may have the tag of a tree, as it was read.
type Stray = slab.Seen

// Collected is what Collect did.
type Collected struct {
	Trees   int   `json:"trees"`
	Reached int   `json:"reached"` // objects of the trees
	Strays  int   `json:"strays"`
	Bytes   int64 `json:"bytes"` // payload of the strays
}

// ErrNamesChange: names of trees kept changing until the tries ran out.
var ErrNamesChange = errors.New("names of trees keep changing: collect again later")

// Collect frees nodes and values that no tree has. Clients leave them that die between allocating an
// object and linking it, or between unlinking and freeing. objects reads every object of the cluster.
//
// Safe beside clients at work: it frees only what is an orphan by the rule of
// slab.Survey. A tree is what a name of its kind leads to.
func Collect(ctx context.Context, c *client.Client, dryRun bool, objects func(ctx context.Context, found func(Stray)) error) (Collected, error) {
	for range collectTries {
		s := survey{ctx: ctx, c: c, objects: objects}
		orphans, done, err := slab.Orphans(&s)
		if err != nil {
			return s.out, err
		}
		if done {
			err = freeOrphans(ctx, c, orphans, dryRun, &s.out)
			return s.out, err
		}
	}
	return Collected{}, ErrNamesChange
}

// survey is the slab.Survey of the trees of a cluster.
type survey struct {
	ctx     context.Context
	c       *client.Client
	objects func(ctx context.Context, found func(Stray)) error
	out     Collected
}

func (s *survey) Objects(saw func(slab.Seen)) error {
	return s.objects(s.ctx, func(o Stray) {
		if o.Tag >= btree.TagRoot && o.Tag <= btree.TagLayer {
			saw(o)
		}
	})
}

func (s *survey) Sessions() (func(uint32) slab.SessionState, error) { return s.c.SessionStates(s.ctx) }

// Named walks all trees. Names are compared before and after, revisions included, so
// that a tree which gets another name meanwhile is not taken for one without a name.
func (s *survey) Named(met func(btree.Ref)) (whole bool, err error) {
	before, err := trees(s.ctx, s.c)
	if err != nil {
		return false, err
	}
	s.out = Collected{Trees: len(before)}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		e := client.Name{Name: name, Ref: before[name].ref}
		if err := s.walk(e, met); errors.Is(err, btree.ErrNoTree) {
			return false, nil // dropped meanwhile
		} else if err != nil {
			return false, err
		}
		beside, err := replacementsOf(client.Name{Name: name, Notes: map[string]string{replacementNote: before[name].beside}})
		if err != nil {
			return false, err
		}
		for _, r := range beside {
			e.Ref = r.Ref
			if err := s.walk(e, met); err != nil && !errors.Is(err, btree.ErrNoTree) { // Settle has freed it, and the name has not changed yet
				return false, err
			}
		}
	}
	after, err := trees(s.ctx, s.c)
	return maps.Equal(before, after), err
}

// walk meets the objects of one tree.
func (s *survey) walk(e client.Name, met func(btree.Ref)) error {
	t, err := attach(s.ctx, s.c, e, btree.Config{CacheBytes: -1})
	if err == nil {
		err = t.Walk(s.ctx, func(o btree.Object) error {
			s.out.Reached++
			met(o.Ref)
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("tree %q: %w", e.Name, err)
	}
	return nil
}

// freeOrphans frees orphans and adds them to out.
func freeOrphans(ctx context.Context, c *client.Client, orphans []slab.Seen, dryRun bool, out *Collected) error {
	for _, o := range orphans {
		if !dryRun {
			err := c.CompareAndFree(ctx, o.Ref, o.Version)
			if errors.Is(err, client.ErrFreed) || errors.Is(err, client.ErrConflict) {
				continue // freed, or repaired, since it was read
			} else if err != nil {
				return err
			}
		}
		out.Strays++
		out.Bytes += int64(o.Bytes)
	}
	return nil
}

// collectTries bounds how often Collect starts again because names have changed.
const collectTries = 5

// named is the object of a name. A name that was deleted and created has another revision.
type named struct {
	ref      btree.Ref
	beside   string // the note of replacements; see Stage
	revision uint64
}

// trees are the names of trees and what they lead to. Two names may lead to one tree.
func trees(ctx context.Context, c *client.Client) (map[string]named, error) {
	out := map[string]named{}
	err := c.Names().List(ctx, "", NameKind, func(n client.Name) error {
		out[n.Name] = named{n.Ref, n.Notes[replacementNote], n.Revision}
		return nil
	})
	return out, err
}

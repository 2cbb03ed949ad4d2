package kv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// A tree is replaced as a whole in three steps, each of which is one change of its name's entry: Stage puts a new, empty
// tree beside it, which its owner fills; Commit makes the name stand for that tree; Settle frees the other one. The
// entry has all these trees meanwhile, so that Collect takes none for garbage. All steps can be repeated.

// ErrNotStaged: nothing is staged beside the tree by that owner.
var ErrNotStaged = errors.New("nothing is staged: the tree was dropped meanwhile, or the replacement given up")

// ReplacingError: another owner has a tree staged.
type ReplacingError struct{ Name, Owner string }

func (e *ReplacingError) Error() string {
	return fmt.Sprintf("tree %q is being replaced by %s", e.Name, e.Owner)
}

// replacement is a further tree of a name's entry. A note lists them.
type replacement struct {
	Owner string     `json:"owner"`
	State string     `json:"state"`
	Ref   client.Ref `json:"ref"` // root of the tree that the name does not stand for
}

const (
	replacementNote = "replacements"
	maxReplacements = 16

	staged    = "staged"    // Ref is being filled; at most one is
	committed = "committed" // Ref is the former content; readers may have it open
	abandoned = "abandoned" // Ref is being freed; the name has never stood for it
)

// replacements are those of one entry, each with an owner of its own.
type replacements []replacement

// replacementsOf reads the note.
func replacementsOf(e client.Name) (all replacements, err error) {
	if note := e.Notes[replacementNote]; note != "" {
		if err = json.Unmarshal([]byte(note), &all); err != nil {
			err = fmt.Errorf("tree %q: its note %q is damaged: %w", e.Name, replacementNote, err)
		}
	}
	return all, err
}

// of is the replacement of an owner, the zero one if it has none.
func (all replacements) of(owner string) (r replacement) {
	for _, x := range all {
		if x.Owner == owner {
			r = x
		}
	}
	return r
}

// with has another replacement of its owner; without a state none.
func (all replacements) with(r replacement) (out replacements) {
	for _, x := range all {
		if x.Owner != r.Owner {
			out = append(out, x)
		}
	}
	if r.State != "" {
		out = append(out, r)
	}
	return out
}

// noting is an entry with these replacements.
func noting(e client.Name, all replacements) client.Name {
	e.Notes = maps.Clone(e.Notes)
	delete(e.Notes, replacementNote)
	if len(all) > 0 {
		b, err := json.Marshal(all)
		if err != nil {
			panic(err) // plain data
		}
		if e.Notes == nil {
			e.Notes = map[string]string{}
		}
		e.Notes[replacementNote] = string(b)
	}
	return e
}

// entry looks up a tree's name with its replacements.
func entry(ctx context.Context, c *client.Client, name string) (client.Name, replacements, error) {
	e, err := lookup(ctx, c, name)
	if err != nil {
		return e, nil, err
	}
	all, err := replacementsOf(e)
	return e, all, err
}

// Pauses between the tries of a step. Each pause is twice as long as the one before, half of it drawn: programs that
// have met in one entry do not meet again, and a controller that answers no change is not asked all the time.
const (
	firstPause   = 2 * time.Millisecond
	longestPause = time.Second
)

// tries are those of one step.
type tries struct{ pause time.Duration }

// again says whether a step has to look at the entry again: it has changed, or it is unknown whether it has. It
// returns after a pause; false if the context has ended by then.
func (t *tries) again(ctx context.Context, err error) bool {
	if !errors.Is(err, client.ErrConflict) && !errors.Is(err, client.ErrUnknown) {
		return false
	}
	t.pause = min(max(firstPause, 2*t.pause), longestPause)
	select {
	case <-time.After(t.pause/2 + rand.N(t.pause/2)):
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// Stage opens the tree that an owner has staged beside the one with a name. The first call makes
// it, empty, with the nodes, replicas and durability of the present tree; if there is no present
// tree that is made too, empty. owner names the replacement: any word that was not used before
// for this tree.
//
// Errors: *ReplacingError, also if too many former contents are not settled; ErrNotTree; those of
// Create.
func Stage(ctx context.Context, c *client.Client, name, owner string) (*Tree, error) {
	var tries tries
	for {
		e, all, err := entry(ctx, c, name)
		switch r := all.of(owner); {
		case errors.Is(err, client.ErrNoName):
			if _, err = Create(ctx, c, name, btree.Config{}); err != nil && !errors.Is(err, client.ErrNameExists) {
				return nil, err
			}
			continue
		case err != nil:
			return nil, err
		case r.State == staged:
			e.Ref = r.Ref
			return attach(ctx, c, e, btree.Config{})
		case r.State != "" || len(all) >= maxReplacements:
			return nil, &ReplacingError{name, all[0].Owner}
		}
		for _, r := range all {
			if r.State == staged {
				return nil, &ReplacingError{name, r.Owner}
			}
		}
		t, err := stage(ctx, c, e, all, owner)
		if errors.Is(err, client.ErrUnknown) || !tries.again(ctx, err) {
			return t, err
		}
	}
}

// stage makes an empty tree like the one of an entry, and notes it there.
func stage(ctx context.Context, c *client.Client, e client.Name, all replacements, owner string) (*Tree, error) {
	like, err := attach(ctx, c, e, btree.Config{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	cfg := btree.Config{NodeBytes: like.Limits().NodeBytes, Staged: like.store.slab == client.StagedSlab, Overhead: c.PayloadOverhead(), Seed: rand.Uint64()}
	st := &objects{c: c, ctx: ctx, slab: slabOf(cfg.Staged), replicas: c.Replicas(e.Ref), durability: c.Durability(e.Ref)}
	defer st.end()
	st.Begin()
	sh, err := btree.Make(st, cfg)
	if err != nil {
		return nil, fmt.Errorf("stage tree %q: %w", e.Name, err)
	}
	now, err := st.op.ChangeName(ctx, noting(e, all.with(replacement{owner, staged, sh.Root()})))
	if err != nil {
		if !errors.Is(err, client.ErrUnknown) && !errors.Is(err, client.ErrUnreachable) {
			_ = st.Free(sh.Root())
		}
		return nil, fmt.Errorf("stage tree: %w", err)
	}
	now.Ref = sh.Root()
	return newTreeOf(c, now, sh, cfg.Staged), nil
}

// OpenStaged opens what an owner has staged; ErrNotStaged if there is nothing, or it is committed.
func OpenStaged(ctx context.Context, c *client.Client, name, owner string) (*Tree, error) {
	e, all, err := entry(ctx, c, name)
	if err != nil {
		return nil, err
	}
	r := all.of(owner)
	if r.State != staged {
		return nil, notStaged(name, owner)
	}
	e.Ref = r.Ref
	return attach(ctx, c, e, btree.Config{})
}

func notStaged(name, owner string) error {
	return fmt.Errorf("tree %q by %s: %w", name, owner, ErrNotStaged)
}

// Commit makes the name stand for what its owner has staged. A reader that opens the name gets all of the former content or all
// of the new one; those that have the former one open go on to read it until Settle. Under a context of
// client.Bind nothing changes once that session has ended.
//
// Errors: ErrNotStaged; client.ErrFenced.
func Commit(ctx context.Context, c *client.Client, name, owner string) error {
	var tries tries
	for {
		e, all, err := entry(ctx, c, name)
		r := all.of(owner)
		switch {
		case err != nil:
			return err
		case r.State == committed:
			return nil
		case r.State != staged:
			return notStaged(name, owner)
		}
		next := noting(e, all.with(replacement{owner, committed, e.Ref}))
		next.Ref = r.Ref
		if _, err = c.Names().Change(ctx, next); !tries.again(ctx, err) {
			return err
		}
	}
}

// Committed says whether the name stands for what an owner has staged, and its former content is not settled yet.
func Committed(ctx context.Context, c *client.Client, name, owner string) (bool, error) {
	_, all, err := entry(ctx, c, name)
	if errors.Is(err, client.ErrNoName) {
		return false, nil // dropped
	}
	return all.of(owner).State == committed, err
}

// Settle ends a replacement: it frees the former content, or what was staged and not committed, which a later Commit
// does not find any more.
func Settle(ctx context.Context, c *client.Client, name, owner string) error {
	var tries tries
	for {
		e, all, err := entry(ctx, c, name)
		r := all.of(owner)
		switch {
		case errors.Is(err, client.ErrNoName):
			return nil // dropped; Collect frees what was staged
		case err != nil:
			return err
		case r.State == "":
			return nil
		}
		next := noting(e, all.with(replacement{Owner: owner}))
		if r.State == staged {
			next = noting(e, all.with(replacement{owner, abandoned, r.Ref}))
		} else if err = dropRoot(ctx, c, e, r.Ref); err != nil {
			return err
		}
		if _, err = c.Names().Change(ctx, next); err != nil && !tries.again(ctx, err) {
			return err
		}
	}
}

// dropRoot frees the tree with a root, which the name does not stand for.
func dropRoot(ctx context.Context, c *client.Client, e client.Name, root client.Ref) error {
	if e.Ref == root {
		return fmt.Errorf("tree %q: its note %q is damaged: it names what the name stands for", e.Name, replacementNote)
	}
	e.Ref = root
	t, err := attach(ctx, c, e, btree.Config{CacheBytes: -1})
	if err == nil {
		err = t.free(ctx)
	}
	if errors.Is(err, btree.ErrNoTree) {
		err = nil
	}
	return err
}

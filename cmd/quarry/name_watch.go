package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/client"
)

type nameWatchCmd struct {
	Names []string `arg:"" complete:"name" help:"The names; they need not exist."`
	Count int      `short:"n" placeholder:"N" help:"End after N changes; 0 means never."`
}

// watchedName is a line of the output.
type watchedName struct {
	Name  string       `json:"name"`
	Entry *client.Name `json:"entry"` // null: there is no such name
}

func (n *nameWatchCmd) Run(ctx context.Context, a *app) error {
	if n.Count < 0 {
		return usagef("--count %d: want 0 or more", n.Count)
	}
	names := slices.Compact(slices.Sorted(slices.Values(n.Names)))
	if len(names) > client.MaxFollowedNames {
		return usagef("%d names: at most %d are watched at once", len(names), client.MaxFollowedNames)
	}
	c, err := a.connect(ctx, readOnly)
	if err != nil {
		return err
	}
	return errors.Join(n.watch(ctx, a, c, names), c.Close())
}

// watch prints each name, and then what they become.
func (n *nameWatchCmd) watch(ctx context.Context, a *app, c *client.Client, names []string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed := make(chan int) // index of a name
	follows, last := make([]*client.FollowedName, len(names)), make([]uint64, len(names))
	for i, name := range names {
		octx, done := a.one(ctx)
		f, err := c.Names().Follow(octx, name)
		done()
		if err != nil {
			return err
		}
		defer f.Close()
		follows[i] = f
		if last[i], err = n.print(a, f, name); err != nil {
			return err
		}
		go func() {
			for {
				select {
				case <-f.Changed():
				case <-ctx.Done():
					return
				}
				select {
				case changed <- i:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	for seen := 0; n.Count == 0 || seen < n.Count; {
		select {
		case i := <-changed:
			e, err := follows[i].Entry()
			if err == nil && e.Revision == last[i] || errors.Is(err, client.ErrNoName) && last[i] == 0 {
				continue // it was not known for some time
			}
			if errors.Is(err, client.ErrUnreachable) {
				a.log.Warn("changes may not be printed until the controllers answer", "name", names[i], "error", err)
				continue
			}
			if last[i], err = n.print(a, follows[i], names[i]); err != nil {
				return err
			}
			seen++
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// print prints what a name is now, and returns its revision, 0 where there is none.
func (n *nameWatchCmd) print(a *app, f *client.FollowedName, name string) (revision uint64, err error) {
	e, err := f.Entry()
	line := watchedName{Name: name}
	switch {
	case err == nil:
		line.Entry = &e
	case !errors.Is(err, client.ErrNoName):
		return 0, err
	}
	if a.cli.JSON {
		b, err := json.Marshal(line)
		if err != nil {
			return 0, err
		}
		_, err = fmt.Fprintf(a.out, "%s\n", b)
		return e.Revision, err
	}
	if line.Entry == nil {
		_, err = fmt.Fprintf(a.out, "%s: no such name\n", name)
		return 0, err
	}
	_, err = fmt.Fprintf(a.out, "%s: %s %v at revision %d\n", name, e.Kind, e.Ref, e.Revision)
	return e.Revision, err
}

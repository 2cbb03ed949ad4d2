package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/quarrystore/quarry/client"
)

type nameCmd struct {
	Set    nameSetCmd    `cmd:"" help:"Point a name at an object; the name is made if there is none."`
	Show   nameGetCmd    `cmd:"" name:"get" help:"Show a name."`
	List   nameListCmd   `cmd:"" help:"List names."`
	Watch  nameWatchCmd  `cmd:"" help:"Print names, and each change of them as the controllers push it."`
	Delete nameDeleteCmd `cmd:"" help:"Delete a name; the object stays."`
}

type nameSetCmd struct {
	Name       string `arg:"" complete:"name" help:"1 to 255 bytes of text."`
	Target     target `arg:"" help:"REF or @NAME."`
	Kind       string `default:"object" help:"Kind of the object that the name is for."`
	IfRevision uint64 `placeholder:"N" help:"Only if the name is at this revision."`
	New        bool   `help:"Only if there is no such name yet."`
}

func (n *nameSetCmd) Run(ctx context.Context, a *app) error {
	if n.New && n.IfRevision != 0 {
		return usagef("both --new and --if-revision are given: want one of them")
	}
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		ref, err := n.Target.ref(ctx, c)
		if err != nil {
			return err
		}
		e, err := n.set(ctx, c, ref)
		if err != nil {
			return err
		}
		return a.printNames([]client.Name{e}, e)
	})
}

// setTries bounds how often others may change the name between our look and our change.
const setTries = 16

// Creates the name or replaces its reference. Two attempts of others may fall between the calls: a name that was
// deleted or changed meanwhile is tried again, setTries times. --new and --if-revision are single attempts.
func (n *nameSetCmd) set(ctx context.Context, c *client.Client, ref client.Ref) (client.Name, error) {
	names := c.Names()
	if n.IfRevision != 0 {
		return names.Swap(ctx, n.Name, n.IfRevision, ref)
	}
	for try := 0; ; try++ {
		e, err := names.Create(ctx, n.Name, n.Kind, ref)
		if n.New || !errors.Is(err, client.ErrNameExists) {
			return e, err
		}
		if e, err = names.Lookup(ctx, n.Name); err == nil {
			e, err = names.Swap(ctx, n.Name, e.Revision, ref)
		}
		if again := errors.Is(err, client.ErrConflict) || errors.Is(err, client.ErrNoName); !again || try == setTries {
			return e, err
		}
	}
}

type nameGetCmd struct {
	Name string `arg:"" complete:"name" help:"The name."`
}

func (n *nameGetCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		e, err := c.Names().Lookup(ctx, n.Name)
		if err != nil {
			return err
		}
		return a.printNames([]client.Name{e}, e)
	})
}

type nameListCmd struct {
	Prefix string `arg:"" complete:"name" optional:"" help:"Only names with this prefix."`
	Kind   string `placeholder:"KIND" help:"Only names of this kind."`
}

func (n *nameListCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		list := []client.Name{}
		err := c.Names().List(ctx, n.Prefix, n.Kind, func(e client.Name) error {
			list = append(list, e)
			return nil
		})
		if err != nil {
			return err
		}
		return a.printNames(list, list)
	})
}

func (a *app) printNames(list []client.Name, v any) error {
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "NAME\tKIND\tREF\tREVISION\tOWNER\tCREATED")
		for _, e := range list {
			fmt.Fprintf(w, "%s\t%s\t%v\t%d\t%s\t%s\n", e.Name, e.Kind, e.Ref, e.Revision, e.Owner, e.Created.Format(time.RFC3339))
		}
	})
}

type nameDeleteCmd struct {
	Name       string `arg:"" complete:"name" help:"The name."`
	IfRevision uint64 `placeholder:"N" help:"Only if the name is at this revision."`
}

func (n *nameDeleteCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		if err := c.Names().Delete(ctx, n.Name, n.IfRevision); err != nil {
			return err
		}
		return a.print(map[string]any{"deleted": n.Name}, func(io.Writer) {})
	})
}

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

type kvFollowCmd struct {
	Name  string `arg:"" complete:"tree" optional:"" help:"Name of the tree; the same as --tree."`
	State string `required:"" complete:"tree" placeholder:"NAME" help:"Tree that keeps what was delivered, made if there is none: whoever follows with it next goes on. One for each receiver, with one process at a time."`
	rangeFlags
	KeysOnly bool `help:"Without the values."`
	Acks     bool `help:"Take changes for received only when their position, from --json, is read from standard input, a line each; end with standard input. Without it a change is received when it is written to standard output."`
	Once     bool `help:"End when everything has been printed that has changed since the last time."`
	Count    int  `short:"n" placeholder:"N" help:"End after N changes; 0 means never."`
}

// kvFollowed is an event of a feed as JSON, a line each.
type kvFollowed struct {
	Event    string `json:"event"` // put, delete, synced
	Position uint64 `json:"position"`
	kvEntry
	Version uint64 `json:"version,omitempty"` // in the place of kvEntry's, which is never left out
}

// Run prints changes until --count or --once is reached or it is interrupted.
func (x *kvFollowCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	if x.Name != "" {
		k.Tree = x.Name
	}
	r, err := x.get(k)
	if err != nil {
		return err
	}
	if x.Count < 0 {
		return usagef("--count %d: want 0 or more", x.Count)
	}
	if x.State == k.Tree {
		return usagef("--state %s: want another tree than the one that is followed", x.State)
	}
	if x.Acks && !a.cli.JSON {
		return usagef("--acks: want --json too, which prints positions")
	}
	c, err := a.connect(ctx, nil)
	if err != nil {
		return err
	}
	out := &kvFollowOut{x: x, k: k, json: a.cli.JSON, out: bufio.NewWriterSize(a.out, 64<<10), left: x.Count}
	if x.Count == 0 {
		out.left = -1
	}
	var acks *followAcks
	if x.Acks {
		acks = readAcks(a.in)
	}
	for err == nil && !out.ended {
		if err = x.follow(ctx, a, c, r, out, acks); err == nil || out.ended || ctx.Err() != nil || !passes(err) && !errors.Is(err, btree.ErrNoTree) {
			continue
		}
		// The session has ended, or the tree was replaced. If its name is gone, opening it says so.
		a.log.Warn("follow goes on", "error", err)
		err = rest(ctx)
	}
	return errors.Join(err, c.Close())
}

// follow prints the events of one feed.
func (x *kvFollowCmd) follow(ctx context.Context, a *app, c *client.Client, r btree.Range, out *kvFollowOut, acks *followAcks) (err error) {
	octx, cancel := a.one(ctx)
	named, err := kv.OpenNamed(octx, c, a.cli.KV.Tree, btree.Config{})
	var t *kv.Tree
	if err == nil {
		defer named.Close()
		t, err = named.Tree(octx)
	}
	cancel()
	if err != nil {
		return err
	}
	feed, err := x.open(ctx, a, t, r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, feed.Close()) }()
	if root := feed.StateRoot(); out.state.IsZero() {
		out.state = root
	} else if root != out.state { // the positions that were printed, and those that are read, are of the other one
		return fmt.Errorf("%w: %s", kv.ErrStateGone, x.State)
	}
	if acks != nil {
		return x.acknowledged(ctx, a, feed, out, acks)
	}
	for before := out.last; !out.ended; before = out.last {
		if err := x.next(ctx, ctx, a, feed, out); err != nil {
			return err
		}
		if out.last == before {
			continue // nothing, or synced alone
		}
		octx, cancel := a.one(context.WithoutCancel(ctx)) // what was printed is not printed again, also if it is interrupted now
		err := feed.Ack(octx, out.last)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// next prints events, if any come before nctx ends.
func (x *kvFollowCmd) next(ctx, nctx context.Context, a *app, feed *kv.Feed, out *kvFollowOut) error {
	events, err := feed.Next(nctx)
	switch {
	case err == nil:
		return out.write(events)
	case ctx.Err() != nil:
		return ctx.Err()
	case nctx.Err() != nil:
		return nil
	case passes(err) && !errors.Is(err, client.ErrFenced):
		a.log.Warn("follow goes on", "error", err)
		return rest(ctx)
	}
	return err
}

// open waits until the state is free: a former follower that was killed has it until its session is fenced, and one that lives until it ends.
func (x *kvFollowCmd) open(ctx context.Context, a *app, t *kv.Tree, r btree.Range) (*kv.Feed, error) {
	waiting, cancel := a.waiting(ctx)
	defer cancel()
	for said := false; ; said = true {
		feed, err := t.Follow(ctx, kv.FeedOptions{State: x.State, Range: r, KeysOnly: x.KeysOnly})
		if !errors.Is(err, kv.ErrFeedOpen) {
			return feed, err
		}
		if !said && a.patient { // else the error says it soon
			a.log.Warn("waiting until the other follower has ended, or its session is fenced", "error", err)
		}
		if perr := a.pause(ctx, waiting, "the state is not free"); ctx.Err() != nil {
			return nil, perr
		} else if perr != nil {
			return nil, fmt.Errorf("%w: %w", perr, err)
		}
	}
}

// passes says whether an error of a watch or a feed is one behind which it goes on.
func passes(err error) bool {
	return slices.ContainsFunc([]error{client.ErrFenced, client.ErrLease, client.ErrUnreachable, client.ErrBusy, client.ErrUnknown}, func(e error) bool { return errors.Is(err, e) })
}

// rest is the pause behind such an error.
func rest(ctx context.Context) error {
	select {
	case <-time.After(watchPause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// kvFollowOut prints events.
type kvFollowOut struct {
	x     *kvFollowCmd
	k     *kvCmd
	json  bool
	out   *bufio.Writer
	left  int       // changes until --count; less than 0: no end
	last  uint64    // position printed last
	state btree.Ref // root of the state of the first feed
	ended bool
}

// write prints a batch, up to the event with which the command ends.
func (o *kvFollowOut) write(events []kv.FeedEvent) error {
	last := o.last
	for _, e := range events {
		if err := o.event(o.out, e); err != nil {
			return err
		}
		if last = max(last, e.Position); e.Kind == kv.Synced {
			o.ended = o.x.Once
		} else if o.left--; o.left == 0 {
			o.ended = true
		}
		if o.ended {
			break
		}
	}
	err := o.out.Flush()
	if err == nil {
		o.last = last
	}
	return err
}

func (o *kvFollowOut) event(w io.Writer, e kv.FeedEvent) (err error) {
	kind, text := "", ""
	entry := kvEntry{}
	switch e.Kind {
	case kv.Synced:
		kind, text = "synced", "synced"
	case kv.Delete:
		kind, text = "delete", "delete\t"+o.k.text(e.Key)
		entry = newKVEntry(e.Key, nil, e.Version, true)
	case kv.Put:
		kind, text = "put", "put\t"+o.k.text(e.Key)
		if entry = newKVEntry(e.Key, e.Value, e.Version, o.x.KeysOnly); !o.x.KeysOnly {
			text += "\t" + o.k.text(e.Value)
		}
	}
	if o.json {
		return json.NewEncoder(w).Encode(kvFollowed{Event: kind, Position: e.Position, kvEntry: entry, Version: e.Version})
	}
	_, err = fmt.Fprintln(w, text)
	return err
}

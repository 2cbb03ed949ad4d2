package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

type kvWatchCmd struct {
	Name     string `arg:"" complete:"tree" optional:"" help:"Name of the tree; the same as --tree."`
	Prefix   string `placeholder:"KEY" help:"Only keys with this prefix."`
	Now      bool   `xor:"from" help:"Only changes from now on. Without it all keys come first."`
	Log      string `xor:"from" placeholder:"FILE" help:"Append each event to FILE too, as JSON, and begin with what has changed since an earlier watch with this FILE ended."`
	KeysOnly bool   `help:"Without the values."`
	Synced   bool   `help:"End when everything that was there at the beginning has been printed."`
	Count    int    `short:"n" placeholder:"N" help:"End after N changes; 0 means never."`
}

// kvEvent is an event as JSON, a line each.
type kvEvent struct {
	Event string      `json:"event"`          // tree, put, delete, synced
	Root  *client.Ref `json:"root,omitempty"` // of tree, which comes first
	kvEntry
	Version uint64 `json:"version,omitempty"` // in the place of kvEntry's, which is never left out
}

// Prints events until --count or --synced is reached or it is interrupted.
func (x *kvWatchCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	if x.Name != "" {
		k.Tree = x.Name
	}
	prefix, err := k.key(x.Prefix)
	if err != nil {
		return err
	}
	if x.Count < 0 {
		return usagef("--count %d: want 0 or more", x.Count)
	}
	log, from, err := x.openLog()
	if err != nil {
		return err
	}
	defer log.Close()
	return k.tree(ctx, a, nil, func(ctx context.Context, t *kv.Tree) error {
		w, err := t.Watch(ctx, kv.WatchOptions{Prefix: prefix, From: from, KeysOnly: x.KeysOnly})
		if err != nil {
			return err
		}
		defer w.Close()
		out := &kvWatchOut{k: k, out: a.out, json: a.cli.JSON, log: log, keysOnly: x.KeysOnly}
		root := t.Root()
		if err := out.write(kvEvent{Event: "tree", Root: &root}, ""); err != nil {
			return err
		}
		for n := 0; ; {
			e, err := w.Next(ctx)
			switch {
			case err == nil:
				err = out.event(e)
			case ctx.Err() == nil && passes(err):
				a.log.Warn("watch goes on", "error", err)
				if err := rest(ctx); err != nil {
					return err
				}
				continue
			}
			if err != nil {
				return err
			}
			if e.Kind != kv.Synced {
				n++
			}
			if x.Count > 0 && n == x.Count || x.Synced && e.Kind == kv.Synced {
				return nil
			}
		}
	})
}

// watchPause is the pause behind an error that passes.
const watchPause = 200 * time.Millisecond

// kvWatchOut prints events, and writes them to the log.
type kvWatchOut struct {
	k        *kvCmd
	out      io.Writer
	json     bool
	keysOnly bool
	log      *os.File // nil: none
}

func (o *kvWatchOut) event(e kv.Event) error {
	switch e.Kind {
	case kv.Synced:
		return o.write(kvEvent{Event: "synced"}, "synced")
	case kv.Delete:
		entry := newKVEntry(e.Key, nil, e.Version, true)
		return o.write(kvEvent{Event: "delete", kvEntry: entry, Version: e.Version}, "delete\t"+o.k.text(e.Key))
	}
	entry := newKVEntry(e.Key, e.Value, e.Version, o.keysOnly)
	text := "put\t" + o.k.text(e.Key)
	if !o.keysOnly {
		text += "\t" + o.k.text(e.Value)
	}
	return o.write(kvEvent{Event: "put", kvEntry: entry, Version: e.Version}, text)
}

// write writes an event as JSON and as text. It is printed first: what the log has was printed, and the last event may be printed twice. In the other
// order it might never be. The log has each change in both orders, since the next watch begins with what it has.
func (o *kvWatchOut) write(e kvEvent, text string) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	if o.json {
		_, err = o.out.Write(line)
	} else if text != "" {
		_, err = fmt.Fprintln(o.out, text)
	}
	if err == nil && o.log != nil {
		_, err = o.log.Write(line)
	}
	return err
}

// openLog opens the file of --log, cuts a line off that was not written to its end, and says what the events in it add up to.
func (x *kvWatchCmd) openLog() (*os.File, kv.From, error) {
	from := kv.From{Now: x.Now}
	if x.Log == "" {
		return nil, from, nil
	}
	f, err := os.OpenFile(x.Log, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, from, err
	}
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		err = fmt.Errorf("--log %s: another watch writes it: %w", x.Log, err)
	} else {
		from, err = replayLog(f)
	}
	if err != nil {
		f.Close()
		return nil, from, err
	}
	return f, from, nil
}

// replayLog reads events, and leaves the file at the end of the last whole one.
func replayLog(f *os.File) (from kv.From, err error) {
	known := map[string]uint64{}
	in, size, n := bufio.NewReader(f), int64(0), 0
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			break
		} else if err != nil {
			return from, err
		}
		n++
		var e kvEvent
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&e); err != nil {
			return from, fmt.Errorf("--log %s, line %d is no event of quarry kv watch: %w", f.Name(), n, err)
		}
		if e.Event == "tree" && e.Root != nil {
			if from.Root != (btree.Ref{}) && from.Root != *e.Root {
				for key := range known {
					known[key] = 0
				}
			}
			from.Root = *e.Root
		}
		if e.Event == "put" || e.Event == "delete" {
			key := string(e.KeyBase64)
			if e.Key != nil {
				key = *e.Key
			}
			if known[key] = e.Version; e.Event == "delete" {
				delete(known, key)
			}
		}
		size += int64(len(line))
	}
	if n == 0 {
		return from, f.Truncate(0)
	}
	keys := slices.SortedFunc(maps.Keys(known), strings.Compare)
	from.Known = func(yield func([]byte, uint64) bool) {
		for _, key := range keys {
			if !yield([]byte(key), known[key]) {
				return
			}
		}
	}
	if err := f.Truncate(size); err != nil {
		return from, err
	}
	_, err = f.Seek(size, io.SeekStart)
	return from, err
}

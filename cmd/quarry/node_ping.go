package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/quarrystore/quarry/client"
)

type nodePingCmd struct {
	Name     string        `arg:"" complete:"node" help:"Name of the node."`
	Count    int           `short:"n" default:"10" help:"Messages, one after the other."`
	Interval time.Duration `default:"0s" help:"Pause between messages. Over shm and verbs a node that has had none for 20 us sleeps, and has to be woken."`
	Size     sizeFlag      `short:"s" default:"64" help:"Bytes of a message, up to 4064."`
}

// Help is shown by --help.
func (*nodePingCmd) Help() string {
	return "Example: quarry node ping n1 --fabric tcp. The node's program answers each message, so it shows more than that its memory is in reach; the first message, which opens the connection, is not counted."
}

// sleep waits for a time unless the context ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pingView is what ping prints with --json.
type pingView struct {
	Node     string  `json:"node"`
	Bytes    int     `json:"bytes"`
	Messages int     `json:"messages"`
	MinUS    float64 `json:"min_us"`
	MedianUS float64 `json:"median_us"`
	MaxUS    float64 `json:"max_us"`
}

func (p *nodePingCmd) Run(ctx context.Context, a *app) error {
	switch {
	case p.Count < 1 || p.Count > 1e6:
		return usagef("--count %d: want 1 to 1000000", p.Count)
	case p.Interval < 0 || p.Interval > time.Minute:
		return usagef("--interval %v: want up to 1m", p.Interval)
	case p.Size > client.MaxEcho:
		return usagef("--size %d: a message has at most %d bytes", p.Size, client.MaxEcho)
	}
	v := pingView{Node: p.Name, Bytes: int(p.Size), Messages: p.Count}
	err := a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		payload, answer := bytes.Repeat([]byte{0x51}, v.Bytes), make([]byte, v.Bytes)
		took := make([]time.Duration, 0, p.Count+1)
		for range p.Count + 1 {
			if err := sleep(ctx, p.Interval); err != nil {
				return err
			}
			start := time.Now()
			n, err := c.Echo(ctx, p.Name, payload, answer)
			if err != nil {
				return err
			}
			if !bytes.Equal(payload, answer[:n]) {
				return errors.New("node " + p.Name + " has answered something else")
			}
			took = append(took, time.Since(start))
		}
		took = took[1:]
		slices.Sort(took)
		us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
		v.MinUS, v.MedianUS, v.MaxUS = us(took[0]), us(took[len(took)/2]), us(took[len(took)-1])
		return nil
	})
	if err != nil {
		return err
	}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintf(w, "node %s has answered %d messages of %d bytes: min %.1f us, median %.1f us, max %.1f us\n", v.Node, v.Messages, v.Bytes, v.MinUS, v.MedianUS, v.MaxUS)
	})
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/verify/litmus"
)

type litmusCmd struct {
	Each time.Duration `default:"1s" help:"Time of each program."`
}

// Help is shown below the flags.
func (*litmusCmd) Help() string {
	return `Needs no cluster: the device talks to itself. For example:

  quarry litmus --rdma-device mlx5_0 --each 10s

A program that must see nothing bad and does ends the command with an error: such a
device loses data. The others tell what the device is like.`
}

func (l *litmusCmd) Run(ctx context.Context, a *app) error {
	if l.Each <= 0 || l.Each > time.Hour {
		return usagef("--each %v: want more than 0, at most an hour", l.Each)
	}
	device, err := verbs.ParseConfig(a.cli.RDMADevice.String())
	if err != nil {
		return usageError{err}
	}
	s, caps, done, err := litmus.OnDevice(ctx, device)
	if err != nil {
		return err
	}
	bar := a.progress("asking " + caps.Device)
	rep := litmus.Report{Device: caps, Results: litmus.Run(ctx, s, l.Each, bar.set)}
	bar.end()
	if err := errors.Join(ctx.Err(), done()); err != nil {
		return err
	}
	rep.Left = verbs.Live()
	if err := a.print(rep, func(w io.Writer) { printLitmus(w, &rep) }); err != nil {
		return err
	}
	return rep.Err()
}

func printLitmus(w io.Writer, rep *litmus.Report) {
	d := &rep.Device
	fmt.Fprintf(w, "%s port %d, %v, MTU %d, atomics %s, %d READs and atomics at a time\n", d.Device, d.Port, d.GID, d.MTU, d.Atomics, d.MaxReads)
	fmt.Fprintf(w, "windows of type 2B: %s, enforced: %s; native FLUSH: %s; native ATOMIC_WRITE: %s\n\n", yes(d.Windows2B), d.Enforced, yes(d.Flush), yes(d.AtomicWrite))
	fmt.Fprintln(w, "PROGRAM\tROUNDS\tBAD\tVERDICT\tASKS FOR")
	for i := range rep.Results {
		r := &rep.Results[i]
		verdict := "ok"
		switch {
		case r.Error != "":
			verdict = "failed: " + r.Error
		case !r.OK():
			verdict = "UNFIT"
		case !r.Must && r.Bad > 0:
			verdict = "noted"
		}
		asks := r.Asks
		if r.Note != "" {
			asks += " (" + r.Note + ")"
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\n", r.Name, r.Rounds, r.Bad, verdict, asks)
	}
	fmt.Fprintf(w, "\nverbs objects left: %+v\n", rep.Left)
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/verify/litmus"
)

type litmusCmd struct {
	Each time.Duration `default:"1s" help:"Time of each program."`

	Memory    string        `placeholder:"PATH" group:"Memory of several hosts" help:"In place of an RDMA device, test memory that two hosts map: a device DAX, or a file."`
	Side      int           `placeholder:"0|1" default:"-1" group:"Memory of several hosts" help:"With --memory: 0 on one host, 1 on the other."`
	At        sizeFlag      `default:"0" placeholder:"BYTES" group:"Memory of several hosts" help:"With --memory: where to find 1 MiB that may be overwritten."`
	Overwrite bool          `group:"Memory of several hosts" help:"With --memory: overwrite what is there."`
	For       time.Duration `name:"wait-for-side" default:"1m" group:"Memory of several hosts" help:"With --memory: how long to wait for the other side."`
}

// Help is shown below the flags.
func (*litmusCmd) Help() string {
	return `Needs no cluster: the device talks to itself. For example:

  quarry litmus --rdma-device mlx5_0 --each 10s

A program that must see nothing bad and does ends the command with an error: such a
device loses data. The others tell what the device is like.

With --memory two hosts run it at the same time on one memory, such as that of a CXL switch:

  host-a$ quarry litmus --memory /dev/dax0.0 --side 0
  host-b$ quarry litmus --memory /dev/dax0.0 --side 1

Memory on which a program sees something bad is not coherent between the two hosts.`
}

func (l *litmusCmd) Run(ctx context.Context, a *app) error {
	switch {
	case l.Memory != "":
		return l.memory(ctx, a)
	case l.Side != -1 || l.At != 0 || l.Overwrite:
		return usagef("--side, --at and --overwrite go with --memory")
	}
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

// memory runs a side of the litmus of memory that two hosts map.
func (l *litmusCmd) memory(ctx context.Context, a *app) error {
	if l.Side != 0 && l.Side != 1 {
		return usagef("--memory needs --side 0 on one host and --side 1 on the other")
	}
	mem, end, err := cxl.OpenScratch(l.Memory, uint64(l.At), l.Overwrite)
	if err != nil {
		return err
	}
	rep, err := cxl.Litmus(ctx, mem, l.Side, l.For)
	if err := errors.Join(err, end()); err != nil {
		return fmt.Errorf("%s: %w", l.Memory, err)
	}
	err = a.print(rep, func(w io.Writer) {
		fmt.Fprintln(w, "PROGRAM\tSTEPS\tMET\tBAD\tVERDICT\tASKS FOR")
		for _, r := range rep.Results {
			verdict := "ok"
			if r.Bad > 0 {
				verdict = "UNFIT"
			}
			fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\t%s\n", r.Name, r.Rounds, r.Met, r.Bad, verdict, r.Asks)
		}
	})
	return errors.Join(err, rep.Err())
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

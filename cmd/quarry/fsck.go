package main

import (
	"context"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/internal/fsck"
)

type fsckCmd struct {
	Region []uint32 `short:"R" help:"Only these regions."`
}

func (f *fsckCmd) Run(ctx context.Context, a *app) error {
	bar := a.progress("checking blocks")
	rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: a.cli.Controller, Token: a.cli.Token, TLS: a.tls, Transport: a.cli.Transport, Regions: f.Region, Progress: bar.set})
	bar.end()
	if err != nil {
		return err
	}
	if err := a.print(rep, func(w io.Writer) { printReport(w, rep) }); err != nil {
		return err
	}
	if !rep.OK() {
		return fmt.Errorf("%d %w, the first: %s", len(rep.Findings)+rep.More, errFindings, rep.Findings[0])
	}
	return nil
}

func printReport(w io.Writer, rep *fsck.Report) {
	fmt.Fprintln(w, "REGION\tREPLICAS\tBLOCKS\tSLABS\tLIVE\tOBJECTS\tPAYLOAD\tCLAIMED\tPENDING\tBUSY")
	for _, r := range rep.Regions {
		fmt.Fprintf(w, "%d\t%d\t%d/%d\t%d\t%d\t%d\t%s\t%d\t%d\t%d\n", r.Region, r.Replicas, r.BlocksInUse, r.Blocks, r.Slabs, r.Live, r.Objects, bytesText(uint64(r.PayloadBytes)), r.Claimed, r.Pending, r.Busy)
	}
	for _, f := range rep.Findings {
		fmt.Fprintln(w, f)
	}
	if rep.More > 0 {
		fmt.Fprintf(w, "and %d more\n", rep.More)
	}
	if rep.OK() {
		fmt.Fprintln(w, "no findings")
	}
}

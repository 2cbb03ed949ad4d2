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
	rep, err := fsck.Cluster(ctx, a.fsckConfig(f.Region, bar.set, nil))
	bar.end()
	if err != nil {
		return err
	}
	view := fsckView{Report: rep}
	if len(f.Region) == 0 {
		if view.Trees, err = a.checkTrees(ctx, rep, rep.Writers); err != nil {
			return err
		}
	}
	if err := a.print(view, func(w io.Writer) { view.print(w) }); err != nil {
		return err
	}
	if !rep.OK() {
		return fmt.Errorf("%d %w, the first: %s", len(rep.Findings)+rep.More, errFindings, rep.Findings[0])
	}
	return nil
}

// fsckView is the report, with the trees of the placement library.
type fsckView struct {
	*fsck.Report
	Trees []treeView `json:"trees"`
}

func (v fsckView) print(w io.Writer) {
	if len(v.Trees) > 0 {
		fmt.Fprintln(w, "TREE\tLEVELS\tINNER\tLEAVES\tLAYERS\tKEYS\tLARGE VALUES\tIN NODES")
		for _, t := range v.Trees {
			fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\n", t.Name, t.Levels, t.Inner, t.Leaves, t.Layers, t.Keys, t.Values, bytesText(uint64(t.UsedBytes)))
		}
	}
	printReport(w, v.Report)
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

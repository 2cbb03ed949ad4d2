package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
)

type fsckCmd struct {
	Region []uint32 `short:"R" help:"Only these regions."`
	Repair bool     `help:"Repair what is found while clients work, mark BAD what is lost, and check again."`
	Bad    bool     `help:"List only slabs that are marked BAD, with their marks: no replica had a whole image. No other finding is shown. See slab restore and slab discard."`
}

// maxRepairs bounds the rounds of check and repair: a report holds so many
// findings, and mending one thing may show another.
const maxRepairs = 10

// Run checks and, with --repair, repairs and checks again while that leaves fewer findings, at most maxRepairs
// times: a repair may uncover another finding.
func (f *fsckCmd) Run(ctx context.Context, a *app) error {
	if a.cli.RDMA || a.cli.Transport == client.TransportVerbs {
		return usagef("fsck reads over shm or tcp; a node that serves verbs passes tcp on to its adapter")
	}
	if f.Bad && f.Repair {
		return usagef("--bad lists what no repair can restore: leave out --repair or --bad")
	}
	rep, err := f.check(ctx, a)
	if err != nil {
		return err
	}
	view := fsckView{}
	for n := 1; f.Repair && len(rep.Findings) > 0 && n <= maxRepairs; n++ {
		done, err := f.repair(ctx, a, rep)
		if err != nil {
			return err
		}
		view.add(done)
		left := len(rep.Findings) + rep.More
		if rep, err = f.check(ctx, a); err != nil {
			return err
		}
		if len(rep.Findings)+rep.More >= left {
			break // nothing more can be done
		}
	}
	if f.Repair && len(f.Region) == 0 {
		done, err := f.unlist(ctx, a)
		if err != nil {
			return err
		}
		if view.Repaired == nil && done.Names+len(done.Left) > 0 {
			view.Repaired = done
		} else if view.Repaired != nil {
			view.Repaired.Add(done)
		}
	}
	view.Report = rep
	if len(f.Region) == 0 && !f.Bad {
		if view.Trees, err = a.checkAllTrees(ctx, rep); err != nil {
			return err
		}
	}
	if err := a.print(view, func(w io.Writer) { view.print(w) }); err != nil {
		return err
	}
	return view.outcome()
}

// outcome is the error of a check that has found something, or has not seen everything.
// Findings decide the exit code.
func (v fsckView) outcome() error {
	var unseen []string
	for _, u := range v.Unchecked {
		unseen = append(unseen, u.String())
	}
	for _, t := range v.Trees {
		if t.Unchecked != "" {
			unseen = append(unseen, fmt.Sprintf("tree %q: %s", t.Name, t.Unchecked))
		}
	}
	switch {
	case len(v.Findings) > 0 && len(unseen) > 0:
		return fmt.Errorf("%d %w, the first: %s; not everything was checked, the first of %d: %s", len(v.Findings)+v.More, errFindings, v.Findings[0], len(unseen), unseen[0])
	case len(v.Findings) > 0:
		return fmt.Errorf("%d %w, the first: %s", len(v.Findings)+v.More, errFindings, v.Findings[0])
	case len(unseen) > 0:
		return fmt.Errorf("%d regions and trees were %w, the first: %s", len(unseen), fsck.ErrUnchecked, unseen[0])
	}
	return nil
}

func (f *fsckCmd) check(ctx context.Context, a *app) (*fsck.Report, error) {
	bar := a.progress("checking blocks")
	defer bar.end()
	cfg := a.fsckConfig(f.Region, bar.set, nil)
	if f.Bad {
		cfg.Only = fsck.KindBad
	}
	var err error
	if cfg.Tenant, err = a.tenantNumber(ctx); err != nil {
		return nil, err
	}
	return checked(fsck.Cluster(ctx, cfg))
}

// checked takes the report of a check that has left out some regions: it names them.
func checked(rep *fsck.Report, err error) (*fsck.Report, error) {
	if errors.Is(err, fsck.ErrUnchecked) {
		err = nil
	}
	return rep, err
}

// repair repairs with a session of its own in each tenant. It has ended when the next check
// begins, so that none of its reservations are taken for findings.
func (f *fsckCmd) repair(ctx context.Context, a *app, rep *fsck.Report) (*fsck.Repaired, error) {
	names, err := a.tenants(ctx)
	if err != nil {
		return nil, err
	}
	all := &fsck.Repaired{Left: []string{}}
	for number, findings := range rep.ByTenant() {
		name, ok := names[number]
		if !ok {
			continue // it is being deleted
		}
		c, err := a.connectIn(ctx, name, nil)
		if err != nil {
			return nil, fmt.Errorf("tenant %s: %w", name, err)
		}
		done, err := fsck.Repair(ctx, c, findings)
		if err = errors.Join(err, c.Close()); err != nil {
			return nil, err
		}
		all.Add(done)
	}
	return all, nil
}

// unlist deletes the names of marks that are not there any more, such as those of a region that was removed, in all tenants.
func (f *fsckCmd) unlist(ctx context.Context, a *app) (*fsck.Repaired, error) {
	names, err := a.tenants(ctx)
	if err != nil {
		return nil, err
	}
	all := &fsck.Repaired{Left: []string{}}
	for _, tenant := range slices.Sorted(maps.Values(names)) {
		c, err := a.connectIn(ctx, tenant, readOnly)
		if err != nil {
			return nil, fmt.Errorf("tenant %s: %w", tenant, err)
		}
		gone, err := c.UnlistBad(ctx)
		all.Names += len(gone)
		if err != nil {
			all.Left = append(all.Left, fmt.Sprintf("names of marks in tenant %s: %v", tenant, err))
		}
		if err := c.Close(); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// fsckView is the report, with the trees of the placement library.
type fsckView struct {
	*fsck.Report
	Trees    []treeView     `json:"trees"`
	Repaired *fsck.Repaired `json:"repaired,omitempty"`
}

// add adds what another round of repair has done. What is left is that of the last round.
func (v *fsckView) add(r *fsck.Repaired) {
	if was := v.Repaired; was != nil {
		was.Left = nil
		r.Add(was)
	}
	v.Repaired = r
}

func (v fsckView) print(w io.Writer) {
	if len(v.Trees) > 0 {
		fmt.Fprintln(w, "TREE\tTENANT\tLEVELS\tINNER\tLEAVES\tLAYERS\tKEYS\tLARGE VALUES\tIN NODES")
		for _, t := range v.Trees {
			if t.Unchecked != "" {
				fmt.Fprintf(w, "%s\t%s\tnot checked: %s\n", t.Name, t.Tenant, t.Unchecked)
				continue
			}
			if t.Encrypted != "" {
				fmt.Fprintf(w, "%s\t%s\t%s\n", t.Name, t.Tenant, t.Encrypted)
				continue
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\n", t.Name, t.Tenant, t.Levels, t.Inner, t.Leaves, t.Layers, t.Keys, t.Values, bytesText(uint64(t.UsedBytes)))
		}
	}
	if r := v.Repaired; r != nil {
		fmt.Fprintf(w, "repaired: %d objects, %d free slabs, %d words of maps and reservations, %d chunks freed, %d lost objects marked BAD, %d names of marks deleted\n", r.Objects, r.Slabs, r.Words, r.Chunks, r.Marked, r.Names)
		for _, l := range r.Left {
			fmt.Fprintln(w, "left as it is:", l)
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
	for _, u := range rep.Unchecked {
		fmt.Fprintln(w, "not checked:", u)
	}
	if rep.More > 0 {
		fmt.Fprintf(w, "and %d more\n", rep.More)
	}
	switch {
	case rep.OK():
		fmt.Fprintln(w, "no findings")
	case len(rep.Findings) == 0:
		fmt.Fprintln(w, "no findings in the regions that were checked")
	}
}

package main

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type regionMoveCmd struct {
	Region uint32 `arg:"" complete:"region" help:"Number of the region."`
	From   string `complete:"node" placeholder:"NODE" help:"Source node; needed where the region has several replicas."`
	To     string `complete:"node" placeholder:"NODE" help:"Destination node; default the one with the most room."`
}

func (c *regionMoveCmd) Run(ctx context.Context, a *app) error {
	r, err := ask(ctx, a, &quarrypb.MoveRegionRequest{Region: c.Region, From: c.From, To: c.To}, quarrypbconnect.ControllerClient.MoveRegion)
	if err != nil {
		return err
	}
	s, err := a.status(ctx)
	if err != nil {
		return err
	}
	list := []regionView{regionViewOf(r, nodeNames(s))}
	return a.print(list, func(w io.Writer) { printRegions(w, list) })
}

type regionRemoveCmd struct {
	Region uint32 `arg:"" complete:"region" help:"Number of the region."`
	Lost   bool   `help:"Confirms that the region is lost. A node that still holds its memory deletes it when the node comes back."`
}

func (c *regionRemoveCmd) Run(ctx context.Context, a *app) error {
	if !c.Lost {
		return usagef("only lost regions can be removed: --lost confirms that the data is gone")
	}
	if _, err := ask(ctx, a, &quarrypb.RemoveRegionRequest{Region: c.Region, Lost: true}, quarrypbconnect.ControllerClient.RemoveRegion); err != nil {
		return err
	}
	return a.print(map[string]any{"region": c.Region, "state": "removed"}, func(w io.Writer) { fmt.Fprintf(w, "region %d is removed\n", c.Region) })
}

func nodeNames(s statusView) map[uint32]string {
	names := map[uint32]string{}
	for _, n := range s.Nodes {
		names[n.ID] = n.Name
	}
	return names
}

type regionRebalanceCmd struct {
	DryRun bool `short:"n" help:"List what would be moved, and move nothing."`
}

type moveView struct {
	Region uint32 `json:"region"`
	From   string `complete:"node" json:"from"`
	To     string `complete:"node" json:"to"`
}

func (c *regionRebalanceCmd) Run(ctx context.Context, a *app) error {
	s, err := a.status(ctx)
	if err != nil {
		return err
	}
	names := nodeNames(s)
	res, err := ask(ctx, a, &quarrypb.RebalanceRequest{DryRun: c.DryRun}, quarrypbconnect.ControllerClient.Rebalance)
	if err != nil {
		return err
	}
	moves := []moveView{}
	for _, m := range res.Moves {
		moves = append(moves, moveView{m.Region, names[m.From], names[m.To]})
	}
	return a.print(moves, func(w io.Writer) {
		if len(moves) == 0 {
			fmt.Fprintln(w, "nothing to move: no move would make the nodes more alike")
			return
		}
		fmt.Fprintln(w, "REGION\tFROM\tTO")
		for _, m := range moves {
			fmt.Fprintf(w, "%d\t%s\t%s\n", m.Region, m.From, m.To)
		}
	})
}

type regionDefaultCmd struct {
	Replicas string `arg:"" optional:"" help:"1 to 3, or auto: 2 where storage nodes lie in two failure domains."`
}

// Help is shown by --help.
func (*regionDefaultCmd) Help() string {
	return "Example: quarry region default 3. Existing regions keep their replicas; running programs use the new default from their next heartbeat."
}

func (c *regionDefaultCmd) Run(ctx context.Context, a *app) error {
	q := &quarrypb.SetDefaultsRequest{}
	switch c.Replicas {
	case "":
	case "auto":
		q.Replicas = new(uint32)
	default:
		n, err := strconv.ParseUint(c.Replicas, 10, 32)
		if err != nil || n == 0 {
			return usagef("replicas %q: want 1 to 3, or auto", c.Replicas)
		}
		replicas := uint32(n)
		q.Replicas = &replicas
	}
	res, err := ask(ctx, a, q, quarrypbconnect.ControllerClient.SetDefaults)
	if err != nil {
		return err
	}
	return a.print(map[string]any{"replicas": res.Replicas, "chosen": res.Chosen}, func(w io.Writer) {
		fmt.Fprintf(w, "%d replicas, %s\n", res.Replicas, map[bool]string{true: "as chosen", false: "by the failure domains of the storage nodes"}[res.Chosen])
	})
}

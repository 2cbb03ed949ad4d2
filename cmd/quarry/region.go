package main

import (
	"context"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type regionMoveCmd struct {
	Region uint32 `arg:"" help:"Number of the region."`
	From   string `placeholder:"NODE" help:"Whose replica moves; needed where there are several."`
	To     string `placeholder:"NODE" help:"Where to; default the node that has most room."`
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

func nodeNames(s statusView) map[uint32]string {
	names := map[uint32]string{}
	for _, n := range s.Nodes {
		names[n.ID] = n.Name
	}
	return names
}

type regionRebalanceCmd struct {
	DryRun bool `short:"n" help:"Only tell what would be moved."`
}

type moveView struct {
	Region uint32 `json:"region"`
	From   string `json:"from"`
	To     string `json:"to"`
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

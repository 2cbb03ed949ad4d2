package main

import (
	"context"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

type jobCallCmd struct {
	Function string  `arg:"" help:"Function: a plugin that is one, compiled into a worker or uploaded; add is in every worker."`
	Object   target  `arg:"" complete:"target" help:"Object: REGION:0xOFFSET/GENERATION.BORN, or @NAME."`
	Args     *string `arg:"" optional:"" help:"Arguments of the function, as they are."`
}

// Help is shown by --help.
func (*jobCallCmd) Help() string {
	return "Example: quarry job call add @visits 1. A worker that was started with --node NAME makes the calls for objects whose primary that node has, under its own session: it needs rights in your tenant. The function is given the object and nothing else, and has a second; it prints its answer. With exit code 3 the object may have been changed, once."
}

// Run calls a function on an object and prints its answer.
func (c *jobCallCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, nil, func(ctx context.Context, cl *client.Client) error {
		ref, err := c.Object.ref(ctx, cl)
		if err != nil {
			return err
		}
		var args []byte
		if c.Args != nil {
			args = []byte(*c.Args)
		}
		answer, err := coproc.Call(ctx, cl, ref, c.Function, args)
		if err != nil {
			return err
		}
		return a.print(map[string]any{"ref": ref, "answer": answer}, func(w io.Writer) { fmt.Fprintf(w, "%s\n", answer) })
	})
}

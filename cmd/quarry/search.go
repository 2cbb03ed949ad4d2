package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/search"
)

type searchCmd struct {
	Index string   `arg:"" complete:"tree" help:"Tree that the plugin search has filled."`
	Words []string `arg:"" help:"Words to look for."`
	Limit int      `default:"10" help:"Largest number of texts to show."`
}

func (c *searchCmd) Run(ctx context.Context, a *app) error {
	if c.Limit < 1 {
		return usagef("--limit %d: want at least 1", c.Limit)
	}
	return a.with(ctx, nil, func(ctx context.Context, cl *client.Client) error {
		t, err := kv.Open(ctx, cl, c.Index, btree.Config{ReadOnly: true})
		if err != nil {
			return err
		}
		texts, err := t.Count(ctx, btree.Range{From: []byte(search.TextsFrom), To: []byte(search.TextsTo)})
		if err != nil {
			return err
		}
		hits, err := search.Query(job.ReadTree(ctx, t), strings.Join(c.Words, " "), texts, c.Limit)
		if err != nil {
			return err
		}
		if hits == nil {
			hits = []search.Hit{}
		}
		return a.print(hits, func(w io.Writer) {
			for _, h := range hits {
				fmt.Fprintf(w, "%.5f\t%s\t%s\n", h.Score, h.Name, strings.Join(h.Words, " "))
			}
		})
	})
}

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/verify/bench"
)

// flush measures the flush methods, on nodes in this process.
func (b *benchCmd) flush(ctx context.Context, a *app) error {
	if b.Self || b.Processes != 0 {
		return usagef("--flush starts its nodes itself, in this process: leave out --self and --processes")
	}
	if n := b.Sizes[0]; n < 8 || n%8 != 0 || n > 1<<20 {
		return usagef("--sizes %d: --flush wants a multiple of 8, from 8 to 1MiB", n)
	}
	device, err := verbs.ParseConfig(a.cli.RDMADevice.String())
	if err != nil {
		return usageError{err}
	}
	rows := []bench.FlushRow{}
	cfg := bench.FlushConfig{Data: cmp.Or(b.FlushOn, os.TempDir()), Device: device, Bytes: int(b.Sizes[0]), Each: b.Duration}
	bar := a.progress("flushing")
	err = bench.Flush(ctx, cfg, func(r bench.FlushRow) { rows = append(rows, r) })
	bar.end()
	if err != nil {
		return err
	}
	if a.cli.JSON {
		return a.print(map[string]any{"machine": machine(), "bytes": cfg.Bytes, "rows": rows}, nil)
	}
	fmt.Fprintf(a.out, "%s\nWRITEs of %d bytes; medians of a round\n", machine(), cfg.Bytes)
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PROVIDER\tMETHOD\tEMPTY ROUND\tWRITE\tFLUSHED\tP99\tTO EMPTY\tMEMORY")
	notes := map[string]string{}
	for _, r := range rows {
		if r.Why != "" {
			notes[r.Provider+", "+r.Method] = "not measured: " + r.Why
			fmt.Fprintf(w, "%s\t%s\t-\t-\t-\t-\t-\t-\n", r.Provider, r.Method)
			continue
		}
		if r.Note != "" {
			notes[r.Provider+", "+r.Method] = r.Note
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%.2f\t%s\n", r.Provider, r.Method, ns(r.EmptyNS), ns(r.WriteNS), ns(r.FlushNS), ns(r.P99NS), r.Ratio, r.Memory)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, r := range rows {
		at := r.Provider + ", " + r.Method
		if note := notes[at]; note != "" {
			fmt.Fprintf(a.out, "%s: %s\n", at, strings.TrimSpace(note))
			delete(notes, at)
		}
	}
	return nil
}

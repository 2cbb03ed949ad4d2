package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/cmd/quarry/kvfile"
)

// fileFlags name a file of keys and values.
type fileFlags struct {
	File   string `arg:"" optional:"" help:"The file; - or nothing means standard input or output."`
	Format string `enum:"auto,csv,jsonl" default:"auto" help:"csv or jsonl; auto goes by the file's name, jsonl if that does not tell."`
}

// standard says whether standard input or output is used.
func (f *fileFlags) standard() bool { return f.File == "" || f.File == "-" }

// name is the file for messages.
func (f *fileFlags) name(standard string) string {
	if f.standard() {
		return standard
	}
	return f.File
}

// format is CSV or JSON lines, by the flag or the file's ending.
func (f *fileFlags) format() kvfile.Format {
	if f.Format != "auto" {
		return kvfile.Format(f.Format)
	}
	if by := kvfile.FormatOf(f.File); by != "" {
		return by
	}
	return kvfile.JSONL
}

type kvDumpCmd struct {
	fileFlags
	rangeFlags
}

func (x *kvDumpCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	r, err := x.get(k)
	if err != nil {
		return err
	}
	return k.tree(ctx, a, readOnly, func(ctx context.Context, t *kv.Tree) (err error) {
		out := a.out
		var f *os.File
		if !x.standard() {
			// Under another name until it is whole.
			if f, err = os.CreateTemp(filepath.Dir(x.File), "."+filepath.Base(x.File)+".*"); err != nil {
				return usagef("dump: %w", err)
			}
			defer os.Remove(f.Name())
			defer f.Close()
			out = f
		}
		bar := a.progress("dumping entries")
		w := kvfile.NewWriter(out, x.format(), k.encoding())
		n, failed := 0, error(nil)
		start := time.Now()
		err = t.Scan(ctx, r, func(key, value []byte, _ uint64) bool {
			if failed = w.Put(key, value); failed == nil {
				failed = ctx.Err()
			}
			if n++; n%1000 == 0 {
				bar.set(n, n+1)
			}
			return failed == nil
		})
		bar.end()
		if err == nil {
			err = failed
		}
		if err == nil {
			err = w.Flush()
		}
		if err == nil && f != nil {
			if err = errors.Join(f.Sync(), f.Close()); err == nil {
				err = os.Rename(f.Name(), x.File)
			}
		}
		if x.standard() {
			err = ifInterrupted(ctx, err, "%d entries of %s are written, the rest is not", n, t)
		} else {
			err = ifInterrupted(ctx, err, "%s is as it was before", x.File)
		}
		if err != nil {
			if errors.Is(err, kvfile.ErrNotText) {
				return fmt.Errorf("dump of %s as CSV: %w: give --base64 or --hex, or --format jsonl", t, err)
			}
			return fmt.Errorf("dump of %s: %w", t, err)
		}
		if x.standard() {
			return nil
		}
		return a.print(map[string]any{"dumped": n, "file": x.File}, func(w io.Writer) {
			fmt.Fprintf(w, "%d entries in %s, %.2f s\n", n, x.File, time.Since(start).Seconds())
		})
	})
}

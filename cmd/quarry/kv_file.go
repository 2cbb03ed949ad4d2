package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/cmd/quarry/kvfile"
)

// fileFlags name a file of keys and values.
type fileFlags struct {
	File   string `arg:"" optional:"" help:"The file; - or nothing means standard input or output."`
	Format string `enum:"auto,csv,jsonl" default:"auto" help:"csv or jsonl; auto goes by the file's name, jsonl if that does not tell."`
}

func (f *fileFlags) standard() bool { return f.File == "" || f.File == "-" }

func (f *fileFlags) name(standard string) string {
	if f.standard() {
		return standard
	}
	return f.File
}

func (f *fileFlags) format() kvfile.Format {
	if f.Format != "auto" {
		return kvfile.Format(f.Format)
	}
	if by := kvfile.FormatOf(f.File); by != "" {
		return by
	}
	return kvfile.JSONL
}

type kvLoadCmd struct {
	fileFlags
	Sorted bool `help:"The file is sorted by key and the tree empty: build it at once, all or nothing."`
	Batch  int  `default:"512" help:"Entries that one call writes, without --sorted."`
}

// counted is the input with a count of bytes.
type counted struct {
	r io.Reader
	n int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

func (x *kvLoadCmd) Run(ctx context.Context, a *app) error {
	k := &a.cli.KV
	if x.Batch < 1 || x.Batch > 1<<16 {
		return usagef("--batch %d: want 1 to %d", x.Batch, 1<<16)
	}
	in := &counted{r: a.in}
	if x.standard() { // a read of standard input does not end by itself
		r, w := io.Pipe()
		go func() {
			_, err := io.Copy(w, a.in)
			w.CloseWithError(err)
		}()
		defer context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) })()
		in.r = r
	}
	total := 0
	if !x.standard() {
		f, err := os.Open(x.File)
		if err != nil {
			return usagef("load: %w", err)
		}
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			total = int(st.Size())
		}
		in.r = f
	}
	name := x.name("standard input")
	r := kvfile.NewReader(in, x.format())
	return k.tree(ctx, a, nil, func(ctx context.Context, t *kv.Tree) error {
		bar := a.progress("loading bytes")
		start := time.Now()
		n, err := 0, error(nil)
		if x.Sorted {
			n, err = t.LoadFrom(ctx, func() (key, value []byte, err error) {
				if bar.set(int(in.n), total); ctx.Err() != nil {
					return nil, nil, ctx.Err()
				}
				return r.Next()
			})
			if errors.Is(err, btree.ErrOrder) {
				err = fmt.Errorf("line %d: %w: sort the file, or load it without --sorted", r.Line(), err)
			}
		} else {
			n, err = x.puts(ctx, t, r, func() { bar.set(int(in.n), total) })
		}
		bar.end()
		if x.Sorted {
			err = ifInterrupted(ctx, err, "nothing is loaded into %s", t)
		} else {
			err = ifInterrupted(ctx, err, "%d entries of %s are loaded into %s, the rest is not; loading the file again is safe", n, name, t)
		}
		if err != nil {
			return fmt.Errorf("%s: %s: %w", t, name, err)
		}
		secs := time.Since(start).Seconds()
		return a.print(map[string]any{"loaded": n, "seconds": secs}, func(w io.Writer) {
			fmt.Fprintf(w, "%d entries from %s in %.2f s, %.0f/s\n", n, name, secs, float64(n)/secs)
		})
	})
}

// puts loads in batches. Of equal keys the last one stays, as if put one by one.
func (x *kvLoadCmd) puts(ctx context.Context, t *kv.Tree, r *kvfile.Reader, progress func()) (n int, err error) {
	const batchBytes = 16 << 20 // of values: the memory of a load
	var keys, values [][]byte
	var lines []int
	flush := func() error {
		for i, err := range t.PutMany(ctx, keys, values) {
			if err != nil {
				return fmt.Errorf("line %d: %w (the %d entries of earlier batches are stored)", lines[i], err, n)
			}
		}
		n += len(keys)
		keys, values, lines = keys[:0], values[:0], lines[:0]
		progress()
		return ctx.Err()
	}
	size := 0
	for {
		key, value, err := r.Next()
		switch {
		case err == io.EOF:
			return n, flush()
		case err != nil:
			// What came before the bad line is stored: say so, and how much it is.
			if ferr := flush(); ferr != nil {
				return n, ferr
			}
			return n, fmt.Errorf("%w (the %d entries before it are stored)", err, n)
		}
		keys, values, lines = append(keys, append([]byte(nil), key...)), append(values, append([]byte(nil), value...)), append(lines, r.Line())
		if size += len(value); len(keys) == x.Batch || size > batchBytes {
			size = 0
			if err := flush(); err != nil {
				return n, err
			}
		}
	}
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

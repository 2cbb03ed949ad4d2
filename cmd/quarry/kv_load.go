package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/cmd/quarry/kvfile"
)

type kvLoadCmd struct {
	fileFlags
	Sort       bool     `default:"true" negatable:"" help:"Sort the entries by key before the first is stored: fuller nodes, fewer rounds. --no-sort stores them as they come in."`
	Sorted     bool     `help:"The file is sorted by key and the tree empty: build it at once from what comes in, all or nothing."`
	SortMemory sizeFlag `default:"256MiB" help:"Memory for sorting; what exceeds it goes to files without a name in $TMPDIR."`
	Fill       int      `default:"90" help:"How full to make the nodes of a tree that was empty, in percent: 50 to 100."`
	Batch      int      `default:"512" help:"Entries that one call writes, where the tree is not empty or the entries are not sorted."`
}

const maxSortMemory = 64 << 30

func (x *kvLoadCmd) check() error {
	switch {
	case x.Batch < 1 || x.Batch > 1<<16:
		return usagef("--batch %d: want 1 to %d", x.Batch, 1<<16)
	case x.Fill < 50 || x.Fill > 100:
		return usagef("--fill %d: want 50 to 100", x.Fill)
	case x.SortMemory < kvfile.MinSortBytes || x.SortMemory > maxSortMemory:
		return usagef("--sort-memory %s: want %s to %s", bytesText(uint64(x.SortMemory)), bytesText(kvfile.MinSortBytes), bytesText(maxSortMemory))
	case x.Sorted && !x.Sort:
		return usagef("--sorted and --no-sort: want one of them")
	}
	return nil
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

// kvLoad is one run of kv load.
type kvLoad struct {
	*kvLoadCmd
	a     *app
	t     *kv.Tree
	name  string // of the input
	in    *counted
	total int // bytes of the input; 0 if not known
	r     *kvfile.Reader
	whole bool // readers see nothing until all is there
}

// Run opens the input and the tree. The end of ctx also ends a read of standard input that waits.
func (x *kvLoadCmd) Run(ctx context.Context, a *app) error {
	if err := x.check(); err != nil {
		return err
	}
	l := &kvLoad{kvLoadCmd: x, a: a, name: x.name("standard input"), in: &counted{r: a.in}}
	if x.standard() { // a read of standard input does not end by itself
		r, w := io.Pipe()
		go func() {
			_, err := io.Copy(w, a.in)
			w.CloseWithError(err)
		}()
		defer context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) })()
		l.in.r = r
	} else {
		f, err := os.Open(x.File)
		if err != nil {
			return usagef("load: %w", err)
		}
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			l.total = int(st.Size())
		}
		l.in.r = f
	}
	l.r = kvfile.NewReader(l.in, x.format())
	return a.cli.KV.treeWith(ctx, a, nil, btree.Config{Fill: x.Fill}, l.run)
}

// run loads the input into the tree and says what is there now.
func (l *kvLoad) run(ctx context.Context, t *kv.Tree) error {
	l.t = t
	start := time.Now()
	var n int
	var err error
	switch {
	case l.Sorted:
		n, err = l.stream(ctx)
	case l.Sort:
		n, err = l.sorted(ctx)
	default:
		bar := l.a.progress("loading bytes")
		n, err = l.puts(ctx, l.read, func(int) { bar.set(int(l.in.n), l.total) })
		bar.end()
	}
	if l.whole {
		err = ifInterrupted(ctx, err, "nothing is loaded into %s", t)
	} else {
		err = ifInterrupted(ctx, err, "%d entries of %s are loaded into %s, the rest is not; loading the file again is safe", n, l.name, t)
	}
	if err != nil {
		return fmt.Errorf("%s: %s: %w", t, l.name, err)
	}
	secs := time.Since(start).Seconds()
	return l.a.print(map[string]any{"loaded": n, "seconds": secs}, func(w io.Writer) {
		fmt.Fprintf(w, "%d entries from %s in %.2f s, %.0f/s\n", n, l.name, secs, float64(n)/secs)
	})
}

// read is the next entry of the input.
func (l *kvLoad) read() (kvfile.Entry, error) {
	key, value, err := l.r.Next()
	return kvfile.Entry{Key: key, Value: value, Line: l.r.Line()}, err
}

// stream builds the tree from an input that is in order.
func (l *kvLoad) stream(ctx context.Context) (int, error) {
	l.whole = true
	bar := l.a.progress("loading bytes")
	defer bar.end()
	n, err := l.t.LoadFrom(ctx, func() (key, value []byte, err error) {
		if bar.set(int(l.in.n), l.total); ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		return l.r.Next()
	})
	if errors.Is(err, btree.ErrOrder) {
		err = fmt.Errorf("line %d: %w: leave out --sorted", l.r.Line(), err)
	}
	return n, err
}

// sorted reads the whole input, then builds the tree, or if that is not empty puts the entries in
// order. Of equal keys the last one stays.
func (l *kvLoad) sorted(ctx context.Context) (n int, err error) {
	l.whole = true
	s := kvfile.NewSorter(int(l.SortMemory))
	defer s.Close()
	if err := l.gather(ctx, s); err != nil {
		return 0, err
	}
	bar := l.a.progress("loading entries")
	defer bar.end()
	in, err := s.Entries()
	if err != nil {
		return 0, err
	}
	line := 0
	n, err = l.t.LoadFrom(ctx, func() (key, value []byte, err error) {
		if n++; n%1000 == 0 {
			bar.set(n, s.Added())
		}
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		e, err := in.Next()
		if err == nil {
			line = e.Line
		}
		return e.Key, e.Value, err
	})
	switch {
	case err == nil:
		return n, nil
	case !errors.Is(err, btree.ErrNotEmpty):
		return 0, fmt.Errorf("line %d: %w", line, err)
	}
	if in, err = s.Entries(); err != nil {
		return 0, err
	}
	l.whole = false
	return l.puts(ctx, in.Next, func(n int) { bar.set(n, s.Added()) })
}

// gather reads the input into the sorter. Nothing is stored of an input with a bad line.
func (l *kvLoad) gather(ctx context.Context, s *kvfile.Sorter) error {
	bar := l.a.progress("sorting bytes")
	defer bar.end()
	for {
		if bar.set(int(l.in.n), l.total); ctx.Err() != nil {
			return ctx.Err()
		}
		e, err := l.read()
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return fmt.Errorf("%w (nothing is stored)", err)
		case len(e.Key) == 0 || len(e.Key) > btree.MaxKeyBytes:
			return fmt.Errorf("line %d: %w: %d bytes, want 1 to %d (nothing is stored)", e.Line, btree.ErrBadKey, len(e.Key), btree.MaxKeyBytes)
		case len(e.Value) > btree.MaxValueBytes:
			return fmt.Errorf("line %d: %w: %d bytes, at most %d (nothing is stored)", e.Line, client.ErrTooLarge, len(e.Value), btree.MaxValueBytes)
		}
		if err := s.Add(e.Key, e.Value, e.Line); err != nil {
			return err
		}
	}
}

// puts loads in batches. Of equal keys the last one stays, as if put one by one.
func (l *kvLoad) puts(ctx context.Context, next func() (kvfile.Entry, error), progress func(n int)) (n int, err error) {
	const batchBytes = 16 << 20 // of values: the memory of a load
	var keys, values [][]byte
	var lines []int
	flush := func() error {
		for i, err := range l.t.PutMany(ctx, keys, values) {
			if err != nil {
				return fmt.Errorf("line %d: %w (the %d entries of earlier batches are stored)", lines[i], err, n)
			}
		}
		n += len(keys)
		keys, values, lines = keys[:0], values[:0], lines[:0]
		progress(n)
		return ctx.Err()
	}
	size := 0
	for {
		e, err := next()
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
		keys, values, lines = append(keys, append([]byte(nil), e.Key...)), append(values, append([]byte(nil), e.Value...)), append(lines, e.Line)
		if size += len(e.Value); len(keys) == l.Batch || size > batchBytes {
			size = 0
			if err := flush(); err != nil {
				return n, err
			}
		}
	}
}

package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/quarrystore/quarry/client"
)

// Options of each part.
type Options struct {
	Workers  int                   // goroutines; 0 means 4
	Replicas int                   // of what Load makes; 0 means 2
	Progress func(done, total int) // may be nil
}

func (o Options) withDefaults() Options {
	if o.Workers == 0 {
		o.Workers = 4
	}
	if o.Replicas == 0 {
		o.Replicas = 2
	}
	if o.Progress == nil {
		o.Progress = func(int, int) {}
	}
	return o
}

// Result of one part.
type Result struct {
	What       string   `json:"what"`
	Provider   string   `json:"provider"`
	Files      int      `json:"files"`
	Bytes      int64    `json:"bytes"`
	Seconds    float64  `json:"seconds"`
	MBPerS     float64  `json:"mb_per_s"` // 10^6 bytes a second
	P50NS      int64    `json:"p50_ns"`
	P99NS      int64    `json:"p99_ns"`
	Rounds     float64  `json:"rounds_per_op"`
	Verbs      float64  `json:"verbs_per_op"`
	Mismatches []string `json:"mismatches"`
}

// tally is a Result in the making; safe for many goroutines.
type tally struct {
	mu    sync.Mutex
	hist  *hdrhistogram.Histogram
	r     Result
	start time.Time
	kind  client.Kind
	base  client.KindStats
	c     *client.Client
}

func begin(c *client.Client, what string, kind client.Kind) *tally {
	return &tally{hist: hdrhistogram.New(1, int64(time.Minute), 3), r: Result{What: what, Mismatches: []string{}}, start: time.Now(),
		kind: kind, base: c.Stats().Kinds[kind.String()], c: c}
}

func (t *tally) add(d time.Duration, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.hist.RecordValue(max(1, int64(d)))
	t.r.Files++
	t.r.Bytes += int64(n)
}

func (t *tally) mismatch(e Entry, why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.r.Mismatches = append(t.r.Mismatches, e.Path+": "+why)
}

func (t *tally) end() Result {
	r := t.r
	r.Seconds = time.Since(t.start).Seconds()
	r.MBPerS = float64(r.Bytes) / 1e6 / r.Seconds
	r.P50NS, r.P99NS = t.hist.ValueAtQuantile(50), t.hist.ValueAtQuantile(99)
	s := t.c.Stats()
	now := s.Kinds[t.kind.String()]
	if n := now.Calls - t.base.Calls; n > 0 {
		r.Rounds = float64(now.Rounds-t.base.Rounds) / float64(n)
		r.Verbs = float64(now.AllVerbs()-t.base.AllVerbs()) / float64(n)
	}
	providers := map[string]bool{}
	for _, p := range s.Providers {
		providers[p] = true
	}
	r.Provider = strings.Join(slices.Sorted(maps.Keys(providers)), ",")
	return r
}

// each calls f for every entry on several goroutines; the first error ends it.
func each(ctx context.Context, entries []Entry, o Options, f func(context.Context, int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next, done atomic.Int64
	var wg sync.WaitGroup
	for range o.Workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(entries) {
					return
				}
				if err := f(ctx, i); err != nil {
					cancel(fmt.Errorf("%s: %w", entries[i].Path, err))
					return
				}
				o.Progress(int(done.Add(1)), len(entries))
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// Load keeps every file of a directory and makes the catalogue.
func Load(ctx context.Context, c *client.Client, dir string, o Options) (Result, error) {
	o = o.withDefaults()
	files, _, err := Find(dir)
	if err != nil {
		return Result{}, err
	}
	t := begin(c, "load", client.KindAlloc)
	err = each(ctx, files, o, func(ctx context.Context, i int) error {
		b, err := readFile(dir, files[i])
		if err != nil {
			return err
		}
		at := time.Now()
		files[i].Ref, err = c.Alloc(ctx, b, client.AllocOptions{WriteOnce: true, Replicas: o.Replicas})
		if err == nil {
			t.add(time.Since(at), len(b))
		}
		return err
	})
	if err != nil {
		return Result{}, err
	}
	result := t.end()
	k := Catalogue{Entries: files}
	b, err := k.encode()
	if err != nil {
		return result, err
	}
	ref, err := c.Alloc(ctx, b, client.AllocOptions{Replicas: o.Replicas})
	if err != nil {
		return result, fmt.Errorf("catalogue: %w", err)
	}
	_, err = c.Names().Create(ctx, CatalogueName, "catalogue", ref)
	return result, err
}

// ReadBack reads every object of the catalogue and compares it with its file, byte
// for byte; what has been freed must be gone.
func ReadBack(ctx context.Context, c *client.Client, dir string, o Options) (Result, error) {
	o = o.withDefaults()
	k, _, err := open(ctx, c)
	if err != nil {
		return Result{}, err
	}
	t := begin(c, "read back", client.KindRead)
	err = each(ctx, k.Entries, o, func(ctx context.Context, i int) error {
		e := k.Entries[i]
		at := time.Now()
		got, err := c.Read(ctx, e.Ref, nil)
		if err != nil {
			return err
		}
		t.add(time.Since(at), len(got))
		want, err := readFile(dir, e)
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			t.mismatch(e, fmt.Sprintf("%d bytes differ from the file's %d", len(got), len(want)))
		}
		return nil
	})
	if err != nil {
		return Result{}, err
	}
	result := t.end()
	for _, e := range k.Freed {
		if _, err := c.Read(ctx, e.Ref, nil); !errors.Is(err, client.ErrFreed) {
			result.Mismatches = append(result.Mismatches, fmt.Sprintf("%s was freed, reading it says: %v", e.Path, err))
		}
	}
	return result, nil
}

// Touch reads an object of every region and writes the catalogue as it is: when it
// returns, all that the catalogue names can be reached.
func Touch(ctx context.Context, c *client.Client) error {
	k, ref, err := open(ctx, c)
	if err != nil {
		return err
	}
	seen := map[uint32]bool{}
	for _, e := range k.Entries {
		if id := e.Ref.Addr.Region(); !seen[id] {
			if _, err := c.Read(ctx, e.Ref, nil); err != nil {
				return fmt.Errorf("%s: %w", e.Path, err)
			}
			seen[id] = true
		}
	}
	b, err := k.encode()
	if err != nil {
		return err
	}
	return c.Write(ctx, ref, b)
}

// FreeThird frees every third object and writes the catalogue anew.
func FreeThird(ctx context.Context, c *client.Client, o Options) (Result, error) {
	o = o.withDefaults()
	k, ref, err := open(ctx, c)
	if err != nil {
		return Result{}, err
	}
	var keep, free []Entry
	for i, e := range k.Entries {
		if i%3 == 0 {
			free = append(free, e)
		} else {
			keep = append(keep, e)
		}
	}
	// The catalogue first: it never names what is no longer there.
	b, err := (&Catalogue{Entries: keep, Freed: free}).encode()
	if err != nil {
		return Result{}, err
	}
	if err := c.Write(ctx, ref, b); err != nil {
		return Result{}, fmt.Errorf("catalogue: %w", err)
	}
	t := begin(c, "free a third", client.KindFree)
	err = each(ctx, free, o, func(ctx context.Context, i int) error {
		at := time.Now()
		err := c.Free(ctx, free[i].Ref)
		if err == nil {
			t.add(time.Since(at), int(free[i].Bytes))
		}
		return err
	})
	return t.end(), err
}

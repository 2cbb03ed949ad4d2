package demo

import (
	"context"
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

// Result of one part.
type Result struct {
	What       string   `json:"what"`
	Provider   string   `json:"provider"`
	Files      int      `json:"files"`
	Bytes      int64    `json:"bytes"`
	Seconds    float64  `json:"seconds"`
	MBPerS     float64  `json:"mb_per_s,omitempty"` // 10^6 bytes a second; 0 where no payload moves
	P50NS      int64    `json:"p50_ns"`             // for a file
	P99NS      int64    `json:"p99_ns"`
	Rounds     float64  `json:"rounds_per_file"`
	Verbs      float64  `json:"verbs_per_file"`
	Mismatches []string `json:"mismatches"`
}

// tally is a Result in the making; safe for many goroutines.
type tally struct {
	mu            sync.Mutex
	hist          *hdrhistogram.Histogram
	r             Result
	start         time.Time
	rounds, verbs uint64
	c             *client.Client
}

func begin(c *client.Client, what string) *tally {
	t := &tally{hist: hdrhistogram.New(1, int64(time.Minute), 3), r: Result{What: what, Mismatches: []string{}}, c: c}
	t.rounds, t.verbs = traffic(c.Stats())
	t.start = time.Now()
	return t
}

// traffic is how many rounds and verbs a client has posted in all.
func traffic(s client.Stats) (rounds, verbs uint64) {
	for _, k := range s.Kinds {
		rounds += k.Rounds
		verbs += k.AllVerbs()
	}
	return rounds, verbs
}

func (t *tally) add(d time.Duration, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.hist.RecordValue(max(1, int64(d)))
	t.r.Files++
	t.r.Bytes += int64(n)
}

func (t *tally) mismatch(path, format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.r.Mismatches = append(t.r.Mismatches, path+": "+fmt.Sprintf(format, args...))
}

func (t *tally) end() Result {
	r := t.r
	r.Seconds = time.Since(t.start).Seconds()
	r.MBPerS = float64(r.Bytes) / 1e6 / r.Seconds
	r.P50NS, r.P99NS = t.hist.ValueAtQuantile(50), t.hist.ValueAtQuantile(99)
	s := t.c.Stats()
	if rounds, verbs := traffic(s); r.Files > 0 {
		r.Rounds = float64(rounds-t.rounds) / float64(r.Files)
		r.Verbs = float64(verbs-t.verbs) / float64(r.Files)
	}
	providers := map[string]bool{}
	for _, p := range s.Providers {
		providers[p] = true
	}
	r.Provider = strings.Join(slices.Sorted(maps.Keys(providers)), ",")
	return r
}

// each calls f for every file on several goroutines; the first error ends it.
func each(ctx context.Context, files []File, o Options, f func(context.Context, File) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next, done atomic.Int64
	var wg sync.WaitGroup
	for range o.Workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(files) {
					return
				}
				if err := f(ctx, files[i]); err != nil {
					cancel(fmt.Errorf("%s: %w", files[i].Path, err))
					return
				}
				o.Progress(int(done.Add(1)), len(files))
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

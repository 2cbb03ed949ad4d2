package demo

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/search"
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

// IndexName is the tree of the search index.
const IndexName = "demo-index"

// Found is a search index and what a question to it has found.
type Found struct {
	Files   int          `json:"files"` // in the index
	Workers int          `json:"workers"`
	BuiltS  float64      `json:"built_s"`
	Query   string       `json:"query"`
	AskedMS float64      `json:"asked_ms"`
	Hits    []search.Hit `json:"hits"`
	Wrong   []string     `json:"wrong"` // hits that are none
}

// Index builds a search index over the files, as a job beside the memory, and asks
// it. Every hit is compared with the file.
func Index(ctx context.Context, c *client.Client, dir, query string) (f Found, err error) {
	f = Found{Query: query, Hits: []search.Hit{}, Wrong: []string{}}
	store, err := job.Open(ctx, c)
	if err != nil {
		return f, err
	}
	workers, err := store.Workers(ctx)
	if err != nil {
		return f, err
	}
	f.Workers = len(workers)
	start := time.Now()
	j, err := store.Submit(ctx, job.Spec{Plugin: search.Name, Input: job.Source{Tree: TreeName, Redis: true}, Output: IndexName})
	if err == nil {
		j, err = store.Wait(ctx, j.ID)
	}
	if err != nil {
		return f, err
	}
	if j.State != job.Done {
		return f, fmt.Errorf("job %d is %s: %s", j.ID, j.State, j.Error)
	}
	f.BuiltS = time.Since(start).Seconds()
	start = time.Now()
	index, err := kv.Open(ctx, c, IndexName, btree.Config{ReadOnly: true})
	if err != nil {
		return f, err
	}
	if f.Files, err = index.Count(ctx, btree.Range{From: []byte(search.TextsFrom), To: []byte(search.TextsTo)}); err != nil {
		return f, err
	}
	hits, err := search.Query(job.ReadTree(ctx, index), query, f.Files, 3)
	if err != nil {
		return f, err
	}
	f.AskedMS = float64(time.Since(start).Microseconds()) / 1e3
	f.Hits = append(f.Hits, hits...)
	for _, h := range f.Hits {
		b, err := os.ReadFile(filepath.Join(dir, h.Name))
		if err != nil {
			return f, err
		}
		var has []string
		var buf []byte
		for w := range words.Split(b, &buf) {
			if slices.Contains(h.Words, string(w)) && !slices.Contains(has, string(w)) {
				has = append(has, string(w))
			}
		}
		if len(h.Words) == 0 || len(has) != len(h.Words) {
			f.Wrong = append(f.Wrong, fmt.Sprintf("%s has %q, the index says %q", h.Name, has, h.Words))
		}
	}
	return f, nil
}

package search

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

// Hit is a text that a query finds.
type Hit struct {
	Name  string   `json:"name"`
	Score float64  `json:"score"`
	Words []string `json:"words"` // of the query, that the text has
}

// TextsFrom and TextsTo bound the keys of the index that stand for a text each.
const TextsFrom, TextsTo = "d/", "d0"

// Query finds the texts that have words of a query, best first: the sum over the
// words of tf * idf, where tf is the word's share of the text and idf the logarithm
// of how rare it is among texts. texts is how many the index has, the keys from TextsFrom
// to TextsTo.
func Query(index coproc.Tree, query string, texts, limit int) ([]Hit, error) {
	var buf, list []byte
	var asked []string
	for w := range words.Split([]byte(query), &buf) {
		if !slices.Contains(asked, string(w)) {
			asked = append(asked, string(w))
		}
	}
	if len(asked) == 0 {
		return nil, fmt.Errorf("query %q has no word in it", query)
	}
	hits := map[string]*Hit{}
	counts := map[string][]uint64{}
	idf := make([]float64, len(asked))
	for i, w := range asked {
		var err error
		list, err = index.Get(append([]byte("t/"), w...), list[:0])
		if errors.Is(err, coproc.ErrNoKey) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found := 0
		for b := list; len(b) > 0; found++ {
			x, rest, err := cutPosting(b)
			if err != nil {
				return nil, fmt.Errorf("word %q: %w", w, err)
			}
			b = rest
			h := hits[x.Name]
			if h == nil {
				h = &Hit{Name: x.Name}
				hits[x.Name], counts[x.Name] = h, make([]uint64, len(asked))
			}
			h.Words = append(h.Words, w)
			counts[x.Name][i] = x.Count
		}
		idf[i] = math.Log(1 + float64(texts)/float64(1+found))
	}
	all := make([]Hit, 0, len(hits))
	for name, h := range hits {
		b, err := index.Get(append([]byte("d/"), name...), nil)
		if err != nil {
			return nil, fmt.Errorf("text %q: %w", name, err)
		}
		n, err := strconv.ParseUint(string(b), 10, 64)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("text %q: damaged length %q", name, b)
		}
		for i, k := range counts[name] {
			h.Score += float64(k) / float64(n) * idf[i]
		}
		all = append(all, *h)
	}
	slices.SortFunc(all, func(a, b Hit) int {
		return cmp.Or(cmp.Compare(b.Score, a.Score), cmp.Compare(a.Name, b.Name))
	})
	return all[:min(limit, len(all))], nil
}

package search

import (
	"encoding/binary"
	"errors"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

// Name and Summary of the plugin.
const (
	Name    = "search"
	Summary = "builds an inverted index over all values"
)

// Plugin indexes.
type Plugin struct {
	buf    []byte
	counts map[string]uint64
}

// New makes a Plugin.
func New() coproc.Plugin { return &Plugin{counts: map[string]uint64{}} }

func init() { coproc.Register(Name, Summary, New) }

// Map emits the length of a text, and each of its words with how often it occurs.
func (p *Plugin) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	clear(p.counts)
	n := 0
	for w := range words.Split(value, &p.buf) {
		p.counts[string(w)]++
		n++
	}
	if err := emit(append([]byte("d/"), key...), strconv.AppendInt(nil, int64(n), 10)); err != nil {
		return err
	}
	var name, posting []byte
	for w, k := range p.counts {
		name = append(append(name[:0], "t/"...), w...)
		posting = appendPosting(posting[:0], key, k)
		if err := emit(name, posting); err != nil {
			return err
		}
	}
	return nil
}

// Reduce puts a word's texts in order.
func (p *Plugin) Reduce(_ coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	if strings.HasPrefix(string(key), "d/") {
		for v := range values {
			return emit(key, v) // a text has one length
		}
		return nil
	}
	var all []Posting
	for v := range values {
		for len(v) > 0 {
			x, rest, err := cutPosting(v)
			if err != nil {
				return err
			}
			all, v = append(all, x), rest
		}
	}
	slices.SortFunc(all, func(a, b Posting) int { return strings.Compare(a.Name, b.Name) })
	var out []byte
	for _, x := range all {
		out = appendPosting(out, []byte(x.Name), x.Count)
	}
	return emit(key, out)
}

// Posting says how often a word occurs in a text.
type Posting struct {
	Name  string
	Count uint64
}

var errPosting = errors.New("damaged posting")

func appendPosting(b, name []byte, count uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(name)))
	return binary.AppendUvarint(append(b, name...), count)
}

func cutPosting(b []byte) (x Posting, rest []byte, err error) {
	n, i := binary.Uvarint(b)
	if i <= 0 || uint64(len(b)-i) < n {
		return x, nil, errPosting
	}
	x.Name, b = string(b[i:i+int(n)]), b[i+int(n):]
	if x.Count, i = binary.Uvarint(b); i <= 0 {
		return x, nil, errPosting
	}
	return x, b[i:], nil
}

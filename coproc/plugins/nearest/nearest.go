package nearest

import (
	"bytes"
	"cmp"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/coproc"
)

// Name and Summary of the plugin.
const (
	Name    = "nearest"
	Summary = "finds the vectors nearest to one"
	// MaxK is the largest number of vectors to find.
	MaxK = 10_000
)

// Plugin keeps the best of its part.
type Plugin struct {
	query   []float32
	norm    float64
	k       int
	best    found
	skipped int
}

// New makes a Plugin.
func New() coproc.Plugin { return &Plugin{} }

func init() { coproc.Register(Name, Summary, New) }

type hit struct {
	score float64
	key   []byte
}

// better orders hits: higher first, then by key, so that parts that run twice agree.
func better(a, b hit) int {
	return cmp.Or(cmp.Compare(b.score, a.score), bytes.Compare(a.key, b.key))
}

// found is a heap with the worst hit on top.
type found []hit

func (f found) Len() int           { return len(f) }
func (f found) Less(i, j int) bool { return better(f[i], f[j]) > 0 }
func (f found) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *found) Push(x any)        { *f = append(*f, x.(hit)) }
func (f *found) Pop() any {
	old := *f
	x := old[len(old)-1]
	*f = old[:len(old)-1]
	return x
}

func (f *found) add(score float64, key []byte, k int) {
	h := hit{score, key}
	if len(*f) == k {
		if better(h, (*f)[0]) >= 0 {
			return
		}
		heap.Pop(f)
	}
	h.key = slices.Clone(key)
	heap.Push(f, h)
}

func (p *Plugin) begin(env coproc.Env) error {
	if p.k > 0 {
		return nil
	}
	k, err := strconv.Atoi(env.Arg("k", "10"))
	if err != nil || k < 1 || k > MaxK {
		return fmt.Errorf("argument k: want 1 to %d, not %q", MaxK, env.Arg("k", ""))
	}
	for s := range strings.SplitSeq(env.Arg("query", ""), ",") {
		x, err := strconv.ParseFloat(strings.TrimSpace(s), 32)
		if err != nil {
			return fmt.Errorf("argument query: want numbers with commas between them: %w", err)
		}
		p.query = append(p.query, float32(x))
		p.norm += x * x
	}
	if p.norm = math.Sqrt(p.norm); p.norm == 0 {
		return errors.New("argument query: the vector has no direction")
	}
	p.k = k
	return nil
}

// Map compares one vector.
func (p *Plugin) Map(env coproc.Env, key, value []byte, _ coproc.Emit) error {
	if err := p.begin(env); err != nil {
		return err
	}
	if len(value) != 4*len(p.query) {
		p.skipped++
		return nil
	}
	var dot, norm float64
	for i, q := range p.query {
		x := math.Float32frombits(binary.LittleEndian.Uint32(value[4*i:]))
		dot += float64(q) * float64(x)
		norm += float64(x) * float64(x)
	}
	if norm > 0 {
		p.best.add(dot/(p.norm*math.Sqrt(norm)), key, p.k)
	}
	return nil
}

// Finish emits the best of the part under one key.
func (p *Plugin) Finish(env coproc.Env, emit coproc.Emit) error {
	if p.skipped > 0 {
		env.Logf("%d vectors have another length than the query's %d", p.skipped, len(p.query))
	}
	for _, h := range p.best {
		b := binary.LittleEndian.AppendUint64(nil, math.Float64bits(h.score))
		if err := emit([]byte("best"), append(b, h.key...)); err != nil {
			return err
		}
	}
	return nil
}

// Reduce keeps the best of all parts.
func (p *Plugin) Reduce(env coproc.Env, _ []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	if err := p.begin(env); err != nil {
		return err
	}
	for v := range values {
		if len(v) < 8 {
			return errors.New("damaged record")
		}
		p.best.add(math.Float64frombits(binary.LittleEndian.Uint64(v)), v[8:], p.k)
	}
	slices.SortFunc(p.best, better)
	for i, h := range p.best {
		if err := emit(fmt.Appendf(nil, "%04d", i+1), fmt.Appendf(nil, "%.6f %s", h.score, h.key)); err != nil {
			return err
		}
	}
	return nil
}

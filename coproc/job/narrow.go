package job

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// mergeRuns is how many runs are read at a time: each takes the memory of one of its objects, runBytes.
const mergeRuns = 32

// merger merges runs into fewer ones, for one attempt of a reduce part.
type merger struct {
	ctx   context.Context // of the attempt
	c     *client.Client
	read  *reading                             // counts what is read
	wrote *atomic.Uint64                       // bytes
	note  func(ref proto.Ref, bytes int) error // records an object in the attempt's manifest
	made  []proto.Ref                          // objects of the runs that it has written and not freed
}

// narrow returns at most mergeRuns runs with the records of all, and in their order. Those that it is given stay:
// another attempt may need them.
func (m *merger) narrow(runs [][]proto.Ref) ([][]proto.Ref, error) {
	for len(runs) > mergeRuns {
		before := len(m.made)
		var fewer [][]proto.Ref
		for some := range slices.Chunk(runs, mergeRuns) {
			refs, err := m.merge(some)
			m.made = append(m.made, refs...)
			if err != nil {
				return nil, err
			}
			fewer = append(fewer, refs)
		}
		freeRefs(m.ctx, m.c, m.made[:before]) // of the pass before
		m.made, runs = slices.Delete(m.made, 0, before), fewer
	}
	return runs, nil
}

// merge writes one run; with an error, a part of it.
func (m *merger) merge(runs [][]proto.Ref) ([]proto.Ref, error) {
	w := &runWriter{ctx: m.ctx, c: m.c, wrote: m.wrote, note: m.note}
	var failed error
	for key, values := range merge(m.ctx, m.c, runs, m.read, &failed) {
		if failed = m.ctx.Err(); failed != nil {
			break
		}
		for v := range values {
			if failed = w.add(key, v); failed != nil {
				return w.refs, failed
			}
		}
	}
	if failed != nil {
		return w.refs, failed
	}
	err := w.flush()
	return w.refs, err
}

// drop frees the runs that it has written.
func (m *merger) drop(ctx context.Context) { freeRefs(ctx, m.c, m.made) }

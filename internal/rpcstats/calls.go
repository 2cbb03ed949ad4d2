package rpcstats

import (
	"cmp"
	"context"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/latency"
)

// Calls is a connect interceptor for handlers. The zero value is ready. What it
// keeps is bounded: methods are the service's, outcomes are connect's codes.
type Calls struct {
	m       sync.Map // key -> *latency.Histogram
	streams atomic.Int64
}

type key struct{ method, outcome string }

// Call is what calls of one method with one outcome have taken.
type Call struct {
	Method  string
	Outcome string // "ok", or connect's name of the error
	Took    latency.Snapshot
}

// Observe counts one call.
func (c *Calls) Observe(procedure string, took time.Duration, err error) {
	k := key{path.Base(procedure), "ok"}
	if err != nil {
		k.outcome = connect.CodeOf(err).String()
	}
	h, ok := c.m.Load(k)
	if !ok {
		h, _ = c.m.LoadOrStore(k, &latency.Histogram{})
	}
	h.(*latency.Histogram).Observe(took)
}

// Streams is the number of streams that are open.
func (c *Calls) Streams() int64 { return c.streams.Load() }

// Snapshot lists everything counted, sorted.
func (c *Calls) Snapshot() (out []Call) {
	c.m.Range(func(k, h any) bool {
		out = append(out, Call{k.(key).method, k.(key).outcome, h.(*latency.Histogram).Snapshot()})
		return true
	})
	slices.SortFunc(out, func(a, b Call) int {
		return cmp.Or(cmp.Compare(a.Method, b.Method), cmp.Compare(a.Outcome, b.Outcome))
	})
	return out
}

// WrapUnary implements connect.Interceptor.
func (c *Calls) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		start := time.Now()
		res, err := next(ctx, req)
		c.Observe(req.Spec().Procedure, time.Since(start), err)
		return res, err
	}
}

// WrapStreamingClient implements connect.Interceptor: handlers have none.
func (c *Calls) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor. How long a stream lasts is
// its reader's choice and says nothing: only open ones are counted.
func (c *Calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, s connect.StreamingHandlerConn) error {
		c.streams.Add(1)
		defer c.streams.Add(-1)
		return next(ctx, s)
	}
}

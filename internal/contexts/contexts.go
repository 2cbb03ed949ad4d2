// Package contexts joins contexts.
package contexts

import (
	"context"
	"errors"
)

// Both returns a context with the values and the cause of bound. It ends when bound ends, when ctx ends, at the deadline of ctx, or when cancel is
// called. If ctx has ended already, so has the result.
func Both(bound, ctx context.Context) (both context.Context, cancel context.CancelFunc) {
	var end context.CancelFunc
	if at, ok := ctx.Deadline(); ok {
		both, end = context.WithDeadline(bound, at)
	} else {
		both, end = context.WithCancel(bound)
	}
	if ctx.Err() != nil { // AfterFunc would end it later
		end()
	}
	stop := context.AfterFunc(ctx, func() {
		if !errors.Is(ctx.Err(), context.DeadlineExceeded) { // both reports that by itself
			end()
		}
	})
	return both, func() { stop(); end() }
}

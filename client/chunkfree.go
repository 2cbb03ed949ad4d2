package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// deferredFrees are chunks that no committed index names, and that the call which made or
// replaced them could not free. A background goroutine frees them, under the session that
// the Client has then. If the Client dies before, they are orphans: fsck frees them once the
// session that wrote them is over.
type deferredFrees struct {
	mu   sync.Mutex
	refs []Ref         // guarded by mu; at most maxDeferredFrees
	wake chan struct{} // of capacity 1: refs is not empty
}

const (
	// maxDeferredFrees bounds the chunks that a Client remembers, 16 GiB of them. Further
	// chunks are left to fsck.
	maxDeferredFrees = 1 << 16
	// deferredFreeRetry is the time between two attempts to free chunks.
	deferredFreeRetry = time.Second
	// deferredFreeTimeout bounds how long Close frees chunks.
	deferredFreeTimeout = 2 * time.Second
)

// deferFrees remembers chunks to be freed in the background.
func (c *Client) deferFrees(refs []Ref) {
	d := &c.deferredFrees
	d.mu.Lock()
	d.refs = append(d.refs, refs[:min(len(refs), maxDeferredFrees-len(d.refs))]...)
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// runDeferredFrees frees chunks in the background until the Client is closed.
func (c *Client) runDeferredFrees() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.deferredFrees.wake:
		}
		for c.ctx.Err() == nil && !c.freeDeferred(c.ctx) {
			select {
			case <-c.ctx.Done():
			case <-time.After(deferredFreeRetry):
			}
		}
	}
}

// freeDeferred makes one attempt to free each remembered chunk. It reports whether none is left.
func (c *Client) freeDeferred(ctx context.Context) (none bool) {
	d := &c.deferredFrees
	d.mu.Lock()
	refs := slices.Clone(d.refs)
	d.mu.Unlock()
	freed := make(map[Ref]bool, len(refs))
	for _, ref := range refs {
		if ctx.Err() != nil {
			break
		}
		err := c.Free(ctx, ref)
		if err == nil || errors.Is(err, ErrFreed) || errors.Is(err, ErrNoRegion) || errors.Is(err, ErrBadRef) || errors.Is(err, ErrBad) {
			freed[ref] = true
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refs = slices.DeleteFunc(d.refs, func(ref Ref) bool { return freed[ref] })
	return len(d.refs) == 0
}

// finishDeferredFrees is the last attempt of Close to free the remembered chunks.
func (c *Client) finishDeferredFrees() {
	ctx, cancel := context.WithTimeout(context.Background(), deferredFreeTimeout)
	defer cancel()
	c.deferredFrees.mu.Lock()
	n := len(c.deferredFrees.refs)
	c.deferredFrees.mu.Unlock()
	if n > 0 && !c.freeDeferred(ctx) {
		c.cfg.Logger.Warn("chunks of large objects could not be freed: quarry fsck --repair frees them", "session", c.SessionID())
	}
}

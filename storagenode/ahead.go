package storagenode

import (
	"context"
	"sync/atomic"

	"github.com/quarrystore/quarry/rdma/host"
)

// ahead is what is read of region files before anybody asks for it: from the node's start on while the disk has nothing else to do,
// then by each reconcile of the region that it goes through.
type ahead struct {
	ctx    context.Context    // of what the start has begun; set, with cancel, before the node serves
	cancel context.CancelFunc // of ctx
	bytes  atomic.Uint64      // the kernel was asked for
}

// aheadShare of the memory that is available at the start may be filled with regions' files.
const aheadShare = 2

// readRegionsAhead has the kernel read region files into the page cache while the node registers and its controllers decide. The first reconcile
// ends it: reconciles read what they go through by themselves.
func (n *Node) readRegionsAhead() {
	n.ahead.ctx, n.ahead.cancel = context.WithCancel(n.ctx)
	memories := make([]*host.Memory, 0, len(n.memories))
	for _, number := range n.regionNumbers() {
		memories = append(memories, n.memories[number])
	}
	n.wg.Go(func() { n.ahead.read(n.ahead.ctx, memories, host.AvailableMemory()/aheadShare) })
}

// read reads memories in order until ctx ends or the budget is used up.
func (a *ahead) read(ctx context.Context, memories []*host.Memory, budget uint64) {
	for _, m := range memories {
		if budget == 0 || ctx.Err() != nil {
			return
		}
		asked := m.ReadAhead(ctx, budget, &a.bytes)
		budget -= min(budget, asked)
	}
}

// readAhead has the kernel read the region's file while a reconcile goes through it: page faults alone leave the disk idle in between.
func (w *work) readAhead(ctx context.Context) {
	w.n.mu.Lock()
	m := w.n.memories[w.req.Region]
	w.n.mu.Unlock()
	if m == nil {
		return
	}
	w.n.ahead.cancel()
	w.n.ahead.read(ctx, []*host.Memory{m}, uint64(len(m.Bytes())))
}

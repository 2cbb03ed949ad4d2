package storagenode

import "context"

// readAhead has the kernel read the region's file while a reconcile goes through it: page faults alone leave the disk idle in between. Nothing is read
// earlier, such as from the node's start on: docs/RDMA.md#testing has what that did.
func (w *work) readAhead(ctx context.Context) {
	w.n.mu.Lock()
	m := w.n.memories[w.req.Region]
	w.n.mu.Unlock()
	if m != nil {
		m.ReadAhead(ctx, &w.n.counts.readAhead)
	}
}

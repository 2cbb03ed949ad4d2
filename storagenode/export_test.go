package storagenode

import (
	"context"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// OnDevice has a node keep its regions on a device that a test has made.
func (c *Config) OnDevice(d *pmem.Device) { c.device = d }

// ShortPatience has nodes of the test wait less for what other processes hold.
func ShortPatience(t interface{ Cleanup(func()) }) { Patience(t, 100*time.Millisecond) }

// Patience is ShortPatience with a time.
func Patience(t interface{ Cleanup(func()) }, d time.Duration) {
	was := lockPatience
	lockPatience = d
	t.Cleanup(func() { lockPatience = was })
}

// Distrust is why a node on a boot drops the caches of a folder's files.
func Distrust(dir, boot string) (why, err error) { return (&folder{dir: dir, boot: boot}).distrust() }

// Forget has the node end what executes procedures as if no request had come for long.
func (n *Node) Forget() {
	n.executors.mu.Lock()
	defer n.executors.mu.Unlock()
	for _, x := range n.executors.byRegion {
		x.used.Store(-int64(execIdle))
	}
}

// Object executes a request of a session with a ticket.
func (n *Node) Object(from *rdma.Ticket, request, answer []byte) (int, error) {
	return n.object(from, request, answer)
}

// ReadAhead is what a reconcile of a region begins with.
func (n *Node) ReadAhead(ctx context.Context, region uint32) {
	(&work{n: n, req: &quarrypb.WorkRequest{Region: region}}).readAhead(ctx)
}

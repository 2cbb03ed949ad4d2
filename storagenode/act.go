package storagenode

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/storagenode/state"
)

// do takes one step and carries its actions out, in order. Commands for different
// regions go on side by side: only the step itself is taken under the lock.
func (n *Node) do(ctx context.Context, ev state.Event) error {
	n.mu.Lock()
	actions, err := n.state.Step(ev)
	if err != nil {
		n.mu.Unlock()
		return err
	}
	region := uint32(0)
	for _, a := range actions {
		if a.Do == state.Save && err == nil {
			// Under the lock, so that a later state is never overwritten by an earlier one.
			err = n.folder.save(&n.state.Kept)
		}
		region = max(region, a.Region)
	}
	n.mu.Unlock()
	if err != nil {
		err = fmt.Errorf("keeping the node's state: %w", err)
	}
	for i := 0; i < len(actions) && err == nil; i++ {
		err = n.act(ctx, actions[i])
	}
	if region != 0 {
		n.mu.Lock()
		_, serr := n.state.Step(state.Ended{Region: region, Failed: err != nil})
		n.mu.Unlock()
		err = errors.Join(err, serr)
	}
	return err
}

func (n *Node) act(ctx context.Context, a state.Action) error {
	n.mu.Lock()
	access, m := n.access, n.memories[a.Region]
	var r state.Region
	if p := n.state.Region(a.Region); p != nil {
		r = *p
	}
	n.mu.Unlock()
	switch a.Do {
	case state.Save:
		return nil // done with the step
	case state.Make:
		return n.make(r)
	case state.Zero:
		// Fresh memory is zero, and what still maps the old one keeps the old one.
		if err := n.free(a.Region); err != nil {
			return err
		}
		return n.make(r)
	case state.Free:
		return n.free(a.Region)
	case state.Mark:
		r.Epoch = a.Epoch
		return n.mark(m, r)
	case state.Serve:
		return access.OpenRegion(ctx, a.Region, a.Epoch, m)
	case state.Cut:
		if access == nil {
			return nil
		}
		return access.CloseRegion(ctx, a.Region, a.Epoch)
	case state.Settle:
		return access.Settle(ctx, a.Next, a.Serials)
	case state.End:
		if len(a.Serials) == 0 {
			return nil
		}
		return access.Fence(ctx, a.Serials...)
	case state.Renew:
		select {
		case n.renew <- struct{}{}:
		default:
		}
		return nil
	}
	return fmt.Errorf("unknown action %v", a)
}

// make makes the memory of a replica and writes its header.
func (n *Node) make(r state.Region) (err error) {
	var m *host.Memory
	if n.folder == nil {
		m, err = host.NewMemory(fmt.Sprintf("region-%d", r.Number), r.Bytes)
	} else {
		m, err = host.OpenMemory(n.folder.path(r.Number), r.Bytes, true)
	}
	if err != nil {
		return err
	}
	if err := n.mark(m, r); err != nil {
		m.Close()
		return err
	}
	n.mu.Lock()
	n.memories[r.Number] = m
	n.mu.Unlock()
	return nil
}

// mark writes the region's header. No key is open: plain stores are allowed.
func (n *Node) mark(m *host.Memory, r state.Region) error {
	h := proto.RegionHeader{Domain: proto.DomainCPU, UUID: r.UUID, Cluster: r.Cluster, RegionBytes: r.Bytes, Region: r.Number, Incarnation: n.incarnation, Epoch: r.Epoch}
	copy(m.Bytes(), h.Encode())
	if !m.Persistent() {
		return nil
	}
	return m.Persist(0, proto.RegionHeaderBytes)
}

func (n *Node) free(region uint32) error {
	n.mu.Lock()
	m := n.memories[region]
	delete(n.memories, region)
	n.mu.Unlock()
	var err error
	if m != nil {
		err = m.Close()
	}
	if n.folder != nil {
		if rerr := os.Remove(n.folder.path(region)); !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// persistent says whether files in a folder survive a loss of power.
func persistent(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type != unix.TMPFS_MAGIC && fs.Type != unix.RAMFS_MAGIC && fs.Type != unix.HUGETLBFS_MAGIC
}

// resident is how much of the regions is in memory: what the files' blocks say,
// which is what has been touched.
func (n *Node) resident() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	var sum uint64
	for _, m := range n.memories {
		sum += m.TouchedBytes()
	}
	return sum
}

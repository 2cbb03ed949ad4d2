package storagenode

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/storagenode/state"
)

// This file carries out the actions of the agent's machine on memory, files and the fabric.

var errStopping = errors.New("the node is stopping")

// do takes one step and carries its actions out, in order. Commands for different regions may run
// at the same time: only the step itself is taken under mu.
//
// ctx bounds the waits for verbs to end, in Cut, EndBelow and End. If it ends first, nothing is
// known of those verbs; the caller gets an error and calls again. nil: everything is done, and
// what it rests on is saved.
func (n *Node) do(ctx context.Context, ev state.Event) error {
	ctx, cancel := context.WithTimeout(ctx, actTimeout)
	defer cancel()
	defer context.AfterFunc(n.ctx, cancel)()
	n.mu.Lock()
	if n.memories == nil {
		n.mu.Unlock()
		return errStopping
	}
	actions, err := n.state.Step(ev)
	if err != nil {
		n.mu.Unlock()
		return err
	}
	n.acting.Add(1)
	defer n.acting.Done()
	region := uint32(0)
	for _, a := range actions {
		if a.Do == state.Save {
			n.wanted()
		}
		region = max(region, a.Region)
	}
	seq := n.keptSeq
	n.mu.Unlock()
	// Also for a step that changed nothing: what it answers may rest on another step,
	// whose state is not saved yet.
	err = n.save(ctx, seq)
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

// act carries out one action.
func (n *Node) act(ctx context.Context, a state.Action) error {
	n.mu.Lock()
	access, m := n.access, n.memories[a.Region] // a nil map has none
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
		return n.zero(m, r)
	case state.Free:
		return n.free(a.Region)
	case state.Mark:
		r.Epoch = a.Epoch
		return n.mark(m, &r)
	case state.Serve:
		m.Own(a.Tenant)
		n.executors.stop(a.Region, a.Epoch-1)
		return access.OpenRegion(ctx, a.Region, a.Epoch, a.Adapter, m)
	case state.Cut:
		n.executors.stop(a.Region, a.Epoch)
		return access.CloseRegion(ctx, a.Region, a.Epoch)
	case state.EndBelow:
		return access.EndBelow(ctx, a.Next, a.Serials)
	case state.End:
		if len(a.Serials) == 0 {
			return nil
		}
		return access.Fence(ctx, a.Serials...)
	case state.Retire:
		return access.adapters[a.Adapter].retire(ctx)
	case state.Stop:
		n.stopWorks(a.Region)
		return nil
	case state.Renew:
		select {
		case n.renew <- struct{}{}:
		default:
		}
		return nil
	}
	return fmt.Errorf("unknown action %v", a)
}

// make allocates the memory of a replica and writes its header.
func (n *Node) make(r state.Region) error {
	var m *host.Memory
	var err error
	if n.keeper == nil {
		if m, err = host.NewHugeMemory(fmt.Sprintf("region-%d", r.Number), r.Bytes, n.cfg.HugepageBytes); err == nil {
			err = n.mark(m, &r)
		}
	} else {
		m, err = n.keeper.create(n.header(&r))
	}
	if err == nil {
		err = n.keep(r.Number, m)
	}
	if err != nil && m != nil {
		m.Close()
	}
	if errors.Is(err, host.ErrNoSpace) {
		n.cfg.Logger.Warn("storage node: no space for a region", "region", r.Number, "bytes", r.Bytes, "error", err)
		return &state.Error{Code: state.NoSpace, Text: fmt.Sprintf("region %d: %v; free some, or lower the node's capacity", r.Number, err)}
	}
	return err
}

// keep registers m as the memory of a region.
func (n *Node) keep(region uint32, m *host.Memory) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.memories == nil {
		return errStopping
	}
	n.memories[region] = m
	return nil
}

// zero zeroes a replica's memory and writes its header again. Access has been cut.
func (n *Node) zero(m *host.Memory, r state.Region) error {
	if err := m.Zero(proto.RegionHeaderBytes); err != nil {
		return err
	}
	return n.mark(m, &r)
}

// header is the region's header as it should be.
func (n *Node) header(r *state.Region) *proto.RegionHeader {
	return &proto.RegionHeader{Domain: n.domain, Kind: r.Kind, UUID: r.UUID, Cluster: r.Cluster, RegionBytes: r.Bytes, Region: r.Number, Incarnation: n.incarnation, Epoch: r.Epoch}
}

// mark writes the region's header.
// Preconditions: no key is open, so that plain stores are allowed.
func (n *Node) mark(m *host.Memory, r *state.Region) error {
	copy(m.Bytes(), n.header(r).Encode())
	if !m.Persistent() {
		return nil
	}
	return m.Persist(0, proto.RegionHeaderBytes)
}

// free gives a replica's memory back. If the memory stays mapped or registered its file is kept,
// because another region would be given its place otherwise: the node's next start finds the
// region, and the controller has it freed then.
func (n *Node) free(region uint32) error {
	n.mu.Lock()
	m := n.memories[region]
	delete(n.memories, region)
	n.mu.Unlock()
	if m != nil && !n.giveBack(m) || n.keeper == nil {
		return nil
	}
	return n.keeper.remove(region)
}

// giveBack unmaps memory that belongs to no region any more. false: it may still be mapped; the log says why.
func (n *Node) giveBack(m *host.Memory) bool {
	err := m.Close()
	if err != nil {
		n.cfg.Logger.Error("storage node: memory not unmapped", "memory", m.Name(), "error", err)
	}
	return err == nil
}

// resident is how much memory or disk the regions occupy, by the blocks of their files.
func (n *Node) resident() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	var sum uint64
	for _, m := range n.memories {
		sum += m.TouchedBytes()
	}
	return sum
}

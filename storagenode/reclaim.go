package storagenode

import (
	"context"
	"errors"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/slab"
)

const (
	// Empty blocks are reclaimed when less than one block in reclaimBelow is free: an empty
	// block that keeps its class need not be formatted again.
	reclaimBelow = 4
	reclaimLeast = 16                    // blocks to have free in a small region
	reclaimBatch = 128                   // blocks that share two grace periods
	reclaimPace  = time.Second           // least time of a batch: each raise empties the caches of all clients
	passEvery    = 20 * time.Millisecond // between two questions whether a grace period is over
)

// reclaimable lists the blocks of a primary's memory to reclaim: those of a reclaim that
// was cut short, and, if there are too few free blocks, as many as are missing of those
// whose map is empty. It is a guess, from this node's memory alone.
func reclaimable(m *host.Memory, geo proto.Geometry) (blocks []uint32) {
	if m == nil || uint64(len(m.Bytes())) != geo.RegionBytes {
		return nil
	}
	headers := make([]byte, 8*geo.Blocks)
	m.Peek(headers, geo.HeaderOff(0))
	free := 0
	for b := range geo.Blocks {
		switch h := proto.Header(proto.Word(headers, int(8*b))); h.State() {
		case proto.BlockFree:
			free++
		case proto.BlockDraining, proto.BlockReclaim:
			blocks = append(blocks, b)
		}
	}
	lacks := max(int(geo.Blocks)/reclaimBelow, min(reclaimLeast, int(geo.Blocks))) - free
	bits := make([]byte, proto.MapBytes)
	for b := uint32(0); b < geo.Blocks && lacks > 0; b++ {
		h := proto.Header(proto.Word(headers, int(8*b)))
		if h.State() != proto.BlockActive || !h.Valid() || b == geo.StagingBlock() && h.Staging() {
			continue
		}
		used := bits[:8*h.Class().MapWords()]
		m.Peek(used, geo.MapOff(b))
		if !slices.ContainsFunc(used, func(x byte) bool { return x != 0 }) {
			blocks = append(blocks, b)
			lacks--
		}
	}
	return blocks
}

// reclaim reclaims the blocks, a batch at a time.
func (l *workLane) reclaim(blocks []uint32) error {
	if err := l.open(); err != nil {
		return err
	}
	a, err := alloc.New(l.slab, nowhere{})
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(blocks, reclaimBatch) {
		began := time.Now()
		if err := alloc.Turn(l); err != nil {
			return err
		}
		freed, err := a.Reclaim(&l.region, batch, func() error { return alloc.Pass(l) })
		l.w.bytes.Add(uint64(freed) * proto.BlockBytes)
		l.w.n.settled.reclaimed.Add(uint64(freed))
		l.w.done.Add(uint32(len(batch)))
		l.w.speed.passed.Add(uint64(len(batch)) * proto.BlockBytes)
		if err != nil {
			return errors.Join(err, l.fault)
		}
		l.Free()
		select {
		case <-time.After(reclaimPace - time.Since(began)):
		case <-l.w.ctx.Done():
			return context.Cause(l.w.ctx)
		}
	}
	return nil
}

// Raise raises the reclaim epoch; see alloc.Epochs.
func (l *workLane) Raise() (uint64, error) {
	res, err := l.askPass(0)
	return res.GetEpoch(), err
}

// Passed says whether the grace period of an epoch is over; see alloc.Epochs.
func (l *workLane) Passed(epoch uint64) (bool, error) {
	res, err := l.askPass(epoch)
	if err != nil || res.Passed {
		return err == nil, err
	}
	select {
	case <-time.After(passEvery):
		return false, nil
	case <-l.w.ctx.Done():
		return false, context.Cause(l.w.ctx)
	}
}

// Hold keeps the session from acknowledging a later epoch; see alloc.Epochs.
func (l *workLane) Hold(epoch uint64) bool {
	s := l.w.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.acked > epoch {
		return false
	}
	l.began.Store(epoch)
	return true
}

// Free ends Hold; see alloc.Epochs.
func (l *workLane) Free() { l.began.Store(l.w.session.reclaim.Load()) }

// askPass asks the leading controller, until there is an answer or the program is over.
func (l *workLane) askPass(epoch uint64) (res *quarrypb.PassResponse, err error) {
	ctx, s := l.w.ctx, l.w.session
	for {
		err := s.n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
			r, err := cl.Pass(ctx, connect.NewRequest(&quarrypb.PassRequest{Serial: s.ticket.Serial, Epoch: epoch, Region: l.w.req.Region, Proof: s.proof}))
			if err == nil {
				res = r.Msg
			}
			return err
		})
		if err == nil || final(err) {
			return res, err
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// nowhere is the Source of an allocator that only reclaims: it has no regions to allocate from.
type nowhere struct{}

func (nowhere) Regions(alloc.Home) []uint32   { return nil }
func (nowhere) Grow(alloc.Home, uint32) error { return slab.ErrNoRegion }
func (nowhere) Random() uint64                { return 0 }

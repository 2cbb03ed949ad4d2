package sim

import (
	"errors"
	"slices"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/slab"
)

// reclaim reclaims blocks as an agent does: half reclaimed and empty ones.
func (p *program) reclaim(lane *slab.Lane) error {
	w := p.g.m.w
	a, err := alloc.New(lane, p.c)
	if err != nil {
		return err
	}
	if err := alloc.Turn(p); err != nil {
		return err
	}
	blocks := []uint32{0}
	if p.req.Region == regionID {
		blocks = w.reclaimable()
	}
	if w.ch.choose(3) == 2 { // also one that is in use, or half reclaimed
		if next := (blocks[0] + 1) % w.geo.Blocks; !slices.Contains(blocks, next) {
			blocks = append(blocks, next)
		}
	}
	freed, err := a.Reclaim(&p.reg, blocks, func() error { return alloc.Pass(p) })
	w.logf("reclaim of blocks %v in epoch %d: %d, %v", blocks, p.req.Epoch, freed, err)
	w.stats.Reclaims += uint64(freed)
	if errors.Is(err, alloc.ErrInUse) {
		w.fail("two reclaims at once", err.Error())
	}
	return err
}

// Raise, Passed, Hold and Free implement alloc.Epochs, as package storagenode does.
func (p *program) Raise() (uint64, error) {
	res, err := p.askPass(0)
	return res.GetEpoch(), err
}

func (p *program) Passed(epoch uint64) (bool, error) {
	res, err := p.askPass(epoch)
	if err != nil || res.Passed {
		return err == nil, err
	}
	p.c.sleep(int64(1+p.c.w.ch.choose(30)) * step)
	return false, p.over()
}

func (p *program) Hold(epoch uint64) bool {
	if p.c.acked > epoch {
		return false
	}
	p.c.beganReclaim = epoch
	return true
}

func (p *program) Free() { p.c.began, p.c.beganReclaim = p.c.view.rev, p.c.view.reclaim }

func (p *program) askPass(epoch uint64) (*quarrypb.PassResponse, error) {
	for {
		ans, err := p.g.m.ask(p.c, &quarrypb.PassRequest{Serial: p.c.serial, Epoch: epoch, Region: p.req.Region, Proof: p.c.proof})
		if over := p.over(); over != nil {
			return nil, over
		}
		if r, ok := ans.(*quarrypb.PassResponse); ok && err == nil {
			return r, nil
		}
		var se *state.Error
		if errors.As(err, &se) && se.Code == state.Precondition {
			p.unsettled = true
			return nil, err
		}
		p.c.sleep(int64(1+p.c.w.ch.choose(30)) * step)
	}
}

// reclaimable chooses blocks to reclaim: all those whose reclaim has ended in the middle, as
// an agent does, or one in use with few bits set.
func (w *world) reclaimable() []uint32 {
	if half := w.halfReclaimed(); len(half) > 0 {
		return half
	}
	p := w.mem(w.mirror.table.node[0])
	best, least := uint32(0), 1<<30
	for b := range w.geo.Blocks {
		h := proto.Header(p.Word(w.geo.HeaderOff(b)))
		if h.State() == proto.BlockActive {
			n := 0
			for i := range h.Class().MapWords() {
				if p.Word(w.geo.MapOff(b)+uint64(8*i)) != 0 {
					n++
				}
			}
			if n = 2*n + w.ch.choose(3); n < least {
				best, least = b, n
			}
		}
	}
	return []uint32{best}
}

// halfReclaimed lists the blocks that the primary has in the middle of a reclaim.
func (w *world) halfReclaimed() (half []uint32) {
	p := w.mem(w.mirror.table.node[0])
	for b := range w.geo.Blocks {
		if st := proto.Header(p.Word(w.geo.HeaderOff(b))).State(); st == proto.BlockDraining || st == proto.BlockReclaim {
			half = append(half, b)
		}
	}
	return half
}

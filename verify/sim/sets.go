package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// With Options.Sets clients hold sets of up to four objects (slab/set.go), read them, write some of them once or more while they hold all,
// and give them back. Reservations of clients that die or lose their session stay.
//
// The history has a read of each object at the instant at which Hold returns, an update for each write, whose predecessor is what the
// set shows, and, where Drop says that the set was whole to the end, a read of each object at the instant at which Drop is called. So a commit of
// another client in between is found as a lost update, or because versions do not fall.

const maxHeldSet = 4

// heldSet is a set as its client knows it.
type heldSet struct {
	regs []int // registers, in the order of the references
}

// holdSet is one operation with a set.
func (c *client) holdSet(reg int) {
	w := c.w
	var set heldSet
	var refs []proto.Ref
	for _, r := range append([]int{reg}, c.others()...) {
		set.regs = append(set.regs, r)
		refs = append(refs, w.check.regs[r].ref)
	}
	c.doing = opUpdate
	w.logf("client %d: hold %v", c.id, refs)
	err := c.lane.Hold(refs)
	w.logf("client %d: hold of %v: %v", c.id, refs, err)
	if w.notHeld(c, refs, err) {
		return
	}
	c.sawHeld(&set, okResult)
	for range w.ch.choose(3) {
		c.compute()
		c.writeSet(&set)
	}
	c.compute()
	c.dropSet(&set)
}

// others chooses registers of other objects.
func (c *client) others() (regs []int) {
	w := c.w
	first := w.ch.choose(len(w.objs))
	for k := range min(w.ch.choose(maxHeldSet), len(w.objs)) {
		o := &w.objs[(first+k)%len(w.objs)]
		regs = append(regs, o.refs[len(o.refs)-1])
	}
	return regs
}

// notHeld counts the answer of Hold, and says whether it was an error.
func (w *world) notHeld(c *client, refs []proto.Ref, err error) bool {
	w.mix(uint64(len(refs)))
	hurt, once := false, false
	for i := range w.check.regs {
		r := &w.check.regs[i]
		once = once || r.single && slices.Contains(refs, r.ref)
	}
	for _, r := range refs {
		hurt = hurt || w.anyHurt(uint64(r.Addr.Off())) || w.excused(uint64(r.Addr.Off()))
	}
	switch {
	case err == nil:
		w.stats.Sets[0]++
		return false
	case errors.Is(err, errDeadline) && w.opt.Faults == 0 && w.d.sched == Walk && w.d.patience >= 6*w.d.lease:
		w.fail("waited in vain", fmt.Sprintf("nothing fails, and client %d cannot hold %v: %v", c.id, refs, err))
	case errors.Is(err, slab.ErrFreed), errors.Is(err, slab.ErrBadRef), w.notDone(err), hurt && errors.Is(err, slab.ErrCorrupt), once && errors.Is(err, slab.ErrImmutable):
	default:
		w.fail("unexpected error", fmt.Sprintf("client %d holds %v: %v", c.id, refs, err))
	}
	w.stats.Sets[1]++
	return true
}

// sawHeld appends reads of all objects of a set at this instant.
func (c *client) sawHeld(set *heldSet, as result) {
	w := c.w
	at := int64(w.steps)
	for i, r := range set.regs {
		b, info, _ := c.lane.Held(i)
		e := event{client: uint8(c.id), kind: opRead, result: as, reg: r, call: at, ret: at, out: proto.Word(b, 0), seen: info.Version, made: info.Version}
		if !w.payloadGood(b) {
			w.fail("damaged payload", fmt.Sprintf("client %d holds %v: % x", c.id, w.check.regs[r].ref, b))
			return
		}
		w.hist = append(w.hist, e)
	}
}

// compute is what a program does while it holds a set: it works by no table meanwhile, and later with another deadline.
func (c *client) compute() {
	if c.w.ch.choose(2) == 1 {
		c.began = math.MaxUint64
		c.sleep(int64(1+c.w.ch.choose(10)) * step)
		switch {
		case c.w.opt.Script != nil && c.w.ch.choose(2) == 1:
			c.sleep(int64(1+c.w.ch.choose(4*int(c.w.d.lease/step))) * step) // longer than a failover that waits for the lease
		case c.w.opt.Faults != 0 && c.w.ch.choose(8) == 7:
			c.sleep(int64(1+c.w.ch.choose(400)) * step)
		}
	}
	c.began = c.view.rev
	c.deadline = c.w.now + c.w.d.patience
}

// writeSet writes some objects of a set.
func (c *client) writeSet(set *heldSet) {
	w := c.w
	var at, events []int
	var payloads, olds [][]byte
	var seen []uint64
	taken := map[int]bool{}
	for i, r := range set.regs {
		if taken[r] || w.ch.choose(3) == 0 {
			continue
		}
		taken[r] = true
		e := c.begin(opUpdate, r)
		w.hist[e].in = w.check.value(c.id)
		b, info, _ := c.lane.Held(i)
		at, events, seen = append(at, i), append(events, e), append(seen, info.Version)
		olds = append(olds, append([]byte(nil), b...))
		payloads = append(payloads, w.payload(make([]byte, maxPayload), w.hist[e].in, w.check.regs[r].ref))
	}
	errs := make([]error, len(at))
	c.lane.WriteHeld(at, payloads, errs)
	for k, e := range events {
		made := uint64(0)
		if errs[k] == nil {
			_, info, lost := c.lane.Held(at[k])
			if made = info.Version; lost != nil && made == seen[k] {
				w.hist[e].blind = true // done, and read back under a later epoch
				made = 0
			}
		}
		w.done(c, e, olds[k], seen[k], made, errs[k])
	}
}

// dropSet gives a set back.
func (c *client) dropSet(set *heldSet) {
	w := c.w
	first := len(w.hist)
	c.sawHeld(set, notDoneResult)
	seen := len(w.hist)
	err := c.lane.Drop()
	w.logf("client %d: drop: %v", c.id, err)
	switch {
	case err == nil:
		w.stats.Sets[2]++
		for e := first; e < seen; e++ {
			w.hist[e].result = okResult
		}
	case errors.Is(err, slab.ErrHoldLost):
		w.stats.Sets[3]++
	case w.notDone(err):
	default:
		w.fail("unexpected error", fmt.Sprintf("client %d drops a set: %v", c.id, err))
	}
}

package sim

import (
	"errors"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// With Options.Batches half of the reads and updates are ReadMany and WriteMany of up to four
// objects, the same one twice among them; in a quarter of the schedules UpdateMany takes the place of WriteMany. Each object is an
// operation of the history by itself: a batch promises no more.

const maxBatch = 4

// batch chooses the registers of a batch beside one.
func (c *client) batch(reg int) []int {
	w := c.w
	regs := []int{reg}
	for range 1 + w.ch.choose(maxBatch-1) {
		o := &w.objs[w.ch.choose(len(w.objs))]
		regs = append(regs, o.refs[len(o.refs)-1])
	}
	return regs
}

// readMany ends the events of objects as their answers come: later ones may begin later.
func (c *client) readMany(regs []int) {
	w := c.w
	refs, events := c.beginAll(opRead, regs)
	err := c.lane.ReadMany(refs, func(i int, b []byte, info slab.Info, err error) {
		w.done(c, events[i], b, info.Version, info.Version, err)
		events[i] = -1
	})
	for _, e := range events {
		if e >= 0 {
			if err == nil {
				w.fail("an object of a batch has no answer", w.describe(e))
			}
			w.done(c, e, nil, 0, 0, err)
		}
	}
}

// writeMany writes without seeing what was there: events are blind.
func (c *client) writeMany(regs []int) {
	w := c.w
	refs, events := c.beginAll(opUpdate, regs)
	payloads, errs := make([][]byte, len(regs)), make([]error, len(regs))
	for i, e := range events {
		w.hist[e].in, w.hist[e].blind = w.check.value(c.id), true
		payloads[i] = w.payload(make([]byte, maxPayload), w.hist[e].in, refs[i])
	}
	c.lane.WriteMany(refs, payloads, errs)
	for i, e := range events {
		if w.check.regs[regs[i]].single && errors.Is(errs[i], slab.ErrImmutable) {
			errs[i] = slab.ErrBusy // written once: not done
		}
		w.done(c, e, nil, 0, w.hist[e].made, errs[i])
	}
}

// updateMany notes what its callbacks have seen, where the version of the commit is known: else the events stay blind, as those of writeMany.
// Some callbacks refuse.
func (c *client) updateMany(regs []int) {
	w := c.w
	refs, events := c.beginAll(opUpdate, regs)
	old, was, errs := make([][]byte, len(regs)), make([]uint64, len(regs)), make([]error, len(regs))
	for _, e := range events {
		w.hist[e].in, w.hist[e].blind = w.check.value(c.id), true
	}
	var buf [maxPayload]byte
	c.lane.UpdateMany(refs, func(i int, b []byte, info *slab.Info) ([]byte, error) {
		old[i], was[i] = append(old[i][:0], b...), info.Version
		if w.log != nil {
			w.logf("client %d: has reserved %v, sees value %d@%d", c.id, refs[i], proto.Word(b, 0), was[i])
		}
		if w.hist[events[i]].in>>8&7 == 7 {
			return nil, slab.ErrBusy // refused: not done
		}
		return w.payload(buf[:], w.hist[events[i]].in, refs[i]), nil
	}, errs)
	for i, e := range events {
		if w.check.regs[regs[i]].single && errors.Is(errs[i], slab.ErrImmutable) {
			errs[i] = slab.ErrBusy // written once: not done
		}
		h := &w.hist[e]
		h.blind = errs[i] != nil || h.made == 0
		w.done(c, e, old[i], was[i], h.made, errs[i])
	}
}

func (c *client) beginAll(k opKind, regs []int) (refs []proto.Ref, events []int) {
	for _, reg := range regs {
		refs = append(refs, c.w.check.regs[reg].ref)
		events = append(events, c.begin(k, reg))
	}
	return refs, events
}

// wroteBlindly notes the version that a commit gave to the value of a blind write. The history
// does without it where a failover has kept the change.
func (w *world) wroteBlindly(value, version uint64) {
	i := slices.IndexFunc(w.hist, func(e event) bool { return e.blind && e.in == value })
	if i >= 0 {
		w.hist[i].made = version
	}
}

package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

type opKind uint8

const (
	opRead opKind = iota
	opUpdate
	opFree
	opBirth
	opKinds
)

func (k opKind) String() string { return [...]string{"read", "update", "free", "birth"}[k] }

type result uint8

const (
	pendingResult result = iota
	okResult
	freedResult
	notDoneResult
	unknownResult
)

func (r result) String() string {
	return [...]string{"pending", "ok", "freed", "not done", "unknown"}[r]
}

// event is one operation of a history.
type event struct {
	client    uint8
	kind      opKind
	result    result
	reg       int    // index of its object in checker.regs
	call, ret int64  // virtual times
	in        uint64 // value written
	out       uint64 // value seen
	seen      uint64 // version seen
	made      uint64 // version made
	// blind: a write that does not tell what it replaced. out and seen are unset, and made is 0
	// where it was not seen at the primary.
	blind bool
	// soft: the image seen at the primary may not have been durable there yet.
	soft bool
	// gone: a loss of power has lost the image that was seen, and a backup of it or there was
	// none. The guarantee of a durable read allows it; see softAnswer.
	gone bool
}

// begin records the call of an operation.
func (c *client) begin(k opKind, reg int) int {
	w := c.w
	c.doing = k
	w.hist = append(w.hist, event{client: uint8(c.id), kind: k, reg: reg, call: int64(w.steps)})
	w.logf("client %d: %v %v", c.id, k, w.check.regs[reg].ref)
	return len(w.hist) - 1
}

// done records its return.
func (w *world) done(c *client, e int, b []byte, seen, made uint64, err error) {
	h := &w.hist[e]
	h.ret = int64(w.steps)
	h.soft = w.softAnswer(h)
	switch {
	case err == nil:
		if h.kind == opUpdate || h.kind == opFree {
			w.check.answered(c, uint64(w.check.regs[h.reg].ref.Addr.Off()), made)
		}
		h.result, h.seen, h.made = okResult, seen, made
		if h.blind {
			break
		}
		if !w.payloadGood(b) {
			w.fail("damaged payload", fmt.Sprintf("client %d %v %v: % x", c.id, h.kind, w.check.regs[h.reg].ref, b))
			return
		}
		h.out = proto.Word(b, 0)
		if a := proto.Word(b, 8); a != 0 && proto.Addr(a) != w.check.regs[h.reg].ref.Addr {
			w.fail("another object's payload", fmt.Sprintf("client %d %v %v: %v", c.id, h.kind, w.check.regs[h.reg].ref, proto.Addr(a)))
			return
		}
	case errors.Is(err, slab.ErrFreed):
		h.result = freedResult
	case errors.Is(err, slab.ErrUnknown):
		h.result, h.ret = unknownResult, never
	case w.notDone(err):
		h.result = notDoneResult
		if errors.Is(err, errDeadline) && w.opt.Faults == 0 && w.opt.Script == nil && w.mach.directed == nil && w.d.sched == Walk && w.d.patience >= 6*w.d.lease {
			w.fail("waited in vain", fmt.Sprintf("nothing fails, and client %d cannot %v %v: %v", c.id, h.kind, w.check.regs[h.reg].ref, err))
		}
	case errors.Is(err, slab.ErrCorrupt) && w.anyHurt(uint64(w.check.regs[h.reg].ref.Addr.Off())):
		h.result = notDoneResult
	case w.excused(uint64(w.check.regs[h.reg].ref.Addr.Off())):
		h.result, h.ret = unknownResult, never
	default:
		w.fail("unexpected error", fmt.Sprintf("client %d %v %v: %v", c.id, h.kind, w.check.regs[h.reg].ref, err))
	}
	if w.log != nil {
		w.logf("client %d: %v of %v: %v value %d@%d -> %d@%d (%v)", c.id, h.kind, w.check.regs[h.reg].ref, h.result, h.out, h.seen, h.in, h.made, err)
	}
	w.mix(uint64(h.result)<<56 ^ h.out<<20 ^ h.made)
	w.count(h.kind, err)
}

// notDone lists the errors that are allowed within the guarantees.
func (w *world) notDone(err error) bool {
	if errors.Is(err, slab.ErrVersions) {
		return w.d.version > 1
	}
	for _, e := range []error{errEnded, errDeadline, slab.ErrBusy, slab.ErrLease, slab.ErrHoldLost, errNotYet, errNoAnswer, context.DeadlineExceeded} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (w *world) count(k opKind, err error) {
	i := 0
	if errors.Is(err, slab.ErrVersions) {
		w.stats.Spent++
	}
	switch {
	case err == nil:
	case errors.Is(err, slab.ErrFreed):
		i = 1
	case errors.Is(err, slab.ErrUnknown):
		i = 3
	default:
		i = 2
	}
	w.stats.Ops[k][i]++
}

// linear checks the histories by the versions of the values: writes are ordered by version, a
// value has one version, a read sees the value of its version, and versions do not fall in
// time. That is linearizability of a register whose values have versions, at a cost of the
// square of the history's length.
func (w *world) linear() {
	for i := range w.hist {
		// Acknowledged writes must not be lost; see softAnswer.
		if e := &w.hist[i]; e.gone && (e.result == freedResult || e.result == okResult && e.kind == opRead) && !w.opt.StrictReads {
			e.result = notDoneResult
			w.stats.Gone++
		}
	}
	w.hist = slices.DeleteFunc(w.hist, func(e event) bool { return w.excused(uint64(w.check.regs[e.reg].ref.Addr.Off())) })
	if w.rotten >= 0 || w.d.partly {
		return // a repair gives a value another version; porcupine checks values only
	}
	w.noteSeen()
	w.placeAll()
	for i := range w.hist {
		if w.check.pos[i] != 0 {
			w.checkOrder(i)
		}
	}
}

// placeAll gives each operation its place in the order of its object, check.pos: an update of version n
// comes at 2n, a read of it at 2n+1, a Free behind all of them, and answers of ErrFreed last. 0:
// the operation is not done, or its outcome is unknown.
func (w *world) placeAll() {
	c := &w.check
	c.pos = c.pos[:0]
	for i := range w.hist {
		e := &w.hist[i]
		p := uint64(0)
		switch {
		case w.isMended(uint64(w.check.regs[e.reg].ref.Addr.Off())):
		case e.result == okResult && e.kind == opRead:
			p = 2*e.seen + 1
		case e.result == okResult && e.kind == opUpdate:
			p = 2 * e.made // 0 for a blind write that a failover has kept
		case e.result == okResult && e.kind == opFree:
			p = 1<<62 - 1
		case e.result == freedResult:
			p = 1 << 62
		}
		c.pos = append(c.pos, p)
	}
}

// checkOrder checks that the place of operation i agrees with the times of all others on its object.
func (w *world) checkOrder(i int) {
	c, e := &w.check, &w.hist[i]
	if e.result == okResult {
		w.checkSeen(i)
	} else if !w.mayBeFreed(i) {
		w.fail("freed without a free", w.describe(i))
	}
	for j := range w.hist {
		f := &w.hist[j]
		if j == i || f.reg != e.reg || c.pos[j] == 0 {
			continue
		}
		if f.ret < e.call && c.pos[j] > c.pos[i] {
			w.fail("not linearizable", w.describe(j)+"  came before  "+w.describe(i))
		}
		if e.result == okResult && f.result == okResult && e.kind != opRead && f.kind != opRead && c.pos[i] == c.pos[j] {
			w.fail("two commits of one version", w.describe(j)+"  and  "+w.describe(i))
		}
	}
}

// checkSeen checks that a value that an operation saw was written before, with that version,
// and that there is no commit between the version that an update saw and the one that it made.
func (w *world) checkSeen(i int) {
	e := &w.hist[i]
	if e.blind {
		return
	}
	r := &w.check.regs[e.reg]
	found := e.out == r.value && e.seen == r.version
	for j := range w.hist {
		f := &w.hist[j]
		if f.reg != e.reg {
			continue
		}
		if f.kind == opUpdate && f.in == e.out && j != i {
			w.checkSource(i, j)
			found = true
		}
		if e.kind != opRead && f.kind == opUpdate && f.result == okResult && f.made > e.seen && (f.made < e.made || e.kind == opFree) && j != i {
			w.fail("lost update", w.describe(j)+"  was not seen by  "+w.describe(i))
		}
		// Two operations saw different values with the same version.
		if f.result == okResult && !f.blind && f.seen == e.seen && f.out != e.out {
			w.fail("one version, two values", w.describe(j)+"  and  "+w.describe(i))
		}
	}
	if !found {
		w.fail("saw a value that was not written", w.describe(i))
	}
}

// checkSource checks that the Update j, which wrote the value that operation i saw, can be where i has it from.
func (w *world) checkSource(i, j int) {
	e, f := &w.hist[i], &w.hist[j]
	switch {
	case f.result != okResult && f.result != unknownResult:
		w.fail("saw a value that was never written", w.describe(i)+"  from  "+w.describe(j))
	case f.result == okResult && f.made != e.seen && !(f.blind && f.made == 0):
		w.fail("saw a value under another version", w.describe(i)+"  from  "+w.describe(j))
	case f.call > e.ret:
		w.fail("saw a value before it was written", w.describe(i)+"  from  "+w.describe(j))
	}
}

// mayBeFreed reports whether a Free of it succeeded or has an unknown outcome.
func (w *world) mayBeFreed(i int) bool {
	e := &w.hist[i]
	for j := range w.hist {
		f := &w.hist[j]
		if j != i && f.reg == e.reg && f.kind == opFree && f.call <= e.ret && (f.result == okResult || f.result == unknownResult) {
			return true
		}
	}
	return false
}

func (w *world) describe(i int) string {
	e := &w.hist[i]
	return fmt.Sprintf("client %d %v %v [%d,%d] %v saw %d@%d made %d@%d", e.client, e.kind, w.check.regs[e.reg].ref, e.call, e.ret, e.result, e.out, e.seen, e.in, e.made)
}

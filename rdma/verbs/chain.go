//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

// sending is what a lane has posted and not awaited.
type sending struct {
	queue []posted // not yet awaited, oldest first
	seq   uint64   // of the last part of a chain posted on this queue pair
	wrs   int      // work requests under way
	slots uint     // bits of the slots in use
	need  int      // work requests that the chains under way and the one behind them have had at once

	asking bool       // the node has yet to answer what notes ask for
	acting bool       // and that is a chain: nothing else is posted before
	told   C.uint64_t // answers on this queue pair, that one included
	askTag uint32     // of the latest request

	rings  int    // WRITEs that wake the node, of wrs
	ringAt uint64 // sequence of the last of them
}

// posted is a chain that has not been awaited. It is sent in parts: in one, unless a verb is
// ordered behind a persistent FLUSH that the node has to be asked for.
type posted struct {
	chain    *rdma.Chain // the caller's; its buffers are in use until it has an outcome
	from, to int         // verbs of the present part
	wrs      int         // its work requests
	seq      uint64      // valid if sent
	slot     int         // index of its bit in sending.slots, and of its answers in scratch; valid if sent
	sent     bool        // the present part has been given to the device, or refused
	asks     bool        // the node is asked to flush or to hash, by the lane's notes
	verifies bool        // to hash: the last verbs of the part are VERIFYs
	acts     bool        // the node executes the verbs of the part, but for the first direct ones
	direct   int         // those that are too long for a message; valid if acts
	skips    bool        // a FLUSH or VERIFY of the present part is not posted, because a later one does its work
	refused  error       // why verb to and all behind it never run
	over     bool        // Step has met the chain's end: its outcome is in the chain
}

// forget empties what is under way, because the queue pair is gone.
func (c *conn) forget() {
	c.seq, c.wrs, c.slots, c.staged, c.asking, c.acting, c.told, c.rings = 0, 0, 0, 0, false, false, 0, 0
	for i := range c.queue {
		c.queue[i].sent = false
	}
}

// Post hands the chain to the device. If earlier chains have to be awaited first, or the send
// queue is too short for it, Wait does that.
func (c *conn) Post(ch *rdma.Chain) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := posted{chain: ch, refused: ch.Refused()}
	if p.refused == nil && c.dead != nil && !c.redials {
		p.refused = c.dead
	}
	if p.refused == nil && c.dead == nil && c.allSent() {
		c.send(&p)
	}
	c.queue = append(c.queue, p)
}

// allSent says whether every chain has been posted completely: a chain never overtakes another.
func (c *conn) allSent() bool {
	for i := range c.queue {
		p := &c.queue[i]
		if p.refused == nil && !(p.sent && p.to == len(p.chain.Verbs)) {
			return false
		}
	}
	return true
}

// window is what the node granted for a caller's window.
func (c *conn) window(w *rdma.Window) *window {
	if uint(w.Slot) >= uint(len(c.windows)) {
		return nil
	}
	own := &c.windows[w.Slot]
	if own.Key == 0 || own.Key != w.Key {
		return nil
	}
	return own
}

// check refuses a verb here that the node's adapter would refuse: there it would cost both ends
// their queue pair.
func (c *conn) check(w *window, v *rdma.Verb) error {
	n := v.Len()
	if n == 0 || v.Off >= w.Bytes || n > w.Bytes-v.Off { // never v.Off+n, which can overflow
		return rdma.ErrBounds
	}
	switch v.Op {
	case rdma.CompareSwap, rdma.FetchAdd:
		if v.Off&7 != 0 {
			return rdma.ErrAlign
		}
		fallthrough
	case rdma.Write:
		if c.as.Rights != rdma.ReadWrite {
			return rdma.ErrReadOnly
		}
	case rdma.Flush:
		if v.Kind == rdma.Persistent && w.Flush == rdma.NoFlush {
			return rdma.ErrNotPersistent
		}
	}
	return nil
}

// send posts the next part of a chain, if the send queue has room.
func (c *conn) send(p *posted) {
	if !c.write(p) {
		return
	}
	if taken, err := c.post(p.wrs, p.seq); err != nil {
		c.unposted(p, taken, err)
	}
}

// post hands the first n of verbs to the device; taken is how many it has accepted.
func (c *conn) post(n int, sequence uint64) (taken int, err error) {
	var count C.int
	if e := C.q_post(c.lane, C.int(n), C.uint64_t(sequence), &count); e != 0 {
		err = unix.Errno(e)
	}
	return int(count), err
}

// unposted ends the connection because the adapter has taken only the first work requests of a
// chain.
func (c *conn) unposted(p *posted, taken int, err error) {
	c.fail(fmt.Errorf("posting %d verbs, %d of them done: %w", p.wrs, taken, err))
}

// write describes the next part of a chain for the C shim. true: the shim must be called. It does
// nothing while the send queue has no room.
func (c *conn) write(p *posted) bool {
	ch := p.chain
	p.wrs = 0 // of an earlier part, or of an earlier queue pair
	if c.slots == 1<<slots-1 || c.acting {
		return false
	}
	if n := c.wrs + len(ch.Verbs) - p.from + c.dialer.device.more(); n > c.depth {
		c.need = max(c.need, min(n, mostDepth))
		return false
	}
	p.slot, p.asks, p.verifies, p.skips, p.acts, p.to = bits.TrailingZeros(^c.slots), false, false, false, false, p.from
	w := c.window(&ch.To.Window)
	if w == nil {
		p.refused, p.sent = rdma.ErrKey, true
		return false
	}
	if w.actsFor(ch.Verbs[p.from:]) {
		return c.writeAct(p, w)
	}
	staged := c.staged
	c.skipping = skipping{at: -1}
	n := 0
	for p.to < len(ch.Verbs) {
		v := &ch.Verbs[p.to]
		if p.asks && (p.verifies || c.behind(w, v)) {
			break
		}
		if p.refused = c.check(w, v); p.refused != nil {
			break
		}
		full, err := c.describe(p, n, w, v)
		if full {
			c.staged = staged
			return false
		}
		if err != nil {
			p.refused = err
			break
		}
		n++
		p.to++
	}
	c.pushSkipped(p)
	p.sent, p.wrs = true, n
	if n == 0 {
		return false
	}
	c.count(p)
	return !p.asks || c.listen(p, asked{c.notes}.answerBytes())
}

// count numbers a part that is about to be posted.
func (c *conn) count(p *posted) {
	if c.dialer.device.caps.IWARP {
		c.overIWARP(p)
	}
	c.dialer.parts.Add(1)
	c.seq++
	p.seq = c.seq
	c.wrs += p.wrs
	c.slots |= 1 << p.slot
}

// describe describes one verb for the C shim.
func (c *conn) describe(p *posted, n int, w *window, v *rdma.Verb) (full bool, err error) {
	word := p.slot*rdma.MaxChainVerbs + n
	d := &c.verbs[n]
	*d = C.q_verb{
		op: C.Q_READ, len: 8, remote: C.uint64_t(w.Base + v.Off), rkey: C.uint32_t(w.rkey),
		local: C.uint64_t(addressOf(c.answers) + 8*uint64(word)), lkey: C.uint32_t(c.answersMR.lkey),
	}
	if v.Fence || c.skipping.fence {
		d.fence, c.skipping.fence = 1, false
	}
	c.stageAt[p.slot][n] = 0
	switch v.Op {
	case rdma.Flush:
		return c.describeFlush(d, n, w, p)
	case rdma.Verify:
		return c.describeVerify(d, n, w, p)
	case rdma.CompareSwap:
		d.op, d.expect, d.value = C.Q_CAS, C.uint64_t(v.Expect), C.uint64_t(v.New)
		return false, nil
	case rdma.FetchAdd:
		d.op, d.value = C.Q_FAA, C.uint64_t(v.New)
		return false, nil
	}
	d.len = C.uint32_t(len(v.Buf))
	if c.dialer.buffers.find(v.Buf, &c.cached) {
		d.local, d.lkey = C.uint64_t(addressOf(v.Buf)), C.uint32_t(c.cached.lkey)
	} else {
		var at int
		if at, full, err = c.room(len(v.Buf), p.chain.Verbs[p.to:]); full || err != nil {
			return full, err
		}
		c.dialer.copied.Add(1)
		c.stageAt[p.slot][n] = int32(at) + 1
		d.local, d.lkey = C.uint64_t(addressOf(c.stage)+uint64(at)), C.uint32_t(c.stageMR.lkey)
		if v.Op == rdma.Write {
			copy(c.stage[at:], v.Buf)
		}
	}
	if v.Op == rdma.Write {
		d.op = C.Q_WRITE
		if d.len <= C.uint32_t(c.lane.inline_max) {
			d.inlined = 1
		}
	}
	return false, nil
}

// collect takes the answers of the first n verbs of a part that has completed.
func (c *conn) collect(p *posted, n int) {
	if n = min(n, p.to-p.from); p.acts { // behind them is a SEND
		n = min(n, p.direct)
	}
	for i := range n {
		v := &p.chain.Verbs[p.from+i]
		switch v.Op {
		case rdma.CompareSwap, rdma.FetchAdd:
			v.Old = c.words[p.slot*rdma.MaxChainVerbs+i]
		case rdma.Read:
			if at := c.stageAt[p.slot][i]; at != 0 {
				copy(v.Buf, c.stage[at-1:])
			}
		}
	}
	p.chain.Done = p.from + n
	c.wrs -= p.wrs
	if p.seq > c.ringAt { // completions come in order
		c.wrs, c.rings = c.wrs-c.rings, 0
	}
	c.slots &^= 1 << p.slot
	if c.slots == 0 {
		c.staged = 0
	}
}

// Wait returns when the oldest chain posted, which is ch, has an outcome.
func (c *conn) Wait(ch *rdma.Chain, deadline int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 || c.queue[0].chain != ch {
		ch.Err, ch.Done = fmt.Errorf("%w: chain not posted, or awaited out of turn", rdma.ErrBroken), 0
		return
	}
	p := c.queue[0]
	c.queue = c.queue[:copy(c.queue, c.queue[1:])]
	if p.over {
		return
	}
	ch.Done = p.from
	c.complete(&p, deadline)
	c.sendHeld()
}

// sendHeld sends the chains that were not sent because the chain that Wait has just completed was under way. It stops at a chain that has to be sent in
// parts. Without it each of these chains would be sent by its own Wait, and rounds to several nodes would run one after the other. It sends none while a
// longer send queue is needed (c.need): the queue can be replaced only when no chain is under way, see start.
func (c *conn) sendHeld() {
	for i := 0; i < len(c.queue) && c.dead == nil && c.need <= c.depth; i++ {
		p := &c.queue[i]
		if !p.sent && p.refused == nil {
			c.send(p)
		}
		if p.refused == nil && !(p.sent && p.to == len(p.chain.Verbs)) {
			return
		}
	}
}

// Step sends a chain part by part; see rdma.Stepper. What it has not sent Wait sends.
func (c *conn) Step(ch *rdma.Chain, deadline int64) (more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 || c.queue[0].chain != ch {
		return false // behind another chain of the connection
	}
	p := &c.queue[0]
	if p.over || !p.sent || p.wrs == 0 || p.refused != nil || p.to == len(ch.Verbs) {
		return false
	}
	ch.Done = p.from
	if !c.await(p, false, deadline) {
		p.over = true
		return false
	}
	if p.refused != nil {
		ch.Err, p.over = p.refused, true
		return false
	}
	p.from, p.sent = p.to, false
	if c.dead == nil {
		c.send(p)
	}
	return p.sent && p.refused == nil && p.to < len(ch.Verbs)
}

// PostAndWait is Post and Wait in one; see rdma.PostWaiter.
func (c *conn) PostAndWait(ch *rdma.Chain, deadline int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch.Done = 0
	if len(c.queue) != 0 {
		ch.Err = fmt.Errorf("%w: chain posted out of turn", rdma.ErrBroken)
		return
	}
	p := posted{chain: ch, refused: ch.Refused()}
	c.complete(&p, deadline)
}

// complete sends what has not been sent, and waits until the chain has an outcome.
func (c *conn) complete(p *posted, deadline int64) {
	ch := p.chain
	for {
		written := c.start(p, deadline)
		switch {
		case p.sent && p.wrs > 0:
			if !c.await(p, written, deadline) {
				return
			}
		case p.refused == nil && c.dead != nil:
			p.refused = c.dead
		case p.refused == nil && len(ch.Verbs) > 0:
			p.refused = fmt.Errorf("%w: no room for the chain", rdma.ErrLimit) // cannot be: it is the only one
		}
		if p.refused != nil || p.to == len(ch.Verbs) {
			ch.Err = p.refused
			return
		}
		p.from, p.sent = p.to, false
	}
}

// start writes a part down, unless it has been sent or refused. It reports whether await is to
// post it.
func (c *conn) start(p *posted, deadline int64) (written bool) {
	if p.sent || p.refused != nil {
		return false
	}
	if c.dead != nil && c.redials {
		c.reconnectBy(deadline)
	}
	for c.dead == nil && !written && !p.sent && p.refused == nil {
		if c.slots == 0 && c.need > c.depth {
			c.deepen(c.need, deadline) // nothing is under way
			continue
		}
		if written = c.write(p); c.slots != 0 || c.need <= c.depth {
			break
		}
	}
	return written
}

// await waits for a part, which it posts itself if it has only been written down;
// false if the chain ends with it.
func (c *conn) await(p *posted, written bool, deadline int64) bool {
	ch := p.chain
	if c.lane == nil { // it failed between Post and here
		ch.Err = c.dead
		return false
	}
	limit := int64(math.MaxInt64)
	if deadline != 0 {
		limit = max(0, deadline-clock.Now())
	}
	var how, taken C.int
	c.lane.awaits = 0
	if p.asks {
		c.lane.awaits = c.told
	}
	if spin := C.int64_t(c.dialer.config.Spin); written {
		how = C.q_once(c.lane, C.int(p.wrs), C.uint64_t(p.seq), &taken, spin, C.int64_t(limit))
	} else {
		how = C.q_wait(c.lane, C.uint64_t(p.seq), spin, C.int64_t(limit))
	}
	if how == C.Q_PENDING {
		if deadline != 0 {
			limit = max(0, deadline-clock.Now())
		}
		how = c.sleep.wait(C.uint64_t(p.seq), limit)
	}
	if how < 0 {
		c.unposted(p, int(taken), unix.Errno(-how))
		ch.Err = c.dead
		return false
	}
	switch how {
	case C.Q_DONE:
		c.collect(p, p.wrs)
		return !p.asks || c.answered(p)
	case C.Q_FAILED:
		c.refusedBy(p)
	case C.Q_TIMEOUT:
		c.fail(errors.New("no answer by the deadline"))
		ch.Err = c.dead
	case C.Q_REMOVED:
		c.drop()
		c.dead, c.redials = c.removed(), false
		ch.Err = c.dead
	case C.Q_SOCKET, C.Q_GONE: // where the manager is the first to know, the socket follows
		c.hear()
		ch.Err = c.dead
		if errors.Is(c.dead, rdma.ErrRefused) {
			// Definite for what comes, not for what was under way.
			ch.Err = fmt.Errorf("%w: node %s ended the session", rdma.ErrBroken, c.addr)
		}
	default:
		c.fail(errors.New("completion queue failed"))
		ch.Err = c.dead
	}
	return false
}

// refusedBy ends a chain one of whose work requests has failed. An adapter that refuses a
// verb answers so and executes nothing behind it, with one exception: a responder may execute
// WRITEs and atomics behind a READ or an atomic before it has answered that, if they carry no
// fence. Both queue pairs go to the error state.
func (c *conn) refusedBy(p *posted) {
	ch, l := p.chain, c.lane
	status, vendor := l.status, l.vendor
	if c.dialer.device.caps.IWARP { // which does not tell which verb was refused, nor whether one was
		c.fail(fmt.Errorf("the queue pair has ended: %s (vendor %#x)", C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(status))), uint32(vendor)))
		ch.Err = c.dead
		return
	}
	overtaken := true
	if uint64(l.failed)>>16 == p.seq {
		at := min(int(l.failed&0xffff), p.wrs)
		overtaken = at < p.wrs && c.overtaken(p, at)
		c.collect(p, at)
		if (p.asks || p.skips) && !p.acts { // of which FLUSHes count as run although they are not carried out
			first, changed := unpushed(ch.Verbs[p.from:p.to], at, p.asks && !p.verifies)
			ch.Done, overtaken = p.from+first, overtaken || changed
		}
		if p.verifies { // there is no answer to any of its VERIFYs
			ch.Done = min(ch.Done, p.to-asked{c.notes}.ranges())
		}
	}
	switch status {
	case C.IBV_WC_REM_ACCESS_ERR, C.IBV_WC_REM_INV_REQ_ERR:
		if overtaken {
			c.fail(errOvertaken)
			ch.Err = c.dead
			return
		}
		c.drop()
		c.dead, c.redials = fmt.Errorf("%w: node %s refused a verb", rdma.ErrBroken, c.addr), true
		ch.Err = rdma.ErrKey
		return
	}
	c.fail(fmt.Errorf("%s (vendor %#x)", C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(status))), uint32(vendor)))
	ch.Err = c.dead
}

var errOvertaken = errors.New("a READ or an atomic was refused, and what was behind it without a fence may have been executed")

// overtaken says whether a verb behind the refused one at a place of a part may have been
// executed. A fence holds back everything behind it until all READs and atomics before it
// are answered.
func (c *conn) overtaken(p *posted, at int) bool {
	if (!p.acts || at < p.direct) && p.chain.Verbs[p.from+at].Op == rdma.Write {
		return false // nothing behind it is executed
	}
	if p.acts && at == p.direct {
		return true // the node may have got the message
	}
	behind := p.chain.Verbs[p.from+at+1 : p.to]
	if p.acts {
		behind = behind[:p.direct-at-1]
	}
	fenced, changes := firstChange(behind)
	fenced = fenced || p.acts // the SEND is
	for i := 0; i < len(c.queue) && !fenced && !changes && c.queue[i].sent; i++ {
		q := &c.queue[i]
		if q == p { // Step: what is behind the verb in its own chain has been looked at
			continue
		}
		fenced, changes = firstChange(q.chain.Verbs[q.from:q.to])
	}
	return changes
}

// firstChange says which comes first: a verb with a fence, or one that changes memory.
func firstChange(verbs []rdma.Verb) (fenced, changes bool) {
	for i := range verbs {
		switch v := &verbs[i]; {
		case v.Fence:
			return true, false
		case v.Op == rdma.Write || v.Op == rdma.CompareSwap || v.Op == rdma.FetchAdd:
			return false, true
		}
	}
	return false, false
}

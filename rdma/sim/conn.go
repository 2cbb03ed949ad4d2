package sim

import (
	"context"
	"fmt"
	"math/bits"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Conn is a connection of a session to a node.
type Conn struct {
	fabric      *Fabric      // steps the connection; one goroutine at a time uses a fabric
	node        *Node        // the responder
	incarnation uint64       // incarnation that answered
	session     uint32       // in whose name verbs run; Agent is never fenced
	index       int          // in Fabric.conns, and its bit in ready and stalled
	domain      proto.Domain // what executes the connection's atomics; DomainCPU but for Foreign
	via         int          // adapter of the node, counted from 1; 0: the node's own way, through whichever adapter serves a region
	broken      bool         // the requester has lost it: Post answers rdma.ErrBroken until Reset
	closed      bool         // Close was called; final
	ended       bool         // its ticket's serial is over; another session may have the id now
	// ReadOnly refuses WRITE, CAS and FETCH_ADD.
	ReadOnly bool
	windows  []opened // by slot
	// Owner is for the caller of Fabric.Dial: the client that waits for answers.
	Owner int

	queue []*pending // chains at the responder in the order of posting, also some without a requester
	late  []*pending // what Forget has given up without asking the responder: it may run at any later step
}

var _ rdma.Conn = (*Conn)(nil)
var _ rdma.Peer = (*Conn)(nil)

// opened is a window that this connection has been given.
type opened struct {
	region uint32 // whose memory
	key    uint64 // of the region's epoch and the session when it was opened
}

// pending is a chain at the responder. It has a copy of what is to be written,
// because the requester may be gone by the time it runs; a READ brings its bytes
// straight to the requester's buffer for as long as it waits.
type pending struct {
	chain   *rdma.Chain // nil once the requester has an outcome
	window  rdma.Window // as the requester had it when posting
	verbs   []rdma.Verb // copies of the chain's; only their state changes
	state   []verbState // of each verb, at the same index
	bytes   []byte      // of WRITEs, and what VERIFYs have read, in the order of the verbs
	left    int         // verbs not done
	refused error       // why the verbs that are left never run; nil: nothing was refused
}

// verbState is how far a verb of a pending chain has come.
type verbState struct {
	units  uint64 // pieces still to be moved, a bit each
	at     int    // first byte in pending.bytes, of a WRITE or a VERIFY
	began  bool   // units is set
	done   bool   // the verb has taken effect completely
	halved bool   // a CAS across domains has read and not yet written
	old    uint64 // the word before a CAS or FETCH_ADD; the answer of a VERIFY
}

// Provider is "sim".
func (c *Conn) Provider() string { return "sim" }

// Peer is the node at the other end.
func (c *Conn) Peer() (uint32, uint64) { return c.node.ID, c.incarnation }

// Node is the node at the other end.
func (c *Conn) Node() *Node { return c.node }

// Session is the session that posts.
func (c *Conn) Session() uint32 { return c.session }

// Opened says whether the connection has a window of a region.
func (c *Conn) Opened(region uint32) bool {
	for _, w := range c.windows {
		if w.region == region {
			return true
		}
	}
	return false
}

// Post sends a chain.
func (c *Conn) Post(ch *rdma.Chain) {
	ch.Err, ch.Done = nil, 0
	f := c.fabric
	if err := ch.Refused(); err != nil {
		c.answer(ch, err)
		return
	}
	if c.broken || c.closed || !c.node.Up || c.incarnation != c.node.Incarnation || c.cutOff() {
		c.broken = true
		c.answer(ch, rdma.ErrBroken)
		return
	}
	var p *pending
	if n := len(f.spare); n > 0 {
		p, f.spare = f.spare[n-1], f.spare[:n-1]
	} else {
		p = &pending{}
	}
	p.chain, p.window, p.refused, p.left = ch, ch.To.Window, nil, len(ch.Verbs)
	p.verbs = append(p.verbs[:0], ch.Verbs...)
	p.state, p.bytes = p.state[:0], p.bytes[:0]
	for i := range p.verbs {
		v := &p.verbs[i]
		s := verbState{at: len(p.bytes)}
		switch v.Op {
		case rdma.Write:
			p.bytes = append(p.bytes, v.Buf...)
		case rdma.Verify:
			p.bytes = append(p.bytes, make([]byte, v.Bytes)...)
		}
		p.state = append(p.state, s)
	}
	for i := range p.verbs { // p.bytes moves no more
		if v, s := &p.verbs[i], &p.state[i]; v.Op == rdma.Verify {
			v.Buf = p.bytes[s.at : s.at+int(v.Bytes)]
		}
	}
	if f.cut(c.session, c.node) {
		p.verbs, p.state, p.left = p.verbs[:0], p.state[:0], 0
		p.refused = errLost
	}
	c.queue = append(c.queue, p)
	c.mark()
}

// errLost: the chain never arrived. It has no answer until its requester gives up.
var errLost = fmt.Errorf("%w: lost on the way", rdma.ErrBroken)

// answer gives a chain its outcome.
func (c *Conn) answer(ch *rdma.Chain, err error) {
	ch.Err = err
	if c.fabric.Answered != nil {
		c.fabric.Answered(c)
	}
}

// mark keeps the connection's bit in ready.
func (c *Conn) mark() {
	f := c.fabric
	bit := uint64(1) << c.index
	f.ready &^= bit
	if len(c.late) > 0 {
		f.ready |= bit
	}
	for _, p := range c.queue {
		if p.refused != errLost && (p.left > 0 || p.chain != nil) {
			f.ready |= bit
			return
		}
	}
}

// Unanswered is the number of chains without an outcome.
func (c *Conn) Unanswered() int {
	n := 0
	for _, p := range c.queue {
		if p.chain != nil {
			n++
		}
	}
	return n
}

// Step moves the connection a little: a piece of a verb, a verb, or an answer.
func (c *Conn) Step() {
	f := c.fabric
	if f.Flaky > 0 && c.session != Agent && f.Choose(f.Flaky) == 1 {
		c.Break()
		return
	}
	if n := len(c.late); n > 0 {
		i := f.Choose(n + 1)
		if i < n || len(c.queue) == 0 {
			i = min(i, n-1)
			if p := c.late[i]; !c.run(p) {
				c.late = append(c.late[:i], c.late[i+1:]...)
				f.recycle(p)
			}
			c.mark()
			return
		}
	}
	for _, p := range c.queue {
		if p.refused == errLost || p.left == 0 && p.chain == nil {
			continue
		}
		if p.left > 0 {
			// Choice 0 runs the chain to its end and answers.
			if f.Choose(4) == 0 {
				for c.run(p) {
					if f.Halt {
						c.mark()
						return
					}
				}
				c.complete(p)
			} else if !c.run(p) && f.Choose(2) == 0 {
				c.complete(p)
			}
		} else {
			c.complete(p)
		}
		break
	}
	c.mark()
}

// complete brings the answer of a finished chain to its requester.
func (c *Conn) complete(p *pending) {
	if p.chain == nil {
		return
	}
	if c.fabric.cut(c.session, c.node) {
		p.refused, p.left = errLost, 0
		return
	}
	ch := p.chain
	p.chain = nil
	for i := range p.verbs {
		v, s := &p.verbs[i], &p.state[i]
		if !s.done {
			break
		}
		ch.Done = i + 1
		if v.Op == rdma.CompareSwap || v.Op == rdma.FetchAdd || v.Op == rdma.Verify {
			ch.Verbs[i].Old = s.old
		}
	}
	err := p.refused
	for i, q := range c.queue {
		if q == p {
			c.queue = append(c.queue[:i], c.queue[i+1:]...)
			break
		}
	}
	c.fabric.recycle(p)
	c.answer(ch, err)
}

// recycle keeps the storage of a chain that has ended for another.
func (f *Fabric) recycle(p *pending) {
	p.chain = nil
	f.spare = append(f.spare, p)
}

// Break ends the connection for its requester: everything posted is answered with
// ErrBroken. What has arrived may still run, until Reset.
func (c *Conn) Break() {
	c.broken = true
	rest := c.queue[:0]
	for _, p := range c.queue {
		ch := p.chain
		p.chain = nil
		if p.left > 0 {
			rest = append(rest, p)
		} else {
			c.fabric.recycle(p)
		}
		if ch != nil {
			c.answer(ch, rdma.ErrBroken)
		}
	}
	c.queue = rest
	c.mark()
}

// drop kills what was posted: it never runs.
func (c *Conn) drop() {
	for _, p := range c.queue {
		c.fabric.recycle(p)
	}
	for _, p := range c.late {
		c.fabric.recycle(p)
	}
	c.queue, c.late = c.queue[:0], c.late[:0]
	c.fabric.ready &^= 1 << c.index
}

// Reset makes a new connection once the responder has said that nothing of the
// old one can run.
func (c *Conn) Reset(context.Context) error {
	f := c.fabric
	switch {
	case c.ended:
		return rdma.ErrRevoked
	case c.closed || !c.node.Up || f.cut(c.session, c.node) || c.cutOff():
		return fmt.Errorf("%w: node %d does not answer", rdma.ErrBroken, c.node.ID)
	case c.incarnation != c.node.Incarnation:
		return fmt.Errorf("%w: node %d has another incarnation", rdma.ErrBroken, c.node.ID)
	case c.session != Agent && c.node.Revoked(c.session):
		return rdma.ErrRevoked
	}
	c.Break()
	c.drop()
	c.broken = false
	return nil
}

// End closes the connection from the node's side, for good: its session is over
// and the id may be another's.
func (c *Conn) End() {
	c.ended = true
	c.Close()
}

// Stall stops the execution of the connection's verbs, or lets it go on.
func (c *Conn) Stall(on bool) {
	if bit := uint64(1) << c.index; on {
		c.fabric.stalled |= bit
	} else {
		c.fabric.stalled &^= bit
	}
}

// Foreign puts the connection in another atomicity domain than CPUs are in.
func (c *Conn) Foreign() { c.domain = proto.DomainAdapter }

// Forget is Reset without asking the responder: what was posted may run at any later
// time. Only a mutant calls it (verify/mutants).
func (c *Conn) Forget() {
	c.Break()
	c.late = append(c.late, c.queue...)
	c.queue = c.queue[:0]
	c.broken = false
	c.mark()
}

// Close gives the connection up.
func (c *Conn) Close() error {
	if !c.closed {
		c.closed = true
		c.Break()
		c.drop()
		c.fabric.conns[c.index] = nil
		c.Stall(false)
	}
	return nil
}

// Open asks for a window.
func (c *Conn) Open(_ context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	if c.broken || c.closed || !c.node.Up || c.incarnation != c.node.Incarnation || c.fabric.cut(c.session, c.node) || c.cutOff() {
		return rdma.Window{}, fmt.Errorf("%w: node %d does not answer", rdma.ErrBroken, c.node.ID)
	}
	m := c.node.Memory(region)
	switch {
	case m == nil:
		return rdma.Window{}, fmt.Errorf("node %d has no copy of region %d: %w", c.node.ID, region, rdma.ErrKey)
	case c.domain != m.Domain && !c.fabric.CrossDomain:
		return rdma.Window{}, fmt.Errorf("region %d is in the domain %v, the connection in %v: %w", region, m.Domain, c.domain, rdma.ErrKey)
	case c.session == Agent:
		return rdma.Window{Region: region, Epoch: epoch, Bytes: m.bytes, Flush: m.Method, Verifies: true}, nil
	case c.node.Revoked(c.session):
		return rdma.Window{}, rdma.ErrRevoked
	case m.key == 0 || m.Epoch != epoch || !c.reaches(m):
		return rdma.Window{}, rdma.ErrKey
	}
	w := opened{region, m.keyOf(c.session)}
	slot := slices.IndexFunc(c.windows, func(o opened) bool { return o.region == region })
	if slot < 0 {
		slot = len(c.windows)
		c.windows = append(c.windows, w)
	}
	c.windows[slot] = w
	return rdma.Window{Region: region, Epoch: epoch, Key: w.key, Bytes: m.bytes, Slot: int32(slot), Flush: m.Method, Verifies: true}, nil
}

// hasKey says whether the window was opened on this connection and is good still.
func (c *Conn) hasKey(m *Memory, w *rdma.Window) bool {
	return m.key != 0 && c.reaches(m) && uint32(w.Slot) < uint32(len(c.windows)) && c.windows[w.Slot] == opened{w.Region, w.Key} && w.Key == m.keyOf(c.session)
}

// Wait returns when the chain has its outcome.
func (c *Conn) Wait(ch *rdma.Chain, _ int64) {
	for c.waits(ch) {
		switch {
		case c.fabric.Yield != nil:
			c.fabric.Yield()
		case !c.fabric.StepAny():
			c.Break() // nothing moves any more: the answer was lost
		}
	}
}

// waits says whether a chain is still under way on the connection.
func (c *Conn) waits(ch *rdma.Chain) bool {
	for _, p := range c.queue {
		if p.chain == ch {
			return true
		}
	}
	return false
}

// run moves a chain by one piece; false when it has come to its end.
func (c *Conn) run(p *pending) bool {
	if p.left == 0 {
		return false
	}
	i := c.pick(p)
	v, s := &p.verbs[i], &p.state[i]
	m := c.node.Memory(p.window.Region)
	if err := c.allowed(m, p, v); err != nil {
		p.refused, p.left = err, 0
		return false
	}
	if w := c.fabric.Watch; w != nil {
		w.Ran(m, c.session)
	}
	c.execute(m, p, v, s)
	if s.done {
		p.left--
	}
	return p.left > 0
}

// pick chooses the verb to move: the first that is not done, or one that may
// overtake it.
func (c *Conn) pick(p *pending) int {
	first := 0
	for p.state[first].done {
		first++
	}
	if c.fabric.InOrder || p.verbs[first].Op == rdma.Write || first+1 == len(p.verbs) {
		return first
	}
	// Everything behind a WRITE or a fence, and every READ and VERIFY, waits for all before it.
	n := 1
	var may [8]int
	may[0] = first
	for i := first + 1; i < len(p.verbs) && n < len(may); i++ {
		v := &p.verbs[i]
		if p.state[i].done {
			continue
		}
		if v.Fence {
			break // a queue pair does not start what is behind it
		}
		if v.Op != rdma.Read && v.Op != rdma.Verify {
			may[n] = i
			n++
		}
		if v.Op == rdma.Write {
			break
		}
	}
	if n == 1 {
		return first
	}
	return may[c.fabric.Choose(n)]
}

// allowed is why the responder refuses a verb; nil: it executes it.
func (c *Conn) allowed(m *Memory, p *pending, v *rdma.Verb) error {
	n := v.Len()
	switch {
	case m == nil:
		return rdma.ErrKey
	case c.session == Agent:
	case c.node.Revoked(c.session):
		return rdma.ErrRevoked
	case !c.hasKey(m, &p.window):
		return rdma.ErrKey
	case c.ReadOnly && v.Op != rdma.Read && v.Op != rdma.Flush && v.Op != rdma.Verify:
		return rdma.ErrReadOnly
	}
	switch {
	case n == 0 || v.Off > m.bytes || n > m.bytes-v.Off:
		return rdma.ErrBounds
	case (v.Op == rdma.CompareSwap || v.Op == rdma.FetchAdd) && v.Off%8 != 0:
		return rdma.ErrAlign
	case v.Op == rdma.Flush && v.Kind == rdma.Persistent && m.Profile == DRAM:
		return rdma.ErrNotPersistent
	}
	return nil
}

// execute carries out a verb, or the part of a READ, VERIFY or WRITE that this step of the schedule
// grants.
func (c *Conn) execute(m *Memory, p *pending, v *rdma.Verb, s *verbState) {
	f := c.fabric
	switch v.Op {
	case rdma.Flush:
		m.flush(v.Kind, v.Off, v.Bytes)
		s.done = true
	case rdma.FetchAdd:
		s.old = m.Word(v.Off)
		c.swap(m, v.Off, s.old, s.old+v.New)
		s.done = true
	case rdma.CompareSwap:
		if !s.halved {
			s.old = m.Word(v.Off)
			if c.domain != m.Domain && s.old == v.Expect {
				s.halved = true // the adapter and the CPU do not see each other's lock
				return
			}
		}
		if s.old == v.Expect {
			c.swap(m, v.Off, s.old, v.New)
		}
		s.done = true
	case rdma.Read, rdma.Write:
		c.move(f, m, p, v, s)
	case rdma.Verify:
		if c.move(f, m, p, v, s); s.done {
			s.old = rdma.Hash(v.Buf, v.New)
		}
	}
}

// swap stores a word that a CAS has changed, and tells the checker.
func (c *Conn) swap(m *Memory, off, old, new uint64) {
	m.Set(off, new)
	if old != new && c.fabric.Watch != nil {
		c.fabric.Watch.Swapped(m, c.session, off, old, new)
	}
}

// move carries some pieces of a READ or WRITE, in any order. A VERIFY is a READ into the memory of its own copy.
func (c *Conn) move(f *Fabric, m *Memory, p *pending, v *rdma.Verb, s *verbState) {
	n := len(v.Buf)
	grain := f.Grain
	for (int(v.Off)%grain+n+grain-1)/grain > 64 {
		grain *= 2
	}
	// Large pieces of a READ still come in words: half of the words as they are when the READ
	// begins, the others as they are when the piece is moved.
	early := v.Op == rdma.Read && f.Grain == 8 && grain > f.Grain && p.chain != nil && (int(v.Off)|n)%8 == 0
	base := int(v.Off) &^ (grain - 1)
	units := (int(v.Off) + n - base + grain - 1) / grain
	if !s.began {
		s.began, s.units = true, 1<<(units-1)<<1-1
		if early {
			m.Load(v.Off, v.Buf)
		}
	}
	now := s.units
	if units > 1 && f.Choose(4) != 0 {
		now = f.some(now)
	}
	s.units &^= now
	for w := now; w != 0; {
		u := bits.TrailingZeros64(w)
		run := bits.TrailingZeros64(^(w >> u)) // neighbours go together
		w &^= (1<<run - 1) << u
		lo, hi := max(base+u*grain, int(v.Off)), min(base+(u+run)*grain, int(v.Off)+n)
		if v.Op != rdma.Write {
			switch to := v.Buf[lo-int(v.Off) : hi-int(v.Off)]; {
			case p.chain == nil && v.Op == rdma.Read:
			case early:
				m.loadAlternate(uint64(lo), to, uint64(c.session)%2)
			default:
				m.Load(uint64(lo), to)
			}
			continue
		}
		m.Store(uint64(lo), p.bytes[s.at+lo-int(v.Off):s.at+hi-int(v.Off)])
		if f.Watch != nil {
			f.Watch.Wrote(m, c.session, uint64(lo), uint64(hi-lo))
		}
	}
	if s.units == 0 {
		s.done = true
		if v.Op == rdma.Read && m.Profile == ADRDDIOOff {
			c.push(m, p, v)
		}
	}
}

// some is a subset of the pieces, halved twice at random, with at least one in it.
func (f *Fabric) some(pieces uint64) uint64 {
	for range 2 {
		if k := bits.OnesCount64(pieces); k > 1 {
			r := pieces & (uint64(f.Choose(1<<16))*0x9e3779b97f4a7c15 ^ uint64(k)<<7)
			if r != 0 {
				pieces = r
			}
		}
	}
	return pieces
}

// push: with DDIO off, a READ behind WRITEs has pushed them to the memory.
func (c *Conn) push(m *Memory, p *pending, read *rdma.Verb) {
	for i := range p.verbs {
		v := &p.verbs[i]
		if v == read {
			return
		}
		if v.Op == rdma.Write || v.Op == rdma.CompareSwap {
			m.Flush(v.Off, v.Len())
		}
	}
}

// Touches says whether a verb that has not run yet covers the word at off.
func (c *Conn) Touches(off uint64) bool {
	for _, p := range c.queue {
		for i := range p.verbs {
			if v := &p.verbs[i]; !p.state[i].done && off >= v.Off && off < v.Off+v.Len() {
				return true
			}
		}
	}
	return false
}

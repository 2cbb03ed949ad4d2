package clientsim

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// dialer connects lanes of one process to the memory of nodes: the real access control
// and the real execution of verbs, behind a network that delays, loses and outlives.
type dialer struct {
	w    *World
	from *Proc
}

func (dialer) Provider() string { return "tcp" }

func (d dialer) Dial(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c := &conn{w: d.w, from: d.from, addr: addr, as: *as, number: lane}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// conn is a lane's connection as its process sees it.
type conn struct {
	w      *World
	from   *Proc
	addr   string
	as     rdma.Credentials
	number uint32
	opened []rdma.Window // by slot
	dead   error         // why nothing can be posted
	queue  []*flight     // posted and not awaited

	mu     sync.Mutex
	link   *link
	closed bool
	gone   chan struct{} // closed by Close
}

// link is one connection as its node sees it: chains that have arrived or will, in order.
type link struct {
	w      *World
	from   *Proc
	to     *Proc
	access *host.Access
	reset  chan struct{} // closed when the node's host has reset the connection
	broken bool          // reset is closed; guarded by World.mu

	mu      sync.Mutex
	lane    *host.Lane
	pending []*flight
	armed   bool
	running bool               // step runs verbs or procedures, or a call is held, without mu
	held    context.CancelFunc // ends the wait of the call that is held; nil: none is
	left    bool
	last    time.Time // no flight arrives before
}

// flight is a chain under way.
type flight struct {
	verbs    []rdma.Verb // own memory
	slot     int32
	key      uint64
	chain    *rdma.Chain
	posted   int       // verbs of chain, when it was posted
	at       time.Time // arrives
	ran      int       // verbs that have run
	err      error
	back     time.Time // the answer is there
	done     chan struct{}
	lost     bool // there is no answer
	farewell bool // the end of the connection
	refused  error
	mem      []byte // of verbs
}

func (c *conn) Provider() string { return "tcp" }

func (c *conn) Peer() (node uint32, incarnation uint64) { return c.link.access.Peer() }

func (c *conn) connect(ctx context.Context) error {
	w := c.w
	w.mu.Lock()
	to := w.lent[c.addr]
	w.mu.Unlock()
	if to == nil || to.proc.isDead() || c.from.isDead() {
		d := c.from.delay()
		if c.from.isDead() {
			d = deadDelay
		}
		_ = w.pause(ctx, d)
		return fmt.Errorf("node %s: %w: %w", c.addr, rdma.ErrBroken, errRefused)
	}
	challenge := to.access.Challenge()
	hello, err := host.NewHello(&c.as, c.number, &challenge, host.Binding{})
	if err != nil {
		return fmt.Errorf("node %s: %w", c.addr, err)
	}
	if err := w.hop(ctx, c.from, to.proc); err != nil {
		return fmt.Errorf("node %s: %w: %w", c.addr, rdma.ErrBroken, err)
	}
	lane, err := to.access.Admit(context.WithoutCancel(ctx), &hello, &challenge, host.Entry{Provider: "tcp", Holds: true})
	if herr := w.hop(ctx, to.proc, c.from); herr != nil {
		if err == nil {
			lane.Leave()
		}
		return fmt.Errorf("node %s: %w: %w", c.addr, rdma.ErrBroken, herr)
	}
	if err != nil {
		return fmt.Errorf("node %s: %w", c.addr, err)
	}
	l := &link{w: w, from: c.from, to: to.proc, access: to.access, lane: lane, reset: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		l.close()
		return fmt.Errorf("node %s: %w: closed", c.addr, rdma.ErrBroken)
	}
	c.link, c.dead, c.queue, c.gone = l, nil, nil, make(chan struct{})
	w.enlist(l)
	return nil
}

// Post sends a chain: what it WRITEs is copied, as a socket would.
func (c *conn) Post(ch *rdma.Chain) {
	f := &flight{chain: ch, posted: len(ch.Verbs), slot: ch.To.Window.Slot, key: ch.To.Window.Key, done: make(chan struct{}), refused: c.dead}
	if f.refused == nil {
		f.refused = ch.Refused()
	}
	c.queue = append(c.queue, f)
	if f.refused != nil {
		return
	}
	size := 0
	for i := range ch.Verbs {
		size += len(ch.Verbs[i].Buf)
	}
	mem := c.w.buffer(size)
	f.mem = mem
	f.verbs = append(f.verbs, ch.Verbs...)
	for i := range f.verbs {
		v := &f.verbs[i]
		n := len(v.Buf)
		if v.Op == rdma.Write {
			copy(mem, v.Buf)
		}
		if n > 0 {
			v.Buf, mem = mem[:n:n], mem[n:]
		}
	}
	c.w.count(&c.w.Counts.Chains)
	if c.w.said(c.as.Serial) == closed {
		c.w.fail("%s posts under session %d (serial %d), which it has closed in good order", c.from.Name, c.as.Session, c.as.Serial)
	}
	if c.from.chance(2) { // struck before it is sent, or behind it
		c.w.posted(c.from, 1, ch)
		c.link.send(f, size)
		return
	}
	c.link.send(f, size)
	c.w.posted(c.from, 1, ch)
}

// send puts a flight on its way.
func (l *link) send(f *flight, bytes int) {
	at := l.w.sendTime(l.from, bytes)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !at.After(l.last) {
		at = l.last.Add(1)
	}
	f.at, l.last = at, at
	l.pending = append(l.pending, f)
	l.arm()
}

// arm sets the timer of the next arrival. Preconditions: l.mu is held.
func (l *link) arm() {
	if l.held != nil && len(l.pending) > 1 && l.pending[1].farewell && !l.left {
		time.AfterFunc(time.Until(l.pending[1].at), l.hungUp)
		return
	}
	if l.armed || l.running || len(l.pending) == 0 || l.left {
		return
	}
	l.armed = true
	time.AfterFunc(time.Until(l.pending[0].at), l.step)
}

// step runs some of the oldest flight. Its sender may have ended.
func (l *link) step() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = false
	if l.left || len(l.pending) == 0 {
		return
	}
	f := l.pending[0]
	if until, dead := l.w.blocked(l.from, l.to); dead {
		l.leave()
		return
	} else if time.Now().Before(until) {
		f.at = until.Add(l.to.delay())
		l.arm()
		return
	}
	if f.farewell {
		l.leave()
		return
	}
	n := len(f.verbs) - f.ran
	if n > 1 && l.to.chance(l.w.wild.Load().Torn) {
		n = 1 + l.to.intn(n-1)
	}
	l.running = true
	l.mu.Unlock() // a procedure takes its time
	done, err := l.lane.Run(f.slot, f.key, f.verbs[f.ran:f.ran+n])
	l.mu.Lock()
	l.running = false
	if l.left {
		l.lane.Leave()
		return
	}
	f.ran += done
	if err == host.ErrHeld {
		l.hold(f)
		return
	}
	f.err = err
	if done > 0 && l.w.said(l.lane.Ticket().Serial) != present {
		l.w.count(&l.w.Counts.Late)
	}
	if err == nil && f.ran < len(f.verbs) {
		f.at = time.Now().Add(l.to.delay())
		l.arm()
		return
	}
	l.pending = l.pending[1:]
	if l.to.chance(l.w.wild.Load().LoseAnswer) {
		f.lost = true // the connection breaks instead
	}
	f.back = l.w.sendTime(l.to, 0)
	close(f.done)
	l.arm()
}

// hold waits until the rest of a flight is to be run: the node holds the call. Preconditions: l.mu is held.
func (l *link) hold(f *flight) {
	ctx, cancel := context.WithCancel(l.to.ctx)
	l.running, l.held = true, cancel
	go func() {
		err := l.lane.AwaitHeld(ctx)
		cancel()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.running, l.held = false, nil
		switch {
		case l.left:
			l.lane.Leave()
		case err != nil: // the node has died
			l.leave()
		default:
			f.at = time.Now()
			l.arm()
		}
	}()
	l.arm()
}

// hungUp is the end of the connection under a call that is held: a node notices it at once.
func (l *link) hungUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil || l.left {
		return // the call has an answer: step takes what comes behind it
	}
	if until, _ := l.w.blocked(l.from, l.to); time.Now().Before(until) {
		l.pending[1].at = until.Add(l.to.delay())
		l.arm()
		return
	}
	l.leave()
}

// leave ends the node's side. Preconditions: l.mu is held.
func (l *link) leave() {
	if l.left {
		return
	}
	if l.held != nil {
		l.held()
	}
	l.left, l.pending = true, nil
	l.w.delist(l)
	if l.lane != nil && !l.running {
		l.lane.Leave()
	}
}

// close sends the end of the connection behind what is on its way. Part of what was
// posted last may not have been sent.
func (l *link) close() {
	l.mu.Lock()
	if n := len(l.pending); n > 0 && !l.left && l.from.chance(2) {
		if f := l.pending[n-1]; f.ran == 0 && !f.farewell && (n > 1 || !l.running) {
			if keep := l.from.intn(len(f.verbs) + 1); keep == 0 && n > 1 {
				l.pending = l.pending[:n-1]
			} else if keep > 0 {
				f.verbs = f.verbs[:keep]
			}
		}
	}
	l.mu.Unlock()
	l.send(&flight{farewell: true, done: make(chan struct{})}, 0)
}

// Wait returns when the oldest chain has its outcome, or the deadline has come.
func (c *conn) Wait(ch *rdma.Chain, deadline int64) {
	ch.Done = 0
	if len(c.queue) == 0 || c.queue[0].chain != ch {
		ch.Err = fmt.Errorf("%w: chain not posted, or awaited out of turn", rdma.ErrBroken)
		return
	}
	f := c.queue[0]
	c.queue = c.queue[1:]
	switch {
	case len(ch.Verbs) != f.posted: // two goroutines use one lane
		c.w.fail("%s changes a chain between Post and Wait: %d verbs became %d", c.from.Name, f.posted, len(ch.Verbs))
		c.fail(errReset)
		ch.Err = c.dead
		return
	case f.refused != nil:
		ch.Err = f.refused
		return
	case c.dead != nil:
		ch.Err = c.dead
		return
	case len(ch.Verbs) == 0: // f.verbs is the link's until the outcome
		ch.Err = nil
		return
	}
	if err := c.await(f, deadline); err != nil {
		c.fail(err)
		ch.Err = c.dead
		return
	}
	if f.err != nil && isBroken(f.err) {
		c.fail(f.err)
		ch.Err = c.dead
		return
	}
	for i := range f.verbs[:f.ran] {
		v := &ch.Verbs[i]
		switch v.Op {
		case rdma.Read:
			copy(v.Buf, f.verbs[i].Buf)
		case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
			v.Old = f.verbs[i].Old
		}
	}
	ch.Done, ch.Err = f.ran, f.err
	c.w.recycle(f.mem) // answered: nothing of it is on its way
}

// await waits for the answer of a flight.
func (c *conn) await(f *flight, deadline int64) error {
	var timeout <-chan time.Time
	if deadline > 0 {
		t := time.NewTimer(time.Duration(deadline - clock.Now()))
		defer t.Stop()
		timeout = t.C
	}
	select {
	case <-f.done:
	case <-c.gone:
		return errReset
	case <-c.link.reset:
		return errReset
	case <-c.from.ctx.Done():
		return errReset
	case <-timeout:
		return context.DeadlineExceeded
	}
	at := f.back
	for {
		t := time.NewTimer(time.Until(at))
		select {
		case <-t.C:
		case <-c.gone:
			t.Stop()
			return errReset
		case <-c.from.ctx.Done():
			t.Stop()
			return errReset
		case <-timeout:
			t.Stop()
			return context.DeadlineExceeded
		}
		until, _ := c.w.blocked(c.link.to, c.from)
		if !time.Now().Before(until) {
			if f.lost {
				return errReset
			}
			return nil
		}
		at = until.Add(c.from.delay())
	}
}

// fail gives the connection up. What is on its way may still arrive.
func (c *conn) fail(err error) {
	if c.dead == nil {
		c.link.close()
	}
	if !isRevoked(err) {
		err = fmt.Errorf("%w: node %s: %w", rdma.ErrBroken, c.addr, err)
	}
	c.dead = err
}

// Open asks the node for a region.
func (c *conn) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	if c.dead != nil {
		return rdma.Window{}, c.dead
	}
	slot := 0
	for slot < len(c.opened) && c.opened[slot].Region != region {
		slot++
	}
	if slot == len(c.opened) {
		c.opened = append(c.opened, rdma.Window{Region: region, Slot: int32(slot)})
	}
	win, err := c.ask(ctx, region, epoch, int32(slot))
	if err == nil {
		c.opened[slot] = win
	}
	return win, err
}

func (c *conn) ask(ctx context.Context, region uint32, epoch uint64, slot int32) (rdma.Window, error) {
	l := c.link
	if err := c.w.hop(ctx, c.from, l.to); err != nil {
		c.fail(err)
		return rdma.Window{}, c.dead
	}
	l.mu.Lock()
	var win rdma.Window
	err := error(rdma.ErrBroken)
	if !l.left {
		win, _, err = l.lane.Open(region, epoch, slot)
	}
	l.mu.Unlock()
	if herr := c.w.hop(ctx, l.to, c.from); herr != nil {
		err = herr
	}
	if err != nil && !isRefused(err) {
		c.fail(err)
		return rdma.Window{}, c.dead
	}
	return win, err
}

// Reset dials again: the node ends the old connection before it admits the new one.
func (c *conn) Reset(ctx context.Context) error {
	c.fail(errReset)
	if err := c.connect(ctx); err != nil {
		return err
	}
	for _, w := range c.opened {
		if w.Key == 0 {
			continue
		}
		if _, err := c.ask(ctx, w.Region, w.Epoch, w.Slot); err != nil && !isKey(err) {
			return err
		}
	}
	return nil
}

// Close may be called from any goroutine.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.closed = true
		close(c.gone)
		c.link.close()
	}
	return nil
}

// equal says whether two payloads are the same, for checks.
func equal(a, b []byte) bool { return bytes.Equal(a, b) }

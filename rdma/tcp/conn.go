package tcp

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Dialer connects lanes over tcp. The zero Dialer is ready.
type Dialer struct {
	TLS  *TLS       // nil: plain
	From netip.Addr // local address of connections; not valid: the kernel chooses
	// Redundant: the node has other addresses. A connection whose peer is silent for silentTimeout is broken then, so that its lane goes on
	// by another address; else the caller's deadlines and the table decide, because there is nowhere to go.
	Redundant bool
}

// Provider is "tcp".
func (Dialer) Provider() string { return "tcp" }

// Dial connects a lane to the node at host:port.
func (d Dialer) Dial(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c := &conn{addr: addr, as: *as, lane: lane, dialer: d}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// silentTimeout is how long the kernel of a node with several addresses may acknowledge nothing that was sent to it, be it a probe of an
// idle connection. It is short beside a call's time, and long beside a switch that reconfigures itself.
const silentTimeout = 2 * time.Second

// net dials connections to a node.
func (d Dialer) net() (n net.Dialer) {
	if d.From.IsValid() {
		n.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(d.From, 0))
	}
	if d.Redundant {
		n.KeepAliveConfig = net.KeepAliveConfig{Enable: true, Idle: silentTimeout / 2, Interval: silentTimeout / 2, Count: 2}
		n.Control = func(_, _ string, c syscall.RawConn) (err error) {
			cerr := c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silentTimeout.Milliseconds()))
			})
			return errors.Join(cerr, err)
		}
	}
	return n
}

const (
	// copyBytes is the length from which a WRITE is sent from where it stands.
	copyBytes = 16 << 10
	inBytes   = 16 << 10
	// welcomeTimeout bounds the wait for a node that says nothing. It may have to
	// end the process of a stuck lane first.
	welcomeTimeout = 15 * time.Second
	// batch is how many windows Reset asks for at a time: less than a socket holds.
	batch = 64
)

// conn is one lane. See rdma.Conn for who may call what.
type conn struct {
	addr    string           // host:port of the node; constant
	as      rdma.Credentials // what the lane is dialled with; constant
	lane    uint32           // number within the session; constant
	dialer  Dialer           // constant
	welcome host.Welcome     // of the present connection
	opened  []rdma.Window    // windows by slot; Key is 0 until an Open of it has succeeded
	socket  socket           // of the present connection; used by the lane's goroutine
	dead    error            // why nothing can be posted; nil after connect

	seq   uint32   // of the latest frame
	queue []posted // not yet awaited, oldest first
	in    []byte   // receive buffer, inBytes long
	r, w  int      // unread bytes are in[r:w]

	mu     sync.Mutex   // of nc, against Close
	nc     *net.TCPConn // the present connection; replaced by connect, closed by Close
	closed bool         // Close was called: connect refuses from now on
}

// posted is a chain under way; refused before it was sent if err is set.
type posted struct {
	chain *rdma.Chain // the caller's; its buffers are in use until it is answered
	seq   uint32      // of its frame
	err   error       // outcome known before it was sent
}

// Provider is "tcp".
func (c *conn) Provider() string { return "tcp" }

// Peer is the node that answered.
func (c *conn) Peer() (node uint32, incarnation uint64) {
	return c.welcome.Node, c.welcome.Incarnation
}

// connect dials the node and shakes hands, with TLS if the dialer has it.
func (c *conn) connect(ctx context.Context) error {
	d := c.dialer.net()
	generic, err := d.DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	nc := generic.(*net.TCPConn)
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	r := &records{TCPConn: nc}
	welcome, over, err := c.greet(r)
	if !stop() && err == nil {
		err = fmt.Errorf("%w: %w", rdma.ErrBroken, context.Cause(ctx))
	}
	var raw syscall.RawConn
	if err == nil {
		raw, err = nc.SyscallConn()
	}
	if err != nil {
		nc.Close()
		return fmt.Errorf("node %s: %w", c.addr, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		nc.Close()
		return fmt.Errorf("node %s: %w: closed", c.addr, rdma.ErrBroken)
	}
	if c.in == nil {
		c.in = make([]byte, inBytes)
	}
	c.nc, c.welcome, c.dead, c.r, c.w, c.queue = nc, welcome, nil, 0, 0, c.queue[:0]
	c.socket.attach(nc, raw, over)
	if over != nil {
		r.socket = &c.socket
	}
	return nil
}

// greet answers the node's challenge, under TLS where both sides have it: over is not nil then. The
// welcome says that an older connection is dead.
func (c *conn) greet(r *records) (w host.Welcome, over *tls.Conn, err error) {
	r.SetDeadline(time.Now().Add(welcomeTimeout))
	defer r.SetDeadline(time.Time{})
	var first [host.ChallengeBytes]byte
	if _, err := io.ReadFull(r, first[:]); err != nil {
		return w, nil, fmt.Errorf("%w: no challenge (does the node run an earlier version?): %w", rdma.ErrBroken, err)
	}
	challenge, err := host.DecodeChallenge(first[:])
	if err != nil {
		return w, nil, err
	}
	take, err := c.dialer.TLS.takes(challenge.TLS)
	if err != nil {
		return w, nil, err
	}
	var nc net.Conn = r
	if take {
		if over, err = c.dialer.TLS.client(r, c.as.Name); err != nil {
			return w, nil, fmt.Errorf("%w: %w", rdma.ErrBroken, err)
		}
		nc = over
	}
	w, err = c.hello(nc, &challenge)
	return w, over, err
}

// hello proves to hold the ticket's key, and reads what the node says to it.
func (c *conn) hello(nc net.Conn, challenge *host.Challenge) (w host.Welcome, err error) {
	binding, err := host.BindingOf(nc)
	if err != nil {
		return w, fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	hello, err := host.NewHello(&c.as, c.lane, challenge, binding)
	if err != nil {
		return w, err
	}
	if _, err := nc.Write(hello.Append(nil)); err != nil {
		return w, fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	var b [host.WelcomeBytes]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return w, fmt.Errorf("%w: no welcome: %w", rdma.ErrBroken, err)
	}
	if w, err = host.DecodeWelcome(b[:]); err != nil {
		return w, err
	}
	return w, w.Err
}

// Post writes the chain as one frame, as far as the socket takes it without
// waiting; Wait sends the rest.
func (c *conn) Post(ch *rdma.Chain) {
	c.seq++
	if c.seq == farewellSeq {
		c.seq = 1
	}
	p := posted{chain: ch, seq: c.seq, err: c.dead}
	if p.err == nil {
		p.err = ch.Refused()
	}
	c.queue = append(c.queue, p)
	if p.err != nil || len(ch.Verbs) == 0 {
		return
	}
	h := head{kind: kindChain, verbs: len(ch.Verbs), seq: p.seq, slot: ch.To.Window.Slot, key: ch.To.Window.Key}
	for i := range ch.Verbs {
		if v := &ch.Verbs[i]; v.Op == rdma.Write {
			h.payload += uint32(len(v.Buf))
		}
	}
	s := &c.socket
	s.out = h.append(s.out)
	for i := range ch.Verbs {
		s.out = host.AppendVerb(s.out, &ch.Verbs[i])
	}
	for i := range ch.Verbs {
		switch v := &ch.Verbs[i]; {
		case v.Op != rdma.Write:
		case len(v.Buf) < copyBytes:
			s.out = append(s.out, v.Buf...)
		default:
			s.cut()
			s.segments = append(s.segments, v.Buf)
		}
	}
	s.cut()
	s.pump()
}

// Wait reads the answers of the oldest chain posted, which is ch.
func (c *conn) Wait(ch *rdma.Chain, deadline int64) {
	ch.Done = 0
	if len(c.queue) == 0 || c.queue[0].chain != ch {
		ch.Err = fmt.Errorf("%w: chain not posted, or awaited out of turn", rdma.ErrBroken)
		return
	}
	p := c.queue[0]
	c.queue = c.queue[:copy(c.queue, c.queue[1:])]
	switch {
	case p.err != nil:
		ch.Err = p.err
	case c.dead != nil:
		ch.Err = c.dead
	case len(ch.Verbs) == 0:
		ch.Err = nil
	default:
		if err := c.await(ch, p.seq, deadline); err != nil {
			c.fail(err)
			ch.Err = c.dead
		}
	}
}

// await reads the answers to a chain. An error means that there is no outcome.
func (c *conn) await(ch *rdma.Chain, seq uint32, deadline int64) error {
	for {
		a, err := c.answer(deadline)
		if err != nil {
			return err
		}
		if a.kind != kindChain || a.seq != seq || a.done < ch.Done || a.done > len(ch.Verbs) ||
			a.results != host.ResultBytes(ch.Verbs[ch.Done:a.done]) || a.last && a.code == 0 && a.done != len(ch.Verbs) {
			return errAnswer
		}
		for ; ch.Done < a.done; ch.Done++ {
			v := &ch.Verbs[ch.Done]
			switch v.Op {
			case rdma.Read:
				buf, more := adjacent(ch.Verbs[ch.Done:a.done])
				err = c.take(buf, deadline)
				ch.Done += more
			case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
				v.Old, err = c.takeWord(deadline)
			}
			if err != nil {
				return err
			}
		}
		if a.last {
			ch.Err = host.CodeError(a.code)
			if errors.Is(ch.Err, rdma.ErrBroken) {
				return errors.New("the node could not finish the chain")
			}
			return nil
		}
	}
}

// adjacent is the memory of the first READ and of those behind it whose buffers
// follow one another, as those of a batch do: one long read instead of many copies.
func adjacent(verbs []rdma.Verb) (buf []byte, more int) {
	buf = verbs[0].Buf
	for _, v := range verbs[1:] {
		n := len(buf)
		if v.Op != rdma.Read || len(v.Buf) == 0 || n == cap(buf) || &buf[:n+1][n] != &v.Buf[0] || cap(buf)-n < len(v.Buf) {
			break
		}
		buf = buf[:n+len(v.Buf)]
		more++
	}
	return buf, more
}

// answer reads the header of the next answer.
func (c *conn) answer(deadline int64) (answer, error) {
	if err := c.need(answerBytes, deadline); err != nil {
		return answer{}, err
	}
	a := decodeAnswer(c.in[c.r:])
	c.r += answerBytes
	if a.seq == farewellSeq {
		if err := host.CodeError(a.code); errors.Is(err, rdma.ErrRefused) {
			return a, err
		}
		return a, errAnswer
	}
	return a, nil
}

// fail gives the connection up. A farewell is a definite answer to all that is
// under way; anything else means that the outcome is not known.
func (c *conn) fail(err error) {
	if !errors.Is(err, rdma.ErrRefused) {
		err = fmt.Errorf("%w: node %s: %w", rdma.ErrBroken, c.addr, err)
	}
	c.dead = err
	c.nc.Close()
	c.socket.drop()
}

// need reads until n bytes are buffered.
func (c *conn) need(n int, deadline int64) error {
	if c.r+n > len(c.in) || c.r == c.w {
		c.r, c.w = 0, copy(c.in, c.in[c.r:c.w])
	}
	for c.w-c.r < n {
		got, err := c.socket.read(c.in[c.w:], deadline)
		if err != nil {
			return err
		}
		c.w += got
	}
	return nil
}

// take moves the next bytes to where they belong, past the buffer when they are many.
func (c *conn) take(b []byte, deadline int64) error {
	n := copy(b, c.in[c.r:c.w])
	c.r += n
	for n < len(b) {
		if rest := b[n:]; len(rest) <= len(c.in)/2 {
			if err := c.need(len(rest), deadline); err != nil {
				return err
			}
			c.r += copy(rest, c.in[c.r:c.w])
			return nil
		}
		got, err := c.socket.read(b[n:], deadline)
		if err != nil {
			return err
		}
		n += got
	}
	return nil
}

// takeWord takes a word of 8 bytes off the input, and waits for it until the deadline.
func (c *conn) takeWord(deadline int64) (uint64, error) {
	if err := c.need(8, deadline); err != nil {
		return 0, err
	}
	w := binary.LittleEndian.Uint64(c.in[c.r:])
	c.r += 8
	return w, nil
}

// Open asks for a window. A region that was opened before keeps its slot.
func (c *conn) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	slot := 0
	for slot < len(c.opened) && c.opened[slot].Region != region {
		slot++
	}
	if slot == host.MaxWindows {
		return rdma.Window{}, rdma.ErrLimit
	}
	if slot == len(c.opened) {
		c.opened = append(c.opened, rdma.Window{Region: region, Slot: int32(slot)})
	}
	wanted := []rdma.Window{{Region: region, Epoch: epoch, Slot: int32(slot)}}
	err := c.open(ctx, wanted)
	if err == nil && wanted[0].Key == 0 {
		err = rdma.ErrKey
	}
	if err != nil {
		return rdma.Window{}, err
	}
	c.opened[slot] = wanted[0]
	return wanted[0], nil
}

// open asks for windows. One that the node does not serve has no key then.
func (c *conn) open(ctx context.Context, ws []rdma.Window) error {
	if c.dead != nil {
		return c.dead
	}
	deadline := int64(0)
	if at, ok := ctx.Deadline(); ok {
		deadline = clock.In(time.Until(at))
	}
	nc := c.nc
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	first := c.seq + 1
	s := &c.socket
	for i := range ws {
		c.seq++
		h := head{kind: kindOpen, seq: c.seq}
		o := host.OpenRequest{Tag: c.seq, Region: ws[i].Region, Slot: ws[i].Slot, Epoch: ws[i].Epoch}
		s.out = o.Append(h.append(s.out))
	}
	s.cut()
	s.pump()
	var refused error
	for i := range ws {
		o, err := c.window(first+uint32(i), deadline)
		if err != nil {
			c.fail(err)
			return c.dead
		}
		ws[i].Key, ws[i].Bytes, ws[i].Flush, ws[i].Verifies = o.Key, o.Bytes, o.Flush, o.Verifies
		if o.Err != nil {
			ws[i].Key = 0
		}
		if o.Err != nil && !errors.Is(o.Err, rdma.ErrKey) {
			refused = o.Err
		}
	}
	return refused
}

// window reads the answer to an open.
func (c *conn) window(seq uint32, deadline int64) (o host.OpenAnswer, err error) {
	a, err := c.answer(deadline)
	if err != nil {
		return o, err
	}
	if a.kind != kindOpen || a.seq != seq || a.results != host.OpenAnswerBytes {
		return o, errAnswer
	}
	if err := c.need(host.OpenAnswerBytes, deadline); err != nil {
		return o, err
	}
	o, err = host.DecodeOpenAnswer(c.in[c.r : c.r+host.OpenAnswerBytes])
	c.r += host.OpenAnswerBytes
	return o, err
}

// Reset dials again. Windows that the node still serves get their slots back,
// under the same keys; the others answer ErrKey from now on.
func (c *conn) Reset(ctx context.Context) error {
	c.fail(errors.New("reset"))
	if err := c.connect(ctx); err != nil {
		return err
	}
	var again []rdma.Window
	for _, w := range c.opened {
		if w.Key != 0 {
			again = append(again, w)
		}
	}
	for len(again) > 0 {
		n := min(batch, len(again))
		if err := c.open(ctx, again[:n]); err != nil {
			return err
		}
		again = again[n:]
	}
	return nil
}

// Close may be called from any goroutine.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if err := c.nc.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

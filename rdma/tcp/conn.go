package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// Dialer connects lanes over tcp. The zero Dialer is ready.
type Dialer struct{}

func (Dialer) Provider() string { return "tcp" }

// Dial connects a lane to the node at host:port.
func (Dialer) Dial(ctx context.Context, addr string, t *rdma.Ticket, lane uint32) (rdma.Conn, error) {
	c := &conn{addr: addr, ticket: *t, lane: lane}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

const (
	dialTimeout = 2 * time.Second
	// slack: the socket's deadline is moved once in this time, not with every chain.
	slack = 100 * time.Millisecond
	// postTimeout bounds the writing of a chain to a node that does not read.
	postTimeout = 10 * time.Second
	// inFlight is how much may be under way in both directions before a further
	// chain waits: less than the sockets buffer, so that neither side blocks the other.
	inFlight = 32 << 10
)

// conn is one lane. See rdma.Conn for who may call what.
type conn struct {
	addr   string
	ticket rdma.Ticket
	lane   uint32
	nc     net.Conn
	err    error // why it is broken; nil after connect

	tx     []byte
	rx     []byte // answers: unread bytes are rx[r:w]
	r, w   int
	flying int           // bytes under way
	queue  []*rdma.Chain // posted, not awaited
	sent   int           // of queue
	armed  int64         // deadline of the socket, clock.Now time

	windows []rdma.Window // by Slot
	slots   []int32       // the node's slot of each on this connection, -1 if not open
	opened  int32
}

func (c *conn) Provider() string { return "tcp" }

func (c *conn) connect(ctx context.Context) error {
	d := net.Dialer{Timeout: dialTimeout}
	nc, err := d.DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	deadline := time.Now().Add(dialTimeout)
	if at, ok := ctx.Deadline(); ok && at.Before(deadline) {
		deadline = at
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	err = c.greet(nc, deadline)
	if !stop() && err == nil {
		err = fmt.Errorf("%w: %w", rdma.ErrBroken, context.Cause(ctx))
	}
	if err != nil {
		nc.Close()
		return err
	}
	c.nc, c.err, c.r, c.w, c.flying, c.armed, c.opened = nc, nil, 0, 0, 0, 0, 0
	c.queue, c.sent = c.queue[:0], 0
	return nil
}

// greet says who we are; the welcome says that an older connection is dead.
func (c *conn) greet(nc net.Conn, deadline time.Time) error {
	_ = nc.SetDeadline(deadline)
	hello := append(make([]byte, 0, helloBytes), magic[:]...)
	hello, _ = c.ticket.AppendBinary(hello)
	hello = le.AppendUint32(hello, c.lane)
	hello = le.AppendUint32(hello, 0)
	if _, err := nc.Write(hello); err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	var welcome [welcomeBytes]byte
	if _, err := io.ReadFull(nc, welcome[:]); err != nil {
		return fmt.Errorf("%w: no welcome from %s: %w", rdma.ErrBroken, c.addr, err)
	}
	if [8]byte(welcome[:8]) != magic {
		return fmt.Errorf("%s does not speak quarry's tcp fabric, or another version of it", c.addr)
	}
	if err := errOf(uint16(le.Uint32(welcome[8:]))); err != nil {
		return err
	}
	return nc.SetDeadline(time.Time{})
}

// Post writes the chain as one frame, unless so much is under way already that
// both sides could block; then Wait writes it in its turn.
func (c *conn) Post(ch *rdma.Chain) {
	ch.Err, ch.Done = nil, 0
	slot := int32(-1)
	if s := ch.To.Window.Slot; int(s) < len(c.slots) && s >= 0 {
		slot = c.slots[s]
	}
	c.queue = append(c.queue, ch)
	out, back := c.size(ch)
	switch {
	case c.err != nil:
		ch.Err = c.err
	case slot < 0:
		ch.Err = rdma.ErrKey
	case len(ch.Verbs) > rdma.MaxChainVerbs || out+back > rdma.MaxChainBytes+maxFrame-requestHead || c.tooLong(ch):
		ch.Err = rdma.ErrLimit
	}
	if ch.Err == nil && c.sent == len(c.queue)-1 && (c.flying == 0 || c.flying+out+back <= inFlight) {
		c.send(ch)
	}
}

func (c *conn) tooLong(ch *rdma.Chain) bool {
	var data int
	for i := range ch.Verbs {
		n := len(ch.Verbs[i].Buf)
		if n > rdma.MaxVerbBytes {
			return true
		}
		data += n
	}
	return data > rdma.MaxChainBytes
}

// size is what a chain sends and gets back.
func (c *conn) size(ch *rdma.Chain) (out, back int) {
	out, back = requestHead, answerHead
	for i := range ch.Verbs {
		v := &ch.Verbs[i]
		out += verbHead + 16
		switch v.Op {
		case rdma.Read:
			back += pad(len(v.Buf))
		case rdma.Write:
			out += pad(len(v.Buf))
		default:
			back += 8
		}
	}
	return out, back
}

// send writes the frame of the chain at queue[sent].
func (c *conn) send(ch *rdma.Chain) {
	c.sent++
	out, back := c.size(ch)
	c.flying += out + back
	c.tx = appendRequest(c.tx[:0], ch, c.slots[ch.To.Window.Slot])
	if c.armed == 0 {
		c.arm(clock.In(postTimeout))
	}
	if _, err := c.nc.Write(c.tx); err != nil {
		c.fail(err)
	}
	if cap(c.tx) > keepBytes {
		c.tx = nil
	}
}

// arm moves the socket's deadline; most calls find it late enough.
func (c *conn) arm(deadline int64) {
	if deadline == 0 {
		deadline = clock.In(postTimeout)
	}
	if c.armed >= deadline && c.armed <= deadline+2*int64(slack) {
		return
	}
	c.armed = deadline + int64(slack)
	_ = c.nc.SetDeadline(time.Now().Add(time.Duration(c.armed - clock.Now())))
}

// fail breaks the connection: every chain under way has an unknown outcome.
func (c *conn) fail(err error) {
	if c.err == nil {
		c.err = fmt.Errorf("%w: %s: %w", rdma.ErrBroken, c.addr, err)
		c.nc.Close()
	}
}

// Wait reads the answer of the oldest chain posted, which is ch.
func (c *conn) Wait(ch *rdma.Chain, deadline int64) {
	if len(c.queue) == 0 || c.queue[0] != ch {
		ch.Err = fmt.Errorf("%w: chain not posted, or out of turn", rdma.ErrBroken)
		return
	}
	if ch.Err == nil && c.err == nil {
		c.arm(deadline)
		if c.sent == 0 {
			c.send(ch)
		}
	}
	wasSent := c.sent > 0
	switch {
	case ch.Err != nil && !wasSent:
	case c.err != nil:
		ch.Err, ch.Done = c.err, 0
	default:
		if err := c.answer(ch); err != nil {
			c.fail(err)
			ch.Err, ch.Done = c.err, 0
		}
	}
	n := copy(c.queue, c.queue[1:])
	c.queue = c.queue[:n]
	if wasSent {
		c.sent--
		out, back := c.size(ch)
		c.flying -= out + back
	}
}

func (c *conn) answer(ch *rdma.Chain) error {
	_, back := c.size(ch)
	b, err := c.read(back)
	if err != nil {
		return err
	}
	err = parseAnswer(ch, le.Uint16(b), int(le.Uint16(b[2:])), b[4:])
	if len(c.rx) > keepBytes && c.r == c.w {
		c.rx, c.r, c.w = nil, 0, 0
	}
	return err
}

// read returns the next answer without its length word, of at most most bytes.
func (c *conn) read(most int) ([]byte, error) {
	for {
		have := c.w - c.r
		need := 4
		if have >= 4 {
			size := int(le.Uint32(c.rx[c.r:]))
			if size < answerHead-4 || size > most-4 {
				return nil, fmt.Errorf("%w: an answer of %d bytes, at most %d were asked for", errFrame, size, most)
			}
			need += size
			if have >= need {
				b := c.rx[c.r+4 : c.r+need]
				if c.r += need; c.r == c.w {
					c.r, c.w = 0, 0
				}
				return b, nil
			}
		}
		if c.r+max(need, most) > len(c.rx) {
			if len(c.rx) < max(need, most) {
				nb := make([]byte, max(need, most, 4096))
				c.w, c.r = copy(nb, c.rx[c.r:c.w]), 0
				c.rx = nb
			} else {
				c.w, c.r = copy(c.rx, c.rx[c.r:c.w]), 0
			}
		}
		n, err := c.nc.Read(c.rx[c.w:])
		if err != nil {
			return nil, err
		}
		c.w += n
	}
}

// Open asks for a window. A region that is open already keeps its slot.
func (c *conn) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	if c.err != nil {
		return rdma.Window{}, c.err
	}
	at := -1
	for i := range c.windows {
		if c.windows[i].Region == region {
			at = i
		}
	}
	w, slot, err := c.open(ctx, region, epoch, at)
	if err != nil {
		return rdma.Window{}, err
	}
	if at < 0 {
		at = len(c.windows)
		c.windows, c.slots = append(c.windows, w), append(c.slots, slot)
	}
	w.Slot = int32(at)
	c.windows[at], c.slots[at] = w, slot
	return w, nil
}

// open sends the request; at is the slot the region has here, or -1.
func (c *conn) open(ctx context.Context, region uint32, epoch uint64, at int) (w rdma.Window, slot int32, err error) {
	slot = c.opened
	if at >= 0 && c.slots[at] >= 0 {
		slot = c.slots[at]
	}
	b := make([]byte, requestHead, requestHead+openBytes)
	le.PutUint32(b, requestHead+openBytes-4)
	b[4] = kindOpen
	le.PutUint32(b[8:], uint32(slot))
	b = le.AppendUint64(b, uint64(region))
	b = le.AppendUint64(b, epoch)
	deadline := clock.In(dialTimeout)
	if t, ok := ctx.Deadline(); ok {
		deadline = min(deadline, clock.In(time.Until(t)))
	}
	c.arm(deadline)
	var a []byte
	if _, err = c.nc.Write(b); err == nil {
		a, err = c.read(answerHead + 16)
	}
	if err == nil && len(a) != answerHead-4+16 {
		err = errFrame
	}
	if err != nil {
		c.fail(err)
		return w, 0, c.err
	}
	if err := errOf(le.Uint16(a)); err != nil {
		return w, 0, err
	}
	if slot == c.opened {
		c.opened++
	}
	return rdma.Window{Region: region, Epoch: epoch, Key: le.Uint64(a[4:]), Bytes: le.Uint64(a[12:])}, slot, nil
}

// Reset dials again. Windows that the node still serves are opened again under
// the same key; the others answer ErrKey from now on.
func (c *conn) Reset(ctx context.Context) error {
	c.fail(errors.New("reset"))
	if err := c.connect(ctx); err != nil {
		return err
	}
	for i := range c.slots {
		c.slots[i] = -1
	}
	for i, w := range c.windows {
		now, slot, err := c.open(ctx, w.Region, w.Epoch, i)
		switch {
		case err == nil && now.Key == w.Key:
			c.slots[i] = slot
		case err != nil && !errors.Is(err, rdma.ErrRefused):
			return err
		}
	}
	return nil
}

// Close may be called from any goroutine.
func (c *conn) Close() error { return c.nc.Close() }

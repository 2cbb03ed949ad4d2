package msg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// ErrUnsupported: the node carries no messages over this provider: it runs an earlier version.
var ErrUnsupported = errors.New("no messages over this connection: the node runs an earlier version; use tcp or shm")

// ErrUnknown: there is no answer. The call may have been executed, once, or may still be until Reset. Every such error is
// rdma.ErrBroken too.
var ErrUnknown = fmt.Errorf("%w: no answer to a message, which may have been executed", rdma.ErrBroken)

// BufferBytes is what a Client takes of its Buffers.
const BufferBytes = 2*Slots*SlotBytes + 64

// Client calls procedures of one node over one connection. It belongs to the goroutine that owns the connection.
type Client struct {
	ring  ring
	to    rdma.Target
	round rdma.Round
	// broken: a chain had no outcome. Nothing is posted before the connection is reset.
	broken bool
	// pause lets time pass between two looks for an answer; an error ends the call.
	pause func(ctx context.Context, try int) error
	// sleeper is the connection, if the client may sleep until the node wakes it; else nil. It does after so many looks.
	sleeper rdma.Sleeper
	looks   int
	// Until bounds calls beside their contexts, in nanoseconds of clock.Now; 0: their contexts alone.
	Until int64
	// Once: a call whose connection breaks ends with ErrUnknown, and is not sent again. The Client is of no use then.
	Once bool
	// Resets counts how often calls had to be sent again.
	Resets uint64
}

// Open opens a mailbox at the node of a connection.
func Open(ctx context.Context, conn rdma.Conn, b rdma.Buffers) (*Client, error) {
	c := &Client{pause: pause, looks: spins}
	if err := c.ring.allocate(b); err != nil {
		return nil, err
	}
	return c, c.Move(ctx, conn)
}

// Conn is the connection that calls go over.
func (c *Client) Conn() rdma.Conn { return c.to.Conn }

// Move opens another mailbox over another connection, in the place of one that is closed. Calls under way stay unknown.
func (c *Client) Move(ctx context.Context, conn rdma.Conn) error {
	c.to.Conn, c.broken = conn, false
	c.sleeper, _ = conn.(rdma.Sleeper)
	return c.Reopen(ctx)
}

// Reopen opens another mailbox in the place of one that the node does not have any more: it was restarted. No call of the
// old one runs after that; those under way stay unknown.
func (c *Client) Reopen(ctx context.Context) error {
	nonce := rand.Uint64() | 1
	if c.broken {
		if err := c.to.Conn.Reset(ctx); err != nil {
			return err
		}
	}
	w, err := c.to.Conn.Open(ctx, rdma.Mailbox, nonce)
	if errors.Is(err, rdma.ErrKey) {
		return fmt.Errorf("%w (provider %s)", ErrUnsupported, c.to.Conn.Provider())
	}
	if err != nil {
		return err
	}
	if w.Bytes < MailboxBytes {
		return fmt.Errorf("%w: mailbox of %d bytes, want %d", ErrUnsupported, w.Bytes, MailboxBytes)
	}
	c.to.Window, c.broken = w, false
	c.ring.start(nonce)
	return nil
}

// Call executes a procedure of the node and returns the length of its answer, which stands in answer. It sends the call
// again behind a Reset of the connection as often as the connection breaks, until ctx ends: the node executes it once.
//
// The error is nil, *Refusal or ErrTooLong for a long answer: the procedure has run, once. ErrUnknown: it has run once
// or not at all. Any other: it has not run, and never will.
//
// Preconditions: no chain of the caller is posted on the connection; Call may reset it.
func (c *Client) Call(ctx context.Context, procedure uint16, request, answer []byte) (n int, err error) {
	slot, err := c.begin(ctx, procedure, request)
	if err != nil {
		return 0, err
	}
	return c.finish(ctx, slot, answer)
}

// Send sends a call and does not wait for its answer. ErrBusy: receive one first. An error says that the call was not
// executed, and never will be.
func (c *Client) Send(ctx context.Context, procedure uint16, request []byte) (Call, error) {
	slot, err := c.begin(ctx, procedure, request)
	if err != nil {
		return 0, err
	}
	if err := c.recover(ctx); err != nil {
		return 0, c.close(slot, err)
	}
	if err := c.exchange(ctx, slot, theRequest, -1); err != nil && !errors.Is(err, rdma.ErrBroken) {
		return 0, c.close(slot, err)
	}
	return Call(c.ring.cookies[slot]), nil
}

// Receive waits for the answer to a call that was sent. Its errors are those of Call.
func (c *Client) Receive(ctx context.Context, call Call, answer []byte) (n int, err error) {
	slot := slotOf(uint64(call))
	if c.ring.cookies[slot] != uint64(call) || c.ring.states[slot] != waiting {
		return 0, fmt.Errorf("%w: call %#x is not under way", ErrUnknown, uint64(call))
	}
	return c.finish(ctx, slot, answer)
}

// begin takes a slot for a call. If all are in use it looks whether the calls that were given up have been answered.
func (c *Client) begin(ctx context.Context, procedure uint16, request []byte) (slot uint64, err error) {
	if slot, err = c.ring.put(procedure, request); err != ErrBusy {
		return slot, err
	}
	for i := range uint64(Slots) {
		if c.ring.states[i] != abandoned {
			continue
		}
		if err := c.recover(ctx); err != nil {
			return 0, err
		}
		if c.ring.states[i] == abandoned && c.exchange(ctx, i, 0, 0) == nil {
			if binary.LittleEndian.Uint64(c.ring.in[i][validOff:]) == c.ring.cookies[i] {
				c.ring.states[i] = free
			}
		}
	}
	return c.ring.put(procedure, request)
}

// finish sends the call of a slot if that has not been done, and waits for its answer.
func (c *Client) finish(ctx context.Context, slot uint64, answer []byte) (n int, err error) {
	r := &c.ring
	want := min(len(answer), MaxPayload)
	for try := 0; ; try++ {
		if err := c.recover(ctx); err != nil {
			return 0, c.close(slot, err)
		}
		sleeps := c.sleeper != nil && (try >= c.looks || r.rung[slot])
		err := c.exchange(ctx, slot, c.parts(slot, sleeps), want)
		switch {
		case err == nil:
		case errors.Is(err, rdma.ErrBroken) && !c.Once:
			if err := c.ended(ctx); err != nil {
				return 0, c.close(slot, err)
			}
			continue
		default:
			return 0, c.close(slot, err)
		}
		f, m, err := r.answer(slot, want)
		switch {
		case err != nil:
			return 0, c.close(slot, fmt.Errorf("answer of node: %w", err))
		case f == complete:
			r.states[slot] = free
			return result(&m, answer)
		case f == partly:
			want = MaxPayload
			continue
		}
		if !sleeps || !c.doze(ctx) {
			err = c.pause(ctx, try)
		}
		if err != nil {
			return 0, c.close(slot, err)
		}
		if err := c.ended(ctx); err != nil {
			return 0, c.close(slot, err)
		}
	}
}

// ended is why a call must end, nil while it may go on.
func (c *Client) ended(ctx context.Context) error {
	if c.Until != 0 && clock.Now() >= c.Until {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// result is what an answer means for the caller of a procedure.
func result(m *message, answer []byte) (n int, err error) {
	switch m.status {
	case statusDone:
	case statusUnknown:
		return 0, fmt.Errorf("procedure %d: %w", m.procedure, ErrProcedure)
	default:
		return 0, &Refusal{Procedure: m.procedure, Text: string(m.payload)}
	}
	if len(m.payload) > len(answer) {
		return 0, fmt.Errorf("%w: answer of %d bytes for a buffer of %d", ErrTooLong, len(m.payload), len(answer))
	}
	return copy(answer, m.payload), nil
}

// close ends a call without an answer, and says what that means for it.
func (c *Client) close(slot uint64, err error) error {
	r := &c.ring
	if !r.sent[slot] {
		r.states[slot] = free
		return err
	}
	r.states[slot] = abandoned
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// parts of an exchange beside the look.
type parts uint8

const (
	theRequest parts = 1 << iota
	theSleep         // that the client sleeps if it finds no answer
)

// parts are those of an exchange of a call whose client sleeps behind it, or does not.
func (c *Client) parts(slot uint64, sleeps bool) (p parts) {
	if !c.ring.sent[slot] {
		p = theRequest
	}
	if sleeps {
		p |= theSleep
	}
	return p
}

// exchange posts the verbs of a slot: those of parts, and a look for an answer of up to want bytes unless
// want is negative. It wakes a node that sleeps.
func (c *Client) exchange(ctx context.Context, slot uint64, what parts, want int) error {
	r := &c.ring
	c.round.Reset()
	c.round.Deadline = c.Until
	if at, ok := ctx.Deadline(); ok {
		if by := clock.In(time.Until(at)); c.Until == 0 || by < c.Until {
			c.round.Deadline = by
		}
	}
	chain, send := c.round.Chain(&c.to), what&theRequest != 0
	if send {
		r.send(chain, slot)
	}
	if what&theSleep != 0 {
		r.listen(chain)
	}
	if want >= 0 {
		r.look(chain, slot, want)
	}
	rdma.Do(&c.round)
	err := chain.Err
	broken := errors.Is(err, rdma.ErrBroken)
	if send && (broken || chain.Done >= sendVerbs) {
		r.sent[slot] = true // at a refusal behind the valid word the node may have the request
	}
	switch {
	case broken:
		c.broken = true
	case err == nil && send && r.sleeps():
		err = c.wake(slot)
	}
	return err
}

// wake wakes the node from the sleep that the latest exchange, of this slot, has found.
func (c *Client) wake(slot uint64) error {
	err := error(nil)
	if c.sleeper != nil && c.ring.wakesThread() {
		by := c.round.Deadline
		c.round.Reset()
		c.round.Deadline = by
		chain := c.round.Chain(&c.to)
		c.ring.ring(chain)
		rdma.Do(&c.round)
		if err = chain.Err; err == nil {
			c.sleeper.Ring(&c.to.Window, BellOff)
			c.ring.rung[slot] = true
		}
	} else if w, ok := c.to.Conn.(rdma.Waker); ok {
		if err = w.Wake(&c.to.Window); err != nil {
			c.broken = true
		}
	}
	if errors.Is(err, rdma.ErrBroken) {
		c.broken = true
	}
	return err
}

// longestDoze bounds a sleep: the end of the connection, of a context without a deadline or of the node wakes nobody.
const longestDoze = 10 * time.Millisecond

// doze sleeps until the node has stored an answer behind the latest exchange, which has listened, or the call is near its end. false: it has
// not slept.
func (c *Client) doze(ctx context.Context) bool {
	seen, ok := c.ring.wakes()
	if !ok {
		return false
	}
	longest := longestDoze
	if c.Until != 0 {
		longest = min(longest, time.Duration(c.Until-clock.Now()))
	}
	if at, ok := ctx.Deadline(); ok {
		longest = min(longest, time.Until(at))
	}
	return longest <= 0 || c.sleeper.Sleep(&c.to.Window, AnsweredOff, seen, longest)
}

// Reset resets the connection and sends the calls under way again. Of calls that were given up it returns the slots: each
// has been executed, once, or never will be.
func (c *Client) Reset(ctx context.Context) error {
	c.broken = true
	return c.recover(ctx)
}

// recover resets a broken connection and sends the calls under way again, with their cookies: the node executes those it
// has not executed, and has kept the answers to the others.
func (c *Client) recover(ctx context.Context) error {
	for try := 0; c.broken; try++ {
		err := c.reconnect(ctx)
		if err != nil {
			if !errors.Is(err, rdma.ErrBroken) || c.ended(ctx) != nil {
				return err
			}
			if err := c.pause(ctx, spins+try); err != nil {
				return err
			}
			continue
		}
		c.broken = false
		c.Resets++
		c.ring.resumed()
		for slot := range uint64(Slots) {
			if c.ring.states[slot] != waiting || !c.ring.sent[slot] {
				continue
			}
			if err := c.exchange(ctx, slot, theRequest, -1); err != nil && !c.broken {
				return err
			} else if err != nil {
				break
			}
		}
	}
	return nil
}

// reconnect resets the connection, within the bounds of the call.
func (c *Client) reconnect(ctx context.Context) error {
	if c.Until != 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.Until-clock.Now()))
		defer cancel()
	}
	return c.to.Conn.Reset(ctx)
}

const (
	// spins is how often a client looks for an answer before it yields its processor: some 20 us over shm.
	spins = 200
	// yields is how often it only yields then.
	yields = 400
	// longestPause bounds the sleep between two looks after that.
	longestPause = time.Millisecond
)

// pause waits a little longer with each try.
func pause(ctx context.Context, try int) error {
	switch {
	case try < spins:
		return nil
	case try < yields:
		runtime.Gosched()
	default:
		time.Sleep(min(time.Duration(try-yields+1)*5*time.Microsecond, longestPause))
	}
	return ctx.Err()
}

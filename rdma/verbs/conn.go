//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// conn is one lane. See rdma.Conn for who may call what.
type conn struct {
	dialer *Dialer            // the device, and the buffers that it can reach
	addr   string             // host:port of the node's socket; constant
	as     rdma.Credentials   // what the lane is dialled with; constant
	number uint32             // the lane of as
	opened context.Context    // ends with Close
	end    context.CancelFunc // of opened

	ncMu sync.Mutex   // of nc, so that Close can wake a goroutine that waits on it
	nc   *net.TCPConn // nil without a connection; replaced by connect and drop

	// mu guards what follows. The lane's goroutine holds it in each call, also while it waits; only Close and
	// vanish, which may be called from other goroutines, wait for it.
	mu      sync.Mutex
	welcome host.Welcome // of the present connection
	acts    bool         // its node's processors execute the atomics of their regions
	windows []window     // by slot
	dead    error        // why nothing can be posted
	redials bool         // dead by a refusal: nothing runs, connecting again is safe
	closed  bool         // Close has run: no connection is made any more
	tag     uint32       // of the latest request on nc; its answer carries the same

	lane  *C.q_lane  // nil without a connection
	verbs []C.q_verb // the lane's array in C's memory, in which write describes a part
	sleep *sleeper   // nil without a connection
	depth int        // work requests that the next queue pair holds, or this one
	scratch
	sending
	skipping
}

// window is what the node granted. Key is the one callers know, rkey the adapter's.
type window struct {
	rdma.Window
	rkey    uint32 // valid on the present queue pair alone; replaced by reopen
	acts    bool   // the node's processors execute its atomics
	flushes bool   // the node's adapter takes native FLUSHes that are visible
}

var errClosed = fmt.Errorf("%w: closed", rdma.ErrBroken)

// Provider is "verbs".
func (c *conn) Provider() string { return "verbs" }

// Peer is the node that answered.
func (c *conn) Peer() (node uint32, incarnation uint64) {
	return c.welcome.Node, c.welcome.Incarnation
}

// connect makes a queue pair and exchanges numbers with the node, whose welcome
// says that an older connection of this lane is dead.
// Preconditions: mu is held.
func (c *conn) connect(ctx context.Context) error {
	c.drop()
	c.dead, c.redials = fmt.Errorf("%w: node %s: not connected", rdma.ErrBroken, c.addr), false
	if c.closed || c.opened.Err() != nil {
		return errClosed
	}
	if c.dialer.gone.Load() {
		c.dead = c.removed()
		return c.dead
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.opened, cancel)()
	var d net.Dialer
	generic, err := d.DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	c.ncMu.Lock()
	c.nc = generic.(*net.TCPConn)
	c.ncMu.Unlock()
	stop := context.AfterFunc(ctx, func() {
		generic.SetDeadline(time.Unix(1, 0))
		generic.(*net.TCPConn).CloseRead() // wakes the wait for the connection manager
	})
	err = c.greet()
	if !stop() && !errors.Is(err, rdma.ErrRefused) {
		err = fmt.Errorf("%w: %w", rdma.ErrBroken, context.Cause(ctx))
	}
	if err != nil {
		c.drop()
		err = fmt.Errorf("node %s: %w", c.addr, err)
		if errors.Is(err, rdma.ErrRefused) {
			c.dead = err
		}
		return err
	}
	c.dead = nil
	return c.reopen(ctx)
}

// openLane makes a queue pair for so many work requests.
func (d *Dialer) openLane(depth int) (lane *C.q_lane, err error) {
	want := C.q_lane_want{depth: C.uint32_t(depth), inline_max: C.uint32_t(d.config.Inline), vector: C.uint32_t(d.vector.Add(1))}
	if d.device.caps.Flush {
		want.flush = 1
	}
	if e := C.q_lane_open(d.device.ctx, d.buffers.pd, &want, &lane); e != 0 {
		return nil, fmt.Errorf("%w: queue pair on %s: %w: it has no more, or locked memory is limited (ulimit -l)", rdma.ErrBroken, d.device.caps.Device, unix.Errno(e))
	}
	return lane, nil
}

// closeLane destroys a queue pair, after which the device touches no buffer of it.
func closeLane(l *C.q_lane) error { return problem("destroying a queue pair", C.q_lane_close(l)) }

// watch lets a lane's waits end when its socket has something to say.
func watch(l *C.q_lane, nc *net.TCPConn) error {
	raw, err := nc.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { l.socket = C.int(fd) })
}

// greet answers the node's challenge and connects the queue pairs.
func (c *conn) greet() error {
	lane, err := c.dialer.openLane(c.depth)
	if err != nil {
		return err
	}
	c.lane, c.verbs = lane, lane.verbs[:]
	if err := watch(lane, c.nc); err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	var first [host.ChallengeBytes]byte
	if _, err := io.ReadFull(c.nc, first[:]); err != nil {
		return fmt.Errorf("%w: no challenge (does the node run an earlier version?): %w", rdma.ErrBroken, err)
	}
	challenge, err := host.DecodeChallenge(first[:])
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	hello, err := host.NewHello(&c.as, c.number, &challenge, host.Binding{})
	if err != nil {
		return err
	}
	if _, err := c.nc.Write(hello.Append(appendIntro(nil))); err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	var b [host.WelcomeBytes + endpointBytes]byte
	if _, err := io.ReadFull(c.nc, b[:]); err != nil {
		return fmt.Errorf("%w: no welcome: %w", rdma.ErrBroken, err)
	}
	w, err := host.DecodeWelcome(b[:host.WelcomeBytes])
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	if w.Err != nil {
		return w.Err
	}
	peer, err := decodeEndpoint(b[host.WelcomeBytes:])
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	if err := c.dialer.device.caps.Agrees(c.dialer.config.Atomics, peer.acts); err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	c.acts = peer.acts
	own := claim{lane: c.number, nonce: peer.nonce}
	if err := c.dialer.device.join(lane, peer, own.append(nil), connectTimeout); err != nil {
		if err == errHeard {
			err = c.farewell()
		}
		if errors.Is(err, rdma.ErrRefused) {
			return err
		}
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	if c.sleep, err = newSleeper(lane); err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
	}
	c.welcome = w
	return nil
}

// drop destroys the queue pair, after which the device touches no buffer of this
// lane any more, and closes the socket, which tells the node.
// Preconditions: mu is held.
func (c *conn) drop() {
	if c.sleep != nil {
		c.sleep.close()
		c.sleep = nil
	}
	if c.lane != nil {
		closeLane(c.lane)
		c.lane, c.verbs = nil, nil
	}
	c.forget()
	c.ncMu.Lock()
	if c.nc != nil {
		c.nc.Close()
		c.nc = nil
	}
	c.ncMu.Unlock()
}

// fail gives the connection up: what is under way has no known outcome.
func (c *conn) fail(err error) {
	c.drop()
	c.dead, c.redials = fmt.Errorf("%w: node %s: %w", rdma.ErrBroken, c.addr, err), false
}

// removed is the outcome of all that a lane is asked once its device is gone.
func (c *conn) removed() error {
	return fmt.Errorf("%w: node %s: %s was removed: start this program again when it is back", rdma.ErrBroken, c.addr, c.dialer.device.caps.Device)
}

// vanish ends a lane whose device is removed, also one that is idle, or whose verbs still
// succeed: the removal waits for it.
func (c *conn) vanish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.drop()
		c.dead, c.redials = c.removed(), false
	}
}

// farewell reads why the node ended the connection.
func (c *conn) farewell() error {
	var room [answerBytes + baseBytes]byte
	b := room[:answerLen(c.acts)]
	c.nc.SetReadDeadline(time.Now().Add(time.Second))
	if _, err := io.ReadFull(c.nc, b); err != nil {
		return err
	}
	if a := decodeAnswer(b); a.kind == kindFarewell && a.err != nil {
		return a.err
	}
	return errPeer
}

// errDisconnected: the connection manager is the only one to say so.
var errDisconnected = fmt.Errorf("%w: the node's end of the queue pair is gone", rdma.ErrBroken)

// hear gives the connection up after the node has ended it, with the reason that the node sent. A refusal is
// the definite outcome of every chain posted later; chains under way have no known outcome.
func (c *conn) hear() {
	err := c.farewell()
	if errors.Is(err, rdma.ErrRefused) {
		c.drop()
		c.dead, c.redials = err, false
		return
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errDisconnected
	}
	c.fail(err)
}

// ask sends a request on the socket and waits for its answer.
func (c *conn) ask(ctx context.Context, r request) (answer, error) {
	c.tag++
	r.tag = c.tag
	nc := c.nc
	nc.SetDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var room [answerBytes + baseBytes]byte
	b := room[:answerLen(c.acts)]
	_, err := nc.Write(r.append(b[:0]))
	if err == nil {
		_, err = io.ReadFull(nc, b)
	}
	if err != nil {
		c.fail(err)
		return answer{}, c.dead
	}
	a := decodeAnswer(b)
	switch {
	case a.kind == kindFarewell:
		c.fail(a.err)
		if errors.Is(a.err, rdma.ErrRefused) {
			c.dead = a.err
		}
		return a, c.dead
	case a.kind != r.kind || a.tag != r.tag:
		c.fail(errPeer)
		return a, c.dead
	}
	return a, nil
}

// Open asks for a window. A region that was opened before keeps its slot.
func (c *conn) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead != nil && c.redials {
		if err := c.reconnect(ctx); err != nil {
			return rdma.Window{}, err
		}
	}
	if c.dead != nil {
		return rdma.Window{}, c.dead
	}
	slot := 0
	for slot < len(c.windows) && c.windows[slot].Region != region {
		slot++
	}
	if slot == host.MaxWindows {
		return rdma.Window{}, rdma.ErrLimit
	}
	w, err := c.open(ctx, region, epoch, int32(slot))
	if err != nil {
		return rdma.Window{}, err
	}
	if slot == len(c.windows) {
		c.windows = append(c.windows, w)
	} else {
		c.windows[slot] = w
	}
	return w.Window, nil
}

// open asks the node for the key of a region, and has the window in slot stand for it.
func (c *conn) open(ctx context.Context, region uint32, epoch uint64, slot int32) (window, error) {
	a, err := c.ask(ctx, request{kind: kindOpen, region: region, slot: slot, epoch: epoch})
	if err == nil {
		err = a.err
	}
	if err != nil {
		return window{}, err
	}
	return window{
		Window: rdma.Window{Region: region, Epoch: epoch, Key: a.key, Base: a.base, Bytes: a.bytes, Slot: slot, Flush: a.flush, Verifies: a.verifies},
		rkey:   a.rkey, flushes: a.flushes, acts: c.acts && region != rdma.Mailbox,
	}, nil
}

// reopen gives windows that the node still serves their slots back, under the
// same keys; the others answer ErrKey from now on.
func (c *conn) reopen(ctx context.Context) error {
	for i := range c.windows {
		old := &c.windows[i]
		if old.Key == 0 {
			continue
		}
		w, err := c.open(ctx, old.Region, old.Epoch, old.Slot)
		switch {
		case err == nil && w.Key == old.Key:
			*old = w
		case err == nil || errors.Is(err, rdma.ErrKey):
			old.Key = 0
		default:
			return err
		}
	}
	return nil
}

// reconnect connects again after a refusal, which leaves both queue pairs in error.
func (c *conn) reconnect(ctx context.Context) error {
	c.dialer.redialled.Add(1)
	return c.connect(ctx)
}

// reconnectBy is reconnect for a chain with a deadline.
func (c *conn) reconnectBy(deadline int64) {
	ctx, cancel := patience(deadline)
	defer cancel()
	c.reconnect(ctx)
}

// patience bounds how long connecting may take for a chain with a deadline.
func patience(deadline int64) (context.Context, context.CancelFunc) {
	limit := 10 * time.Second
	if deadline != 0 {
		limit = min(limit, time.Duration(deadline-clock.Now()))
	}
	return context.WithTimeout(context.Background(), limit)
}

// deepen connects again, with a queue pair that holds n work requests: those of a device
// cannot grow. Windows keep their keys.
// Preconditions: nothing is under way.
func (c *conn) deepen(n int, deadline int64) {
	for c.depth < n {
		c.depth *= 2
	}
	c.dialer.deepened.Add(1)
	ctx, cancel := patience(deadline)
	defer cancel()
	c.connect(ctx)
}

// Reset dials again: the welcome says that the node's old queue pair is gone, and
// ours was destroyed before we asked.
func (c *conn) Reset(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = c.queue[:0]
	return c.connect(ctx)
}

// Close may be called from any goroutine. It waits for the lane's own to leave.
func (c *conn) Close() error {
	c.end()
	c.ncMu.Lock()
	if c.nc != nil { // wakes a goroutine that polls it
		c.nc.CloseRead()
		c.nc.CloseWrite()
	}
	c.ncMu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	c.drop()
	c.dead, c.redials = errClosed, false
	err := c.release()
	d := c.dialer
	d.mu.Lock()
	delete(d.conns, c)
	d.mu.Unlock()
	return err
}

package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/futex"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// Dialer connects to nodes on this host by the path of their socket. Lanes of one
// Dialer share their mappings of a region. Safe for many goroutines.
type Dialer struct {
	mappings mappings // of all its lanes
}

// NewDialer is ready for use.
func NewDialer() *Dialer { return &Dialer{} }

// Provider is "shm".
func (d *Dialer) Provider() string { return "shm" }

// Dial connects a lane.
func (d *Dialer) Dial(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c := &conn{dialer: d, addr: addr, as: *as, lane: lane}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// conn is one lane; see rdma.Conn. Chains run in the lane's goroutine: Post executes, Wait does nothing.
type conn struct {
	dialer *Dialer          // shares its mappings with the dialer's other lanes
	addr   string           // path of the node's socket; constant
	as     rdma.Credentials // what the lane is dialled with; constant
	lane   uint32           // number within the session; constant
	opened windows          // windows by slot, to open them again after Reset; used by the lane's goroutine
	tag    uint32           // of the Open sent last; an answer with another one is late
	link   *link            // the present connection; used by the lane's goroutine

	mu     sync.Mutex // of link, against Close
	closed bool       // Close was called: connect refuses from now on
}

// link is a connection between two Resets.
type link struct {
	socket  *net.UnixConn // unixpacket; the link ends with it
	runner  *host.Runner  // executes chains on the mapped memory, behind the gate page
	welcome host.Welcome  // of the node
	answers chan answer   // of the reader
	ended   chan struct{} // closed when the reader has ended and all is unmapped

	mu     sync.Mutex // of what follows, against the reader's end
	mapped []*mapping // by slot
	over   bool       // the reader has ended: nothing may be mapped any more
}

// answer is the node's answer to an Open, with the memory's descriptor.
type answer struct {
	host.OpenAnswer
	memory *os.File // nil where there is no window; the receiver closes it
}

// connect makes the connection's link: socket, gate page and lane.
func (c *conn) connect(ctx context.Context) error {
	l, err := c.dialer.link(ctx, c.addr, &c.as, c.lane)
	if err != nil {
		return fmt.Errorf("shm node %s: %w", c.addr, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link = l
	if c.closed {
		l.close()
		return fmt.Errorf("shm node %s: %w: closed", c.addr, rdma.ErrBroken)
	}
	return nil
}

// link connects to the node's socket, and shakes hands.
func (d *Dialer) link(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (*link, error) {
	var dialer net.Dialer
	generic, err := dialer.DialContext(ctx, "unixpacket", addr)
	if err != nil {
		return nil, broken(err)
	}
	socket := generic.(*net.UnixConn)
	if err := rightPeer(socket, addr); err != nil {
		socket.Close()
		return nil, broken(err)
	}
	stop := context.AfterFunc(ctx, func() { socket.SetDeadline(time.Now()) })
	l, err := shake(socket, as, lane)
	if !stop() && err == nil {
		err = broken(ctx.Err())
	}
	if err != nil {
		socket.Close()
		return nil, err
	}
	socket.SetDeadline(time.Time{})
	l.answers, l.ended = make(chan answer, 1), make(chan struct{})
	go l.read(&d.mappings)
	return l, nil
}

// shake proves on a new socket that the client holds its ticket's key, and receives the gate
// page.
func shake(socket *net.UnixConn, as *rdma.Credentials, lane uint32) (*link, error) {
	buf := make([]byte, receiveBytes)
	b, page, err := receive(socket, buf)
	if err != nil {
		return nil, broken(fmt.Errorf("no challenge (does the node run an earlier version?): %w", err))
	}
	if page != nil {
		page.Close()
	}
	challenge, err := host.DecodeChallenge(b)
	if err != nil {
		return nil, err
	}
	hello, err := host.NewHello(as, lane, &challenge, host.Binding{})
	if err != nil {
		return nil, err
	}
	if err := send(socket, hello.Append(nil), nil); err != nil {
		return nil, broken(err)
	}
	if b, page, err = receive(socket, buf); err != nil {
		return nil, broken(err)
	}
	if page != nil {
		defer page.Close()
	}
	welcome, err := host.DecodeWelcome(b)
	if err == nil {
		err = welcome.Err
	}
	if err == nil && page == nil {
		err = broken(errors.New("the node sent no gate page"))
	}
	if err != nil {
		return nil, err
	}
	mem, err := host.JoinPage(page)
	if err != nil {
		return nil, err
	}
	runner, err := host.NewRunner(mem, as.Rights)
	return &link{socket: socket, runner: runner, welcome: welcome}, err
}

// broken marks an error of the socket: nothing runs on a link that is not made,
// and everything has run or never will on one that is.
func broken(err error) error { return fmt.Errorf("%w: %w", rdma.ErrBroken, err) }

// read passes on answers until the node, or close, ends the stream. Then nothing
// of the node's memory may stay mapped: a new incarnation of it may want it back.
func (l *link) read(m *mappings) {
	buf := make([]byte, receiveBytes)
	for {
		b, f, err := receive(l.socket, buf)
		if err != nil {
			break
		}
		a := answer{memory: f}
		if a.OpenAnswer, err = host.DecodeOpenAnswer(b); err == nil {
			select { // drop an answer whose caller has given up
			case old := <-l.answers:
				old.discard()
			default:
			}
			l.answers <- a
			continue
		}
		a.discard()
		break
	}
	l.socket.Close()
	l.runner.Lose()
	l.mu.Lock()
	l.over = true
	for slot := range l.mapped {
		l.unmap(m, int32(slot))
	}
	l.mu.Unlock()
	select {
	case a := <-l.answers:
		a.discard()
	default:
	}
	close(l.ended)
}

// discard closes memory that was received and is not used.
func (a *answer) discard() {
	if a.memory != nil {
		a.memory.Close()
	}
}

// close ends the link and returns when nothing is mapped any more.
func (l *link) close() {
	l.runner.Shut()
	l.socket.Close()
	<-l.ended
}

// unmap empties a slot.
// Preconditions: l.mu held; no chain can touch the slot.
func (l *link) unmap(m *mappings, slot int32) {
	if p := l.mapped[slot]; p != nil {
		l.mapped[slot] = nil
		m.leave(p)
	}
}

// use maps what an answer brought into a slot.
func (l *link) use(m *mappings, slot int32, a *answer, write bool) error {
	if a.memory == nil {
		return broken(errors.New("the node sent no memory"))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over { // a process that maps memory after the end of its session is killed
		return broken(errors.New("the node has ended the connection"))
	}
	p, err := m.enter(a.memory, a.Offset, a.Bytes, write, a.Flush != rdma.NoFlush)
	if err != nil {
		return err
	}
	for int(slot) >= len(l.mapped) {
		l.mapped = append(l.mapped, nil)
	}
	l.unmap(m, slot)
	l.mapped[slot] = p
	l.runner.Map(slot, a.Key, p.Mem[:a.Bytes], p.Flusher)
	return nil
}

// Provider is "shm".
func (c *conn) Provider() string { return "shm" }

// Peer is the node that answered.
func (c *conn) Peer() (node uint32, incarnation uint64) {
	return c.link.welcome.Node, c.link.welcome.Incarnation
}

// Post executes the chain.
func (c *conn) Post(ch *rdma.Chain) {
	w := &ch.To.Window
	ch.Done, ch.Err = c.link.runner.Run(w.Slot, w.Key, ch.Verbs)
	if ch.Err == rdma.ErrKey {
		c.drop(w.Slot)
	}
}

// Prefetch asks for memory.
func (c *conn) Prefetch(w *rdma.Window, off uint64, bytes int) {
	c.link.runner.Prefetch(w.Slot, off, bytes)
}

// drop unmaps a window whose key the node has made invalid.
func (c *conn) drop(slot int32) {
	l := c.link
	l.mu.Lock()
	defer l.mu.Unlock()
	if slot >= 0 && int(slot) < len(l.mapped) && !l.runner.Valid(slot) {
		l.runner.Map(slot, 0, nil, pmem.Flusher{})
		l.unmap(&c.dialer.mappings, slot)
	}
}

// Wait has nothing to wait for.
func (c *conn) Wait(*rdma.Chain, int64) {}

// Wake has the node look into the lane's mailbox.
func (c *conn) Wake(*rdma.Window) error {
	if err := send(c.link.socket, bell, nil); err != nil {
		return broken(err)
	}
	return nil
}

// Ring wakes the node's thread that sleeps on a word of the mailbox.
func (c *conn) Ring(w *rdma.Window, off uint64) { c.link.runner.WakeAt(w.Slot, off) }

// Sleep sleeps on a word of the mailbox, unless too many threads of this process do.
func (c *conn) Sleep(w *rdma.Window, off uint64, seen uint32, longest time.Duration) bool {
	thread, ok := futex.Take()
	if ok {
		c.link.runner.SleepAt(w.Slot, off, seen, longest)
		thread.Give()
	}
	return ok
}

// Open has the node send the region's memory, and maps it.
func (c *conn) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	slot, err := c.opened.slot(region)
	if err != nil {
		return rdma.Window{}, err
	}
	w, err := c.open(ctx, region, epoch, slot)
	if err != nil {
		return rdma.Window{}, err
	}
	c.opened.keep(w)
	return w, nil
}

// open is Open into a slot. Memory that the slot had before is unmapped first.
func (c *conn) open(ctx context.Context, region uint32, epoch uint64, slot int32) (rdma.Window, error) {
	l := c.link
	c.drop(slot)
	c.tag++
	request := host.OpenRequest{Tag: c.tag, Region: region, Epoch: epoch, Slot: slot}
	if err := send(l.socket, request.Append(nil), nil); err != nil {
		return rdma.Window{}, broken(err)
	}
	for {
		select {
		case a := <-l.answers:
			if a.Tag != c.tag { // of an Open that gave up waiting
				a.discard()
				continue
			}
			defer a.discard()
			if a.Err == nil {
				a.Err = l.use(&c.dialer.mappings, slot, &a, c.as.Rights == rdma.ReadWrite)
			}
			return rdma.Window{Region: region, Epoch: epoch, Key: a.Key, Bytes: a.Bytes, Slot: slot, Flush: a.Flush, Verifies: a.Verifies}, a.Err
		case <-l.ended:
			return rdma.Window{}, broken(errors.New("the node has ended the connection"))
		case <-ctx.Done():
			return rdma.Window{}, broken(ctx.Err())
		}
	}
}

// Reset ends the link: the node answers a new one only when nothing of the old one runs. It opens
// the windows again.
func (c *conn) Reset(ctx context.Context) error {
	c.link.close()
	if err := c.connect(ctx); err != nil {
		return err
	}
	for _, w := range c.opened {
		if w.Key == 0 {
			continue
		}
		if _, err := c.open(ctx, w.Region, w.Epoch, w.Slot); err != nil && !errors.Is(err, rdma.ErrKey) {
			return err
		}
	}
	return nil
}

// Close ends the link. Any goroutine may call it.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.link.close()
	return nil
}

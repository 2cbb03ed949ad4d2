package shm

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Inproc dials nodes of this very process, which it knows by an address of the
// caller's choice. Provider "inproc". Safe for many goroutines.
type Inproc struct {
	mu    sync.Mutex              // guards nodes
	nodes map[string]*host.Access // by address
}

// NewInproc knows no nodes yet.
func NewInproc() *Inproc { return &Inproc{nodes: make(map[string]*host.Access)} }

// Add makes a node reachable at addr, in the place of one that was there.
func (d *Inproc) Add(addr string, a *host.Access) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nodes[addr] = a
}

// Remove makes addr unreachable for new connections.
func (d *Inproc) Remove(addr string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.nodes, addr)
}

// Provider is "inproc".
func (d *Inproc) Provider() string { return "inproc" }

// Dial connects a lane.
func (d *Inproc) Dial(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c := &inprocConn{dialer: d, addr: addr, as: *as, number: lane}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// inprocConn is one lane; see rdma.Conn. Post executes the chain in the caller's goroutine.
type inprocConn struct {
	dialer *Inproc          // where Reset looks the node up again
	addr   string           // as given to Inproc.Add; constant
	as     rdma.Credentials // what the lane is dialled with; constant
	number uint32           // of the lane within its session; constant
	access *host.Access     // of the node that answered the last connect
	opened windows          // windows by slot, to open them again after Reset

	mu     sync.Mutex // of lane, against Close
	lane   *host.Lane // the present one; Reset replaces it
	closed bool       // Close was called: connect refuses from now on
}

// connect admits a lane at the node with the connection's ticket.
func (c *inprocConn) connect(ctx context.Context) error {
	c.dialer.mu.Lock()
	a := c.dialer.nodes[c.addr]
	c.dialer.mu.Unlock()
	if a == nil {
		return fmt.Errorf("node %s: %w: not in this process", c.addr, rdma.ErrBroken)
	}
	challenge := a.Challenge()
	hello, err := host.NewHello(&c.as, c.number, &challenge, host.Binding{})
	if err != nil {
		return fmt.Errorf("node %s: %w", c.addr, err)
	}
	lane, err := a.Admit(ctx, &hello, &challenge, host.Entry{Provider: "inproc"})
	if err != nil {
		return fmt.Errorf("node %s: %w", c.addr, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		lane.Leave()
		return fmt.Errorf("node %s: %w: closed", c.addr, rdma.ErrBroken)
	}
	c.access, c.lane = a, lane
	return nil
}

// Provider is "inproc".
func (c *inprocConn) Provider() string { return "inproc" }

// Peer is the node that answered.
func (c *inprocConn) Peer() (node uint32, incarnation uint64) { return c.access.Peer() }

// Post executes the chain.
func (c *inprocConn) Post(ch *rdma.Chain) {
	w := &ch.To.Window
	ch.Done, ch.Err = c.lane.Run(w.Slot, w.Key, ch.Verbs)
}

// Wait has nothing to wait for.
func (c *inprocConn) Wait(*rdma.Chain, int64) {}

// Open opens a region. The memory is this process's own: nothing is mapped.
func (c *inprocConn) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	slot, err := c.opened.slot(region)
	if err != nil {
		return rdma.Window{}, err
	}
	w, _, err := c.lane.Open(region, epoch, slot)
	if err == nil {
		c.opened.keep(w)
	}
	return w, err
}

// Reset leaves the node, which waits for the lane's verbs, and enters again. It opens the windows
// again.
func (c *inprocConn) Reset(ctx context.Context) error {
	c.lane.Leave()
	if err := c.connect(ctx); err != nil {
		return err
	}
	for _, w := range c.opened {
		if w.Key == 0 {
			continue
		}
		if _, _, err := c.lane.Open(w.Region, w.Epoch, w.Slot); err != nil && !errors.Is(err, rdma.ErrKey) {
			return err
		}
	}
	return nil
}

// Close leaves the node. Any goroutine may call it.
func (c *inprocConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.lane.Leave()
	return nil
}

// windows are those a connection has opened, by slot, to open them again after Reset.
type windows []rdma.Window

// slot is the one of a region, or a new one.
func (ws *windows) slot(region uint32) (int32, error) {
	for i := range *ws {
		if (*ws)[i].Region == region {
			return int32(i), nil
		}
	}
	if len(*ws) == host.MaxWindows {
		return 0, rdma.ErrLimit
	}
	*ws = append(*ws, rdma.Window{Region: region})
	return int32(len(*ws) - 1), nil
}

// keep records an open window by its slot.
func (ws windows) keep(w rdma.Window) { ws[w.Slot] = w }

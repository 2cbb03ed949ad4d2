//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/rdma"
)

// Dialer connects lanes over one RDMA device. Close it after its connections.
type Dialer struct {
	config    Config        // with defaults; constant
	device    *device       // open until Close
	buffers   buffers       // memory that verbs use without a copy; with a lock of its own
	copied    atomic.Uint64 // buffers that travelled through a stage
	redialled atomic.Uint64 // connections made again after a refusal
	flushed   atomic.Uint64 // native FLUSHes
	pushed    atomic.Uint64 // READs posted after WRITEs as a persistent FLUSH (method appliance)
	asked     atomic.Uint64 // ranges flushed by nodes
	acted     atomic.Uint64 // messages by which nodes executed chains
	parts     atomic.Uint64 // of chains that were posted
	deepened  atomic.Uint64 // connections made again for a longer send queue
	vector    atomic.Uint32 // of the completion queue made last
	gone      atomic.Bool   // the device is removed
	watch     *removal      // follows the removal of the device
	async     *events       // follows the device's asynchronous events

	mu     sync.Mutex         // guards conns and closed
	conns  map[*conn]struct{} // those that have not been closed, for Close and vanish
	closed bool               // Close was called
}

var _ rdma.Dialer = (*Dialer)(nil)

// NewDialer opens the device.
func NewDialer(c Config) (*Dialer, error) {
	dev, err := openDevice(c, netip.Addr{})
	if err != nil {
		return nil, err
	}
	d := &Dialer{config: c.withDefaults(), device: dev, conns: make(map[*conn]struct{})}
	d.buffers.access = dev.sinkAccess()
	if d.buffers.pd = C.q_pd(dev.ctx); d.buffers.pd == nil {
		dev.close()
		return nil, fmt.Errorf("protection domain on %s: the device has no more", dev.caps.Device)
	}
	if d.watch, err = d.device.watch(d.vanish); err != nil {
		C.q_free_pd(d.buffers.pd)
		dev.close()
		return nil, err
	}
	if d.async, err = dev.follow(func(_ string, kind eventKind) {
		if kind == eventFatal { // a lane whose queue is lost finds out by itself
			d.vanish()
		}
	}); err != nil {
		return nil, errors.Join(err, d.watch.close(), problem("freeing the protection domain", C.q_free_pd(d.buffers.pd)), dev.close())
	}
	return d, nil
}

// vanish ends all lanes of a device that is removed.
func (d *Dialer) vanish() {
	d.gone.Store(true)
	d.mu.Lock()
	conns := make([]*conn, 0, len(d.conns))
	for c := range d.conns {
		conns = append(conns, c)
	}
	d.mu.Unlock()
	for _, c := range conns {
		c.vanish()
	}
}

// Provider is "verbs".
func (*Dialer) Provider() string { return "verbs" }

// Caps describes the device in use.
func (d *Dialer) Caps() Caps { return d.device.caps }

// Stats is a snapshot.
func (d *Dialer) Stats() Stats {
	return Stats{Copied: d.copied.Load(), Registered: d.buffers.registered.Load(), Redialled: d.redialled.Load(), Flushed: d.flushed.Load(), Pushed: d.pushed.Load(), Asked: d.asked.Load(), Acted: d.acted.Load(), Parts: d.parts.Load(), Deepened: d.deepened.Load()}
}

// Register makes mapped memory, such as an Arena's, known as a source of
// buffers: verbs then use it without a copy. It must stay mapped until Close.
func (d *Dialer) Register(mem []byte) error { return d.buffers.add(mem) }

// Forget takes back what Register has made known.
// Preconditions: no verb uses the memory.
func (d *Dialer) Forget(mem []byte) error { return d.buffers.forget(mem) }

// Dial connects a lane to the node whose verbs server listens at host:port.
func (d *Dialer) Dial(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c := &conn{dialer: d, addr: addr, depth: leastDepth, as: *as, number: lane}
	c.opened, c.end = context.WithCancel(context.Background())
	if err := c.prepare(); err != nil {
		c.end()
		return nil, err
	}
	d.mu.Lock()
	d.conns[c] = struct{}{}
	d.mu.Unlock()
	c.mu.Lock()
	err := c.connect(ctx)
	c.mu.Unlock()
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close ends the dialer's connections and closes the device. A second time it does nothing.
func (d *Dialer) Close() error {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	var open []*conn
	for c := range d.conns {
		open = append(open, c)
	}
	d.mu.Unlock()
	if closed {
		return nil
	}
	for _, c := range open {
		c.Close()
	}
	d.async.close()
	if err := d.watch.close(); err != nil {
		return err
	}
	if err := d.buffers.close(); err != nil {
		return err
	}
	if err := problem("freeing the protection domain", C.q_free_pd(d.buffers.pd)); err != nil {
		return err
	}
	return d.device.close()
}

package storagenode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/storagenode/state"
)

// This file has the adapters of a node. Each is a domain of atomics: a region is served by the one that the controllers name when they
// open an epoch, to clients over verbs by its server, and to tcp clients by its loop.

// adapter is one that the node serves RDMA with.
type adapter struct {
	number   uint32       // on the node, from 0
	device   verbs.Config // settings
	caps     verbs.Caps   // of the device, when the node started
	listener net.Listener // queue pairs are exchanged there
	address  string       // of listener, as the table shows it

	server  *verbs.Server               // nil until a controller has answered
	shut    func(context.Context) error // server.Close
	loop    *verbs.Loop                 // nil unless the adapter executes the atomics
	retired atomic.Bool                 // nothing goes through the adapter any more
}

// errRetired: the node has lost the adapter.
var errRetired = fmt.Errorf("%w: the node has lost the adapter", rdma.ErrBroken)

// listen opens the port at which queue pairs are exchanged. several: the node has other adapters, so that the port is at the
// adapter's own address, unless RDMA.Listen says where.
func (a *adapter) listen(ctx context.Context, c *Config, several bool) error {
	at := c.RDMA.Listen
	switch {
	case at == "" && several && a.caps.RoCE && !a.caps.GID.IsLinkLocalUnicast():
		at = net.JoinHostPort(a.caps.GID.String(), "0")
	case at == "":
		name, err := c.fabricHost()
		if err != nil {
			return fmt.Errorf("storage node %s: fabric: %w", c.Name, err)
		}
		at = net.JoinHostPort(name, "0")
	case several:
		name, port, err := net.SplitHostPort(at)
		if err != nil {
			return fmt.Errorf("storage node %s: verbs: %w", c.Name, err)
		}
		if number, err := strconv.ParseUint(port, 10, 16); err == nil && number > 0 {
			at = net.JoinHostPort(name, strconv.FormatUint(number+uint64(a.number), 10))
		}
	}
	var lc net.ListenConfig
	var err error
	if a.listener, err = lc.Listen(ctx, "tcp", at); err != nil {
		return fmt.Errorf("storage node %s: verbs: %w", c.Name, err)
	}
	if ip := netip.MustParseAddrPort(a.listener.Addr().String()).Addr(); several && !ip.IsUnspecified() {
		a.address = a.listener.Addr().String()
		return nil
	}
	a.address, err = c.advertised("verbs", a.listener.Addr())
	return err
}

// endpoint is the adapter as the table shows it. A client that knows of one adapter alone takes a node with several for one
// without verbs, and uses tcp.
func (a *adapter) endpoint(several bool) *quarrypb.Endpoint {
	e := &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_VERBS, Address: a.address}
	if !several {
		return e
	}
	e.Provider, e.Adapter, e.Rail = quarrypb.Provider_PROVIDER_VERBS_ADAPTER, a.number, a.device.Rail
	e.Megabits = verbs.Megabits("/", a.caps.Device, a.caps.Port)
	if numa, known := host.AdapterNUMA("/", a.caps.Device); known {
		at := uint32(numa)
		e.Numa = &at
	}
	return e
}

// status describes the adapter.
func (a *adapter) status() Adapter {
	times, took := a.server.Registration()
	return Adapter{Device: a.caps.Device, Number: a.caps.Port, Port: verbs.ReadPort("/", a.caps.Device, a.caps.Port), Events: a.server.Events(), Lost: a.retired.Load(),
		Registrations: times, RegisterSeconds: took.Seconds(), AccessErrors: a.server.AccessErrors(), Expelled: a.server.Expelled(), VerifiedBytes: a.server.VerifiedBytes()}
}

// retire ends all access through the adapter. nil: no verb runs there any more, and none ever will.
func (a *adapter) retire(ctx context.Context) error {
	if err := a.end(ctx); err != nil {
		return err
	}
	a.retired.Store(true)
	return nil
}

// end closes the server, and waits for that until ctx ends: the driver of a device that has failed may hold the call that destroys a
// queue pair or a registration for ever, and a context does not end such a call. The memory stays pinned then.
func (a *adapter) end(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- a.shut(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("the access through %s has not ended: %w", a.caps.Device, ctx.Err())
	}
}

// close gives the device back.
// Preconditions: no lane of a tcp client has a way through it.
func (a *adapter) close(ctx context.Context) error {
	var err error
	if a.loop != nil {
		err = a.loop.Close()
	}
	if a.retired.Load() {
		return err
	}
	return errors.Join(err, a.end(ctx))
}

// lose gives up an adapter that has failed, and has the controllers told. Where another one is left, the node goes on: else, or if the
// access through this one does not end, the process has to end, and the kernel takes all access away.
func (n *Node) lose(a *adapter, cause error) {
	err := n.do(n.ctx, state.AdapterFailed{Adapter: a.number})
	if err == nil {
		err = n.do(n.ctx, state.AdapterRetired{Adapter: a.number})
	}
	switch {
	case n.ctx.Err() != nil:
	case err != nil:
		n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, errors.Join(cause, err))
	default:
		n.cfg.Logger.Warn("storage node: an adapter is lost: its regions go on by another one", "node", n.cfg.Name, "device", a.caps.Device, "adapter", a.number, "reason", cause)
	}
}

// crossroads is the way of tcp lanes to regions of several adapters: through the one that serves the region.
type crossroads struct {
	adapters []*adapter

	mu sync.RWMutex      // guards at
	at map[uint32]uint32 // adapter that serves a region, or served it last
}

// point leads lanes to a region through an adapter.
// Preconditions: no adapter serves the region.
func (x *crossroads) point(region, adapter uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.at[region] = adapter
}

// Lane makes the way of one lane. It connects to an adapter when a region there is opened.
func (x *crossroads) Lane(_ context.Context, t *rdma.Ticket) (host.RelayLane, error) {
	return &crossroadsLane{x: x, ticket: t, lanes: make([]host.RelayLane, len(x.adapters)), at: make(map[uint32]host.RelayLane)}, nil
}

// crossroadsLane is the way of one lane, whose goroutine owns it.
type crossroadsLane struct {
	x      *crossroads
	ticket *rdma.Ticket
	lanes  []host.RelayLane          // by adapter; nil until needed
	at     map[uint32]host.RelayLane // by region: that its window was opened on
}

// Open opens a region at the adapter that serves it.
func (l *crossroadsLane) Open(ctx context.Context, region uint32, epoch uint64) (*rdma.Target, error) {
	l.x.mu.RLock()
	number, known := l.x.at[region]
	l.x.mu.RUnlock()
	if !known {
		return nil, rdma.ErrKey
	}
	way, err := l.through(ctx, l.x.adapters[number])
	if err != nil {
		return nil, err
	}
	to, err := way.Open(ctx, region, epoch)
	if err == nil {
		l.at[region] = way
	}
	return to, err
}

// through is the lane's way through an adapter.
func (l *crossroadsLane) through(ctx context.Context, a *adapter) (host.RelayLane, error) {
	if a.retired.Load() {
		return nil, errRetired
	}
	if l.lanes[a.number] == nil {
		made, err := a.loop.Lane(ctx, l.ticket)
		if err != nil {
			return nil, err
		}
		l.lanes[a.number] = made
	}
	return l.lanes[a.number], nil
}

// Do executes a chain at the adapter that its window was opened at.
func (l *crossroadsLane) Do(c *rdma.Chain) {
	if way := l.at[c.To.Window.Region]; way != nil {
		way.Do(c)
		return
	}
	c.Done, c.Err = 0, rdma.ErrKey
}

// Close ends the lane's connections.
func (l *crossroadsLane) Close() error {
	var errs []error
	for _, way := range l.lanes {
		if way != nil {
			errs = append(errs, way.Close())
		}
	}
	return errors.Join(errs...)
}

// sessionsOf adds the sessions of an adapter's clients to a list that is sorted by serial.
func sessionsOf(a *adapter, all []host.SessionStatus) []host.SessionStatus {
	for _, v := range a.server.Sessions() {
		i, known := slices.BinarySearchFunc(all, v.Serial, func(s host.SessionStatus, serial uint64) int { return cmp.Compare(s.Serial, serial) })
		if known {
			all[i].Providers["verbs"] += v.Providers["verbs"]
			all[i].Usage.Add(v.Usage)
		} else {
			all = slices.Insert(all, i, v)
		}
	}
	return all
}

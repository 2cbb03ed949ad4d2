package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma/rail"
)

// Client is a connection to a cluster: one leased session at a time, and the lanes that work
// under it. Safe for concurrent use.
type Client struct {
	cfg           Config           // with defaults; never changes
	control       *controllerCalls // safe for concurrent use
	dialers       *dialers         // never changes; closed once no lane is in use
	hostID        string           // boot id of this host, "" if unknown; decides where shm is possible
	maxBeatPeriod time.Duration    // longest time between two heartbeats; never changes

	// ctx ends when Close ends the background goroutines, which wg counts.
	ctx    context.Context
	cancel context.CancelFunc // of ctx
	wg     sync.WaitGroup     // of heartbeats, table streams, trims and deferred frees
	// disposals counts the goroutines that wait for a busy lane of an ended session before
	// they free the session's memory (dispose). disposing is their number, for Close.
	disposals sync.WaitGroup
	disposing atomic.Int32

	// current is the session for new calls; never nil after Connect. It may have ended.
	current atomic.Pointer[session]
	binds   atomic.Bool   // Bind was called
	mu      sync.Mutex    // guards closed and opening
	closed  bool          // guarded by mu; Close has begun
	opening chan struct{} // guarded by mu; closed when the session that is being opened is current; nil if none is

	hot hot // objects that nodes are asked for first

	watches atomic.Pointer[watchHub] // nil before the first Watcher; stored under mu

	names atomic.Pointer[nameHub] // nil before the first Follow

	deferredFrees   deferredFrees // chunks of large objects still to be freed
	payloadKeys     payloadKeys   // what payloads are encrypted with, by tenant
	providers       sync.Map      // nodeAdapter -> nodeProvider: the provider that worked for it
	rails           []rail.Own    // of Config.Rails; never changes
	downs           rail.Downs    // addresses of nodes that did not answer lately
	crossed         sync.Map      // incarnation and rail, as nodeProvider: crossings that were warned of
	railEvents      railEvents
	past            pastStats     // sums of ended sessions
	pendingRaw      pendingRaw    // sessions that have ended in a change of a raw region
	clusterReplicas atomic.Uint32 // the cluster's default, as last heard from a controller; 0 before
}

// Connect opens a session with a cluster. ctx bounds the connecting only.
//
// Errors: ErrUnreachable if no controller answers; ctx's error; ErrArgument for a Config that is
// not valid; a plain error for a wrong token, or RDMA that is required and missing.
func Connect(ctx context.Context, cfg Config) (*Client, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, control: newControllerCalls(cfg), maxBeatPeriod: time.Second}
	c.deferredFrees.wake = make(chan struct{}, 1)
	c.payloadKeys = payloadKeys{rings: map[string]*payloadkey.Ring{}, missed: make(chan struct{}, 1)}
	var err error
	c.rails, _ = rail.ParseOwn(cfg.Rails) // validated
	if c.dialers, err = openDialers(&cfg); err != nil {
		return nil, err
	}
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		c.hostID = strings.TrimSpace(string(id))
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	s, err := c.openSession(ctx)
	if err != nil {
		c.cancel()
		c.control.close()
		return nil, errors.Join(err, c.dialers.close())
	}
	if n, standard := cfg.Replicas, int(c.clusterReplicas.Load()); n != 0 && n < standard {
		cfg.Logger.Warn("client: Config.Replicas asks for fewer replicas than the cluster's default", "replicas", n, "default", standard)
	}
	c.start(s)
	c.wg.Go(c.runDeferredFrees)
	if cfg.Keys != nil {
		c.wg.Go(c.refreshKeys)
	}
	return c, nil
}

// start makes s the session for new calls and starts its background goroutines.
func (c *Client) start(s *session) {
	if err := c.dialers.register(s.arena); err != nil {
		c.cfg.Logger.Warn("fabric: buffers will be copied", "reason", err)
	}
	c.current.Store(s)
	c.wg.Go(s.trimIdleLanes)
	c.wg.Go(s.restIdleLanes)
	c.wg.Go(func() { s.heartbeats(c.ctx) })
	c.wg.Go(func() {
		ctx, cancel := context.WithCancel(c.ctx)
		defer cancel()
		c.wg.Go(func() {
			defer cancel()
			select {
			case <-s.done:
			case <-ctx.Done():
			}
		})
		s.watchTable(ctx)
	})
}

// replace opens a new session after one that has ended, and asks the controller to fence the old
// one, so that other clients need not wait for its lease. The new session does not wait for that
// fence: a fence cannot complete while the last node of a region is gone.
func (c *Client) replace(old *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.opening != nil || c.current.Load() != old {
		return
	}
	opened := make(chan struct{})
	c.opening = opened
	c.wg.Go(func() {
		_, _ = request(c.control, c.ctx, &quarrypb.RevokeSessionRequest{Serial: old.ticket.Serial, Reason: "ended by its client", Proof: old.shown.Load().proof}, quarrypbconnect.ControllerClient.RevokeSession)
	})
	c.wg.Go(func() {
		s := c.openNext()
		if s != nil {
			c.past.add(old)
			c.start(s)
		}
		c.mu.Lock()
		c.opening = nil
		c.mu.Unlock()
		close(opened)
		if s != nil {
			c.retire(old) // waits for busy lanes; calls under the new session go on meanwhile
		}
	})
}

// openNext opens a session, with as many attempts as it takes. It returns nil once the Client
// is closed.
func (c *Client) openNext() *session {
	for c.ctx.Err() == nil {
		s, err := c.openSession(c.ctx)
		if err == nil {
			return s
		}
		select {
		case <-c.ctx.Done():
		case <-time.After(watchRetry):
		}
	}
	return nil
}

// retire closes the connections of an ended session and frees its memory.
func (c *Client) retire(s *session) {
	ctx, cancel := context.WithTimeout(c.ctx, DefaultTimeout)
	defer cancel()
	var busy []*lane
	for _, l := range s.lanes {
		if l.takeWhenIdle(ctx) != nil {
			busy = append(busy, l)
			continue
		}
		_ = l.close(ctx)
	}
	c.dispose(s, busy)
}

// dispose frees the memory of an ended session once the lanes in busy are idle. A call that
// does not return, such as one with a callback that blocks, delays that.
// Preconditions: the caller owns all other lanes of s and has closed them.
func (c *Client) dispose(s *session, busy []*lane) {
	if len(busy) == 0 {
		s.free()
		return
	}
	c.disposing.Add(1)
	c.disposals.Go(func() {
		defer c.disposing.Add(-1)
		ctx := context.Background()
		for _, l := range busy {
			_ = l.takeWhenIdle(ctx)
			_ = l.close(ctx)
		}
		s.free()
	})
}

// session returns the session for a new call: that of Bind, or the present one. While one is being opened it
// waits, at most until ctx ends or Config.Timeout has passed.
func (c *Client) session(ctx context.Context) (*session, error) {
	if c.binds.Load() { // or else save the search through the context
		if s, ok := ctx.Value(boundKey{}).(*session); ok && s.client == c {
			if err := s.err(); err != nil {
				return nil, err
			}
			return s, nil
		}
	}
	for {
		s := c.current.Load()
		if s.ended.Load() == nil {
			return s, nil
		}
		c.mu.Lock()
		closed, opening := c.closed, c.opening
		c.mu.Unlock()
		if closed {
			return nil, ErrClosed
		}
		if opening == nil {
			c.replace(s)
			continue
		}
		t := time.NewTimer(c.cfg.Timeout)
		select {
		case <-opening:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("%w: %w", s.err(), ctx.Err())
		case <-t.C:
			return nil, fmt.Errorf("%w: no new session within %v", s.err(), c.cfg.Timeout)
		}
	}
}

// onLane runs a call of a kind on a lane.
func (c *Client) onLane(ctx context.Context, k Kind, f func(*lane) error) error {
	l, err := c.lane(ctx, k)
	if err != nil {
		return err
	}
	err = f(l)
	c.done(l, err)
	return err
}

// lane takes an idle lane and starts a call on it. done ends the call.
func (c *Client) lane(ctx context.Context, k Kind) (*lane, error) { return c.laneFor(ctx, k, Ref{}) }

// laneFor is lane for a call whose first verb is a READ of ref. It prefetches the object's
// memory, so that the processor loads it while the call starts.
func (c *Client) laneFor(ctx context.Context, k Kind, ref Ref) (*lane, error) {
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	return s.laneFor(ctx, k, ref)
}

// laneFor is Client.laneFor under session s.
func (s *session) laneFor(ctx context.Context, k Kind, ref Ref) (*lane, error) {
	if s.client.cfg.ReadOnly && k.changes() {
		return nil, ErrReadOnly
	}
	l, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	if o := l.last; o != nil && o.Near != nil && o.ID == ref.Addr.Region() {
		l.slab.Prefetch(&o.Region, ref)
	}
	if err := l.start(ctx, k); err != nil {
		s.release(l)
		return nil, err
	}
	return l, nil
}

// done ends the call on l with its answer and gives the lane back.
func (c *Client) done(l *lane, err error) {
	l.finish(err)
	l.session.release(l)
}

// ReadOnly reports whether the Client's sessions cannot change memory.
func (c *Client) ReadOnly() bool { return c.cfg.ReadOnly }

// SessionID returns the number of the Client's present session: the one that its
// reservations of slabs name. A later session has another number.
func (c *Client) SessionID() uint32 { return c.current.Load().ticket.Session }

// Close gives back the slabs and connections that the Client holds and ends the session. It
// waits for calls that are running and for sets that are held (Held), at most DefaultTimeout, or two seconds if no controller
// answers. Later calls fail with ErrClosed. A second Close does nothing.
//
// On an error the session could not be closed in order: the controller fences it after its
// lease and frees what it held.
func (c *Client) Close() error { return c.closeWithin(c.closeTimeout()) }

// unreachableCloseTimeout bounds Close where no controller answers, first for the question
// whether one does, then for the rest.
const unreachableCloseTimeout = time.Second

// closeTimeout asks a controller for an answer and returns how long Close may take. Without
// controllers a session cannot be closed in order, so a longer wait would gain nothing.
func (c *Client) closeTimeout() time.Duration {
	ctx, cancel := context.WithTimeout(context.Background(), unreachableCloseTimeout)
	defer cancel()
	_, err := request(c.control, ctx, &quarrypb.ReadTableRequest{SinceRevision: c.current.Load().view.Load().table.Revision()}, quarrypbconnect.ControllerClient.ReadTable)
	if errors.Is(err, ErrUnreachable) || ctx.Err() != nil {
		return unreachableCloseTimeout
	}
	return DefaultTimeout
}

// closeWithin is Close with a bound on the wait for running calls. The lanes of calls that
// are still running keep the session's scratch memory until they end.
func (c *Client) closeWithin(timeout time.Duration) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	opening := c.opening
	c.mu.Unlock()
	if opening != nil {
		c.cancel()
		<-opening
	}
	c.endWatches()
	c.names.Load().end()
	c.finishDeferredFrees()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	err := c.current.Load().close(ctx)
	c.cancel()
	c.wg.Wait()
	c.control.close()
	if c.disposing.Load() > 0 {
		// Lanes that are still busy use the adapter.
		go func() {
			c.disposals.Wait()
			_ = c.dialers.close()
		}()
		return err
	}
	return errors.Join(err, c.dialers.close())
}

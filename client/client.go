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

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Client is a session with a cluster. Safe for many goroutines.
type Client struct {
	cfg       Config
	control   *control
	hostID    string
	beatEvery time.Duration
	ctx       context.Context
	cancel    context.CancelFunc
	wg        sync.WaitGroup

	current atomic.Pointer[session]
	mu      sync.Mutex
	closed  bool
	opening chan struct{} // non-nil while a new session is being opened; closed when done

	fabrics   *fabrics
	providers sync.Map // node id -> provider in use
	past      pastStats
}

// Connect opens a session. The context bounds the connecting only.
func Connect(ctx context.Context, cfg Config) (*Client, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, control: newControl(cfg), beatEvery: time.Second}
	var err error
	if c.fabrics, err = openFabrics(&cfg); err != nil {
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
		return nil, errors.Join(err, c.fabrics.close())
	}
	c.adopt(s)
	return c, nil
}

// adopt makes a session the one that calls use.
func (c *Client) adopt(s *session) {
	if err := c.fabrics.register(s.arena); err != nil {
		c.cfg.Logger.Warn("fabric: buffers will be copied", "reason", err)
	}
	c.current.Store(s)
	c.wg.Add(2)
	c.wg.Go(s.trim)
	go func() { defer c.wg.Done(); s.beat(c.ctx) }()
	go func() {
		defer c.wg.Done()
		ctx, cancel := context.WithCancel(c.ctx)
		defer cancel()
		c.wg.Go(func() {
			defer cancel()
			select {
			case <-s.done:
			case <-ctx.Done():
			}
		})
		s.watch(ctx)
	}()
}

// replace opens a session in the place of one that has ended, and has the old one
// fenced so that nobody waits for its lease.
func (c *Client) replace(old *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.opening != nil || c.current.Load() != old {
		return
	}
	done := make(chan struct{})
	c.opening = done
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		defer func() {
			c.mu.Lock()
			c.opening = nil
			c.mu.Unlock()
			close(done)
		}()
		_, _ = unary(c.control, c.ctx, &quarrypb.RevokeSessionRequest{Session: old.ticket.Session, Reason: "ended by its client"}, quarrypbconnect.ControllerClient.RevokeSession)
		for c.ctx.Err() == nil {
			s, err := c.openSession(c.ctx)
			if err == nil {
				c.past.add(old)
				c.adopt(s)
				c.retire(old)
				return
			}
			select {
			case <-c.ctx.Done():
			case <-time.After(watchRetry):
			}
		}
	}()
}

// retire closes the connections of an ended session as its lanes fall idle.
func (c *Client) retire(s *session) {
	ctx, cancel := context.WithTimeout(c.ctx, DefaultTimeout)
	defer cancel()
	for _, l := range s.lanes {
		if s.waiter.take(ctx, l) != nil {
			return // still in use
		}
		_ = l.close(ctx)
	}
	_ = c.fabrics.forget(s.arena)
}

// session is the session for a new call; it waits while one is being opened.
func (c *Client) session(ctx context.Context) (*session, error) {
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
		t := time.NewTimer(DefaultTimeout)
		select {
		case <-opening:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("%w: %w", s.err(), ctx.Err())
		case <-t.C:
			return nil, fmt.Errorf("%w: no new session within %v", s.err(), DefaultTimeout)
		}
	}
}

// on runs a call on a lane.
func (c *Client) on(ctx context.Context, k Kind, f func(*lane) error) error {
	l, err := c.lane(ctx, k)
	if err != nil {
		return err
	}
	err = f(l)
	c.done(l, err)
	return err
}

// lane takes a lane for a call; done gives it back.
func (c *Client) lane(ctx context.Context, k Kind) (*lane, error) { return c.laneFor(ctx, k, Ref{}) }

// laneFor is lane for a call that begins with a READ of an object: its memory is asked
// for before anything else is done, and comes nearer meanwhile.
func (c *Client) laneFor(ctx context.Context, k Kind, ref Ref) (*lane, error) {
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	l, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	if o := l.last; o != nil && o.Near != nil && o.ID == ref.Addr.Region() {
		l.slab.Foresee(&o.Region, ref)
	}
	if err := l.start(ctx, k); err != nil {
		s.release(l)
		return nil, err
	}
	return l, nil
}

func (c *Client) done(l *lane, err error) {
	l.finish(err)
	l.session.release(l)
}

// SessionID is the number that the Client's present session has in reservations.
func (c *Client) SessionID() uint32 { return c.current.Load().ticket.Session }

// Close gives back what the Client holds and ends the session. Calls still
// running are waited for, up to DefaultTimeout.
func (c *Client) Close() error {
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
	ctx, cancel := context.WithTimeout(context.Background(), DefaultTimeout)
	defer cancel()
	err := c.current.Load().close(ctx)
	c.cancel()
	c.wg.Wait()
	c.control.close()
	return errors.Join(err, c.fabrics.close())
}

// isSessionOver says whether a controller has given the session up.
func isSessionOver(err error) bool {
	var ce *connect.Error
	return errors.As(err, &ce) && (ce.Code() == connect.CodeNotFound || ce.Code() == connect.CodeFailedPrecondition)
}

// certify asks once whether a session is fenced everywhere.
func certify(serial uint64, holder uint32, fenced *bool) func(context.Context, quarrypbconnect.ControllerClient) error {
	return func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		res, err := cl.CertifyFence(ctx, connect.NewRequest(&quarrypb.CertifyFenceRequest{Serial: serial, Session: holder}))
		if err == nil {
			*fenced = res.Msg.Fenced
		}
		return err
	}
}

package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// controllerCalls sends requests to the controllers of a cluster. It asks the controller that
// answered last first, then the leader that a standby names, then the others in turn. Safe
// for concurrent use.
type controllerCalls struct {
	urls    []string                           // base URLs; never changes
	clients []quarrypbconnect.ControllerClient // one for each URL
	// heartbeats are clients of the same controllers over connections of their own. A call whose
	// context ends closes its HTTP/1 connection; controllers take the end of the connection of the
	// last heartbeat for a sign that the process has died.
	heartbeats []quarrypbconnect.ControllerClient
	current    atomic.Int32 // index of the controller to ask first
	http       [2]*http.Client
}

const (
	// tryTimeout bounds one request to one controller, so that a stopped controller does
	// not use up the caller's deadline.
	tryTimeout = 2 * time.Second
	// regionsTimeout bounds one request to make or remove the regions of a space: nodes make and clear up to 64 GiB of memory meanwhile.
	regionsTimeout = 30 * time.Second
	// connectTimeout bounds the connecting to a controller.
	connectTimeout = time.Second
	// electionTimeout is how long a request waits for controllers that answer but have no
	// leader; electionPause is the time between two rounds of requests meanwhile.
	electionTimeout = 8 * time.Second
	electionPause   = 50 * time.Millisecond
	// triesEach is how many requests each controller gets before the call fails.
	triesEach = 2
)

// newControllerCalls prepares calls to the controllers of a Config. It makes no connection.
func newControllerCalls(cfg Config) *controllerCalls {
	c := &controllerCalls{}
	for i := range c.http {
		c.http[i] = &http.Client{Transport: cfg.Wire.Transport(userdir.Transport(&http.Transport{
			TLSClientConfig:     cfg.TLS,
			MaxIdleConnsPerHost: 8,
			IdleConnTimeout:     90 * time.Second,
			DialContext:         (&net.Dialer{Timeout: connectTimeout}).DialContext,
			ForceAttemptHTTP2:   true,
		}))}
	}
	token := connect.WithInterceptors(cfg.caller())
	for _, u := range cfg.Controllers {
		u = strings.TrimRight(u, "/")
		c.urls = append(c.urls, u)
		c.clients = append(c.clients, quarrypbconnect.NewControllerClient(c.http[0], u, token))
		c.heartbeats = append(c.heartbeats, quarrypbconnect.NewControllerClient(c.http[1], u, token))
	}
	return c
}

// close closes idle connections to the controllers.
func (c *controllerCalls) close() {
	for _, h := range c.http {
		h.CloseIdleConnections()
	}
}

// callOptions say how a request is retried.
type callOptions struct {
	// tryTimeout bounds each try.
	tryTimeout time.Duration
	// patient: a controller that is the only one has the time that the call has left.
	patient bool
	// electionTimeout is how long to go on while controllers answer that none leads.
	electionTimeout time.Duration
	// atMostOnce: the request must not be carried out twice. The call ends with ErrUnknown
	// if a try may have reached a controller and brought no answer.
	atMostOnce bool
	// heartbeat: the request goes over the connection of heartbeats.
	heartbeat bool
}

// usual are the options of most calls.
var usual = callOptions{tryTimeout: tryTimeout, patient: true, electionTimeout: electionTimeout}

// try is one request to one controller.
type try func(context.Context, quarrypbconnect.ControllerClient) error

// do sends a request to one controller after the other until one has decided it.
//
// It returns nil, the *connect.Error of the controller's refusal, or one of:
//   - an error that wraps ctx.Err(): ctx ended. It wraps ErrUnreachable too only if a
//     controller had failed to answer before.
//   - ErrUnreachable: each controller has failed to answer triesEach times. If one waits for a leader, or closes
//     connections, the call goes on for electionTimeout first.
//   - ErrUnknown, with atMostOnce: the request may have been carried out.
func (c *controllerCalls) do(ctx context.Context, opt callOptions, f try) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var last error    // why the tries so far failed; not why ctx ended
	var closes uint64 // a bit for each controller that closed the connection of its last try without an answer
	elected := clock.In(opt.electionTimeout)
	clients := c.clients
	if opt.heartbeat {
		clients = c.heartbeats
	}
	for n := 1; ; n++ {
		i := int(c.current.Load())
		opt.tryTimeout = c.timeOfTry(ctx, opt, n)
		tctx, cancel := context.WithTimeout(ctx, opt.tryTimeout)
		err := f(tctx, clients[i])
		cancel()
		if err == nil {
			return nil
		}
		if refusal := decided(err); refusal != nil {
			return refusal
		}
		ended := endedBy(ctx, err)
		if opt.atMostOnce && !undelivered(err) {
			if ended == nil {
				ended = opt.rootCause(err)
			}
			return fmt.Errorf("%w: controller %s: %w", ErrUnknown, c.urls[i], ended)
		}
		if ended == nil {
			c.next(i, err)
			bit := uint64(1) << (i % 64)
			if closes &^= bit; dropped(err) {
				closes |= bit
			}
			// A standby's answer says more than a closed connection, and that more than silence.
			if electing(err) || !electing(last) && (dropped(err) || closes == 0) {
				last = err
			}
			if !c.tryAgain(ctx, n, (electing(last) || closes != 0) && clock.Now() <= elected) {
				return c.unreachable(opt.rootCause(last))
			}
			ended = ctx.Err()
		}
		switch {
		case ended == nil:
		case last == nil:
			return fmt.Errorf("the call ended before controller %s had answered: %w", c.urls[i], ended)
		default:
			return c.unreachable(fmt.Errorf("%w; the call ended: %w", opt.rootCause(last), ended))
		}
	}
}

// timeOfTry is how long try n may take. A try that is cut short leaves time for the other
// controllers. Where there is no other, it leaves time for as many tries as are due.
func (c *controllerCalls) timeOfTry(ctx context.Context, opt callOptions, n int) time.Duration {
	d, ok := ctx.Deadline()
	if !ok || !opt.patient || len(c.clients) > 1 {
		return opt.tryTimeout
	}
	return max(opt.tryTimeout, time.Until(d)/time.Duration(max(1, triesEach+1-n)))
}

// tryAgain reports whether another try is due after n have failed. While a controller is waited for, until it is
// elected or has a place for the connection, it pauses between two rounds of all controllers.
func (c *controllerCalls) tryAgain(ctx context.Context, n int, wait bool) bool {
	round := triesEach * len(c.clients)
	switch {
	case n < round:
		return true
	case !wait:
		return false
	case n%round == 0:
		select {
		case <-ctx.Done():
		case <-time.After(electionPause):
		}
	}
	return true
}

// unreachable is the error of a call that no controller has answered.
func (c *controllerCalls) unreachable(cause error) error {
	return fmt.Errorf("%w: no controller answers at %s: %w", ErrUnreachable, strings.Join(c.urls, ", "), cause)
}

// decided returns the error of a request that a controller has carried out or refused, and
// nil if the request may be sent again.
func decided(err error) error {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return nil
	}
	switch ce.Code() {
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeCanceled:
		return nil
	case connect.CodeUnknown:
		return fmt.Errorf("%w: %w", ErrUnknown, ce)
	}
	return ce
}

// deadlineUnit is the unit in which a request carries its deadline, rounded down. So a
// controller may give up a request this much earlier than the caller's clock does.
const deadlineUnit = time.Millisecond

// endedBy returns the error of ctx if the end of ctx made a try fail with err, else nil.
func endedBy(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if d, ok := ctx.Deadline(); ok && connect.CodeOf(err) == connect.CodeDeadlineExceeded && time.Until(d) <= deadlineUnit {
		return context.DeadlineExceeded
	}
	return nil
}

// rootCause strips the layers of a failed try that only repeat the address and the method.
// A try that used up its own timeout is not an error of the caller's context.
func (opt callOptions) rootCause(err error) error {
	var op *net.OpError
	var ce *connect.Error
	switch {
	case errors.As(err, &op) && op.Timeout():
		return fmt.Errorf("no connection within %v", min(opt.tryTimeout, connectTimeout))
	case errors.As(err, &op):
		return op.Err
	case !connect.IsWireError(err) && errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no answer within %v", opt.tryTimeout)
	case errors.As(err, &ce):
		return &controllerMessage{ce}
	}
	return err
}

// controllerMessage prints a controller's message without the code in front of it.
type controllerMessage struct{ cause *connect.Error }

func (e *controllerMessage) Error() string { return e.cause.Message() }
func (e *controllerMessage) Unwrap() error { return e.cause }

// undelivered reports whether a failed request has certainly not been carried out: no
// connection was made, or the controller answered that it does not lead.
func undelivered(err error) bool {
	var op *net.OpError
	return electing(err) || errors.As(err, &op) && op.Op == "dial"
}

// electing reports whether err is the answer of a controller that does not lead. Such an
// answer carries LeaderHeader, which is empty while there is no leader.
func electing(err error) bool {
	var ce *connect.Error
	return errors.As(err, &ce) && ce.Code() == connect.CodeUnavailable && len(ce.Meta().Values(quarrypb.LeaderHeader)) > 0
}

// dropped reports whether the connection of a try was closed without an answer: a port that strangers flood with
// handshakes closes the oldest of them, and that may be this caller's. A controller that has ended refuses connections.
func dropped(err error) bool {
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return strings.Contains(err.Error(), "server closed idle connection") // net/http exports no value for it
}

// next chooses the controller to ask after controller i has failed with err.
func (c *controllerCalls) next(i int, err error) {
	to := (i + 1) % len(c.clients)
	var ce *connect.Error
	if errors.As(err, &ce) {
		if leader := strings.TrimRight(ce.Meta().Get(quarrypb.LeaderHeader), "/"); leader != "" {
			for j, u := range c.urls {
				if u == leader {
					to = j
				}
			}
		}
	}
	c.current.CompareAndSwap(int32(i), int32(to))
}

// request sends an idempotent request: it may be carried out more than once.
func request[Q, A any](c *controllerCalls, ctx context.Context, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	var out *A
	err := c.do(ctx, usual, tryOf(&out, q, method))
	return out, err
}

// requestOnce sends a request that must not be carried out twice; see callOptions.atMostOnce.
func requestOnce[Q, A any](c *controllerCalls, ctx context.Context, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	return requestOnceWithin(c, ctx, tryTimeout, q, method)
}

// requestOnceWithin is requestOnce of a request that may take as long.
func requestOnceWithin[Q, A any](c *controllerCalls, ctx context.Context, within time.Duration, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	var out *A
	opt := usual
	opt.atMostOnce, opt.tryTimeout = true, within
	err := c.do(ctx, opt, tryOf(&out, q, method))
	return out, err
}

// tryOf makes a try of a generated method. It stores the answer in out.
func tryOf[Q, A any](out **A, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) try {
	return func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		res, err := method(cl, ctx, connect.NewRequest(q))
		if err == nil {
			*out = res.Msg
		}
		return err
	}
}

// watchTable receives table changes from one controller and applies them until the stream ends.
func (c *controllerCalls) watchTable(ctx context.Context, since uint64, apply func(*quarrypb.Table) error) error {
	i := int(c.current.Load())
	st, err := c.clients[i].WatchTable(ctx, connect.NewRequest(&quarrypb.WatchTableRequest{SinceRevision: since}))
	if err != nil {
		return err
	}
	defer st.Close()
	for st.Receive() {
		if err := apply(st.Msg()); err != nil {
			return err
		}
	}
	return st.Err()
}

// watchNames receives pushes of names from controller i and applies them until the stream ends.
func (c *controllerCalls) watchNames(ctx context.Context, i int, names []string, apply func(*quarrypb.NamesUpdate)) error {
	st, err := c.clients[i].WatchNames(ctx, connect.NewRequest(&quarrypb.WatchNamesRequest{Names: names}))
	if err == nil {
		defer st.Close()
		for st.Receive() {
			apply(st.Msg())
		}
		err = st.Err()
	}
	if err != nil && electing(err) {
		c.next(i, err)
	}
	return err
}

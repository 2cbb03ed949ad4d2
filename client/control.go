package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// control calls controllers: the last that answered first, the leader that a
// standby names next, then the others in turn.
type control struct {
	urls    []string
	clients []quarrypbconnect.ControllerClient
	current atomic.Int32
	http    *http.Client
	token   string
}

const (
	// callTimeout bounds one try at one controller, so that a stopped one does not
	// use up the caller's deadline.
	callTimeout = 2 * time.Second
	// electionPatience is how long controllers that are there may take to agree on a
	// leader; electionPause is between two rounds of questions.
	electionPatience = 8 * time.Second
	electionPause    = 50 * time.Millisecond
)

func newControl(cfg Config) *control {
	tr := &http.Transport{
		TLSClientConfig:     cfg.TLS,
		MaxIdleConnsPerHost: 8,
		IdleConnTimeout:     90 * time.Second,
		DialContext:         (&net.Dialer{Timeout: time.Second}).DialContext,
		ForceAttemptHTTP2:   true,
	}
	c := &control{http: &http.Client{Transport: tr}, token: cfg.Token}
	for _, u := range cfg.Controllers {
		u = strings.TrimRight(u, "/")
		c.urls = append(c.urls, u)
		c.clients = append(c.clients, quarrypbconnect.NewControllerClient(c.http, u, connect.WithInterceptors(agentauth.Token(cfg.Token))))
	}
	return c
}

func (c *control) close() { c.http.CloseIdleConnections() }

// call runs f against one controller after the other until one has an answer of
// its own. It gives every controller two tries within the context's deadline, and
// more while one of them is there but nobody leads.
func (c *control) call(ctx context.Context, f func(context.Context, quarrypbconnect.ControllerClient) error) error {
	return c.callFor(ctx, manner{each: callTimeout, patience: electionPatience}, f)
}

// manner of a call.
type manner struct {
	each     time.Duration // bound on each try
	patience time.Duration // with controllers that are there and have no leader
	// once: the request must not be carried out twice. ErrUnknown when it may have
	// arrived and no answer came.
	once bool
}

// callFor is call in another manner.
func (c *control) callFor(ctx context.Context, how manner, f func(context.Context, quarrypbconnect.ControllerClient) error) error {
	var last error
	patience := clock.In(how.patience)
	for try := 1; ; try++ {
		i := int(c.current.Load())
		tctx, cancel := context.WithTimeout(ctx, how.each)
		err := f(tctx, c.clients[i])
		cancel()
		if err == nil {
			return nil
		}
		var ce *connect.Error
		if errors.As(err, &ce) && ce.Code() != connect.CodeUnavailable && ce.Code() != connect.CodeDeadlineExceeded && ce.Code() != connect.CodeCanceled {
			if ce.Code() == connect.CodeUnknown {
				return fmt.Errorf("%w: %w", ErrUnknown, ce)
			}
			return ce
		}
		if how.once && !undelivered(err) {
			return fmt.Errorf("%w: controller %s: %w", ErrUnknown, c.urls[i], plain(err))
		}
		if !electing(err) && electing(last) {
			err = last // what a controller has said says more than silence
		}
		last = err
		c.next(i, ce)
		if round := 2 * len(c.clients); try >= round {
			if !electing(last) || clock.Now() > patience {
				break
			}
			if try%round == 0 {
				select {
				case <-ctx.Done():
				case <-time.After(electionPause):
				}
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	return fmt.Errorf("%w: no controller answers at %s: %w", ErrUnreachable, strings.Join(c.urls, ", "), plain(last))
}

// plain is the root of a failed call: what the layers above it add is the address,
// which is named anyway, and the method.
func plain(err error) error {
	var op *net.OpError
	var ce *connect.Error
	switch {
	case errors.As(err, &op):
		return op.Err
	case errors.Is(err, context.DeadlineExceeded):
		return context.DeadlineExceeded
	case errors.As(err, &ce):
		return &plainError{ce}
	}
	return err
}

// plainError says what a controller said, without the code in front of it.
type plainError struct{ cause *connect.Error }

func (e *plainError) Error() string { return e.cause.Message() }
func (e *plainError) Unwrap() error { return e.cause }

// undelivered says whether a failed request has certainly not been carried out:
// nobody was reached, or a controller said that it does not lead.
func undelivered(err error) bool {
	var op *net.OpError
	return electing(err) || errors.As(err, &op) && op.Op == "dial"
}

// electing says whether an error is the answer of a controller that does not lead. It
// names the leader, if there is one.
func electing(err error) bool {
	var ce *connect.Error
	return errors.As(err, &ce) && ce.Code() == connect.CodeUnavailable && len(ce.Meta().Values(quarrypb.LeaderHeader)) > 0
}

// next chooses whom to ask after controller i did not answer.
func (c *control) next(i int, err *connect.Error) {
	to := (i + 1) % len(c.clients)
	if err != nil {
		if leader := strings.TrimRight(err.Meta().Get(quarrypb.LeaderHeader), "/"); leader != "" {
			for j, u := range c.urls {
				if u == leader {
					to = j
				}
			}
		}
	}
	c.current.CompareAndSwap(int32(i), int32(to))
}

// unary adapts a generated method to one answer message; it may be carried out twice.
func unary[Q, A any](c *control, ctx context.Context, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	var out *A
	err := c.call(ctx, oneTry(&out, q, method))
	return out, err
}

// oneTry is one request to one controller.
func oneTry[Q, A any](out **A, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) func(context.Context, quarrypbconnect.ControllerClient) error {
	return func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		res, err := method(cl, ctx, connect.NewRequest(q))
		if err == nil {
			*out = res.Msg
		}
		return err
	}
}

// change is unary for what must not be carried out twice.
func change[Q, A any](c *control, ctx context.Context, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	var out *A
	err := c.callFor(ctx, manner{each: callTimeout, patience: electionPatience, once: true}, oneTry(&out, q, method))
	return out, err
}

// watch follows the table of one controller until the stream ends.
func (c *control) watch(ctx context.Context, since uint64, apply func(*quarrypb.Table) error) error {
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

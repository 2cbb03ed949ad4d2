package flight

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

const (
	// TenantHeader is the header of a call that names the tenant, for callers that may work in several.
	TenantHeader = "quarry-tenant"

	tokenHeader    = "authorization"
	bearer         = "bearer "
	maxTokenBytes  = 512
	maxTenantBytes = 63
	flightService  = "/arrow.flight.protocol.FlightService/"
	healthService  = "/grpc.health.v1.Health/"
	healthCheck    = healthService + "Check"
	// maxStrangers is how many calls may run at a time whose token had no open session yet: each may send a message of Config.MessageBytes
	// before its token is checked.
	maxStrangers = 16
	// maxFirst is how many streams of a caller may wait for their first message at a time, and firstMessage how long they may.
	maxFirst     = 4
	firstMessage = 10 * time.Second
	// maxShort is how many calls may run at a time that are no streams of batches, and shortCall how long one may take.
	maxShort  = 64
	shortCall = 2 * time.Minute
)

// principal is who makes a call, as far as the call says it.
type principal struct {
	token, tenant string
}

// key is what sessions are kept by: no token is kept in a map.
func (p principal) key() callerKey { return callerKey{sha256.Sum256([]byte(p.token)), p.tenant} }

// callerKey is a principal with a hash in the place of the token.
type callerKey struct {
	token  tokenHash
	tenant string
}

type tokenHash [sha256.Size]byte

// principalOf reads the headers of a call.
func principalOf(h metadata.MD) (p principal, err error) {
	one := func(name string, most int) (string, error) {
		v := h.Get(name)
		if len(v) == 0 {
			return "", nil
		}
		if len(v) > 1 || len(v[0]) > most {
			return "", status.Errorf(codes.Unauthenticated, "header %s: want it once, with at most %d bytes", name, most)
		}
		return v[0], nil
	}
	if p.tenant, err = one(TenantHeader, maxTenantBytes); err != nil {
		return p, err
	}
	shown, err := one(tokenHeader, len(bearer)+maxTokenBytes)
	if err != nil || shown == "" {
		return p, err
	}
	if len(shown) <= len(bearer) || !strings.EqualFold(shown[:len(bearer)], bearer) {
		return p, status.Errorf(codes.Unauthenticated, "header %s: want Bearer TOKEN, with a token of the cluster (quarry token create)", tokenHeader)
	}
	p.token = shown[len(bearer):]
	return p, nil
}

// gate counts calls.
type gate struct {
	strangers atomic.Int64

	mu    sync.Mutex
	short int               // calls that are no streams of batches
	of    map[tokenHash]int // these by token
}

// slot is the place of a call that is no stream of batches. It is free again when the call has ended and its answer is written.
type slot struct {
	g      *gate
	token  tokenHash
	stream context.Context // of the call, which has no shortCall
	uses   atomic.Int64
}

// enter takes a slot, which is used once; one token has at most half of them.
func (g *gate) enter(stream context.Context, token tokenHash) *slot {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.short >= maxShort || token != noToken && g.of[token] >= maxShort/2 {
		return nil
	}
	if g.of == nil {
		g.of = map[tokenHash]int{}
	}
	g.short++
	g.of[token]++
	s := &slot{g: g, token: token, stream: stream}
	s.uses.Store(1)
	return s
}

// hold uses a slot until what it returns is called. A slot that is free stays so: the call has gone, and so will its answer.
func (s *slot) hold() (leave func(bool)) {
	for {
		n := s.uses.Load()
		if n == 0 {
			return func(bool) {}
		}
		if s.uses.CompareAndSwap(n, n+1) {
			return func(bool) { s.leave() }
		}
	}
}

// leave ends a use of a slot.
func (s *slot) leave() {
	if s.uses.Add(-1) > 0 {
		return
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.g.short--
	if s.g.of[s.token]--; s.g.of[s.token] == 0 {
		delete(s.g.of, s.token)
	}
}

type slotContext struct{}

func slotOf(ctx context.Context) *slot { return ctx.Value(slotContext{}).(*slot) }

// tap looks at the headers of a call before anything else of it is read. It refuses callers that show nothing, and strangers that are too many.
func (s *Server) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	refuse := func(c codes.Code, format string, args ...any) (context.Context, error) {
		s.stats.refused.Add(1)
		return nil, status.Errorf(c, format, args...)
	}
	if strings.HasPrefix(info.FullMethodName, healthService) {
		if info.FullMethodName != healthCheck {
			return refuse(codes.Unimplemented, "%s: only Check is served", info.FullMethodName)
		}
	} else {
		p, err := principalOf(info.Header)
		if err != nil {
			s.stats.refused.Add(1)
			return nil, err
		}
		if p.token == "" && !s.cfg.Open {
			return refuse(codes.Unauthenticated, "no token: send the header %s: Bearer TOKEN, with a token of the cluster (quarry token create)", tokenHeader)
		}
		key := p.key()
		if !s.callers.knows(key) {
			in := s.stranger(ctx)
			if in == nil {
				return refuse(codes.ResourceExhausted, "%d calls with tokens that are not known yet run already: try again", maxStrangers)
			}
			ctx = in
		}
		if _, streams := streamsOfBatches[info.FullMethodName]; streams {
			return ctx, nil
		}
		place := s.calls.enter(ctx, key.token)
		if place == nil {
			noStranger(ctx) // gRPC does not end the context of a call that is refused here
			return refuse(codes.ResourceExhausted, "%d calls run already, or half as many of this caller: try again", maxShort)
		}
		if info.FullMethodName != flightService+"ListFlights" { // its messages have limits of their own
			within, cancel := context.WithTimeout(ctx, shortCall)
			context.AfterFunc(ctx, cancel)
			ctx = within
		}
		context.AfterFunc(ctx, place.leave)
		return context.WithValue(ctx, slotContext{}, place), nil
	}
	in := s.stranger(ctx)
	if in == nil {
		return refuse(codes.ResourceExhausted, "%d calls with tokens that are not known yet run already: try again", maxStrangers)
	}
	return in, nil
}

type strangerContext struct{}

// stranger counts a call of a stranger until its caller has a session (noStranger) or it ends, and returns its context; nil if there are too many.
func (s *Server) stranger(ctx context.Context) context.Context {
	if s.calls.strangers.Add(1) > maxStrangers {
		s.calls.strangers.Add(-1)
		return nil
	}
	leave := sync.OnceFunc(func() { s.calls.strangers.Add(-1) })
	context.AfterFunc(ctx, leave)
	return context.WithValue(ctx, strangerContext{}, leave)
}

// noStranger says that a call counts no more as one of a stranger.
func noStranger(ctx context.Context) {
	if leave, ok := ctx.Value(strangerContext{}).(func()); ok {
		leave()
	}
}

// streamsOfBatches are the calls whose streams are counted by themselves.
var streamsOfBatches = map[string]struct{}{flightService + "DoGet": {}, flightService + "DoPut": {}}

type callerContext struct{}

// callerOf is who makes the call.
func callerOf(ctx context.Context) *caller { return ctx.Value(callerContext{}).(*caller) }

// admit opens, or finds, the session of a call's principal; leave gives it back.
func (s *Server) admit(ctx context.Context) (in context.Context, leave func(), err error) {
	h, _ := metadata.FromIncomingContext(ctx)
	p, err := principalOf(h)
	if err != nil {
		return nil, nil, err
	}
	c, err := s.callers.enter(ctx, p)
	if err != nil {
		return nil, nil, err
	}
	noStranger(ctx)
	if from, ok := peer.FromContext(ctx); ok {
		if info, ok := from.AuthInfo.(peerInfo); ok {
			info.authenticated()
		}
	}
	return context.WithValue(ctx, callerContext{}, c), func() { s.callers.leave(c) }, nil
}

// serve runs a call for its caller, and counts it. A panic is the call's error: what a caller sends must not end the server.
func (s *Server) serve(ctx context.Context, method string, call func(context.Context) error) (err error) {
	if method == healthCheck {
		return call(ctx)
	}
	defer func() {
		if p := recover(); p != nil {
			s.cfg.Logger.Error("flight: a call failed and was ended", "method", method, "panic", p, "stack", string(debug.Stack()))
			err = status.Errorf(codes.Internal, "%v; the server's log has more", fmt.Sprint(p))
		}
		s.stats.calls.Add(1)
		if err != nil {
			s.stats.failed.Add(1)
			err = asStatus(err)
		}
	}()
	// What gRPC compresses is another message, whose end is not told.
	if err := grpc.SetSendCompressor(ctx, encoding.Identity); err != nil {
		return err
	}
	ctx, leave, err := s.admit(ctx)
	if err != nil {
		return err
	}
	defer leave()
	return call(ctx)
}

func (s *Server) unary(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (out any, err error) {
	err = s.serve(ctx, info.FullMethod, func(ctx context.Context) (err error) {
		if out, err = next(ctx, q); err == nil && info.FullMethod != healthCheck {
			place := slotOf(ctx)
			o := s.outgoing(place.stream, out, place.hold())
			o.send()
			out = o
		}
		return err
	})
	return out, err
}

func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return s.serve(ss.Context(), info.FullMethod, func(ctx context.Context) error {
		a := &admitted{ServerStream: ss, s: s, ctx: ctx, limit: s.cfg.SlowReader}
		a.ctx = context.WithValue(ctx, admittedContext{}, a)
		return cmp.Or(next(srv, a), a.drain())
	})
}

// admitted is a stream whose context names the caller, and whose caller has to go on.
type admitted struct {
	grpc.ServerStream
	s     *Server
	ctx   context.Context
	last  *outgoing     // that was sent
	limit time.Duration // for a message
	begun bool          // the first message has come
}

type admittedContext struct{}

// streamOf is the stream of a call.
func streamOf(ctx context.Context) *admitted { return ctx.Value(admittedContext{}).(*admitted) }

func (a *admitted) Context() context.Context { return a.ctx }

// RecvMsg waits for a message, for a time: a caller that sends nothing keeps no slot. First messages of a caller come few at a time, because no slot
// is taken for them.
func (a *admitted) RecvMsg(m any) error {
	if a.begun {
		return a.receive(a.ctx, a.limit, m)
	}
	limit := min(a.limit, firstMessage)
	ctx, cancel := context.WithTimeout(a.ctx, limit)
	defer cancel()
	first := callerOf(a.ctx).first
	if err := first.take(ctx, 1); err != nil {
		return status.Errorf(codes.ResourceExhausted, "%d streams of this caller are without their first message: try again", maxFirst)
	}
	defer first.give(1)
	a.begun = true
	return a.receive(ctx, limit, m)
}

// receive waits for a message until limit is over. The caller gives the stream up then, which ends the goroutine.
func (a *admitted) receive(ctx context.Context, limit time.Duration, m any) error {
	got := make(chan error, 1)
	go func() { got <- a.ServerStream.RecvMsg(m) }()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case err := <-got:
		return err
	case <-late.C:
	case <-ctx.Done():
	}
	if err := a.ctx.Err(); err != nil {
		return err
	}
	return status.Errorf(codes.DeadlineExceeded, "no message has come for %v", limit)
}

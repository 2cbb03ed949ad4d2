package client

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// undecided is a controller that starts to lead after a number of requests.
type undecided struct {
	quarrypbconnect.UnimplementedControllerHandler
	asked, leadsAfter atomic.Int32
}

func (e *undecided) Status(context.Context, *connect.Request[quarrypb.StatusRequest]) (*connect.Response[quarrypb.StatusResponse], error) {
	if e.asked.Add(1) <= e.leadsAfter.Load() {
		err := connect.NewError(connect.CodeUnavailable, errors.New("does not lead"))
		err.Meta().Set(quarrypb.LeaderHeader, "")
		return nil, err
	}
	return connect.NewResponse(&quarrypb.StatusResponse{LiveSessions: 7}), nil
}

// TestCallsWaitForALeader: a call waits for the end of an election, but not for controllers
// that do not answer.
func TestCallsWaitForALeader(t *testing.T) {
	e := &undecided{}
	e.leadsAfter.Store(9)
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(e))
	s := httptest.NewServer(mux)
	defer s.Close()
	gone := httptest.NewServer(mux)
	gone.Close()
	c := newControllerCalls(Config{Controllers: []string{gone.URL, s.URL}})
	defer c.close()
	got, err := request(c, t.Context(), &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	require.NoError(t, err)
	require.EqualValues(t, 7, got.LiveSessions)
	require.EqualValues(t, 10, e.asked.Load())

	// The end of the caller's context ends the call.
	ctx, cancel := context.WithCancel(t.Context())
	e.asked.Store(0)
	e.leadsAfter.Store(1 << 30)
	tries := 0
	err = c.do(ctx, usual, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		if tries++; tries == 7 {
			cancel()
		}
		_, err := cl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		return err
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorContains(t, err, "does not lead")
	require.Equal(t, 7, tries)

	// Without electionTimeout the call fails at once, and so does a call that no election delays.
	e.asked.Store(0)
	err = c.do(t.Context(), callOptions{tryTimeout: tryTimeout}, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		_, err := cl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		return err
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.LessOrEqual(t, e.asked.Load(), int32(4))
	tries = 0
	err = c.do(t.Context(), usual, func(context.Context, quarrypbconnect.ControllerClient) error {
		tries++
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("slow"))
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.Equal(t, 4, tries)

	// No controller answers: two tries each.
	s.Close()
	tries = 0
	err = c.do(t.Context(), usual, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		tries++
		_, err := cl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		return err
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.Equal(t, 4, tries)
}

// late is a context whose deadline has passed and whose timer has not fired.
type late struct{ context.Context }

func (late) Deadline() (time.Time, bool) { return time.Now(), true }

// TestWhoseDeadlineItWas: the error of a call is that of the caller's context if that has
// ended the call, ErrUnreachable if controllers have not answered, or both.
func TestWhoseDeadlineItWas(t *testing.T) {
	c := newControllerCalls(Config{Controllers: []string{"http://a", "http://b"}})
	defer c.close()
	refused := connect.NewError(connect.CodeUnavailable, errors.New("refused"))
	try := func(ctx context.Context, opt callOptions, f func(ctx context.Context, try int) error) (tries int, err error) {
		err = c.do(ctx, opt, func(ctx context.Context, _ quarrypbconnect.ControllerClient) error {
			tries++
			return f(ctx, tries)
		})
		return tries, err
	}
	once := usual
	once.atMostOnce = true

	// The controller counts the caller's deadline in whole milliseconds, and is the first to
	// say that it has passed.
	over := func(context.Context, int) error {
		return connect.NewWireError(connect.CodeDeadlineExceeded, errors.New("context deadline exceeded"))
	}
	tries, err := try(late{t.Context()}, usual, over)
	require.Equal(t, 1, tries)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, ErrUnreachable)
	_, err = try(late{t.Context()}, once, over)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, ErrUnknown)

	// The caller's context ends in the third try: two have failed by themselves.
	ctx, cancel := context.WithCancel(t.Context())
	tries, err = try(ctx, usual, func(ctx context.Context, try int) error {
		if try < 3 {
			return refused
		}
		cancel()
		return connect.NewError(connect.CodeCanceled, ctx.Err())
	})
	require.Equal(t, 3, tries)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorContains(t, err, "refused")

	// Tries use up their own time, and the caller has more.
	tries, err = try(t.Context(), callOptions{tryTimeout: time.Nanosecond}, func(ctx context.Context, _ int) error {
		<-ctx.Done()
		return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	})
	require.Equal(t, 4, tries)
	require.ErrorIs(t, err, ErrUnreachable)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "no answer within 1ns")
}

// TestTheOnlyControllerHasTime: an answer that takes long is waited for where no other
// controller could be asked instead.
func TestTheOnlyControllerHasTime(t *testing.T) {
	for _, urls := range [][]string{{"http://a"}, {"http://a", "http://b"}} {
		synctest.Test(t, func(t *testing.T) {
			c := newControllerCalls(Config{Controllers: urls})
			defer c.close()
			ctx, cancel := context.WithTimeout(t.Context(), DefaultTimeout)
			defer cancel()
			err := c.do(ctx, usual, func(ctx context.Context, _ quarrypbconnect.ControllerClient) error {
				select {
				case <-time.After(2 * tryTimeout):
					return nil
				case <-ctx.Done():
					return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
				}
			})
			if len(urls) == 1 {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, ErrUnreachable)
			}
		})
	}
}

// TestRegionsHaveTime: a request that makes regions, which takes nodes a while, is not given up after the time of a usual one, also where
// there is another controller to ask.
func TestRegionsHaveTime(t *testing.T) {
	e := &untilDeadline{}
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(e))
	s := httptest.NewServer(mux)
	defer s.Close()
	cl := &Client{control: newControllerCalls(Config{Controllers: []string{s.URL, s.URL}})}
	defer cl.control.close()
	require.ErrorIs(t, cl.CreateRaw(t.Context(), RawRegion{Space: "s", DataBytes: 1 << 20}, 1, false), ErrNoSpace)
	require.Greater(t, e.left, regionsTimeout/2)
	require.ErrorIs(t, cl.DeleteRaw(t.Context(), "s"), ErrNoName)
	require.Greater(t, e.left, regionsTimeout/2)
}

// untilDeadline is a controller that notes how much time requests about regions have.
type untilDeadline struct {
	quarrypbconnect.UnimplementedControllerHandler
	left time.Duration
}

func (e *untilDeadline) CreateRegion(ctx context.Context, _ *connect.Request[quarrypb.CreateRegionRequest]) (*connect.Response[quarrypb.CreateRegionResponse], error) {
	at, _ := ctx.Deadline()
	e.left = time.Until(at)
	return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("no room"))
}

func (e *untilDeadline) DeleteSpace(ctx context.Context, _ *connect.Request[quarrypb.DeleteSpaceRequest]) (*connect.Response[quarrypb.DeleteSpaceResponse], error) {
	at, _ := ctx.Deadline()
	e.left = time.Until(at)
	return nil, connect.NewError(connect.CodeNotFound, errors.New("no such space"))
}

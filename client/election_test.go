package client

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// undecided is a controller that does not lead before it has been asked some times.
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

// A call waits for the end of an election, and not for controllers that are gone.
func TestCallsWaitForALeader(t *testing.T) {
	e := &undecided{}
	e.leadsAfter.Store(9)
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(e))
	s := httptest.NewServer(mux)
	defer s.Close()
	gone := httptest.NewServer(mux)
	gone.Close()
	c := newControl(Config{Controllers: []string{gone.URL, s.URL}})
	defer c.close()
	got, err := unary(c, t.Context(), &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	require.NoError(t, err)
	require.EqualValues(t, 7, got.LiveSessions)
	require.EqualValues(t, 10, e.asked.Load())

	// The caller's patience counts.
	ctx, cancel := context.WithCancel(t.Context())
	e.asked.Store(0)
	e.leadsAfter.Store(1 << 30)
	tries := 0
	err = c.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		if tries++; tries == 7 {
			cancel()
		}
		_, err := cl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		return err
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorContains(t, err, "does not lead")
	require.Equal(t, 7, tries)

	// Whoever has no patience is told at once; so is everybody when it is not an election.
	e.asked.Store(0)
	err = c.callFor(t.Context(), manner{each: callTimeout}, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		_, err := cl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		return err
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.LessOrEqual(t, e.asked.Load(), int32(4))
	tries = 0
	err = c.call(t.Context(), func(context.Context, quarrypbconnect.ControllerClient) error {
		tries++
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("slow"))
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.Equal(t, 4, tries)

	// Nobody is there: two tries each.
	s.Close()
	tries = 0
	err = c.call(t.Context(), func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		tries++
		_, err := cl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		return err
	})
	require.ErrorIs(t, err, ErrUnreachable)
	require.Equal(t, 4, tries)
}

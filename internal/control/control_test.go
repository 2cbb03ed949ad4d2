package control

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// fake is a controller that answers Status.
type fake struct {
	quarrypbconnect.UnimplementedControllerHandler
	url    string
	leads  atomic.Bool
	names  *fake // as the leader
	asked  atomic.Int64
	refuse error
}

func (f *fake) Status(context.Context, *connect.Request[quarrypb.StatusRequest]) (*connect.Response[quarrypb.StatusResponse], error) {
	f.asked.Add(1)
	if f.refuse != nil {
		return nil, f.refuse
	}
	if !f.leads.Load() {
		err := connect.NewError(connect.CodeUnavailable, errors.New("does not lead"))
		named := ""
		if f.names != nil {
			named = f.names.url + "/"
		}
		err.Meta().Set(quarrypb.LeaderHeader, named)
		return nil, err
	}
	return connect.NewResponse(&quarrypb.StatusResponse{Version: f.url}), nil
}

func newFake(t *testing.T, leads bool) *fake {
	f := &fake{}
	f.leads.Store(leads)
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(f))
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	f.url = s.URL
	return f
}

// stopped is the URL of a controller that takes connections and never answers.
func stopped(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return "http://" + l.Addr().String()
}

func gone(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return "http://" + l.Addr().String()
}

func ask(t *testing.T, urls ...string) (*quarrypb.StatusResponse, string, error) {
	h := Client(&http.Transport{})
	t.Cleanup(h.CloseIdleConnections)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	return Ask(ctx, Controllers{URLs: urls, HTTP: h}, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
}

func TestAskFindsTheLeader(t *testing.T) {
	leader, standby := newFake(t, true), newFake(t, false)
	standby.names = leader
	for _, urls := range [][]string{{leader.url}, {standby.url}, {gone(t), standby.url}, {stopped(t), standby.url}, {stopped(t), gone(t), leader.url + "/"}, {leader.url, stopped(t)}} {
		leader.asked.Store(0)
		got, by, err := ask(t, urls...)
		require.NoError(t, err, "%v", urls)
		require.Equal(t, leader.url, got.Version)
		require.Equal(t, leader.url, by)
		require.EqualValues(t, 1, leader.asked.Load(), "a request is put once")
	}
}

// A controller that is asked over https leads nobody to a port without TLS, where a token would
// be read on the way.
func TestHttpsLeadsToHttpsOnly(t *testing.T) {
	bare := newFake(t, true)
	f := &fake{names: bare}
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(f))
	s := httptest.NewTLSServer(mux)
	t.Cleanup(s.Close)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for f.asked.Load() < 3 && ctx.Err() == nil {
			runtime.Gosched()
		}
		cancel()
	}()
	_, _, err := Ask(ctx, Controllers{URLs: []string{s.URL}, HTTP: s.Client(), Token: "secret"}, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	require.Error(t, err)
	require.Zero(t, bare.asked.Load())
}

func TestAskWaitsForALeader(t *testing.T) {
	a, b := newFake(t, false), newFake(t, false)
	go func() {
		for a.asked.Load() < 3 {
			time.Sleep(time.Millisecond)
		}
		b.leads.Store(true)
	}()
	got, _, err := ask(t, a.url, b.url)
	require.NoError(t, err)
	require.Equal(t, b.url, got.Version)
}

func TestAskGivesUp(t *testing.T) {
	_, _, err := ask(t, gone(t), gone(t))
	require.Error(t, err)
	_, _, err = ask(t)
	require.ErrorIs(t, err, ErrNoAnswer)
	refusing, other := newFake(t, true), newFake(t, true)
	refusing.refuse = connect.NewError(connect.CodeNotFound, errors.New("no such thing"))
	_, by, err := ask(t, refusing.url, other.url)
	require.Equal(t, connect.CodeNotFound, connect.CodeOf(err))
	require.Equal(t, refusing.url, by)
	require.Zero(t, other.asked.Load(), "a refusal is an answer")
	// A request of unknown outcome is not sent to the same controller again.
	refusing.refuse = connect.NewError(connect.CodeUnavailable, errors.New("the leadership changed; whether it was done is unknown"))
	refusing.asked.Store(0)
	_, _, err = ask(t, refusing.url)
	require.ErrorContains(t, err, "unknown")
	require.EqualValues(t, 1, refusing.asked.Load())
}

package httpserver

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// net/http keeps a connection whose request it has not read to the end for half a second.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// start serves h, and says with which states the server's hook was called.
func start(t *testing.T, h http.Handler) (s *Server, address string, states chan http.ConnState) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s, states = New("test", h), make(chan http.ConnState, 1024)
	s.ConnState = func(_ net.Conn, st http.ConnState) { states <- st }
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
	return s, l.Addr().String(), states
}

// http.Server alone waits 5 s for the connection.
func TestShutdownClosesUnusedConnections(t *testing.T) {
	s, address, states := start(t, http.NotFoundHandler())
	c, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, http.StateNew, <-states)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	require.NoError(t, s.Shutdown(ctx))
	require.Equal(t, http.StateClosed, <-states)
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err)
}

func TestShutdownWaitsForRequests(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	s, address, _ := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		<-end
		_, _ = io.WriteString(w, "whole")
	}))
	answer := make(chan string, 1)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	go func() {
		r, err := client.Get("http://" + address)
		if err != nil {
			answer <- err.Error()
			return
		}
		b, _ := io.ReadAll(r.Body)
		r.Body.Close()
		answer <- string(b)
	}()
	<-begun
	shutting := make(chan struct{})
	s.RegisterOnShutdown(func() { close(shutting) })
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(context.WithoutCancel(t.Context())) }()
	<-shutting
	close(end)
	require.Equal(t, "whole", <-answer)
	require.NoError(t, <-down)
}

package httpserver

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
)

// One port serves TLS and plain HTTP, also while others connect and say nothing: those are closed, the oldest first.
func TestMixedServesBoth(t *testing.T) {
	authority, ca, _, err := identity.NewAuthority("dev", time.Hour)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := New("mixed", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil {
			_, _ = io.WriteString(w, r.Proto+" over TLS")
			return
		}
		_, _ = io.WriteString(w, "plain "+r.Proto)
	}))
	conf, err := authority.Serve(identity.Controller, "dev", []string{"127.0.0.1"}, time.Hour)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(listenMixed(l, conf, time.Hour)) }()

	var silent []net.Conn
	for range 3 * maxSilent {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		silent = append(silent, c)
	}
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(ca))
	for scheme, want := range map[string]string{"http": "plain HTTP/1.1", "https": "HTTP/2.0 over TLS"} {
		h := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}}
		res, err := h.Get(scheme + "://" + l.Addr().String())
		require.NoError(t, err)
		got, err := io.ReadAll(res.Body)
		res.Body.Close()
		require.NoError(t, err)
		require.Equal(t, want, string(got))
		h.CloseIdleConnections()
	}
	for _, c := range silent[:2*maxSilent] {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it is not closed")
	}
	require.NoError(t, s.Close())
	require.ErrorIs(t, <-ended, http.ErrServerClosed)
	_, err = silent[len(silent)-1].Read(make([]byte, 1))
	require.Error(t, err, "the end of the server closes those that have sent nothing")
}

// counted counts the connections of a listener that are open, and the most that were at a time.
type counted struct {
	net.Listener
	mu         sync.Mutex
	open, most int
}

func (l *counted) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.mu.Lock()
		l.open++
		l.most = max(l.most, l.open)
		l.mu.Unlock()
		c = &countedConn{Conn: c, of: l}
	}
	return c, err
}

type countedConn struct {
	net.Conn
	of   *counted
	once sync.Once
}

func (c *countedConn) Close() error {
	c.once.Do(func() {
		c.of.mu.Lock()
		c.of.open--
		c.of.mu.Unlock()
	})
	return c.Conn.Close()
}

// Connections that have sent a byte wait in the kernel while the server takes no more.
func TestMixedBoundsThoseThatWait(t *testing.T) {
	const strangers = 10 * maxSilent
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	in := &counted{Listener: l}
	m := listenMixed(in, &tls.Config{}, time.Hour)
	defer m.Close()
	var all []net.Conn
	for range strangers {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		_, _ = c.Write([]byte("G")) // it may be closed for a newer one by now
		all = append(all, c)
	}
	go func() {
		for c, err := m.Accept(); err == nil; c, err = m.Accept() {
			_ = c.Close()
		}
	}()
	for _, c := range all {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "neither accepted nor closed")
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	require.LessOrEqual(t, in.most, 2*maxSilent+1)
}

// A connection that sends nothing is closed after some time.
func TestMixedEndsSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := listenMixed(l, &tls.Config{}, time.Millisecond)
	defer m.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

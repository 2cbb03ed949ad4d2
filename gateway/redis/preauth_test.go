package redis_test

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A browser sends these bytes when a web page posts a form, or text, to the port.
func TestHTTPRequestsAreNotExecuted(t *testing.T) {
	for name, password := range map[string]string{"no password": "", "before the password": "open sesame"} {
		t.Run(name, func(t *testing.T) {
			addr := gateway(t, redis.Config{Password: password})
			host := strings.TrimPrefix(addr, "tcp:")
			for _, request := range []string{
				"POST / HTTP/1.1\r\nHost: " + host + "\r\nContent-Type: text/plain\r\nContent-Length: 30\r\n\r\nSET planted yes\r\nSET planted2 yes\r\n",
				"post / HTTP/1.1\r\n\r\nSET planted yes\r\n",
				"GET / HTTP/1.1\r\nHoSt: " + host + "\r\n\r\nSET planted yes\r\n",
				"PUT / HTTP/1.1\r\nHost: " + host + "\r\n\r\nSET planted yes\r\n",
			} {
				p := dial(t, addr)
				p.send([]byte(request))
				got, _ := io.ReadAll(p.r) // it ends: by a FIN or a reset
				require.NotContains(t, string(got), "OK")
			}
			p := dial(t, addr)
			if password != "" {
				require.Equal(t, "+OK", p.do("AUTH", password))
			}
			require.Equal(t, ":0", p.cmd("EXISTS planted planted2"))
		})
	}
}

// 3000 connections that say nothing do not keep out a client with the password, though there may
// be only two clients.
func TestPreAuthKeepsNoUserOut(t *testing.T) {
	addr := gateway(t, redis.Config{Password: "open sesame", MaxClients: 2})
	first := dial(t, addr)
	require.Equal(t, "+OK", first.do("AUTH", "open sesame"))
	var all []net.Conn
	for range 3000 {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer c.Close()
		all = append(all, c)
	}
	second := dial(t, addr)
	require.Equal(t, "+OK", second.do("AUTH", "open sesame"))
	require.Equal(t, "+OK", second.cmd("SET k v"))
	require.Equal(t, `"v"`, first.cmd("GET k"))
	third := dial(t, addr)
	require.Equal(t, "-ERR max number of clients reached", third.do("AUTH", "open sesame"))
	third.gone()
	require.NoError(t, all[0].SetReadDeadline(time.Now().Add(patience)))
	_, err := all[0].Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "the oldest unauthenticated connection is closed")
}

func TestPreAuthHoldsLittleMemory(t *testing.T) {
	addr := gateway(t, redis.Config{Password: "open sesame"})
	for _, in := range []string{
		"*10\r\n" + strings.Repeat(fmt.Sprintf("$16000\r\n%s\r\n", strings.Repeat("x", 16000)), 3),
		strings.Repeat("x", 40_000),
		"*" + strings.Repeat("1", 40_000),
	} {
		p := dial(t, addr)
		_, _ = p.Write([]byte(in))
		got, _ := io.ReadAll(p.r)
		require.Contains(t, string(got), "unauthenticated command length")
	}
}

// slowToEnd is a listener whose connections end only when the test lets them, as goroutines do that get no
// processor time.
type slowToEnd struct {
	accepted, most atomic.Int64
	end            chan struct{} // each receive ends a connection that was closed
	closed         chan struct{}
	close          sync.Once
}

func (l *slowToEnd) Accept() (net.Conn, error) {
	select {
	case <-l.closed:
		return nil, net.ErrClosed
	default:
	}
	if l.accepted.Add(1) > l.most.Load() {
		<-l.closed
		return nil, net.ErrClosed
	}
	here, _ := net.Pipe()
	return &endsSlowly{Conn: here, l: l, closed: make(chan struct{})}, nil
}

func (l *slowToEnd) Close() error   { l.close.Do(func() { close(l.closed) }); return nil }
func (l *slowToEnd) Addr() net.Addr { return &net.TCPAddr{} }

type endsSlowly struct {
	net.Conn
	l      *slowToEnd
	closed chan struct{}
	once   sync.Once
}

func (c *endsSlowly) Close() error { c.once.Do(func() { close(c.closed) }); return c.Conn.Close() }

func (c *endsSlowly) Read([]byte) (int, error) {
	select {
	case <-c.l.closed:
	case <-c.closed:
		select {
		case <-c.l.closed:
		case <-c.l.end:
		}
	}
	return 0, net.ErrClosed
}

// Connections that were closed for newer ones, and have not ended, hold memory: no more are accepted
// until some of them have.
func TestDroppedConnectionsAreBounded(t *testing.T) {
	bound := int64(redis.MaxPreAuth + redis.MaxDropped)
	l := &slowToEnd{end: make(chan struct{}), closed: make(chan struct{})}
	l.most.Store(bound)
	_, tree := newTree(t, testcluster.Options{})
	done := make(chan error, 1)
	go func() {
		done <- redis.New(redis.Config{Tree: tree, Password: "open sesame"}).Serve(t.Context(), l)
	}()
	for range 100 { // each that ends makes room for one
		require.Eventually(t, func() bool { return l.accepted.Load() >= bound }, patience, time.Millisecond)
		require.Equal(t, bound, l.accepted.Load(), "accepted beside connections that have not ended")
		bound++
		l.most.Store(bound)
		l.end <- struct{}{}
	}
	require.Eventually(t, func() bool { return l.accepted.Load() == bound }, patience, time.Millisecond)
	l.Close()
	require.NoError(t, <-done)
	require.Equal(t, bound, l.accepted.Load(), "accepted beside connections that have not ended")
}

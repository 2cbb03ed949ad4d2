package redis_test

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
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

package httpserver

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
)

const patience = 3 * time.Minute

// gated serves calls of up to 16 bytes with the token "t".
func gated(t *testing.T) (s *Server, address string, served chan string) {
	served = make(chan string, 64)
	gate := Gate{MaxBytes: func(string) int64 { return 16 }, Allow: func(r *http.Request) error {
		if r.Header.Get("T") != "t" {
			return connect.NewError(connect.CodeUnauthenticated, errors.New("no token"))
		}
		return nil
	}}
	s, address, _ = start(t, gate.Before(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		served <- string(b)
	})))
	return s, address, served
}

func TestGateRefusesBeforeTheBody(t *testing.T) {
	_, address, served := gated(t)
	for name, c := range map[string]struct {
		head string
		code int
		says string
	}{
		"no token":        {"Content-Length: 9\r\n", http.StatusUnauthorized, "no token"},
		"compressed":      {"T: t\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n", http.StatusNotImplemented, "uncompressed only"},
		"compressed rows": {"T: t\r\nConnect-Content-Encoding: br\r\nContent-Length: 9\r\n", http.StatusNotImplemented, "uncompressed only"},
		"too large":       {"T: t\r\nContent-Length: 17\r\n", http.StatusTooManyRequests, "more than 16 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			c2, err := net.Dial("tcp", address)
			require.NoError(t, err)
			defer c2.Close()
			_, err = io.WriteString(c2, "POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/proto\r\n"+c.head+"\r\n") // and no body
			require.NoError(t, err)
			require.NoError(t, c2.SetReadDeadline(time.Now().Add(patience)))
			res, err := http.ReadResponse(bufio.NewReader(c2), nil)
			require.NoError(t, err)
			b, err := io.ReadAll(res.Body)
			require.NoError(t, err)
			require.Equal(t, c.code, res.StatusCode)
			require.Contains(t, string(b), c.says)
		})
	}
	require.Empty(t, served)
}

func TestGateBoundsBodiesWithoutLength(t *testing.T) {
	_, address, served := gated(t)
	post := func(body string) *http.Response {
		r, err := http.NewRequest(http.MethodPost, "http://"+address+"/x", struct{ io.Reader }{strings.NewReader(body)})
		require.NoError(t, err)
		r.Header.Set("T", "t")
		res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
		require.NoError(t, err)
		res.Body.Close()
		return res
	}
	require.Equal(t, http.StatusOK, post("0123456789abcdef").StatusCode)
	require.Equal(t, "0123456789abcdef", <-served)
	require.Equal(t, http.StatusTooManyRequests, post("0123456789abcdefg").StatusCode)
	require.Empty(t, served)
}

func TestPreAuthConnectionsAreClosedForNewerOnes(t *testing.T) {
	s, address, _ := gated(t)
	s.mu.Lock()
	s.MaxPreAuth = 4
	s.mu.Unlock()
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}}
	defer client.CloseIdleConnections()
	call := func() {
		r, err := http.NewRequest(http.MethodPost, "http://"+address+"/x", nil)
		require.NoError(t, err)
		r.Header.Set("T", "t")
		res, err := client.Do(r)
		require.NoError(t, err)
		res.Body.Close()
	}
	call()
	known := func() (n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, k := range s.conns {
			if k.known {
				n++
			}
		}
		return n
	}
	require.Equal(t, 1, known())
	before := s.port.refused[PreAuth].Load()
	var idle []net.Conn
	for range 20 {
		c, err := net.Dial("tcp", address)
		require.NoError(t, err)
		defer c.Close()
		idle = append(idle, c)
	}
	for _, c := range idle[:16] {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	require.EqualValues(t, 16, s.port.refused[PreAuth].Load()-before)
	call()
	require.Equal(t, 1, known(), "the connection that was known is still used")
}

func TestHostAndOrigin(t *testing.T) {
	s, address, _ := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "inside") }))
	s.Hosts = []string{"advertised.example:7420"}
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	for name, c := range map[string]struct {
		host string
		head http.Header
		want int
	}{
		"address":                   {"127.0.0.1:" + port, nil, 200},
		"IPv6":                      {"[::1]:" + port, nil, 200},
		"localhost":                 {"LocalHost:1", nil, 200},
		"advertised":                {"advertised.example", nil, 200},
		"name pointed at loopback":  {"evil.example:" + port, nil, http.StatusMisdirectedRequest},
		"a name like localhost":     {"localhost.evil.example", nil, http.StatusMisdirectedRequest},
		"address of another host":   {"192.0.2.1", nil, http.StatusMisdirectedRequest},
		"own page":                  {"localhost:" + port, http.Header{"Origin": {"http://localhost:" + port}, "Sec-Fetch-Site": {"same-origin"}}, 200},
		"page of another origin":    {"localhost:" + port, http.Header{"Origin": {"http://evil.example"}}, http.StatusForbidden},
		"page of another port":      {"localhost:" + port, http.Header{"Origin": {"http://localhost:1"}}, http.StatusForbidden},
		"page without an origin":    {"localhost:" + port, http.Header{"Origin": {"null"}}, http.StatusForbidden},
		"image in a foreign page":   {"localhost:" + port, http.Header{"Sec-Fetch-Site": {"cross-site"}, "Sec-Fetch-Mode": {"no-cors"}, "Sec-Fetch-Dest": {"image"}}, http.StatusForbidden},
		"a link that is followed":   {"localhost:" + port, http.Header{"Sec-Fetch-Site": {"cross-site"}, "Sec-Fetch-Mode": {"navigate"}, "Sec-Fetch-Dest": {"document"}}, 200},
		"a frame in a foreign page": {"localhost:" + port, http.Header{"Sec-Fetch-Site": {"cross-site"}, "Sec-Fetch-Mode": {"navigate"}, "Sec-Fetch-Dest": {"iframe"}}, http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := http.NewRequest(http.MethodGet, "http://"+address+"/", bytes.NewReader(nil))
			require.NoError(t, err)
			r.Host, r.Header = c.host, c.head
			res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
			require.NoError(t, err)
			defer res.Body.Close()
			b, err := io.ReadAll(res.Body)
			require.NoError(t, err)
			require.Equal(t, c.want, res.StatusCode, "%s", b)
			require.Equal(t, c.want == 200, string(b) == "inside")
		})
	}
}

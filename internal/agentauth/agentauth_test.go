package agentauth_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type agent struct {
	quarrypbconnect.UnimplementedAgentHandler
	calls int
}

func (a *agent) Ping(context.Context, *connect.Request[quarrypb.PingRequest]) (*connect.Response[quarrypb.PingResponse], error) {
	a.calls++
	return connect.NewResponse(&quarrypb.PingResponse{Id: 7}), nil
}

func (a *agent) DropRegion(context.Context, *connect.Request[quarrypb.DropRegionRequest]) (*connect.Response[quarrypb.DropRegionResponse], error) {
	a.calls++
	return connect.NewResponse(&quarrypb.DropRegionResponse{}), nil
}

// spy keeps what was sent, as one that reads the network does, or the node that is called.
type spy struct {
	http.Client
	last *http.Request
	body []byte
}

func (s *spy) Do(r *http.Request) (*http.Response, error) {
	s.body, _ = io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(s.body))
	s.last = r.Clone(context.Background())
	return s.Client.Do(r)
}

// again sends what was kept, changed.
func (s *spy) again(t *testing.T, change func(r *http.Request, body []byte) []byte) int {
	r := s.last.Clone(t.Context())
	body := change(r, bytes.Clone(s.body))
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	res, err := s.Client.Do(r)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	return res.StatusCode
}

func serve(t *testing.T, keys *keyring.Ring, self func() (agentauth.Node, bool)) (*agent, *httptest.Server) {
	a := &agent{}
	_, h := quarrypbconnect.NewAgentHandler(a)
	gate := httpserver.Gate{Allow: agentauth.Allow(keys, self), MaxBytes: func(string) int64 { return 1000 }, Body: agentauth.Body}
	srv := httptest.NewServer(gate.Before(h))
	t.Cleanup(srv.Close)
	return a, srv
}

// Only who has the private key commands a node, and a command is good for the node, the
// incarnation, the method and the request that it was signed for.
func TestOnlyControllersAreObeyed(t *testing.T) {
	key, other := keyring.NewSigner([32]byte{1}), keyring.NewSigner([32]byte{2})
	ring := keyring.NewRing(key.Public())
	self, registered := agentauth.Node{Cluster: [16]byte{1}, Number: 1}, false
	a, srv := serve(t, ring, func() (agentauth.Node, bool) { return self, registered })

	var s spy
	drop := func(over connect.HTTPClient) connect.Code {
		r := connect.NewRequest(&quarrypb.DropRegionRequest{Region: 3, Epoch: 4})
		r.Header().Set(quarrypb.IncarnationHeader, "77")
		_, err := quarrypbconnect.NewAgentClient(over, srv.URL).DropRegion(t.Context(), r)
		if err == nil {
			return 0
		}
		return connect.CodeOf(err)
	}
	require.Equal(t, connect.CodeUnavailable, drop(agentauth.Client(&s, key, self)), "not registered yet")
	registered = true
	require.Equal(t, connect.CodeUnauthenticated, drop(&s), "not signed")
	require.Equal(t, connect.CodeUnauthenticated, drop(agentauth.Client(&s, other, self)), "another key")
	require.Equal(t, connect.CodeUnauthenticated, drop(agentauth.Client(&s, key, agentauth.Node{Cluster: self.Cluster, Number: 2})), "for another node")
	require.Equal(t, connect.CodeUnauthenticated, drop(agentauth.Client(&s, key, agentauth.Node{Number: 1})), "for another cluster")
	require.Zero(t, a.calls)
	require.Zero(t, drop(agentauth.Client(&s, key, self)))
	require.Equal(t, 1, a.calls)

	same := func(_ *http.Request, body []byte) []byte { return body }
	for name, change := range map[string]func(*http.Request, []byte) []byte{
		"another region":       func(_ *http.Request, body []byte) []byte { body[1]++; return body },
		"another incarnation":  func(r *http.Request, b []byte) []byte { r.Header.Set(quarrypb.IncarnationHeader, "78"); return b },
		"no incarnation":       func(r *http.Request, b []byte) []byte { r.Header.Del(quarrypb.IncarnationHeader); return b },
		"no number":            func(r *http.Request, b []byte) []byte { r.Header.Set(quarrypb.IncarnationHeader, "x"); return b },
		"another method":       func(r *http.Request, b []byte) []byte { r.URL.Path = quarrypbconnect.AgentPingProcedure; return b },
		"another codec":        func(r *http.Request, b []byte) []byte { r.Header.Set("Content-Type", "application/json"); return b },
		"compressed":           func(r *http.Request, b []byte) []byte { r.Header.Set("Content-Encoding", "gzip"); return b },
		"without a signature":  func(r *http.Request, b []byte) []byte { r.Header.Del(quarrypb.SignatureHeader); return b },
		"with a signature cut": func(r *http.Request, b []byte) []byte { r.Header.Set(quarrypb.SignatureHeader, "00 AA AA"); return b },
	} {
		require.Equal(t, http.StatusUnauthorized, s.again(t, change), name)
	}
	require.Equal(t, 1, a.calls)
	require.Equal(t, http.StatusTooManyRequests, s.again(t, func(*http.Request, []byte) []byte { return make([]byte, 1001) }), "read no further than the limit")
	require.Equal(t, http.StatusOK, s.again(t, same), "the same command at the same node does no harm")

	// The node that was commanded passes the command on.
	_, second := serve(t, ring, func() (agentauth.Node, bool) { return agentauth.Node{Cluster: self.Cluster, Number: 2}, true })
	s.last.URL.Host, s.last.Host = second.Listener.Addr().String(), ""
	require.Equal(t, http.StatusUnauthorized, s.again(t, same), "at another node")

	ring.Set(other.Public())
	require.Equal(t, connect.CodeUnauthenticated, drop(agentauth.Client(&s, key, self)), "a key that has gone")
	require.Zero(t, drop(agentauth.Client(&s, other, self)))
}

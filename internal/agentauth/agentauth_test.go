package agentauth_test

import (
	"bytes"
	"context"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/httpserver"
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

func TestOnlyTheClustersKeyIsObeyed(t *testing.T) {
	key, other := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	var served []byte
	a := &agent{}
	_, h := quarrypbconnect.NewAgentHandler(a)
	gate := httpserver.Gate{Allow: agentauth.Allow(func() []byte { return served }), MaxBytes: func(string) int64 { return 64 }}
	srv := httptest.NewServer(gate.Before(h))
	defer srv.Close()

	ping := func(opts ...connect.ClientOption) connect.Code {
		_, err := quarrypbconnect.NewAgentClient(srv.Client(), srv.URL, opts...).Ping(t.Context(), connect.NewRequest(&quarrypb.PingRequest{}))
		if err == nil {
			return 0
		}
		return connect.CodeOf(err)
	}
	with := func(k []byte) connect.ClientOption { return connect.WithInterceptors(agentauth.Client(k)) }

	require.Equal(t, connect.CodeUnavailable, ping(with(nil)), "no key yet: nobody, not even the empty key")
	require.Equal(t, connect.CodeUnavailable, ping(with(key)))
	served = key
	require.Equal(t, connect.CodeUnauthenticated, ping())
	require.Equal(t, connect.CodeUnauthenticated, ping(with(other)))
	require.Zero(t, a.calls)
	require.Zero(t, ping(with(key)))
	require.Equal(t, 1, a.calls)
}

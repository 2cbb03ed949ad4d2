package agentauth

import (
	"cmp"
	"context"
	"crypto/subtle"
	"net/http"
	"strconv"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Token adds the cluster's token to every call of a controller. "" is the one that a quarry dev of
// this user has left for its port on this host, if any.
func Token(token string) connect.Interceptor { return give{token: token} }

// Caller adds a token, and the tenant that the calls are made in; "" for none.
func Caller(token, tenant string) connect.Interceptor { return give{token: token, tenant: tenant} }

// ForJob is Caller for the calls that a worker makes for a job of the tenant; 0 for none.
func ForJob(token, tenant string, job uint64) connect.Interceptor {
	return give{token: token, tenant: tenant, job: job}
}

// ForUser is Caller for the calls that a gateway makes for one of its users, such as redis:NAME.
func ForUser(token, tenant, user string) connect.Interceptor {
	return give{token: token, tenant: tenant, user: user}
}

type give struct {
	token, tenant string
	job           uint64
	user          string
}

// to sets the headers of a call of the controller at an address.
func (g give) to(h http.Header, address string) {
	if token := cmp.Or(g.token, userdir.Token(address)); token != "" {
		h.Set(quarrypb.TokenHeader, token)
	}
	if g.tenant != "" {
		h.Set(quarrypb.TenantHeader, g.tenant)
	}
	if g.user != "" {
		h.Set(quarrypb.UserHeader, g.user)
	}
	if g.job != 0 {
		h.Set(quarrypb.JobHeader, strconv.FormatUint(g.job, 10))
	}
}

func (g give) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		g.to(r.Header(), r.Peer().Addr)
		return next(ctx, r)
	}
}

func (g give) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		g.to(c.RequestHeader(), c.Peer().Addr)
		return c
	}
}

func (give) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// RightToken compares in a time that does not tell how much was right.
func RightToken(want, given string) bool {
	return want == "" || subtle.ConstantTimeCompare([]byte(given), []byte(want)) == 1
}

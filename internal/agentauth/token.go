package agentauth

import (
	"context"
	"crypto/subtle"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Token adds the cluster's token, "" for none, to every call of a controller.
func Token(token string) connect.Interceptor { return giveToken(token) }

type giveToken string

func (g giveToken) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		if g != "" {
			r.Header().Set(quarrypb.TokenHeader, string(g))
		}
		return next(ctx, r)
	}
}

func (g giveToken) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		if g != "" {
			c.RequestHeader().Set(quarrypb.TokenHeader, string(g))
		}
		return c
	}
}

func (giveToken) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// RightToken compares in a time that does not tell how much was right.
func RightToken(want, given string) bool {
	return want == "" || subtle.ConstantTimeCompare([]byte(given), []byte(want)) == 1
}

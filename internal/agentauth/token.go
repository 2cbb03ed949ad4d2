package agentauth

import (
	"context"
	"crypto/subtle"
	"errors"
	"slices"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// ErrToken is the answer to a call without the cluster's token.
var ErrToken = errors.New("wrong or missing cluster token: set --token or QUARRY_TOKEN")

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

// RequireToken refuses calls that do not carry the cluster's token, but for those
// of the procedures named, whose messages have a field for it. "" asks for none.
func RequireToken(token string, but ...string) connect.Interceptor { return &wantToken{token, but} }

type wantToken struct {
	token string
	but   []string
}

// RightToken compares in a time that does not tell how much was right.
func RightToken(want, given string) bool {
	return want == "" || subtle.ConstantTimeCompare([]byte(given), []byte(want)) == 1
}

func (w *wantToken) check(procedure, given string) error {
	if RightToken(w.token, given) || slices.Contains(w.but, procedure) {
		return nil
	}
	return connect.NewError(connect.CodeUnauthenticated, ErrToken)
}

func (w *wantToken) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		if err := w.check(r.Spec().Procedure, r.Header().Get(quarrypb.TokenHeader)); err != nil {
			return nil, err
		}
		return next(ctx, r)
	}
}

func (w *wantToken) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (w *wantToken) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, c connect.StreamingHandlerConn) error {
		if err := w.check(c.Spec().Procedure, c.RequestHeader().Get(quarrypb.TokenHeader)); err != nil {
			return err
		}
		return next(ctx, c)
	}
}

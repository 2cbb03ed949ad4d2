package agentauth

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"strings"

	"connectrpc.com/connect"
)

const (
	header = "Authorization"
	scheme = "Bearer "
)

var (
	errNoKey  = errors.New("agent: not registered with a controller yet; it obeys nobody until then")
	errBearer = errors.New("agent: the call does not carry this cluster's bearer; only its controllers may command a node")
)

// Bearer is the token of a cluster: HMAC-SHA-256 of "agent" under its ticket key.
func Bearer(key []byte) string {
	m := hmac.New(sha256.New, key)
	m.Write([]byte("agent"))
	return hex.EncodeToString(m.Sum(nil))
}

// Client adds the bearer of the key to every unary call.
func Client(key []byte) connect.Interceptor {
	value := scheme + Bearer(key)
	return connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			req.Header().Set(header, value)
			return next(ctx, req)
		}
	})
}

// Allow refuses calls that do not carry the bearer of the key. key answers nil while there is
// none, and is asked at every call. It is for httpserver.Gate, which asks before the body is read.
func Allow(key func() []byte) func(*http.Request) error {
	return func(r *http.Request) error { return check(key(), r.Header.Get(header)) }
}

func check(key []byte, value string) error {
	if len(key) == 0 {
		return connect.NewError(connect.CodeUnavailable, errNoKey)
	}
	token, ok := strings.CutPrefix(value, scheme)
	// In constant time: how much of a guess is right must not show.
	if !ok || !hmac.Equal([]byte(token), []byte(Bearer(key))) {
		return connect.NewError(connect.CodeUnauthenticated, errBearer)
	}
	return nil
}

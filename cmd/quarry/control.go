package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

var errNoController = errors.New("no controller answers")

// ask calls one controller after the other, and the leader that a standby names,
// until one answers.
func ask[Q, A any](ctx context.Context, a *app, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	h := &http.Client{Transport: &http.Transport{TLSClientConfig: a.tls, DialContext: (&net.Dialer{Timeout: time.Second}).DialContext, ForceAttemptHTTP2: true}}
	defer h.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	var last error
	urls := a.cli.Controller
	for i := 0; i < len(urls) && i < 32; i++ {
		if !strings.HasPrefix(urls[i], "http://") && !strings.HasPrefix(urls[i], "https://") {
			return nil, usagef("controller %q: want a URL such as http://127.0.0.1:7420", urls[i])
		}
		res, err := method(quarrypbconnect.NewControllerClient(h, strings.TrimRight(urls[i], "/"), connect.WithInterceptors(agentauth.Token(a.cli.Token))), ctx, connect.NewRequest(q))
		if err == nil {
			return res.Msg, nil
		}
		var ce *connect.Error
		if !errors.As(err, &ce) || ce.Code() != connect.CodeUnavailable && ce.Code() != connect.CodeDeadlineExceeded {
			if errors.As(err, &ce) {
				return nil, fmt.Errorf("%s: %w", urls[i], bare{ce})
			}
			return nil, err
		}
		last = err
		if leader := strings.TrimRight(ce.Meta().Get(quarrypb.LeaderHeader), "/"); leader != "" && !contains(urls, leader) {
			urls = append(urls[:len(urls):len(urls)], leader)
		}
	}
	if ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return nil, ctx.Err()
	}
	return nil, fmt.Errorf("%w: %s: %w (is one running? try quarry dev)", errNoController, strings.Join(urls, ", "), bare{last})
}

// bare is a connect error without its code in the text.
type bare struct{ err error }

func (b bare) Error() string {
	var ce *connect.Error
	if errors.As(b.err, &ce) {
		return ce.Message()
	}
	return b.err.Error()
}

func (b bare) Unwrap() error { return b.err }

func contains(urls []string, u string) bool {
	for _, x := range urls {
		if strings.TrimRight(x, "/") == u {
			return true
		}
	}
	return false
}

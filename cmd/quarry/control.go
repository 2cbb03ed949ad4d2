package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/control"
)

var errNoController = errors.New("no controller answers")

// ask asks the controllers, one after the other, until the leader has answered.
func ask[Q, A any](ctx context.Context, a *app, q *Q, method control.Method[Q, A]) (*A, error) {
	for _, u := range a.cli.Controller {
		if !strings.HasPrefix(u, "http://") && !strings.HasPrefix(u, "https://") {
			return nil, usagef("controller %q: want a URL such as http://127.0.0.1:7420", u)
		}
	}
	h := control.Client(&http.Transport{TLSClientConfig: a.tls})
	defer h.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	res, by, err := control.Ask(ctx, control.Controllers{URLs: a.cli.Controller, HTTP: h, Token: a.cli.Token, Tenant: a.cli.Tenant}, q, method)
	var ce *connect.Error
	switch {
	case err == nil:
		return res, nil
	case by != "" && errors.As(err, &ce):
		return nil, fmt.Errorf("%s: %w", by, bare{ce})
	case by != "":
		return nil, err
	case errors.Is(ctx.Err(), context.Canceled):
		return nil, ctx.Err()
	}
	return nil, fmt.Errorf("%w: %s: %w (is one running? try quarry dev)", errNoController, strings.Join(a.cli.Controller, ", "), bare{err})
}

// bare is a connect error without its code in the text.
type bare struct{ err error }

// Error is the message without the RPC's code in front.
func (b bare) Error() string {
	var ce *connect.Error
	if errors.As(b.err, &ce) {
		return ce.Message()
	}
	return b.err.Error()
}

func (b bare) Unwrap() error { return b.err }

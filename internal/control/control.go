// Package control asks the controllers of a cluster from outside: one after the
// other, until the one that leads has answered.
package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

const (
	// most is how many controllers are asked, those that others name included.
	most = 32
	// lookTime is the longest wait for a sign of life of a controller that is one of several.
	lookTime = time.Second
	// leaderless is how long Ask waits for a leader, where ctx has no deadline, while some
	// controller answers that it does not lead. A change of the leader takes about a second,
	// on a host with too much to do several.
	leaderless = 15 * time.Second
	again      = 50 * time.Millisecond
)

// ErrNoAnswer is the outcome when no controller was there to be asked.
var ErrNoAnswer = errors.New("no answer")

// Controllers are the controllers of a cluster, any of which may lead.
type Controllers struct {
	URLs   []string
	HTTP   *http.Client
	Token  string // of the cluster; "" for none
	Tenant string // that requests are made in; "" for none
}

// Method is a call of a controller, such as quarrypbconnect.ControllerClient.Status.
type Method[Q, A any] func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)

// Ask asks one controller after the other, and the leader that a standby names (see quarrypb.LeaderFrom),
// until one answers. by is the one that has, with an answer or with a refusal.
//
// Where there are several, Ask first probes each one: a stopped process accepts connections
// and never answers, and would use up the time in which another could. A request goes once to a
// controller that leads. Its result is the result of Ask, also an error, unless the controller
// answers that it does not lead.
func Ask[Q, A any](ctx context.Context, c Controllers, q *Q, method Method[Q, A]) (answer *A, by string, err error) {
	urls := c.distinct()
	known, last := urls, error(ErrNoAnswer)
	until, ok := ctx.Deadline()
	if !ok {
		until = time.Now().Add(leaderless)
	}
	for {
		standby := false
		for i := 0; i < len(urls) && i < most && ctx.Err() == nil; i++ {
			if err := c.there(ctx, urls[i], len(urls)-i); err != nil {
				last = err
				continue
			}
			res, err := method(quarrypbconnect.NewControllerClient(c.HTTP, urls[i], connect.WithInterceptors(agentauth.Caller(c.Token, c.Tenant))), ctx, connect.NewRequest(q))
			if err == nil {
				return res.Msg, urls[i], nil
			}
			named, final := leaderFrom(q, err)
			if final != nil {
				return nil, urls[i], final
			}
			last = err
			standby = standby || len(named) > 0
			if len(named) > 0 {
				if leader := quarrypb.LeaderFrom(urls[i], named[0], known); leader != "" && !slices.Contains(urls, leader) {
					urls = append(urls, leader)
				}
			}
		}
		if !standby || time.Now().After(until) {
			return nil, "", last
		}
		select {
		case <-ctx.Done():
			return nil, "", last
		case <-time.After(again):
		}
	}
}

// distinct is each controller's URL once, without a slash at the end.
func (c Controllers) distinct() (urls []string) {
	for _, u := range c.URLs {
		if u = strings.TrimRight(u, "/"); !slices.Contains(urls, u) {
			urls = append(urls, u)
		}
	}
	return urls
}

// leaderFrom classifies a controller's error. final is not nil if no other controller may be asked: this one leads
// and has refused the request, or it may have executed it. Otherwise named is the leader's URL that a standby has
// sent, "" where the standby has none; it is empty if the controller did not answer.
func leaderFrom(q any, err error) (named []string, final error) {
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != connect.CodeUnavailable && ce.Code() != connect.CodeDeadlineExceeded {
		return nil, err
	}
	named = ce.Meta().Values(quarrypb.LeaderHeader)
	var op *net.OpError
	if len(named) == 0 && !reads(q) && !(errors.As(err, &op) && op.Op == "dial") {
		return nil, fmt.Errorf("whether it was done is unknown: %w", err)
	}
	return named, nil
}

// reads says whether a request changes nothing, so that it may be put twice.
func reads(q any) bool {
	switch q.(type) {
	case *quarrypb.StatusRequest, *quarrypb.ListSessionsRequest, *quarrypb.LookupNameRequest, *quarrypb.InspectNodeRequest, *quarrypb.ReadTableRequest:
		return true
	}
	return false
}

// there says whether a controller answers anything, in its share of the time that
// is left for it and the others behind it. One that is alone is not asked.
func (c Controllers) there(ctx context.Context, url string, left int) error {
	if left == 1 {
		return nil
	}
	share := lookTime
	if d, ok := ctx.Deadline(); ok {
		share = min(share, time.Until(d)/time.Duration(left+1))
	}
	ctx, cancel := context.WithTimeout(ctx, share)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return err
	}
	res, err := c.HTTP.Do(r)
	if err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	defer res.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 4096))
	return nil
}

// Client is an HTTP client that does not wait long for hosts that are not there.
func Client(t *http.Transport) *http.Client {
	t.DialContext = (&net.Dialer{Timeout: time.Second}).DialContext
	t.ForceAttemptHTTP2 = true
	return &http.Client{Transport: userdir.Transport(t)}
}

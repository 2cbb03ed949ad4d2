package controller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Calls that change the cluster are lines of the log, and the latest ones records of etcd.
const (
	maxAudit        = 1000
	maxAuditRequest = 512 // bytes of a request, as JSON
	maxAuditOutcome = 256
)

// auditor records calls when they have been answered. Refusals of a standby are not recorded: it
// has not handled the call.
type auditor struct{ c *Controller }

// WrapUnary records calls that change the cluster, with their outcome.
func (a auditor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		res, err := next(ctx, r)
		if !rights.Admin(r.Spec().Procedure) || own(r.Any()) {
			return res, err
		}
		var ce *connect.Error
		if errors.As(err, &ce) && len(ce.Meta().Values(quarrypb.LeaderHeader)) > 0 {
			return res, err
		}
		e := &quarrypb.AuditEntry{UnixMs: time.Now().UnixMilli(), Method: method(r.Spec().Procedure), Caller: rights.From(ctx).Name, Remote: r.Peer().Addr, Outcome: outcome(err)}
		if m, ok := r.Any().(proto.Message); ok {
			b, _ := protojson.Marshal(m) // no request of these methods has a secret
			e.Request = shortened(string(b), maxAuditRequest)
		}
		a.c.audit(ctx, e)
		return res, err
	}
}

func (auditor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (auditor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// own says whether a program ends its own session, which it names by its serial. Such calls are
// not recorded.
func own(msg any) bool {
	q, ok := msg.(*quarrypb.RevokeSessionRequest)
	return ok && q.Session == 0
}

// method is the name of a call without its service.
func method(procedure string) string { return procedure[strings.LastIndexByte(procedure, '/')+1:] }

// outcome is how a call ended, for people.
func outcome(err error) string {
	if err == nil {
		return "ok"
	}
	code := connect.CodeOf(err).String() + ": "
	return shortened(code+strings.TrimPrefix(err.Error(), code), maxAuditOutcome) // the text of connect's errors begins with the code
}

// shortened cuts a text for the record.
func shortened(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// allow refuses what the table does not give, and logs that. Refusals are not kept: an unauthenticated caller could
// fill the record.
func (c *Controller) allow(r *http.Request) error {
	err := rights.Allow(r)
	if err != nil && rights.Admin(r.URL.Path) {
		c.cfg.Logger.Warn("audit: refused", "method", method(r.URL.Path), "caller", rights.From(r.Context()).Name, "remote", r.RemoteAddr, "outcome", outcome(err))
	}
	return err
}

// audit logs an entry, and keeps it. The call that it is about is answered either way.
func (c *Controller) audit(ctx context.Context, e *quarrypb.AuditEntry) {
	c.cfg.Logger.Info("audit", "method", e.Method, "caller", e.Caller, "remote", e.Remote, "request", e.Request, "outcome", e.Outcome)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), etcdTimeout)
	defer cancel()
	if err := c.keepAudit(ctx, e); err != nil {
		c.cfg.Logger.Warn("audit: the entry is in this log only", "method", e.Method, "error", err)
	}
}

func (c *Controller) auditPrefix() string { return c.cfg.Prefix + "audit/" }

// keepAudit writes an entry, and deletes the oldest ones.
func (c *Controller) keepAudit(ctx context.Context, e *quarrypb.AuditEntry) error {
	value, err := proto.Marshal(e)
	if err != nil {
		return err
	}
	key := fmt.Sprintf("%s%020d", c.auditPrefix(), time.Now().UnixNano())
	if _, err := c.cfg.Etcd.Put(ctx, key, string(value)); err != nil {
		return err
	}
	res, err := c.cfg.Etcd.Get(ctx, c.auditPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
	if err != nil || len(res.Kvs) <= maxAudit {
		return err
	}
	_, err = c.cfg.Etcd.Delete(ctx, c.auditPrefix(), clientv3.WithRange(string(res.Kvs[len(res.Kvs)-maxAudit].Key)))
	return err
}

// ListAudit answers the latest entries, newest first.
func (s *service) ListAudit(ctx context.Context, r *connect.Request[quarrypb.ListAuditRequest]) (*connect.Response[quarrypb.ListAuditResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	most := int64(r.Msg.Most)
	if most == 0 || most > maxAudit {
		most = maxAudit
	}
	res, err := s.c.cfg.Etcd.Get(ctx, s.c.auditPrefix(), clientv3.WithPrefix(), clientv3.WithLimit(most), clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))
	if err != nil {
		return nil, etcdError(err)
	}
	out := &quarrypb.ListAuditResponse{}
	for _, kv := range res.Kvs {
		e := &quarrypb.AuditEntry{}
		if err := proto.Unmarshal(kv.Value, e); err != nil {
			return nil, connect.NewError(connect.CodeDataLoss, fmt.Errorf("record %s is damaged: %w", kv.Key, err))
		}
		out.Entries = append(out.Entries, e)
	}
	return connect.NewResponse(out), nil
}

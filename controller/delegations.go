package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A delegation is a record that the submitter of a job has made: while it lasts, workers act for the
// submitter in that job. It is no secret, and a worker is not given one: a call names the job, the worker
// shows its own identity, and the controller looks up what the submitter may do at that moment.

const (
	delegationLasts  = 24 * time.Hour
	delegationMost   = 30 * 24 * time.Hour
	maxDelegations   = 1024 // of one tenant
	maxPlugins       = 48 << 10
	maxWorkers       = 4096
	workerHold       = 10 * time.Second // a worker that has not polled for so long is gone
	delegationHold   = 100 * time.Millisecond
	delegationsEvery = 5 * time.Second
)

// jobs is what a controller knows of delegations and workers.
type jobs struct {
	opened atomic.Bool // a session for a job has been opened, or may have been

	mu      sync.Mutex             // guards the fields below
	list    []*quarrypb.Delegation // read a moment ago
	until   time.Time              // list is read again then
	workers map[string]seenWorker  // that have polled, by name
}

// seenWorker is a worker as its last poll has shown it.
type seenWorker struct {
	rec     *quarrypb.Worker
	at      time.Time // of that poll
	tenants []string  // that it serves; none: all
}

// delegationKey is where a delegation's record is.
func (c *Controller) delegationKey(tenant uint32, job uint64) string {
	return fmt.Sprintf("%sdelegation/%08x/%020d", c.cfg.Prefix, tenant, job)
}

// worksOnly says whether the caller has the role of a worker and no other: then it has no rights
// but those of jobs.
func worksOnly(c rights.Caller) bool {
	return c.Is(identity.Worker) && !c.Is(identity.Client, identity.Gateway, identity.Operator)
}

// submitterOf is the caller for whom the workers of a delegation act.
func submitterOf(d *quarrypb.Delegation) rights.Caller {
	c := rights.Caller{Name: d.Submitter, Token: d.Token}
	for _, r := range d.Roles {
		c.Roles = append(c.Roles, identity.Role(r))
	}
	c.ID.Role, c.ID.Name = identity.Role(d.Role), d.Name
	return c
}

// actingForJob is acting for a worker that names a job: it has the rights that the job's
// submitter has now.
func (c *Controller) actingForJob(ctx context.Context, worker rights.Caller, tenant, header string) (acting, error) {
	job, err := strconv.ParseUint(header, 10, 64)
	if err != nil || job == 0 {
		return acting{}, invalid("header %s: %q is no number of a job", quarrypb.JobHeader, header)
	}
	if !worker.Is(identity.Worker) {
		return acting{}, denied("%s may not act for job %d: it is for [worker]", worker.Name, job)
	}
	tenants, err := c.tenantList(ctx, false)
	if err != nil {
		return acting{}, err
	}
	if !serves(served(tenants, worker), cmp.Or(tenant, quarrypb.DefaultTenant)) {
		return acting{}, denied("%s has grants in other tenants than %s: it serves those alone", worker.Name, cmp.Or(tenant, quarrypb.DefaultTenant))
	}
	id, ok := tenantID(tenants, cmp.Or(tenant, quarrypb.DefaultTenant))
	if !ok { // made a moment ago
		if tenants, err = c.tenantList(ctx, true); err != nil {
			return acting{}, err
		}
		if id, ok = tenantID(tenants, tenant); !ok {
			return acting{}, connect.NewError(connect.CodeNotFound, fmt.Errorf("no tenant %q: quarry tenant list shows them", tenant))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	res, err := c.cfg.Etcd.Get(ctx, c.delegationKey(id, job))
	if err != nil {
		return acting{}, etcdError(err)
	}
	var d quarrypb.Delegation
	switch {
	case len(res.Kvs) == 0:
		return acting{}, denied("%s may not act for job %d of tenant %s: nothing is delegated for it, or that has ended", worker.Name, job, cmp.Or(tenant, quarrypb.DefaultTenant))
	case proto.Unmarshal(res.Kvs[0].Value, &d) != nil:
		return acting{}, connect.NewError(connect.CodeDataLoss, fmt.Errorf("record %s is damaged", res.Kvs[0].Key))
	case time.Now().UnixMilli() >= d.ExpiresUnixMs:
		return acting{}, denied("%s may not act for job %d of tenant %s: its delegation ended at %s", worker.Name, job, d.Tenant, time.UnixMilli(d.ExpiresUnixMs).UTC().Format(time.RFC3339))
	}
	return c.actingBy(ctx, &d, worker)
}

// actingBy is what a delegation allows at this moment.
func (c *Controller) actingBy(ctx context.Context, d *quarrypb.Delegation, worker rights.Caller) (acting, error) {
	by := submitterOf(d)
	if !c.stillShown(d) {
		return acting{}, denied("%s may not act for job %d of tenant %s: the token, or the authority of the certificate, that %s has shown was replaced", worker.Name, d.Job, d.Tenant, by.Name)
	}
	if by.Token != "" {
		if _, err := c.token(ctx, by.Token); err != nil && !errors.Is(err, errUnauthenticated) {
			return acting{}, connect.NewError(connect.CodeUnavailable, err)
		} else if err != nil {
			return acting{}, denied("%s may not act for job %d of tenant %s: %s is not valid any more", worker.Name, d.Job, d.Tenant, by.Name)
		}
	}
	in, err := c.actingAs(ctx, by, d.Tenant)
	in.job, in.keeps = d.Job, !by.Is(identity.Worker, identity.Gateway, identity.Operator)
	in.caller = fmt.Sprintf("%s, for job %d of %s,", worker.Name, d.Job, by.Name)
	return in, err
}

// tenantID is the number of a tenant with a name; false: there is none.
func tenantID(list []*quarrypb.Tenant, name string) (uint32, bool) {
	if name == quarrypb.DefaultTenant {
		return 0, true
	}
	i := slices.IndexFunc(list, func(t *quarrypb.Tenant) bool { return t.Name == name })
	if i < 0 {
		return 0, false
	}
	return list[i].Id, true
}

// served are the tenants that a worker has grants in: it works for their jobs alone. None: for all.
func served(list []*quarrypb.Tenant, worker rights.Caller) (names []string) {
	if worker.Is(identity.Operator) {
		return nil
	}
	for _, t := range list {
		if slices.ContainsFunc(t.Grants, func(g *quarrypb.Grant) bool { return isFor(g, worker) }) {
			names = append(names, t.Name)
		}
	}
	return names
}

// serves says whether a worker that serves these tenants serves this one.
func serves(tenants []string, tenant string) bool {
	return len(tenants) == 0 || slices.Contains(tenants, tenant)
}

// DelegateJob records that workers may act for the caller in one job.
func (s *service) DelegateJob(ctx context.Context, r *connect.Request[quarrypb.DelegateJobRequest]) (*connect.Response[quarrypb.Delegation], error) {
	q, caller := r.Msg, rights.From(ctx)
	lasts := cmp.Or(time.Duration(q.LastsS)*time.Second, delegationLasts)
	switch {
	case r.Header().Get(quarrypb.JobHeader) != "":
		return nil, denied("%s acts for a job: it cannot delegate what is not its own", caller.Name)
	case q.Job == 0 || len(q.Digest) != 32:
		return nil, invalid("job %d with a digest of %d bytes: want a number and 32 bytes", q.Job, len(q.Digest))
	case lasts > delegationMost:
		return nil, invalid("a delegation for %v: want at most %v", lasts, delegationMost)
	case s.c.open():
		return connect.NewResponse(&quarrypb.Delegation{}), nil // workers need none
	}
	in, err := s.c.acting(ctx, r.Header())
	switch {
	case err != nil:
		return nil, err
	case !in.some(mayWrite):
		return nil, denied("%s may only read in tenant %s: a job writes its records and its output there", in.caller, in.name)
	}
	d := &quarrypb.Delegation{Job: q.Job, Tenant: in.name, TenantId: in.id, Digest: q.Digest, ExpiresUnixMs: time.Now().Add(lasts).UnixMilli(),
		Submitter: caller.Name, Role: string(caller.ID.Role), Name: caller.ID.Name, Token: caller.Token, Shown: []byte(caller.Shown)}
	for _, role := range caller.Roles {
		d.Roles = append(d.Roles, string(role))
	}
	return s.recordDelegation(ctx, d)
}

// recordDelegation writes a delegation that is not there yet.
func (s *service) recordDelegation(ctx context.Context, d *quarrypb.Delegation) (*connect.Response[quarrypb.Delegation], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	list, err := s.c.delegationList(ctx, true)
	if err != nil {
		return nil, err
	}
	if n := len(slices.DeleteFunc(slices.Clone(list), func(o *quarrypb.Delegation) bool { return o.TenantId != d.TenantId })); n >= maxDelegations {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("tenant %s has %d jobs that have not ended, the most there can be: quarry job cancel", d.Tenant, n))
	}
	value, err := proto.Marshal(d)
	if err != nil {
		return nil, err
	}
	key := s.c.delegationKey(d.TenantId, d.Job)
	cmps := append(s.c.whileTenant(d.TenantId), guard(t.key, t.rev), clientv3.Compare(clientv3.CreateRevision(key), "=", 0))
	res, err := s.c.cfg.Etcd.Txn(ctx).If(cmps...).Then(clientv3.OpPut(key, string(value))).Else(clientv3.OpGet(key), clientv3.OpGet(t.key, clientv3.WithKeysOnly())).Commit()
	if err != nil {
		return nil, etcdError(err) // twice the same is once
	}
	s.c.forgetDelegations()
	if res.Succeeded {
		return connect.NewResponse(told(d)), nil
	}
	if kvs := res.Responses[1].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != t.rev {
		return nil, s.notLeading()
	}
	have := &quarrypb.Delegation{}
	kvs := res.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return nil, tenantGone(d.TenantId)
	}
	if proto.Unmarshal(kvs[0].Value, have) != nil || have.Submitter != d.Submitter || string(have.Digest) != string(d.Digest) {
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("job %d of tenant %s is delegated already", d.Job, d.Tenant))
	}
	return connect.NewResponse(told(have)), nil
}

// told is a delegation in the form of answers.
func told(d *quarrypb.Delegation) *quarrypb.Delegation {
	d = proto.CloneOf(d)
	d.Shown = nil
	return d
}

// delegationList is the list of delegations, oldest first in each tenant. It may be
// delegationHold old, unless latest is set: then it is read now.
func (c *Controller) delegationList(ctx context.Context, latest bool) ([]*quarrypb.Delegation, error) {
	c.jobs.mu.Lock()
	list, until := c.jobs.list, c.jobs.until
	c.jobs.mu.Unlock()
	asked := time.Now()
	if !latest && asked.Before(until) {
		return list, nil
	}
	res, err := c.cfg.Etcd.Get(ctx, c.cfg.Prefix+"delegation/", clientv3.WithPrefix())
	if err != nil {
		return nil, etcdError(err)
	}
	list = nil
	for _, kv := range res.Kvs {
		d := &quarrypb.Delegation{}
		if err := proto.Unmarshal(kv.Value, d); err != nil {
			return nil, connect.NewError(connect.CodeDataLoss, fmt.Errorf("record %s is damaged: %w", kv.Key, err))
		}
		list = append(list, d)
	}
	c.jobs.mu.Lock()
	defer c.jobs.mu.Unlock()
	c.jobs.list, c.jobs.until = list, asked.Add(delegationHold)
	return list, nil
}

// forgetDelegations has the records read again by the next call that needs them.
func (c *Controller) forgetDelegations() {
	c.jobs.mu.Lock()
	defer c.jobs.mu.Unlock()
	c.jobs.until = time.Time{}
}

// EndDelegation is for the submitter, for workers that serve the tenant, and for operators.
func (s *service) EndDelegation(ctx context.Context, r *connect.Request[quarrypb.EndDelegationRequest]) (*connect.Response[quarrypb.EndDelegationResponse], error) {
	caller, name := rights.From(ctx), r.Header().Get(quarrypb.TenantHeader)
	list, err := s.c.delegationList(ctx, true)
	if err != nil {
		return nil, err
	}
	tenants, err := s.c.tenantList(ctx, true)
	if err != nil {
		return nil, err
	}
	if name == "" { // as for other calls: the one that it has grants in
		if names := served(tenants, caller); len(names) == 1 {
			name = names[0]
		}
	}
	name = cmp.Or(name, quarrypb.DefaultTenant)
	i := slices.IndexFunc(list, func(d *quarrypb.Delegation) bool { return d.Tenant == name && d.Job == r.Msg.Job })
	if i < 0 {
		return connect.NewResponse(&quarrypb.EndDelegationResponse{}), nil
	}
	d := list[i]
	own := d.Submitter == caller.Name && d.Token == caller.Token
	if !own && !caller.Is(identity.Operator) && !(caller.Is(identity.Worker) && serves(served(tenants, caller), name)) {
		return nil, denied("%s has not submitted job %d of tenant %s: its submitter, workers and operators end its delegation", caller.Name, d.Job, name)
	}
	if err := s.lead(ctx, clientv3.OpDelete(s.c.delegationKey(d.TenantId, d.Job))); err != nil {
		return nil, err
	}
	s.c.forgetDelegations()
	if r.Msg.Revoke {
		err = s.revokeJobs(ctx, "its delegation is revoked", func(x *quarrypb.Session) bool { return x.Tenant == d.TenantId && x.Job == d.Job })
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&quarrypb.EndDelegationResponse{}), nil
}

// revokeJobs ends live sessions of jobs, and returns when no verb of theirs changes a byte any more.
func (s *service) revokeJobs(ctx context.Context, reason string, which func(*quarrypb.Session) bool) error {
	res, err := do[quarrypb.ListSessionsResponse](ctx, s, &quarrypb.ListSessionsRequest{}, nil)
	if err != nil {
		return err
	}
	var errs []error
	for _, x := range res.Msg.Sessions {
		if x.Job != 0 && which(x) {
			_, err := do[quarrypb.RevokeSessionResponse](ctx, s, &quarrypb.RevokeSessionRequest{Session: x.Session, Reason: reason}, nil)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// PollJobs answers the delegations that a worker may act by.
func (s *service) PollJobs(ctx context.Context, r *connect.Request[quarrypb.PollJobsRequest]) (*connect.Response[quarrypb.PollJobsResponse], error) {
	caller, w := rights.From(ctx), r.Msg.Worker
	if caller.Is(identity.Operator) {
		return connect.NewResponse(&quarrypb.PollJobsResponse{All: true}), nil
	}
	if err := validWorker(w); err != nil {
		return nil, err
	}
	if s.c.term.Load() == nil {
		return nil, s.notLeading()
	}
	tenants, err := s.c.tenantList(ctx, false)
	if err != nil {
		return nil, err
	}
	mine := served(tenants, caller)
	if name := r.Header().Get(quarrypb.TenantHeader); name != "" {
		if !serves(mine, name) {
			return nil, denied("%s has grants in %s, not in tenant %s", caller.Name, strings.Join(mine, ", "), name)
		}
		mine = []string{name}
	}
	if err := s.c.sawWorker(seenWorker{w, time.Now(), mine}); err != nil {
		return nil, err
	}
	list, err := s.c.delegationList(ctx, false)
	if err != nil {
		return nil, err
	}
	out := &quarrypb.PollJobsResponse{}
	for _, d := range list {
		if !serves(mine, d.Tenant) || time.Now().UnixMilli() >= d.ExpiresUnixMs {
			continue
		}
		in, err := s.c.actingBy(ctx, d, caller)
		if connect.CodeOf(err) == connect.CodePermissionDenied && err != nil {
			continue // its submitter has lost its rights
		}
		if err != nil {
			return nil, err
		}
		d = told(d)
		if d.Grants = in.grants; in.all {
			d.Grants = nil
		}
		out.Jobs = append(out.Jobs, d)
	}
	slices.SortStableFunc(out.Jobs, func(a, b *quarrypb.Delegation) int { return cmp.Compare(a.ExpiresUnixMs, b.ExpiresUnixMs) })
	return connect.NewResponse(out), nil
}

// validWorker refuses a worker's description that is beyond the limits.
func validWorker(w *quarrypb.Worker) error {
	switch {
	case w.GetName() == "" || len(w.Name) > state.MaxNameBytes || len(w.Node) > state.MaxNameBytes || len(w.Host) > state.MaxNameBytes:
		return invalid("worker %q: want names of 1 to %d bytes", w.GetName(), state.MaxNameBytes)
	case len(w.Plugins) > maxPlugins || !json.Valid(w.Plugins):
		return invalid("worker %q: want at most %d bytes of JSON about its plugins, not %d", w.Name, maxPlugins, len(w.Plugins))
	}
	return nil
}

// sawWorker records that a worker has polled.
func (c *Controller) sawWorker(w seenWorker) error {
	c.jobs.mu.Lock()
	defer c.jobs.mu.Unlock()
	for name, o := range c.jobs.workers {
		if w.at.Sub(o.at) > workerHold {
			delete(c.jobs.workers, name)
		}
	}
	if c.jobs.workers == nil {
		c.jobs.workers = map[string]seenWorker{}
	}
	if _, known := c.jobs.workers[w.rec.Name]; !known && len(c.jobs.workers) >= maxWorkers {
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d workers, the most there can be", maxWorkers))
	}
	c.jobs.workers[w.rec.Name] = w
	return nil
}

// ListWorkers lists the workers that have polled lately and serve the caller's tenant.
func (s *service) ListWorkers(ctx context.Context, r *connect.Request[quarrypb.ListWorkersRequest]) (*connect.Response[quarrypb.ListWorkersResponse], error) {
	if s.c.term.Load() == nil {
		return nil, s.notLeading()
	}
	in, err := s.c.acting(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	out := &quarrypb.ListWorkersResponse{}
	s.c.jobs.mu.Lock()
	defer s.c.jobs.mu.Unlock()
	for _, w := range s.c.jobs.workers {
		if time.Since(w.at) <= workerHold && serves(w.tenants, in.name) {
			out.Workers = append(out.Workers, w.rec)
		}
	}
	slices.SortFunc(out.Workers, func(a, b *quarrypb.Worker) int { return cmp.Compare(a.Name, b.Name) })
	return connect.NewResponse(out), nil
}

// watchDelegations removes delegations and places in the queue that have ended, and ends the sessions of workers that have not
// closed them since. The leader does it.
func (c *Controller) watchDelegations() {
	c.jobs.opened.Store(true) // by a leader before this one
	over := map[uint64]bool{} // serials of sessions without a delegation, when last seen
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-time.After(delegationsEvery):
		}
		if !c.Leads() {
			c.jobs.opened.Store(true)
			continue
		}
		ctx, cancel := context.WithTimeout(c.ctx, upkeepTimeout)
		var err error
		if over, err = c.tendDelegations(ctx, over); err != nil && c.ctx.Err() == nil {
			c.cfg.Logger.Debug("controller: delegations", "error", err)
		}
		if err := c.tendQueue(ctx); err != nil && c.ctx.Err() == nil {
			c.cfg.Logger.Debug("controller: queue of jobs", "error", err)
		}
		cancel()
	}
}

// reachesMemory says whether a session may still reach memory: its fence has not begun. An
// expired one may, because a heartbeat renews its lease.
func reachesMemory(x *quarrypb.Session) bool { return x.State == "live" || x.State == "expired" }

// stillAllowed says whether the submitter of a job may still write in its tenant. It is true
// while that is unknown. The record stays when it is false, because the rights may be given back.
func (c *Controller) stillAllowed(ctx context.Context, d *quarrypb.Delegation) bool {
	in, err := c.actingBy(ctx, d, rights.Caller{Name: "a worker"})
	switch connect.CodeOf(err) {
	case connect.CodePermissionDenied, connect.CodeNotFound:
		return false
	}
	return err != nil || in.id == d.TenantId && in.some(mayWrite)
}

// tendDelegations ends the sessions that already had no delegation the last time, and returns
// those that have none now.
func (c *Controller) tendDelegations(ctx context.Context, over map[uint64]bool) (map[uint64]bool, error) {
	s := &service{c: c}
	list, err := c.delegationList(ctx, true)
	if err != nil {
		return over, err
	}
	type key struct {
		tenant uint32
		job    uint64
	}
	valid := map[key]bool{}
	for _, d := range list {
		if time.Now().UnixMilli() < d.ExpiresUnixMs {
			valid[key{d.TenantId, d.Job}] = c.stillAllowed(ctx, d)
		} else if err := s.lead(ctx, clientv3.OpDelete(c.delegationKey(d.TenantId, d.Job))); err != nil {
			return over, err
		}
	}
	if !c.jobs.opened.Swap(false) {
		return map[uint64]bool{}, nil
	}
	next, any := map[uint64]bool{}, false
	err = s.revokeJobs(ctx, "its delegation has ended", func(x *quarrypb.Session) bool {
		any = true
		if !reachesMemory(x) || valid[key{x.Tenant, x.Job}] {
			return false
		}
		next[x.Serial] = true
		return over[x.Serial]
	})
	if any || err != nil {
		c.jobs.opened.Store(true)
	}
	return next, err
}

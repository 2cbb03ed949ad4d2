package controller

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// The machine decides about tenants. Which one a call is made in is looked up in their records, by any
// controller.

// tenantHold is how long a controller uses what it has read of tenants.
const tenantHold = time.Second

// tenants are the records that were read a moment ago.
type tenants struct {
	mu    sync.Mutex // guards both
	list  []*quarrypb.Tenant
	until time.Time // they are read again then
}

// tenantList is at most tenantHold old; latest: it is read now.
func (c *Controller) tenantList(ctx context.Context, latest bool) ([]*quarrypb.Tenant, error) {
	c.tenants.mu.Lock()
	list, until := c.tenants.list, c.tenants.until
	c.tenants.mu.Unlock()
	asked := time.Now()
	if !latest && asked.Before(until) {
		return list, nil
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	res, err := c.cfg.Etcd.Get(ctx, c.cfg.Prefix+state.TenantPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, etcdError(err)
	}
	list = make([]*quarrypb.Tenant, len(res.Kvs))
	for i, kv := range res.Kvs {
		list[i] = &quarrypb.Tenant{}
		if err := proto.Unmarshal(kv.Value, list[i]); err != nil {
			return nil, connect.NewError(connect.CodeDataLoss, fmt.Errorf("record %s is damaged: %w", kv.Key, err))
		}
	}
	c.tenants.mu.Lock()
	defer c.tenants.mu.Unlock()
	c.tenants.list, c.tenants.until = list, asked.Add(tenantHold)
	return list, nil
}

// What grants may allow.
const (
	mayRead   = quarrypb.Right_RIGHT_READ
	mayWrite  = quarrypb.Right_RIGHT_WRITE
	mayCreate = quarrypb.Right_RIGHT_CREATE
	mayDelete = quarrypb.Right_RIGHT_DELETE
)

// acting is the tenant that a call is made in, and what its caller may do there.
type acting struct {
	id     uint32            // of the tenant
	name   string            // of the tenant
	caller string            // as errors name it
	all    bool              // else what the grants say
	leaves bool              // the tenant is being deleted
	grants []*quarrypb.Grant // of the caller, in this tenant
	job    uint64            // not 0: a worker acts for the submitter of this job
	keeps  bool              // names: the role of the submitter deletes none
}

// acting finds out which tenant a call is made in. Operators work in any. A caller with grants works in the
// tenants that they are of, any other one in the default tenant.
func (c *Controller) acting(ctx context.Context, h http.Header) (acting, error) {
	caller, name := rights.From(ctx), h.Get(quarrypb.TenantHeader)
	if h.Get(quarrypb.JobHeader) != "" {
		return c.actingForJob(ctx, caller, name, h.Get(quarrypb.JobHeader))
	}
	if user := h.Get(quarrypb.UserHeader); user != "" {
		return c.actingForUser(ctx, caller, name, user)
	}
	return c.actingAs(ctx, caller, name)
}

// actingAs is acting of a caller that has named a tenant, or none.
func (c *Controller) actingAs(ctx context.Context, caller rights.Caller, name string) (acting, error) {
	in := acting{name: cmp.Or(name, quarrypb.DefaultTenant), caller: caller.Name, all: caller.Is(identity.Operator)}
	if in.all && in.name == quarrypb.DefaultTenant {
		return in, nil
	}
	for _, latest := range []bool{false, true} { // it may have been made or granted a moment ago
		list, err := c.tenantList(ctx, latest)
		if err != nil {
			return acting{}, err
		}
		if err = in.find(list, caller, name); err == nil || latest {
			return in, err
		}
	}
	return in, nil
}

// find looks for the tenant in the records: name is what the caller asked for.
func (in *acting) find(list []*quarrypb.Tenant, caller rights.Caller, name string) error {
	var granted []*quarrypb.Tenant
	var names []string
	for _, t := range list {
		if slices.ContainsFunc(t.Grants, func(g *quarrypb.Grant) bool { return isFor(g, caller) }) {
			granted, names = append(granted, t), append(names, t.Name)
		}
	}
	from := granted
	switch {
	case in.all:
		from = list
	case len(granted) == 0 && caller.User != "":
		return denied("%s has no grant: an operator gives one with quarry tenant grant", caller.Name)
	case len(granted) == 0 && worksOnly(caller):
		return denied("%s has no rights of its own: a worker acts for the jobs that are delegated to it (quarry worker), or gets a grant (quarry tenant grant)", caller.Name)
	case len(granted) == 0 && in.name == quarrypb.DefaultTenant:
		in.all = true
		return nil
	case len(granted) > 1 && name == "":
		return invalid("%s has grants in the tenants %s: name one (--tenant, QUARRY_TENANT)", caller.Name, strings.Join(names, ", "))
	case len(granted) == 1 && name == "":
		in.name = granted[0].Name
	}
	i := slices.IndexFunc(from, func(t *quarrypb.Tenant) bool { return t.Name == in.name })
	switch {
	case i < 0 && in.all:
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("no tenant %q: quarry tenant list shows them", in.name))
	case i < 0:
		return denied("%s has no grant in tenant %s: an operator gives one with quarry tenant grant", caller.Name, in.name)
	}
	in.id, in.leaves = from[i].Id, from[i].Deleting
	for _, g := range from[i].Grants {
		if isFor(g, caller) {
			in.grants = append(in.grants, g)
		}
	}
	return nil
}

// isFor says whether a grant is the caller's.
func isFor(g *quarrypb.Grant, c rights.Caller) bool {
	switch kind, value, _ := strings.Cut(g.Identity, ":"); {
	case kind == "token":
		return c.Token != "" && value == c.Token
	case kind == "redis":
		return c.User != "" && value == c.User
	case kind == "role":
		return c.Is(identity.Role(value))
	}
	return c.ID.Name != "" && g.Identity == string(c.ID.Role)+"/"+c.ID.Name
}

// may says whether the caller has a right to a name.
func (in *acting) may(right quarrypb.Right, name string) bool {
	if right == mayDelete && in.keeps {
		return false
	}
	if name == quarrypb.JobsTree && right != mayDelete {
		return in.some(right)
	}
	return in.all || slices.ContainsFunc(in.grants, func(g *quarrypb.Grant) bool {
		return slices.Contains(g.Rights, right) && strings.HasPrefix(name, g.Prefix)
	})
}

// some says whether the caller has a right to anything.
func (in *acting) some(right quarrypb.Right) bool {
	return in.all || slices.ContainsFunc(in.grants, func(g *quarrypb.Grant) bool { return slices.Contains(g.Rights, right) })
}

// lacks is the error for a caller without a right.
func (in *acting) lacks(right quarrypb.Right, to string) error {
	return denied("%s may not %s %s in tenant %s: its grants there do not say so (quarry tenant grants %s)", in.caller, quarrypb.Word(right), to, in.name, in.name)
}

// check refuses what the caller has no right to.
func (in *acting) check(right quarrypb.Right, name string) error {
	switch {
	case in.leaves && (right == mayCreate || right == mayWrite):
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("tenant %s is being deleted with all that it holds", in.name))
	case in.may(right, name):
		return nil
	}
	return in.lacks(right, fmt.Sprintf("name %q", name))
}

// mayOpen refuses a session with rights to memory that no grant has.
func (in *acting) mayOpen(memory uint32) error {
	switch {
	case in.some(mayWrite), memory == uint32(rdma.ReadOnly) && in.some(mayRead):
		return nil
	case in.some(mayRead):
		return denied("%s may only read in tenant %s: open a read-only session", in.caller, in.name)
	}
	return in.lacks(mayRead, "memory")
}

// tenantFor is the number of the tenant of a call about a name, which the caller must have a right to.
func (c *Controller) tenantFor(ctx context.Context, h http.Header, right quarrypb.Right, name string) (uint32, error) {
	in, err := c.acting(ctx, h)
	if err == nil {
		err = in.check(right, name)
	}
	return in.id, err
}

// whileTenant makes a transaction fail if a tenant has been deleted. The default one never is.
func (c *Controller) whileTenant(id uint32) []clientv3.Cmp {
	if id == 0 {
		return nil
	}
	return []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(c.cfg.Prefix+state.TenantKey(id)), ">", 0)}
}

// tenantGone is the error for a tenant that was deleted meanwhile.
func tenantGone(id uint32) error {
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("tenant %d has been deleted", id))
}

// ownSessions leaves out the sessions of other tenants, for a caller that has grants.
func (c *Controller) ownSessions(ctx context.Context, h http.Header, list *quarrypb.ListSessionsResponse) error {
	if rights.From(ctx).Is(identity.Operator, identity.Node, identity.Controller, identity.Viewer) {
		return nil
	}
	in, err := c.acting(ctx, h)
	list.Sessions = slices.DeleteFunc(list.Sessions, func(s *quarrypb.Session) bool { return s.Tenant != in.id })
	return err
}

// CreateTenant and SetTenant are for operators.
func (s *service) CreateTenant(ctx context.Context, r *connect.Request[quarrypb.CreateTenantRequest]) (*connect.Response[quarrypb.Tenant], error) {
	return do[quarrypb.Tenant](ctx, s, r.Msg, nil)
}

func (s *service) SetTenant(ctx context.Context, r *connect.Request[quarrypb.SetTenantRequest]) (*connect.Response[quarrypb.Tenant], error) {
	return do[quarrypb.Tenant](ctx, s, r.Msg, nil)
}

// DeleteTenant looks for names first, for an answer that says which; the transaction that deletes the record looks again.
func (s *service) DeleteTenant(ctx context.Context, r *connect.Request[quarrypb.DeleteTenantRequest]) (*connect.Response[quarrypb.DeleteTenantResponse], error) {
	if r.Msg.WithData {
		return s.deleteWithData(ctx, r.Msg)
	}
	list, err := s.c.tenantList(ctx, true)
	if err != nil {
		return nil, err
	}
	for _, t := range list {
		if t.Name != r.Msg.Name || t.Id == 0 {
			continue
		}
		const most = 4
		prefix := s.c.nameKey(t.Id, "")
		res, err := s.c.cfg.Etcd.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(most), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
		if err != nil {
			return nil, etcdError(err)
		}
		var names []string
		for _, kv := range res.Kvs {
			names = append(names, strings.TrimPrefix(string(kv.Key), prefix))
		}
		if len(names) > 0 {
			return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("tenant %s holds %d names, among them %s: quarry name delete, or --with-data", t.Name, res.Count, strings.Join(names, ", ")))
		}
	}
	return settled(do[quarrypb.DeleteTenantResponse](ctx, s, r.Msg, nil))
}

// deletePatience bounds one call; the deletion goes on, and the next call ends it.
const deletePatience = 4 * time.Second

// deleteWithData has the machine empty the tenant, then deletes its names, then the record. Each step may be
// repeated, by this leader or another.
func (s *service) deleteWithData(ctx context.Context, r *quarrypb.DeleteTenantRequest) (*connect.Response[quarrypb.DeleteTenantResponse], error) {
	for until := time.Now().Add(deletePatience); ; {
		// Afterwards no controller believes that the tenant takes names.
		res, err := settled(do[quarrypb.DeleteTenantResponse](ctx, s, r, nil))
		switch {
		case err != nil:
			return nil, err
		case res.Msg.Regions == 0 && res.Msg.Sessions == 0:
			if err := s.deleteNames(ctx, r.Name); err != nil {
				return nil, err
			}
			return settled(do[quarrypb.DeleteTenantResponse](ctx, s, &quarrypb.DeleteTenantRequest{Name: r.Name}, nil))
		case ctx.Err() != nil || time.Now().After(until):
			return res, nil
		}
	}
}

// namesAtOnce bounds the names that one transaction deletes.
const namesAtOnce = 500

// deleteNames deletes the names of a tenant.
func (s *service) deleteNames(ctx context.Context, tenant string) error {
	list, err := s.c.tenantList(ctx, true)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(list, func(t *quarrypb.Tenant) bool { return t.Name == tenant && t.Id != 0 && t.Deleting })
	if i < 0 {
		return nil // deleted already, or made anew
	}
	prefix := s.c.nameKey(list[i].Id, "")
	for {
		t := s.c.term.Load()
		if t == nil {
			return s.notLeading()
		}
		res, err := s.c.cfg.Etcd.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(namesAtOnce), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
		if err != nil {
			return etcdError(err)
		}
		if len(res.Kvs) == 0 {
			return nil
		}
		last := string(res.Kvs[len(res.Kvs)-1].Key)
		done, err := s.c.cfg.Etcd.Txn(ctx).If(guard(t.key, t.rev)).Then(clientv3.OpDelete(prefix, clientv3.WithRange(last+"\x00"))).Commit()
		switch {
		case err != nil:
			t.names.lost()
			return etcdError(err)
		case !done.Succeeded:
			return s.notLeading()
		}
		t.names.gone(int(done.Responses[0].GetResponseDeleteRange().Deleted))
	}
}

// ListTenants shows operators, viewers and controllers all tenants, and others those that they
// administer.
func (s *service) ListTenants(ctx context.Context, r *connect.Request[quarrypb.ListTenantsRequest]) (*connect.Response[quarrypb.ListTenantsResponse], error) {
	res, err := do[quarrypb.ListTenantsResponse](ctx, s, r.Msg, nil)
	if caller := rights.From(ctx); err == nil && !caller.Is(identity.Operator, identity.Viewer, identity.Controller) {
		res.Msg.Tenants = slices.DeleteFunc(res.Msg.Tenants, func(t *quarrypb.Tenant) bool { return !isAdmin(t, caller) })
		if len(res.Msg.Tenants) == 0 {
			return nil, denied("%s has the right admin in no tenant: operators and viewers see all", caller.Name)
		}
	}
	return res, err
}

// Grant is for operators and for admins of the tenant. The record says which of the two has given
// it.
func (s *service) Grant(ctx context.Context, r *connect.Request[quarrypb.GrantRequest]) (*connect.Response[quarrypb.Tenant], error) {
	asAdmin, err := s.c.administers(ctx, r.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	if r.Msg.Grant != nil {
		r.Msg.Grant.ByAdmin = asAdmin
	}
	if err := checkIdentity(r.Msg.Grant.GetIdentity()); err != nil {
		return nil, err
	}
	return settled(do[quarrypb.Tenant](ctx, s, r.Msg, nil))
}

// checkIdentity refuses what no caller is.
func checkIdentity(id string) error {
	users := []identity.Role{identity.Client, identity.Worker, identity.Gateway}
	kind, value, named := strings.Cut(id, ":")
	role, name, slash := strings.Cut(id, "/")
	switch {
	case named && kind == "token" && len(value) == 2*tokenIDBytes,
		named && kind == "redis" && value != "",
		named && kind == "role" && slices.Contains(users, identity.Role(value)),
		!named && slash && name != "" && slices.Contains(users, identity.Role(role)):
		return nil
	}
	return invalid("identity %q: want ROLE/NAME of a certificate, token:ID or role:ROLE, with the role client, worker or gateway (operators need no grant), or redis:NAME of a gateway's user", id)
}

// RevokeGrant is for operators, who can take any grant away, and for admins of the tenant, who
// can take those away that an admin has given.
func (s *service) RevokeGrant(ctx context.Context, r *connect.Request[quarrypb.RevokeGrantRequest]) (*connect.Response[quarrypb.Tenant], error) {
	asAdmin, err := s.c.administers(ctx, r.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	r.Msg.ByAdmin = asAdmin
	return settled(do[quarrypb.Tenant](ctx, s, r.Msg, nil))
}

// isAdmin says whether a caller has the right admin in a tenant.
func isAdmin(t *quarrypb.Tenant, caller rights.Caller) bool {
	return slices.ContainsFunc(t.Grants, func(g *quarrypb.Grant) bool {
		return isFor(g, caller) && slices.Contains(g.Rights, quarrypb.Right_RIGHT_ADMIN)
	})
}

// administers refuses a change of grants, unless the caller is an operator or has the right admin in
// the tenant. asAdmin: it is no operator. A grant that is being revoked may serve calls that are under way.
func (c *Controller) administers(ctx context.Context, tenant string) (asAdmin bool, err error) {
	caller := rights.From(ctx)
	if caller.Is(identity.Operator) {
		return false, nil
	}
	list, err := c.tenantList(ctx, true)
	if err != nil {
		return true, err
	}
	if slices.ContainsFunc(list, func(t *quarrypb.Tenant) bool { return t.Name == tenant && isAdmin(t, caller) }) {
		return true, nil
	}
	return true, denied("%s may not change grants of tenant %s: operators may, and identities with the right admin there", caller.Name, tenant)
}

// settled answers once no controller uses what it has read before a change.
func settled[A any](res *connect.Response[A], err error) (*connect.Response[A], error) {
	if err == nil {
		time.Sleep(tenantHold)
	}
	return res, err
}

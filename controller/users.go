package controller

import (
	"context"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A gateway knows users that the cluster does not: those of its own protocol, whose passwords it checks. A grant
// to redis:NAME lets gateways work for such a user in a tenant. Its prefix is one of keys, not of names.

const userPrefix = "redis:"

// actingForUser is acting of a gateway that names one of its users.
func (c *Controller) actingForUser(ctx context.Context, gateway rights.Caller, tenant, user string) (acting, error) {
	name, ok := strings.CutPrefix(user, userPrefix)
	switch {
	case !gateway.Is(identity.Gateway):
		return acting{}, denied("%s may not act for %s: it is for [gateway]", gateway.Name, user)
	case !ok || name == "" || tenant == "":
		return acting{}, invalid("user %q in tenant %q: want redis:NAME, and a tenant", user, tenant)
	}
	list, err := c.tenantList(ctx, false)
	if err != nil {
		return acting{}, err
	}
	if !serves(served(list, gateway), tenant) {
		return acting{}, denied("%s has grants in other tenants than %s: it serves those alone", gateway.Name, tenant)
	}
	in, err := c.actingAs(ctx, rights.Caller{Name: user, User: name}, tenant)
	for i, g := range in.grants {
		in.grants[i] = proto.CloneOf(g)
		in.grants[i].Prefix = "" // which keys it may use is the gateway's to check
	}
	in.keeps = true
	return in, err
}

// ListUserGrants answers what a gateway has to know to act for its users, in the tenants that it serves.
func (s *service) ListUserGrants(ctx context.Context, _ *connect.Request[quarrypb.ListUserGrantsRequest]) (*connect.Response[quarrypb.ListTenantsResponse], error) {
	list, err := s.c.tenantList(ctx, false)
	if err != nil {
		return nil, err
	}
	mine := served(list, rights.From(ctx))
	out := &quarrypb.ListTenantsResponse{}
	for _, t := range list {
		t = &quarrypb.Tenant{Id: t.Id, Name: t.Name, Grants: slices.DeleteFunc(slices.Clone(t.Grants), func(g *quarrypb.Grant) bool { return !strings.HasPrefix(g.Identity, userPrefix) })}
		if len(t.Grants) > 0 && serves(mine, t.Name) {
			out.Tenants = append(out.Tenants, t)
		}
	}
	return connect.NewResponse(out), nil
}

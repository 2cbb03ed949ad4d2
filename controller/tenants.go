package controller

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// The machine decides about tenants. Which one a call is made in is looked up in their records, by any
// controller.

// tenantHold is how long a controller believes what it has read of tenants.
const tenantHold = time.Second

// tenants are the records that were read a moment ago.
type tenants struct {
	mu    sync.Mutex
	list  []*quarrypb.Tenant
	until time.Time
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

// tenant is the number of the tenant that a call is made in.
func (c *Controller) tenant(ctx context.Context, h http.Header) (uint32, error) {
	name := h.Get(quarrypb.TenantHeader)
	if name == "" || name == quarrypb.DefaultTenant {
		return 0, nil
	}
	for _, latest := range []bool{false, true} { // it may have been made a moment ago
		list, err := c.tenantList(ctx, latest)
		if err != nil {
			return 0, err
		}
		if i := slices.IndexFunc(list, func(t *quarrypb.Tenant) bool { return t.Name == name }); i >= 0 {
			return list[i].Id, nil
		}
	}
	return 0, connect.NewError(connect.CodeNotFound, fmt.Errorf("no tenant %q: quarry tenant list shows them", name))
}

func (s *service) CreateTenant(ctx context.Context, r *connect.Request[quarrypb.CreateTenantRequest]) (*connect.Response[quarrypb.Tenant], error) {
	return do[quarrypb.Tenant](ctx, s, r.Msg, nil)
}

func (s *service) SetTenant(ctx context.Context, r *connect.Request[quarrypb.SetTenantRequest]) (*connect.Response[quarrypb.Tenant], error) {
	return do[quarrypb.Tenant](ctx, s, r.Msg, nil)
}

func (s *service) DeleteTenant(ctx context.Context, r *connect.Request[quarrypb.DeleteTenantRequest]) (*connect.Response[quarrypb.DeleteTenantResponse], error) {
	return do[quarrypb.DeleteTenantResponse](ctx, s, r.Msg, nil)
}

func (s *service) ListTenants(ctx context.Context, r *connect.Request[quarrypb.ListTenantsRequest]) (*connect.Response[quarrypb.ListTenantsResponse], error) {
	return do[quarrypb.ListTenantsResponse](ctx, s, r.Msg, nil)
}

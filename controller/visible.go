package controller

import (
	"context"
	"net/http"
	"slices"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// visible are the tenants whose regions a caller is shown.
type visible struct {
	all     bool
	tenants []uint32 // else these
}

// sees finds out which tenants' regions a caller is shown. Operators, nodes, controllers and
// viewers are shown all. A caller with grants is shown the tenants of its grants; the submitter
// of a job and the user of a gateway, the tenant of the call. Workers are shown none, every other
// caller all.
func (c *Controller) sees(ctx context.Context, h http.Header) (visible, error) {
	caller := rights.From(ctx)
	if caller.Is(identity.Operator, identity.Node, identity.Controller, identity.Viewer) {
		return visible{all: true}, nil
	}
	if h.Get(quarrypb.JobHeader) != "" || h.Get(quarrypb.UserHeader) != "" {
		in, err := c.acting(ctx, h)
		return visible{in.all, []uint32{in.id}}, err
	}
	list, err := c.tenantList(ctx, false)
	if err != nil {
		return visible{}, err
	}
	v := visible{}
	for _, t := range list {
		if slices.ContainsFunc(t.Grants, func(g *quarrypb.Grant) bool { return isFor(g, caller) }) {
			v.tenants = append(v.tenants, t.Id)
		}
	}
	v.all = len(v.tenants) == 0 && !worksOnly(caller)
	return v, nil
}

// table is t, or a copy with the visible rows. t is shared between callers.
func (v visible) table(t *quarrypb.Table) *quarrypb.Table {
	if v.all {
		return t
	}
	return state.Bounded(t, v.tenants...)
}

// status leaves out what is not visible. r is of one caller.
func (v visible) status(r *quarrypb.StatusResponse) {
	if v.all {
		return
	}
	r.Table = v.table(r.Table)
	r.Progress = slices.DeleteFunc(r.Progress, func(p *quarrypb.Progress) bool {
		return !slices.ContainsFunc(r.Table.Regions, func(g *quarrypb.Region) bool { return g.Id == p.Region })
	})
}

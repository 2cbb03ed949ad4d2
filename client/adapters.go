package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// This file has several adapters, of nodes and of the client. A region is served by one adapter of each of its nodes, which the
// replica's row names: the lane has a connection to that one, by any adapter of its own.

// adapter is one of the client's.
type adapter struct {
	*verbs.Dialer
	rail string // that it is at; "": no named one
}

// nodeAdapter names what a connection of a lane leads to.
type nodeAdapter struct{ node, adapter uint32 }

// everyAdapter is that of connections over other providers: the node goes on to the adapter that serves a region.
const everyAdapter = math.MaxUint32

// verbsPaths are the adapters of the client by which an adapter of a node is reached, best first.
func (c *Client) verbsPaths(e *quarrypb.Endpoint, lane uint32) (own []adapter, path rail.Path, err error) {
	q := rail.Question{Ends: []rail.End{{Address: e.Address, Rail: e.Rail, NUMA: -1}}, Memory: -1, Strict: c.cfg.RailPolicy == RailsStrict, Turn: lane}
	for _, a := range c.dialers.verbs {
		if a.rail != "" {
			q.Own = append(q.Own, rail.Own{Name: a.rail, From: a.Caps().GID})
		}
	}
	paths, err := rail.Choose(q)
	if err != nil {
		return nil, rail.Path{}, err
	}
	return adaptersFor(c.dialers.verbs, paths, lane, func(a adapter) netip.Addr { return a.Caps().GID }), paths[0], nil
}

// adaptersFor are the adapters that paths lead from; where these name none, all, beginning with another one for each lane.
func adaptersFor(all []adapter, paths []rail.Path, lane uint32, address func(adapter) netip.Addr) (own []adapter) {
	for _, p := range paths {
		for _, a := range all {
			if p.From.IsValid() && p.From == address(a) && a.rail == p.End.Rail {
				own = append(own, a)
			}
		}
	}
	if len(own) > 0 {
		return own
	}
	for i := range all {
		own = append(own, all[(i+int(lane%uint32(len(all))))%len(all)])
	}
	return own
}

// dialVerbs connects a lane to an adapter of a node by the first adapter of the client that it is reached from.
//
// A lane that has a connection to that adapter by another one of the client may call it: the node's adapter has one access control, and ends
// the lane's old connection before it accepts the new one.
func (c *Client) dialVerbs(ctx context.Context, n *quarrypb.Node, e *quarrypb.Endpoint, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	own, path, err := c.verbsPaths(e, lane)
	if err != nil {
		return nil, fmt.Errorf("%w: %w to node %s: %w", ErrUnreachable, errTransport, n.Name, err)
	}
	var errs []error
	for _, a := range own {
		conn, err := a.Dial(ctx, e.Address, as.For(n.Id, n.Name), lane)
		if err == nil {
			c.crossing(n, &path)
			return conn, nil
		}
		if errs = append(errs, fmt.Errorf("%s %s: %w", TransportVerbs, e.Address, err)); rail.Answered(err) || ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// have is the lane's connection to an adapter of a node, or one to the node by which every adapter is reached; nil: there is none.
func (l *lane) have(at nodeAdapter) *nodeConn {
	if c := l.conns[at]; c != nil {
		return c
	}
	return l.conns[nodeAdapter{at.node, everyAdapter}]
}

// serves reports whether a table has in service what a connection leads to: an incarnation of a node and, over verbs, an adapter.
func serves(t *table.Table, c *nodeConn) bool {
	return inService(t, c.node, c.incarnation) && !slices.Contains(t.Node(c.node).GetLostAdapters(), c.adapter)
}

// adapterAt is the adapter of a node that serves a region.
func adapterAt(r *quarrypb.Region, node uint32) uint32 {
	for _, rep := range r.GetReplicas() {
		if rep.Node == node {
			return rep.Adapter
		}
	}
	return 0
}

// anyAdapter is the adapter of a node for what concerns no region: the same one for all calls, until it is lost.
func anyAdapter(n *quarrypb.Node) (adapter uint32) {
	for slices.Contains(n.GetLostAdapters(), adapter) {
		adapter++
	}
	return adapter
}

package client

import (
	"context"
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

// verbsPath is a way to an adapter of a node.
type verbsPath struct {
	adapter // of the client
	rail.Path
}

// verbsPaths are the ways to an adapter of a node, best first.
func (c *Client) verbsPaths(e *quarrypb.Endpoint, lane uint32) ([]verbsPath, error) {
	q := rail.Question{Ends: []rail.End{{Address: e.Address, Rail: e.Rail, NUMA: -1}}, Memory: -1, Strict: c.cfg.RailPolicy == RailsStrict, Turn: lane}
	address := func(a adapter) netip.Addr { return a.Caps().GID }
	for _, a := range c.dialers.verbs {
		if a.rail != "" {
			q.Own = append(q.Own, rail.Own{Name: a.rail, From: address(a)})
		}
	}
	paths, err := rail.Choose(q)
	if err != nil {
		return nil, err
	}
	return waysBy(c.dialers.verbs, paths, &q, address, c.downs.Has), nil
}

// waysBy are the ways by the adapters that paths lead from, and behind these, unless the client refuses to cross, by its others: the first ones
// may be removed, or cut off. Ways that led nowhere lately are last.
func waysBy(own []adapter, paths []rail.Path, q *rail.Question, address func(adapter) netip.Addr, down func(rail.Path) bool) (all []verbsPath) {
	first := adaptersFor(own, paths, q.Turn, address)
	for _, a := range first {
		all = append(all, verbsPath{a, rail.Path{End: q.Ends[0], From: address(a), Crosses: paths[0].Crosses}})
	}
	for _, a := range own {
		if !q.Strict && !slices.Contains(first, a) {
			all = append(all, verbsPath{a, rail.Path{End: q.Ends[0], From: address(a), Crosses: true}})
		}
	}
	slices.SortStableFunc(all, func(a, b verbsPath) int { return downLast(down(a.Path), down(b.Path)) })
	return all
}

// downLast orders paths by whether they are down.
func downLast(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
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

// dialVerbs connects a lane to an adapter of a node by the first way to it that works.
//
// A lane that has a connection to that adapter by another one of the client may call it: the node's adapter has one access control, and ends
// the lane's old connection before it accepts the new one.
func (c *Client) dialVerbs(ctx context.Context, n *quarrypb.Node, e *quarrypb.Endpoint, as *rdma.Credentials, lane uint32) (conn rdma.Conn, err error) {
	ways, err := c.verbsPaths(e, lane)
	switch {
	case err == nil && len(ways) == 0:
		return nil, fmt.Errorf("%s %s: no RDMA device", TransportVerbs, e.Address)
	case err != nil:
		return nil, fmt.Errorf("%w: %w to node %s: %w", ErrUnreachable, errTransport, n.Name, err)
	}
	paths := make([]rail.Path, len(ways))
	for i, w := range ways {
		paths[i] = w.Path
	}
	tried := 0
	err = rail.Try(ctx, paths, rail.Answered, func(share context.Context, p rail.Path) (err error) {
		w := ways[tried]
		tried++
		if conn, err = w.Dial(share, e.Address, as.For(n.Id, n.Name), lane); err == nil {
			c.crossing(n, &p)
			c.downs.Answered(p)
			return nil
		}
		if len(ways) > 1 && ctx.Err() == nil && !rail.Answered(err) {
			c.pathFailed(n.Name, p, err)
		}
		return fmt.Errorf("%s %s: %w", TransportVerbs, e.Address, err)
	})
	return conn, err
}

// have is the lane's connection to an adapter of a node, or one to the node by which every adapter is reached; nil: there is none.
func (l *lane) have(at nodeAdapter) *nodeConn {
	if c := l.conns[at]; c != nil {
		return c
	}
	return l.conns[nodeAdapter{at.node, everyAdapter}]
}

// leadsTo says whether a connection is by the provider of an adapter, which becomes the connection's if there is none yet. A connection by
// another provider must not take the place of one that may have chains without an answer: the node would not end that one for it.
func (l *lane) leadsTo(c *nodeConn, adapter uint32) bool {
	if bit := uint32(1) << adapter; c.adapter == everyAdapter && c.leads&bit == 0 {
		used, _ := l.session.client.rememberProvider(nodeAdapter{c.node, adapter}, nodeProvider{c.incarnation, c.Provider()})
		if used != c.Provider() {
			return false
		}
		c.leads |= bit
	}
	return true
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

package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// errTransport: the node has no endpoint that the configuration allows.
var errTransport = errors.New("no usable transport")

// order of preference under auto.
var preferred = []quarrypb.Provider{quarrypb.Provider_PROVIDER_VERBS, quarrypb.Provider_PROVIDER_SHM, quarrypb.Provider_PROVIDER_TCP}

func providerName(p quarrypb.Provider) string {
	switch p {
	case quarrypb.Provider_PROVIDER_VERBS:
		return TransportVerbs
	case quarrypb.Provider_PROVIDER_SHM:
		return TransportSHM
	case quarrypb.Provider_PROVIDER_TCP:
		return TransportTCP
	}
	return p.String()
}

// allowed says whether the configuration lets a provider be used to a node.
func (c *Client) allowed(e *quarrypb.Endpoint) bool {
	name := providerName(e.Provider)
	switch {
	case c.fabrics.byName[name] == nil:
		return false
	case c.cfg.RequireRDMA:
		return name == TransportVerbs
	case e.Provider == quarrypb.Provider_PROVIDER_SHM && (e.HostId == "" || e.HostId != c.hostID):
		return false
	}
	return c.cfg.Transport == TransportAuto || c.cfg.Transport == name
}

// chose says once which provider is used to a node, and, where the node has RDMA
// and it is another, why.
func (c *Client) chose(n *quarrypb.Node, name, address string, failed []error) {
	c.cfg.Logger.Info("fabric", "node", n.Name, "provider", name, "address", address)
	if name == TransportVerbs || c.cfg.Transport != TransportAuto {
		return
	}
	for _, e := range n.Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_VERBS {
			c.cfg.Logger.Warn("fabric: the node has RDMA, it is not used", "node", n.Name, "provider", name, "reason", errors.Join(append(failed, c.fabrics.noRDMA)...))
			return
		}
	}
}

// dial connects a lane to a node. The first provider that works for a node stays:
// under auto another is tried only while none has ever worked.
func (c *Client) dial(ctx context.Context, n *quarrypb.Node, t *rdma.Ticket, lane uint32) (rdma.Conn, error) {
	chosen, _ := c.providers.Load(n.Id)
	var errs []error
	for _, p := range preferred {
		for _, e := range n.Endpoints {
			name := providerName(e.Provider)
			if e.Provider != p || !c.allowed(e) || chosen != nil && chosen != name {
				continue
			}
			conn, err := c.fabrics.byName[name].Dial(ctx, e.Address, t, lane)
			if err == nil {
				if _, known := c.providers.LoadOrStore(n.Id, name); !known {
					c.chose(n, name, e.Address, errs)
				}
				return conn, nil
			}
			if errors.Is(err, rdma.ErrRevoked) {
				return nil, err
			}
			errs = append(errs, fmt.Errorf("%s %s: %w", name, e.Address, err))
		}
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("node %s: %w", n.Name, errors.Join(errs...))
	}
	if c.cfg.Transport == TransportSHM && proto.Domain(n.Domain) != proto.DomainCPU {
		return nil, fmt.Errorf("%w: %w to node %s with shm: %w", ErrUnreachable, errTransport, n.Name, rdma.ErrDomain)
	}
	want := c.cfg.Transport
	if c.cfg.RequireRDMA {
		want = "RDMA"
	}
	return nil, fmt.Errorf("%w: %w to node %s with %s", ErrUnreachable, errTransport, n.Name, want)
}

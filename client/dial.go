package client

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
)

// errTransport: the node has no endpoint that the Config allows.
var errTransport = errors.New("no usable transport")

// preferred lists the providers in the order in which TransportAuto tries them. A node on this host that has verbs too offers shm only where
// its processors execute the atomics: over verbs each of them would be a message to the node.
var preferred = []quarrypb.Provider{quarrypb.Provider_PROVIDER_SHM, quarrypb.Provider_PROVIDER_VERBS, quarrypb.Provider_PROVIDER_TCP}

func providerName(p quarrypb.Provider) string {
	switch p {
	case quarrypb.Provider_PROVIDER_VERBS, quarrypb.Provider_PROVIDER_VERBS_ADAPTER:
		return TransportVerbs
	case quarrypb.Provider_PROVIDER_SHM:
		return TransportSHM
	case quarrypb.Provider_PROVIDER_TCP:
		return TransportTCP
	}
	return p.String()
}

// allowed reports whether the Config and this host allow the use of a node's endpoint.
func (c *Client) allowed(e *quarrypb.Endpoint) bool {
	name := providerName(e.Provider)
	switch {
	case c.dialers.byName[name] == nil:
		return false
	case c.cfg.RequireRDMA:
		return name == TransportVerbs
	case e.Provider == quarrypb.Provider_PROVIDER_SHM && (e.HostId == "" || e.HostId != c.hostID):
		return false
	}
	return c.cfg.Transport == TransportAuto || c.cfg.Transport == name
}

// logProvider logs which provider is used for a node and, if the node has RDMA and another
// provider between hosts is used, why. failed are the errors of the providers tried before.
func (c *Client) logProvider(n *quarrypb.Node, name, address string, failed []error) {
	c.cfg.Logger.Info("fabric", "node", n.Name, "provider", name, "address", address)
	if name != TransportTCP || c.cfg.Transport != TransportAuto {
		return
	}
	for _, e := range n.Endpoints {
		if providerName(e.Provider) == TransportVerbs {
			c.cfg.Logger.Warn("fabric: the node has RDMA, which is not used", "node", n.Name, "provider", name, "reason", errors.Join(append(failed, c.dialers.noRDMA)...))
			return
		}
	}
}

// nodeProvider is the provider that has worked for an adapter of one incarnation of a node, or for
// the node if it has one adapter or none. A later incarnation may run on another host or have other
// adapters.
type nodeProvider struct {
	incarnation uint64
	provider    string
}

// rememberProvider records the provider that has worked for an adapter of an incarnation of a node, unless
// one is recorded. It returns the recorded one, and reports whether that is new.
func (c *Client) rememberProvider(at nodeAdapter, p nodeProvider) (provider string, first bool) {
	for {
		old, known := c.providers.LoadOrStore(at, p)
		if !known {
			return p.provider, true
		}
		if was := old.(nodeProvider); was.incarnation == p.incarnation {
			return was.provider, false
		}
		if c.providers.CompareAndSwap(at, old, p) {
			return p.provider, true
		}
	}
}

// dial connects a lane to a node. The first provider that works for an adapter of an incarnation of a node
// is used for that adapter from then on: TransportAuto tries another only while none has worked. Lanes depend on
// that: a chain without an answer is over when the lane has another connection by the same provider.
//
// way is the address that was taken of a node that has several, else nil. adapter is the one of a node with several that serves what
// the lane wants; by other providers every adapter is reached.
func (c *Client) dial(ctx context.Context, n *quarrypb.Node, adapter uint32, as *rdma.Credentials, lane uint32) (conn rdma.Conn, way *rail.Path, err error) {
	chosen := ""
	at := nodeAdapter{n.Id, adapter}
	if v, ok := c.providers.Load(at); ok && v.(nodeProvider).incarnation == n.Incarnation {
		chosen = v.(nodeProvider).provider
	}
	var errs []error
	for _, p := range preferred {
		for _, e := range n.Endpoints {
			name := providerName(e.Provider)
			if name != providerName(p) || !c.allowed(e) || chosen != "" && chosen != name || e.Adapter != adapter && e.Provider == quarrypb.Provider_PROVIDER_VERBS_ADAPTER {
				continue
			}
			address := e.Address
			switch p {
			case quarrypb.Provider_PROVIDER_TCP:
				conn, way, err = c.dialTCP(ctx, n, as, lane)
				if way != nil {
					address = way.End.Address
				}
			case quarrypb.Provider_PROVIDER_VERBS:
				conn, err = c.dialVerbs(ctx, n, e, as, lane)
			default:
				if conn, err = c.dialers.byName[name].Dial(ctx, e.Address, as.For(n.Id, n.Name), lane); err != nil {
					err = fmt.Errorf("%s %s: %w", name, e.Address, err)
				}
			}
			if err == nil {
				used, first := c.rememberProvider(at, nodeProvider{n.Incarnation, name})
				if used == name {
					if first {
						c.logProvider(n, name, address, errs)
					}
					return conn, way, nil
				}
				conn.Close()
				err = fmt.Errorf("%s %s: another lane has connected by %s meanwhile", name, e.Address, used)
			}
			if errors.Is(err, rdma.ErrRevoked) {
				return nil, nil, err
			}
			errs = append(errs, err)
			if p == quarrypb.Provider_PROVIDER_TCP {
				break // all addresses were tried
			}
		}
	}
	return nil, nil, c.undialled(n, errs)
}

// undialled is why a lane is not connected to a node: what its endpoints have answered, or that none may be used.
func (c *Client) undialled(n *quarrypb.Node, errs []error) error {
	if allTLS(errs) {
		return fmt.Errorf("%w: %w to node %s: %w", ErrUnreachable, errTransport, n.Name, errs[0])
	}
	if len(errs) > 0 {
		return fmt.Errorf("node %s: %w", n.Name, errors.Join(errs...))
	}
	if c.cfg.Transport == TransportSHM && proto.Domain(n.Domain) != proto.DomainCPU {
		return fmt.Errorf("%w: %w to node %s with shm: %w", ErrUnreachable, errTransport, n.Name, rdma.ErrDomain)
	}
	want := c.cfg.Transport
	if c.cfg.RequireRDMA {
		want = "RDMA"
	}
	return fmt.Errorf("%w: %w to node %s with %s", ErrUnreachable, errTransport, n.Name, want)
}

// allTLS says whether the node is well, and this client is not configured for it.
func allTLS(errs []error) bool {
	if len(errs) == 1 {
		if joined, ok := errs[0].(interface{ Unwrap() []error }); ok { // of several addresses
			return allTLS(joined.Unwrap())
		}
	}
	return len(errs) > 0 && !slices.ContainsFunc(errs, func(err error) bool { return !errors.Is(err, rdma.ErrTLS) })
}

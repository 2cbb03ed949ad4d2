package client

import (
	"net"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Where returns the number of the storage node that holds the primary copy of an object, by
// the Client's table: the node nearest to the object's memory. false if the table has no such
// region. It sends nothing.
func (c *Client) Where(ref Ref) (node uint32, ok bool) {
	t := c.current.Load().view.Load().table
	r := t.Region(ref.Addr.Region())
	if r == nil || len(r.Replicas) == 0 {
		return 0, false
	}
	return r.Replicas[0].Node, true
}

// Tenant returns the number of the tenant that the Client's session is in; see Config.Tenant. 0 is the
// tenant "default".
func (c *Client) Tenant() uint32 { return c.current.Load().ticket.Tenant }

// Cluster returns the UUID of the cluster that the Client's session is in.
func (c *Client) Cluster() [16]byte { return c.current.Load().ticket.Cluster }

// Node returns the number of the storage node with a name, by the Client's table. It sends
// nothing.
func (c *Client) Node(name string) (id uint32, ok bool) {
	for _, n := range c.current.Load().view.Load().table.Nodes() {
		if n.Name == name {
			return n.Id, true
		}
	}
	return 0, false
}

// NodeName returns the name of the storage node with a number, "" if the Client's table has no such node. It sends
// nothing.
func (c *Client) NodeName(id uint32) string {
	for _, n := range c.current.Load().view.Load().table.Nodes() {
		if n.Id == id {
			return n.Name
		}
	}
	return ""
}

// NodeHost returns the host of the address at which the storage node with a number serves the network, "" if the Client's table has no
// such node or the node serves its own host alone. It sends nothing.
func (c *Client) NodeHost(id uint32) string {
	for _, n := range c.current.Load().view.Load().table.Nodes() {
		if n.Id != id {
			continue
		}
		for _, e := range n.Endpoints {
			if e.Provider == quarrypb.Provider_PROVIDER_SHM {
				continue
			}
			if host, _, err := net.SplitHostPort(e.Address); err == nil {
				return host
			}
		}
	}
	return ""
}

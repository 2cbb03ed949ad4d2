package storagenode

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// port is an address at which the node serves tcp.
type port struct {
	listener net.Listener
	endpoint *quarrypb.Endpoint // as the table shows it; never changes
}

// listenTCP opens the ports of the tcp fabric.
func (n *Node) listenTCP(ctx context.Context) error {
	all, err := rail.ParseListen(n.cfg.Listen)
	if err != nil {
		return fmt.Errorf("storage node %s: fabric: %w", n.cfg.Name, err)
	}
	for _, l := range all {
		var lc net.ListenConfig
		listener, err := lc.Listen(ctx, "tcp", l.Address)
		if err != nil {
			return fmt.Errorf("storage node %s: fabric: %w", n.cfg.Name, err)
		}
		e := &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_TCP, Tls: fabricTLS[n.cfg.FabricTLS.Mode()], Rail: l.Rail}
		n.ports = append(n.ports, port{listener, e})
		if e.Address, err = n.cfg.fabricAddress(listener.Addr(), len(all)); err != nil {
			return err
		}
		ip := netip.MustParseAddrPort(listener.Addr().String()).Addr().Unmap()
		numa, megabits := rail.Facts("/", ip)
		if e.Megabits = megabits; numa >= 0 {
			node := uint32(numa)
			e.Numa = &node
		}
		if l.Rail != "" {
			own := rail.Own{Name: l.Rail}
			if !ip.IsUnspecified() {
				own.From = ip
			}
			n.rails = append(n.rails, own)
		}
	}
	n.tcpAddress = n.ports[0].endpoint.Address
	return nil
}

// fabricAddress is the address of a port of the tcp fabric as the table shows it. One name cannot lead to several ports of
// different networks, so that a node with more than one shows what it listens at.
func (c Config) fabricAddress(l net.Addr, ports int) (string, error) {
	if ports == 1 {
		return c.advertised("fabric", l)
	}
	if ip := netip.MustParseAddrPort(l.String()).Addr(); ip.IsUnspecified() {
		return "", fmt.Errorf("storage node %s: the fabric port %v is at all addresses: a node with several gives each an address of its own", c.Name, l)
	}
	return l.String(), nil
}

// fabricHost is the host of the first address of the tcp fabric.
func (c Config) fabricHost() (string, error) {
	first, _, _ := strings.Cut(c.Listen, ",")
	if _, address, named := strings.Cut(first, "="); named {
		first = address
	}
	host, _, err := net.SplitHostPort(first)
	return host, err
}

// pulseHost is where the pulse is heard unless it is said: beside the fabric or, on a node at several networks, beside the agent, so that a
// network of the fabric that is cut does not silence it.
func (c Config) pulseHost() (string, error) {
	if !strings.Contains(c.Listen, ",") {
		return c.fabricHost()
	}
	host, _, err := net.SplitHostPort(c.AgentListen)
	return host, err
}

// serveTCP accepts tcp clients at every port. All ports have one access control: a lane that comes back by another address
// ends its old connection first.
func (n *Node) serveTCP() {
	n.tcp = tcp.NewServer(n.access.Access, n.cfg.Logger)
	n.tcp.TLS = n.cfg.FabricTLS
	for _, p := range n.ports {
		n.wg.Go(func() {
			if err := n.tcp.Serve(p.listener); err != nil && n.ctx.Err() == nil {
				n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
			}
		})
	}
}

// endpoints are the ports as the table shows them. A simulated node has one address and no port.
func (n *Node) endpoints() (all []*quarrypb.Endpoint) {
	for _, p := range n.ports {
		all = append(all, p.endpoint)
	}
	if len(all) == 0 {
		all = append(all, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_TCP, Address: n.tcpAddress, Tls: fabricTLS[n.cfg.FabricTLS.Mode()]})
	}
	return all
}

// Rail is an address at which a node serves tcp.
type Rail struct {
	Rail     string  `json:"rail,omitempty"`
	Address  string  `json:"address"`
	NUMA     *uint32 `json:"numa,omitempty"`
	Megabits uint32  `json:"megabits,omitempty"`
}

// addresses are the ports as Stats shows them.
func (n *Node) addresses() (all []Rail) {
	for _, e := range n.endpoints() {
		all = append(all, Rail{Rail: e.Rail, Address: e.Address, NUMA: e.Numa, Megabits: e.Megabits})
	}
	return all
}

// dialPeer connects a program to a replica over tcp, by the rail that both nodes are on.
func (n *Node) dialPeer(ctx context.Context, p *quarrypb.WorkPeer, as *rdma.Credentials, lane uint32) (conn rdma.Conn, err error) {
	ends := rail.Ends(p.Endpoints, quarrypb.Provider_PROVIDER_TCP)
	if len(ends) == 0 { // of a node with one address
		ends = []rail.End{{Address: p.Address, NUMA: -1}}
	}
	paths, err := rail.Choose(rail.Question{Own: n.rails, Ends: ends, Memory: -1, Strict: n.cfg.StrictRails, Turn: lane, Down: n.downs.Has})
	if err != nil {
		return nil, err
	}
	err = rail.Try(ctx, paths, rail.Answered, func(ctx context.Context, way rail.Path) (err error) {
		d := n.cfg.Wire.Dialer(tcp.Dialer{TLS: n.cfg.FabricTLS, From: way.From, Redundant: len(paths) > 1})
		conn, err = d.Dial(ctx, way.End.Address, as, lane)
		if err == nil && way.Crosses {
			n.crosses(p, &way)
		}
		switch {
		case len(paths) == 1:
		case err == nil || rail.Answered(err):
			n.downs.Answered(way)
		case n.downs.Failed(way):
			n.cfg.Logger.Warn("storage node: an address of another node does not answer", "node", n.cfg.Name, "other", p.Name, "address", way.End.Address, "rail", way.End.Rail, "error", err)
		}
		return err
	})
	return conn, err
}

// crosses warns once of each rail of another node's incarnation that is on none of this node's.
func (n *Node) crosses(p *quarrypb.WorkPeer, way *rail.Path) {
	type crossing struct {
		incarnation uint64
		rail        string
	}
	if _, told := n.crossed.LoadOrStore(crossing{p.Incarnation, way.End.Rail}, true); !told {
		n.cfg.Logger.Warn("storage node: another node is reached across rails", "node", n.cfg.Name, "other", p.Name, "address", way.End.Address, "rail", way.End.Rail)
	}
}

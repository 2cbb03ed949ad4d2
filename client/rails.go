package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// Values of Config.RailPolicy.
const (
	RailsWarn   = rail.Warn   // a node on no rail of the Client is reached across rails, which is logged and counted
	RailsStrict = rail.Strict // it is not reached
)

// paths are the ways to a node over one provider, best first.
func (c *Client) paths(n *quarrypb.Node, p quarrypb.Provider, lane uint32) ([]rail.Path, error) {
	ends := rail.Ends(n.Endpoints, p)
	if p != quarrypb.Provider_PROVIDER_TCP || c.cfg.Wire != nil {
		return rail.Choose(rail.Question{Ends: ends, Memory: -1})
	}
	return rail.Choose(rail.Question{Own: c.rails, Ends: ends, Memory: rail.Memory(n), Strict: c.cfg.RailPolicy == RailsStrict, Turn: lane, Down: c.downs.Has})
}

// dialTCP connects a lane to a node by the best rail that answers.
//
// A lane that has a connection by another address of the node may call it: the node has one access control for all of its addresses, and
// ends the lane's old connection before it accepts the new one, as for two connections by one address.
// way is nil where the node has one address, which its lanes share whatever happens.
func (c *Client) dialTCP(ctx context.Context, n *quarrypb.Node, as *rdma.Credentials, lane uint32) (conn rdma.Conn, way *rail.Path, err error) {
	paths, err := c.paths(n, quarrypb.Provider_PROVIDER_TCP, lane)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w to node %s: %w", ErrUnreachable, errTransport, n.Name, err)
	}
	several := len(paths) > 1
	var used rail.Path
	err = rail.Try(ctx, paths, rail.Answered, func(share context.Context, p rail.Path) (err error) {
		used = p
		if conn, err = c.dialers.by(p, several).Dial(share, p.End.Address, as.For(n.Id, n.Name), lane); err == nil {
			return nil
		}
		if several && ctx.Err() == nil && !rail.Answered(err) && !errors.Is(err, rdma.ErrTLS) {
			c.pathFailed(n.Name, p, err)
		}
		return fmt.Errorf("%s %s: %w", TransportTCP, p.End.Address, err)
	})
	if err != nil {
		return nil, nil, err
	}
	c.crossing(n, &used)
	if !several {
		return conn, nil, nil
	}
	c.downs.Answered(used)
	return conn, &used, nil
}

// crossing counts a connection across rails, and warns once of each rail of a node's incarnation.
func (c *Client) crossing(n *quarrypb.Node, p *rail.Path) {
	if !p.Crosses {
		return
	}
	c.railEvents.crossings.Add(1)
	if _, told := c.crossed.LoadOrStore(nodeProvider{n.Incarnation, p.End.Rail}, true); !told {
		c.cfg.Logger.Warn("fabric: the node is reached across rails", "node", n.Name, "address", p.End.Address, "rail", p.End.Rail, "own", c.cfg.Rails)
	}
}

// pathFailed notes that a path did not answer: for a while all lanes of the Client try it after the other paths to the node.
func (c *Client) pathFailed(node string, p rail.Path, err error) {
	if c.downs.Failed(p) {
		c.railEvents.failures.Add(1)
		c.cfg.Logger.Warn("fabric: an address of the node does not answer", "node", node, "address", p.End.Address, "rail", p.End.Rail, "error", err)
	}
}

// railEvents counts for Events.
type railEvents struct{ crossings, failures atomic.Uint64 }

// by is the dialer of a path. redundant: the node has others.
func (f *dialers) by(p rail.Path, redundant bool) rdma.Dialer {
	d, real := f.byName[TransportTCP].(tcp.Dialer)
	if !real { // a simulation's
		return f.byName[TransportTCP]
	}
	d.From, d.Redundant = p.From, redundant
	return d
}

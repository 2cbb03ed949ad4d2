package storagenode

import (
	"context"
	"net"
	"slices"
	"sync"

	"github.com/quarrystore/quarry/internal/member"
)

// NoGossip as an address leaves a node out of the cluster's gossip.
const NoGossip = "none"

// gossip is the part that a node takes in its cluster's gossip: it tells that it is
// there, and controllers hear of it when it is not.
type gossip struct {
	port *member.Port // nil: none
	list *member.List // nil until the node has joined

	mu    sync.Mutex
	seeds []string // addresses of controllers
}

// listenGossip opens the port of it.
func (n *Node) listenGossip(ctx context.Context) (err error) {
	listen := n.cfg.GossipListen
	if listen == NoGossip {
		return nil
	}
	if listen == "" {
		host, _, err := net.SplitHostPort(n.cfg.Listen)
		if err != nil {
			return err
		}
		listen = net.JoinHostPort(host, "0")
	}
	n.gossip.port, err = member.Listen(ctx, listen, n.cfg.Advertise)
	if err != nil && n.cfg.GossipListen == "" {
		// Nobody has asked for it, and all goes on without it.
		n.cfg.Logger.Warn("storage node: no gossip", "node", n.cfg.Name, "error", err)
		return nil
	}
	return err
}

// gossipAddress is where others reach the node's gossip; "" if it takes no part.
func (n *Node) gossipAddress() string {
	if n.gossip.port == nil {
		return ""
	}
	return n.gossip.port.Address()
}

// joinGossip takes part, once a controller has told of which cluster the node is.
func (n *Node) joinGossip() (err error) {
	if n.gossip.port == nil {
		return nil
	}
	n.mu.Lock()
	cluster, key := n.state.Cluster, n.key
	n.mu.Unlock()
	n.gossip.list, err = n.gossip.port.Join(member.Config{
		Cluster: cluster[:], Secret: key, Token: n.cfg.Token, Self: n.about, Seeds: n.seeds, Logger: n.cfg.Logger,
	})
	return err
}

func (n *Node) about() member.About {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := member.About{Kind: member.Storage, Name: n.cfg.Name, Life: n.incarnation, Node: n.state.Node, Domain: n.cfg.FailureDomain, Health: "well",
		CapacityBytes: n.cfg.CapacityBytes, FreeBytes: n.cfg.CapacityBytes - min(n.cfg.CapacityBytes, n.state.HostedSize)}
	if n.life.cut.Load() {
		a.Health = "cut" // from the controllers
	}
	return a
}

func (n *Node) seeds() []string {
	n.gossip.mu.Lock()
	defer n.gossip.mu.Unlock()
	return n.gossip.seeds
}

// learnSeeds keeps the addresses that a controller has named.
func (n *Node) learnSeeds(addresses []string) {
	n.gossip.mu.Lock()
	defer n.gossip.mu.Unlock()
	n.gossip.seeds = slices.Clone(addresses[:min(len(addresses), maxSeeds)])
}

// maxSeeds is more than there are controllers.
const maxSeeds = 64

// leaveGossip says goodbye and ends.
func (n *Node) leaveGossip() {
	switch {
	case n.gossip.list != nil:
		if err := n.gossip.list.Close(); err != nil {
			n.cfg.Logger.Debug("storage node: gossip", "node", n.cfg.Name, "error", err)
		}
	case n.gossip.port != nil:
		_ = n.gossip.port.Close()
	}
}

package storagenode

import (
	"context"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/pulse"
)

// NoGossip as an address leaves a node out of the cluster's pulse.
const NoGossip = "none"

// vital is the node's member of the cluster's pulse. By it controllers see that the node answers, and
// the node that the leader does.
type vital struct {
	port   *pulse.Port   // nil: none
	list   *pulse.List   // nil until the node has joined
	health atomic.Uint32 // one word that the pulse carries
	hurry  chan struct{} // of capacity 1: another controller leads, or none answers
	calm   time.Duration // between heartbeats while the leader's pulse is heard; of beat alone

	mu    sync.Mutex // guards seeds
	seeds []string   // addresses of controllers
}

// listenPulse opens the UDP port of the pulse.
func (n *Node) listenPulse(ctx context.Context) (err error) {
	listen := n.cfg.GossipListen
	if listen == NoGossip {
		return nil
	}
	if listen == "" {
		host, err := n.cfg.pulseHost()
		if err != nil {
			return err
		}
		listen = net.JoinHostPort(host, "0")
	}
	n.pulse.port, err = pulse.Listen(ctx, listen, n.cfg.Advertise)
	if err != nil && n.cfg.GossipListen == "" {
		// The address is a default, and the pulse is a hint: the node works without it.
		n.cfg.Logger.Warn("storage node: no pulse", "node", n.cfg.Name, "error", err)
		return nil
	}
	return err
}

// joinPulse joins the pulse, once the first registration has named the cluster.
func (n *Node) joinPulse() (err error) {
	if n.pulse.port == nil {
		return nil
	}
	n.mu.Lock()
	cluster, key, id := n.state.Cluster, n.pulseKey, n.state.Node
	n.mu.Unlock()
	n.pulse.list, err = n.pulse.port.Join(pulse.Config{
		Cluster: cluster[:], Secret: key, Logger: n.cfg.Logger,
		Kind: pulse.Storage, Incarnation: n.incarnation, Node: id, Seeds: n.seeds,
		Self: func() pulse.Self { return pulse.Self{Health: pulse.Health(n.pulse.health.Load())} },
		Led: func(uint64) {
			select {
			case n.pulse.hurry <- struct{}{}:
			default:
			}
		},
	})
	return err
}

// noteHealth puts the node's health into its pulse.
func (n *Node) noteHealth() {
	h := pulse.Well
	switch {
	case n.counts.cut.Load():
		h = pulse.Cut // from the controllers
	case n.unfit() != "":
		h = pulse.Unfit
	}
	n.pulse.health.Store(uint32(h))
}

// beatEvery is the time to the next heartbeat, where often is that of a node without a pulse.
func (n *Node) beatEvery(often time.Duration) time.Duration {
	if l := n.pulse.list; l == nil || l.Leader() == 0 || n.ending.stopping.Load() {
		return often
	}
	return max(often, n.pulse.calm)
}

func (n *Node) seeds() []string {
	n.pulse.mu.Lock()
	defer n.pulse.mu.Unlock()
	return n.pulse.seeds
}

// learnSeeds stores the addresses of controllers' pulses that an answer has named.
func (n *Node) learnSeeds(addresses []string) {
	addresses = addresses[:min(len(addresses), maxSeeds)]
	n.pulse.mu.Lock()
	defer n.pulse.mu.Unlock()
	if len(addresses) > 0 && !slices.Equal(addresses, n.pulse.seeds) {
		n.pulse.seeds = slices.Clone(addresses)
		n.controllers.meet(n.pulse.seeds)
	}
}

// maxSeeds is more than there are controllers.
const maxSeeds = 64

// leavePulse announces in the pulse that the node stops, and closes the port.
func (n *Node) leavePulse() {
	switch {
	case n.pulse.list != nil:
		if err := n.pulse.list.Close(); err != nil {
			n.cfg.Logger.Debug("storage node: pulse", "node", n.cfg.Name, "error", err)
		}
	case n.pulse.port != nil:
		_ = n.pulse.port.Close()
	}
}

package controller

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/pulse"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// NoGossip as an address leaves a process out of the cluster's pulse.
const NoGossip = "none"

const (
	clusterEvery = 300 * time.Millisecond // looks for the record of a cluster that is being made
	shownSilent  = time.Minute            // a member that is no more shows in the status for so long
	maxNames     = 64                     // of controllers, also of those that are no more
)

// Sources of suspicions: each only has a node probed.
const (
	fromPulse      = iota // neither this controller nor others get an answer from it
	fromConnection        // the connection that its heartbeats came over has ended
	sources
)

// SuspicionSources are their names.
var SuspicionSources = [sources]string{"pulse", "connection"}

// watch is the part that a controller takes in its cluster's pulse.
type watch struct {
	port        *pulse.Port // nil: none
	incarnation uint64
	list        atomic.Pointer[pulse.List] // nil until the cluster is known

	mu    sync.Mutex        // guards the fields below
	names map[uint64]string // of controllers, by incarnation
	known []string          // addresses where controllers are heard, as last read
	stand []candidacy       // as last read
	// wake has the standbys look at the leader, and elect at the leader of etcd.
	wake, elect chan struct{}
}

// listenPulse opens the port of the pulse.
func (c *Controller) listenPulse(ctx context.Context, at net.Addr) (err error) {
	g := &c.pulse
	g.incarnation, g.names = rand.Uint64()|1, map[uint64]string{}
	g.wake, g.elect = make(chan struct{}, 1), make(chan struct{}, 1)
	listen := c.cfg.GossipListen
	if listen == NoGossip {
		return nil
	}
	if listen == "" {
		host, _, err := net.SplitHostPort(at.String())
		if err != nil {
			return err
		}
		listen = net.JoinHostPort(host, "0")
	}
	advertise := ""
	if u, err := url.Parse(c.cfg.Advertise); err == nil {
		advertise = u.Hostname()
	}
	g.port, err = pulse.Listen(ctx, listen, advertise)
	if err != nil && c.cfg.GossipListen == "" {
		// The address is a default, and the pulse is a hint: the controller works without it.
		c.cfg.Logger.Warn("controller: no pulse", "error", err)
		return nil
	}
	return err
}

// joinPulse takes part in the pulse from when the cluster is known until the controller closes.
func (c *Controller) joinPulse() {
	for {
		cluster, keys, err := c.cluster()
		if err == nil && cluster != nil {
			l, err := c.pulse.port.Join(pulse.Config{
				Cluster: cluster.Uuid, Secret: keys.PulseSecret, Logger: c.cfg.Logger,
				Kind: pulse.Controller, Incarnation: c.pulse.incarnation, Self: c.self, Seeds: c.seeds, Changed: c.changedMember,
			})
			if err != nil {
				c.cfg.Logger.Warn("controller: no pulse", "error", err)
				return
			}
			c.pulse.list.Store(l)
			<-c.ctx.Done()
			if err := l.Close(); err != nil {
				c.cfg.Logger.Debug("controller: pulse", "error", err)
			}
			return
		}
		select {
		case <-c.ctx.Done():
			_ = c.pulse.port.Close()
			return
		case <-time.After(clusterEvery):
		}
	}
}

// cluster reads the records that the first leader has written; nil if there are none yet.
func (c *Controller) cluster() (*quarrypb.Cluster, *quarrypb.SigningKeys, error) {
	ctx, cancel := context.WithTimeout(c.ctx, etcdTimeout)
	defer cancel()
	// What a member has is right, because the uuid and the secret of the pulse never change,
	// and it is there without a leader of etcd too.
	var values [2][]byte
	for i, key := range []string{state.ClusterKey, state.KeysKey} {
		res, err := c.cfg.Etcd.Get(ctx, c.cfg.Prefix+key, clientv3.WithSerializable())
		if err != nil || len(res.Kvs) == 0 {
			return nil, nil, err
		}
		values[i] = res.Kvs[0].Value
	}
	rec := &quarrypb.Cluster{}
	if err := proto.Unmarshal(values[0], rec); err != nil {
		return nil, nil, fmt.Errorf("record of the cluster: %w", err)
	}
	keys, err := state.DecodeKeys(values[1])
	if err != nil {
		return nil, nil, fmt.Errorf("record of the keys: %w", err)
	}
	return rec, keys, nil
}

// self is what this controller says of itself in each tick.
func (c *Controller) self() pulse.Self {
	if t := c.term.Load(); t != nil {
		return pulse.Self{Health: pulse.Leads, Term: uint64(t.rev)}
	}
	return pulse.Self{Health: pulse.Standby}
}

// seeds are the addresses of the other controllers. Each member of etcd knows them: what
// it says may be old, and costs the leader of etcd nothing.
func (c *Controller) seeds() (others []string) {
	g := &c.pulse
	stand, err := c.candidaciesOf(c.ctx, clientv3.WithSerializable())
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		g.known, g.stand = g.known[:0:0], stand
	}
	for _, k := range stand {
		if k.Pulse == "" {
			continue
		}
		g.known = append(g.known, k.Pulse)
		if len(g.names) >= maxNames {
			clear(g.names)
		}
		g.names[k.Incarnation] = k.Name
	}
	own := g.port.Address()
	return slices.DeleteFunc(slices.Clone(g.known), func(at string) bool { return at == own })
}

// pulses are the addresses where controllers are heard, for nodes.
func (c *Controller) pulses() []string {
	g := &c.pulse
	if g.port == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.known) == 0 {
		return []string{g.port.Address()}
	}
	return g.known // is replaced, never changed
}

// changedMember starts the probe of a member that fell silent.
func (c *Controller) changedMember(m pulse.Member) {
	switch {
	case m.State == pulse.Alive:
	case m.Kind == pulse.Storage && m.State == pulse.Silent:
		c.doubt(m.Node, m.Incarnation, fromPulse)
	case m.Kind == pulse.Storage:
		if t := c.term.Load(); t != nil {
			t.hint(state.PulseLate{Node: m.Node, Incarnation: m.Incarnation})
		}
	case m.State == pulse.Silent:
		for _, look := range []chan struct{}{c.pulse.wake, c.pulse.elect} {
			select {
			case look <- struct{}{}:
			default:
			}
		}
	}
}

// doubt has the leader's machine probe an incarnation of a node, if this is the leader.
func (c *Controller) doubt(node uint32, incarnation uint64, source int) {
	t := c.term.Load()
	if t == nil || c.ctx.Err() != nil {
		return
	}
	c.counted.suspicions[source].Add(1)
	t.hint(state.Suspect{Node: node, Incarnation: incarnation})
}

// hint hands an event to the machine if it has room; heartbeats that stay away will tell it too.
func (t *term) hint(ev state.Event) {
	select {
	case t.events <- ev:
	default:
	}
}

// doubtSilent gives a new leader what the pulse has shown before.
func (c *Controller) doubtSilent() {
	if l := c.pulse.list.Load(); l != nil {
		for _, m := range l.Members() {
			c.changedMember(m)
		}
	}
}

// silent says whether an incarnation answers neither this controller nor others.
func (c *Controller) silent(incarnation uint64) bool {
	l := c.pulse.list.Load()
	return l != nil && l.Silent(incarnation)
}

// pulsed says whether datagrams pass in both directions between this controller and an incarnation.
func (c *Controller) pulsed(incarnation uint64) bool {
	l := c.pulse.list.Load()
	return l != nil && l.Answers(incarnation)
}

// members are for the status: those that answer, and those that have not been
// silent for long. names are those of nodes.
func (c *Controller) members(names map[uint32]string) (out []*quarrypb.Member) {
	l := c.pulse.list.Load()
	if l == nil {
		return nil
	}
	all := l.Members()
	c.pulse.mu.Lock()
	defer c.pulse.mu.Unlock()
	for _, m := range all {
		if m.State == pulse.Silent && time.Since(m.Since) > shownSilent {
			continue
		}
		v := &quarrypb.Member{Kind: m.Kind.String(), Name: names[m.Node], Incarnation: m.Incarnation, Node: m.Node, Address: m.Address.String(), Health: m.Health.String(),
			State: string(m.State), StateMs: uint64(time.Since(m.Since).Milliseconds())}
		if m.Kind == pulse.Controller {
			v.Name = c.pulse.names[m.Incarnation]
		}
		if m.State != pulse.Silent {
			v.SeenBy = append(v.SeenBy, c.cfg.Name)
		}
		v.SeenBy = append(v.SeenBy, c.seenBy(m.Incarnation, all)...)
		out = append(out, v)
	}
	self := &quarrypb.Member{Kind: pulse.Controller.String(), Name: c.cfg.Name, Incarnation: c.pulse.incarnation, Address: c.pulse.port.Address(),
		Health: c.self().Health.String(), State: string(pulse.Alive), SeenBy: append([]string{c.cfg.Name}, c.seenBy(c.pulse.incarnation, all)...)}
	return append(out, self)
}

// seenBy are the other controllers to which an incarnation is not silent. Call with mu of pulse held.
func (c *Controller) seenBy(incarnation uint64, all []pulse.Member) (names []string) {
	for _, k := range all {
		if k.Kind == pulse.Controller && k.State != pulse.Silent && (k.Incarnation == incarnation || !slices.Contains(k.Silent, incarnation)) {
			names = append(names, c.pulse.names[k.Incarnation])
		}
	}
	return names
}

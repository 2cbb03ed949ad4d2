package controller

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/member"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// NoGossip as an address leaves a process out of the cluster's gossip.
const NoGossip = "none"

const (
	clusterEvery = 300 * time.Millisecond // looks for the record of a cluster that is being made
	shownSilent  = time.Minute            // a member that is no more shows in the status for so long
)

// Sources of suspicions: each only has a node probed.
const (
	fromGossip     = iota // other members get no answer from it
	fromConnection        // the connection that its heartbeats came over has ended
	sources
)

// SuspicionSources are their names.
var SuspicionSources = [sources]string{"gossip", "connection"}

// gossip is the part that a controller takes in its cluster's gossip.
type gossip struct {
	port *member.Port // nil: none
	life uint64
	list atomic.Pointer[member.List] // nil until the cluster is known

	mu    sync.Mutex
	nodes map[uint32]string // addresses, as nodes have registered them
	// wake has the standbys look at the leader.
	wake chan struct{}
}

// listenGossip opens the port of it.
func (c *Controller) listenGossip(ctx context.Context, at net.Addr) (err error) {
	g := &c.gossip
	g.life, g.nodes, g.wake = rand.Uint64()|1, map[uint32]string{}, make(chan struct{}, 1)
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
	g.port, err = member.Listen(ctx, listen, advertise)
	if err != nil && c.cfg.GossipListen == "" {
		// Nobody has asked for it, and all goes on without it.
		c.cfg.Logger.Warn("controller: no gossip", "error", err)
		return nil
	}
	return err
}

// joinGossip takes part once the cluster is known, until the controller closes.
func (c *Controller) joinGossip() {
	for {
		cluster, err := c.cluster()
		if err == nil && cluster != nil {
			l, err := c.gossip.port.Join(member.Config{
				Cluster: cluster.Uuid, Secret: cluster.TicketKey, Token: c.cfg.Token, Logger: c.cfg.Logger,
				Self: c.about, Seeds: c.seeds, Changed: c.changedMember,
			})
			if err != nil {
				c.cfg.Logger.Warn("controller: no gossip", "error", err)
				return
			}
			c.gossip.list.Store(l)
			<-c.ctx.Done()
			if err := l.Close(); err != nil {
				c.cfg.Logger.Debug("controller: gossip", "error", err)
			}
			return
		}
		select {
		case <-c.ctx.Done():
			_ = c.gossip.port.Close()
			return
		case <-time.After(clusterEvery):
		}
	}
}

// cluster reads the record that the first leader has written; nil if there is none yet.
func (c *Controller) cluster() (*quarrypb.Cluster, error) {
	ctx, cancel := context.WithTimeout(c.ctx, etcdTimeout)
	defer cancel()
	res, err := c.cfg.Etcd.Get(ctx, c.cfg.Prefix+state.ClusterKey)
	if err != nil || len(res.Kvs) == 0 {
		return nil, err
	}
	rec := &quarrypb.Cluster{}
	if err := proto.Unmarshal(res.Kvs[0].Value, rec); err != nil {
		return nil, fmt.Errorf("record of the cluster: %w", err)
	}
	return rec, nil
}

// about is what this controller tells of itself.
func (c *Controller) about() member.About {
	a := member.About{Kind: member.Controller, Name: c.cfg.Name, Life: c.gossip.life, Health: "standby"}
	if c.Leads() {
		a.Health = "leads"
	}
	if l := c.gossip.list.Load(); l != nil {
		for _, m := range l.Members() {
			if m.State == member.Silent && time.Since(m.Since) < shownSilent {
				a.Silent = append(a.Silent, m.Life)
			}
		}
	}
	return a
}

// seeds are the controllers, and, for the leader, the nodes that have registered.
func (c *Controller) seeds() []string {
	out := c.gossipers(c.ctx)
	if c.Leads() {
		c.gossip.mu.Lock()
		defer c.gossip.mu.Unlock()
		for _, at := range c.gossip.nodes {
			out = append(out, at)
		}
	}
	slices.Sort(out)
	return out
}

// gossipers are the addresses of the controllers' gossip.
func (c *Controller) gossipers(ctx context.Context) (out []string) {
	for _, k := range c.candidacies(ctx) {
		if k.Gossip != "" {
			out = append(out, k.Gossip)
		}
	}
	return out
}

// gossips notes where a node hears gossip.
func (c *Controller) gossips(node uint32, address string) {
	if len(address) > state.MaxNameBytes {
		address = ""
	}
	c.gossip.mu.Lock()
	defer c.gossip.mu.Unlock()
	if delete(c.gossip.nodes, node); address != "" {
		c.gossip.nodes[node] = address
	}
}

// changedMember has whoever fell silent looked at.
func (c *Controller) changedMember(m member.Member) {
	if m.State != member.Silent {
		return
	}
	if m.Kind == member.Storage {
		c.doubt(m.Node, m.Life, fromGossip)
		return
	}
	select {
	case c.gossip.wake <- struct{}{}:
	default:
	}
}

// doubt has the leader's machine probe a life of a node, if this is the leader.
func (c *Controller) doubt(node uint32, life uint64, source int) {
	t := c.term.Load()
	if t == nil || c.ctx.Err() != nil {
		return
	}
	c.counted.suspicions[source].Add(1)
	select {
	case t.events <- state.Suspect{Node: node, Incarnation: life}:
	default: // the machine is busy; heartbeats that stay away will tell it too
	}
}

// doubtSilent gives a new leader what gossip has said before.
func (c *Controller) doubtSilent() {
	if l := c.gossip.list.Load(); l != nil {
		for _, m := range l.Members() {
			c.changedMember(m)
		}
	}
}

// silent says whether a life does not answer other members.
func (c *Controller) silent(life uint64) bool {
	l := c.gossip.list.Load()
	return l != nil && slices.ContainsFunc(l.Members(), func(m member.Member) bool { return m.Life == life && m.State == member.Silent })
}

// members are for the status: those who are there, and those who have not been
// silent for long.
func (c *Controller) members() (out []*quarrypb.Member) {
	l := c.gossip.list.Load()
	if l == nil {
		return nil
	}
	all := l.Members()
	for _, m := range all {
		if m.State == member.Silent && time.Since(m.Since) > shownSilent {
			continue
		}
		v := &quarrypb.Member{Kind: m.Kind, Name: m.Name, Life: m.Life, Node: m.Node, Address: m.Address, FailureDomain: m.Domain, Health: m.Health,
			CapacityBytes: m.CapacityBytes, FreeBytes: m.FreeBytes, State: string(m.State), StateMs: uint64(time.Since(m.Since).Milliseconds())}
		for _, k := range all {
			sees := !slices.Contains(k.Silent, m.Life)
			if k.Life == c.gossip.life {
				sees = m.State == member.Alive
			}
			if k.Kind == member.Controller && k.State == member.Alive && sees {
				v.SeenBy = append(v.SeenBy, k.Name)
			}
		}
		out = append(out, v)
	}
	return out
}

// beats is whose heartbeats come over a connection. A process that is killed takes
// its connections with it: nothing tells of its end sooner.
type beats struct {
	mu   sync.Mutex
	node uint32
	life uint64
}

type beatsKey struct{}

// watchConnections has the server tell of connections that end.
func (c *Controller) watchConnections(s *http.Server) {
	var all sync.Map // of net.Conn to *beats
	s.ConnContext = func(ctx context.Context, nc net.Conn) context.Context {
		b := &beats{}
		all.Store(nc, b)
		return context.WithValue(ctx, beatsKey{}, b)
	}
	s.ConnState = func(nc net.Conn, st http.ConnState) {
		if st != http.StateClosed && st != http.StateHijacked {
			return
		}
		v, ok := all.LoadAndDelete(nc)
		if !ok {
			return
		}
		b := v.(*beats)
		b.mu.Lock()
		node, life := b.node, b.life
		b.mu.Unlock()
		if node != 0 {
			c.doubt(node, life, fromConnection)
		}
	}
}

// heartbeatOf notes whose heartbeat has come over a request's connection.
func heartbeatOf(ctx context.Context, node uint32, life uint64) {
	if b, ok := ctx.Value(beatsKey{}).(*beats); ok {
		b.mu.Lock()
		b.node, b.life = node, life
		b.mu.Unlock()
	}
}

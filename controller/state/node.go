package state

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/internal/pulse"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/rail"
)

// This file has storage nodes: their registration, their heartbeats, and what is known of them.

// node is a storage node: its record, and what this leader has seen of it. Times are in ns of the
// machine's clock.
type node struct {
	rec *quarrypb.Node // as staged
	pub *quarrypb.Node // as committed; nil before the first commit
	rev uint64         // of pub

	seen      bool  // has registered with this leader
	heard     int64 // when it gave its last sign of life
	due       int64 // it becomes suspect then unless it gives another
	found     []*quarrypb.HostedRegion
	connected []*quarrypb.Connected // as last heard
	keyIDs    []uint64              // of the keys that it verifies with, as last heard
	used      uint64                // bytes of blocks in use, as last heard

	// How it is watched: see watch.go.
	suspect, probing     bool
	fails                int         // probes in a row without the right answer
	refused              bool        // the node's host refused the connection of each of these probes
	probeNext, calmUntil int64       // no probe before; no suspicion before
	lost                 bool        // treated as gone: unreachable, unfit or sick. Ends with a good probe, not before sickUntil, or with a new incarnation
	goneAt               int64       // when its loss or its new incarnation was learned
	proved               bool        // it has answered a probe of this leader in this incarnation ...
	provedAt             int64       // ... the last such was sent then
	wanted               bool        // a region waits for a newer proof
	registering          bool        // another incarnation registers; the last one is being looked for
	losses               int         // how often it was lost; delays its next replica, see steady
	upSince              int64       // when it registered or answered again
	refusedUntil         int64       // it has refused a replica: none before
	fullUntil            int64       // it has refused one for want of room: no new region before
	complaints           []complaint // of clients, see sick.go
	sickUntil            int64       // left for what clients or itself said, however it answers
	unfit                string      // why it calls itself unfit; "": it does not

	stopping      bool  // its process ends when no region needs it; see stop.go
	stoppingSince int64 // when stopping changed

	at       int    // Invariant: m.nodes[at] is this one
	hosts    int    // replicas of regions that clients may have keys of: fences wait for this node
	primary  int    // regions that have their primary here
	assigned uint64 // bytes of all replicas here
	// byAdapter counts replicas that are not OUT by the adapter that serves them.
	byAdapter [MaxAdapters]int
	// What its medium holds of regions and has left for more, as last heard; nil: it does not say.
	medium *uint64

	// drops are calls that give back memory of regions that were not made while the node
	// was lost. They are tried once, when it answers again.
	drops []proto.Message

	// owed are the serials whose fence this node has not acknowledged. Sorted.
	owed      []uint64
	fenceOut  bool  // a Fence call is under way
	fenceNext int64 // no call before
}

// heardOfMedium takes what a node says of its medium.
func (n *node) heardOfMedium(hosted uint64, available *uint64) {
	n.medium = nil
	if available != nil && hosted <= n.rec.CapacityBytes && *available <= 1<<62 {
		sum := hosted + *available
		n.medium = &sum
	}
}

// capacity is how many bytes of replicas a node can host: what it was told to, and what
// its medium has.
func (n *node) capacity() uint64 {
	if n.medium != nil {
		return min(n.rec.CapacityBytes, *n.medium)
	}
	return n.rec.CapacityBytes
}

// up says whether a node is at work as far as this leader knows.
func (m *Machine) up(n *node) bool {
	return n.seen && !n.lost && m.now-n.heard < int64(m.cfg.Lease) &&
		n.rec.State != quarrypb.NodeState_NODE_STATE_DOWN
}

// registerNode takes a node in. If the record has another incarnation of the name, the old
// process is looked for first: two processes must not serve as one node.
func (m *Machine) registerNode(waiter uint64, r *quarrypb.RegisterNodeRequest) {
	if err := m.checkNode(r); err != nil {
		m.fail(waiter, err)
		return
	}
	n := m.nodeByName[r.Node.Name]
	sum := sha256.Sum256(r.Secret)
	r.Node.SecretHash = sum[:]
	switch {
	case n != nil && n.rec.Incarnation == r.Node.Incarnation && !hmac.Equal(n.rec.SecretHash, r.Node.SecretHash):
		m.fail(waiter, errorf(Denied, "node %s: that incarnation has registered with another secret: restart the node", r.Node.Name))
	case r.Node.Id != 0 && (n == nil || n.rec.Id != r.Node.Id):
		m.fail(waiter, errorf(Precondition, "node %s calls itself number %d, which is not its number here: start it with its own data folder", r.Node.Name, r.Node.Id))
	case n == nil && len(m.nodes) >= MaxNodes:
		m.fail(waiter, errorf(Exhausted, "node %s: the cluster has %d nodes, the most there can be", r.Node.Name, MaxNodes))
	case n != nil && n.registering:
		m.fail(waiter, errorf(Busy, "node %s: another registration of that name is being checked; try again", r.Node.Name))
	case n != nil && n.rec.State == nodeDown:
		m.fail(waiter, errorf(Precondition, "node %s has been removed from the cluster: take it back with quarry node add %s, or give this one another name", n.rec.Name, n.rec.Name))
	case (n == nil || n.rec.Incarnation != r.Node.Incarnation) && fabricOf(r.Node) != wire.FabricVersion:
		// An incarnation that serves already goes on, so that its data can still be read by those who speak its version.
		m.fail(waiter, errorf(Precondition, "node %s speaks version %d of the fabric, this cluster's controllers %d%s", r.Node.Name, fabricOf(r.Node), wire.FabricVersion, wire.WayFrom(fabricOf(r.Node))))
	case n == nil:
		m.admit(waiter, r)
	case n.rec.Incarnation == r.Node.Incarnation && !sameAddresses(n.rec, r.Node, len(r.Secret) > 0):
		// One run of a process keeps its ports. Another one that claims to be this run would be sent
		// its commands, and the tickets of its clients.
		m.fail(waiter, errorf(Exists, "node %s runs at %s and does not change its addresses while it runs: give this one another name", n.rec.Name, n.rec.AgentUrl))
	case n.rec.Incarnation == r.Node.Incarnation:
		m.admit(waiter, r)
	default:
		// The name has had another incarnation. Only if that is over may this one begin.
		m.probeFormer(waiter, r, n)
	}
}

// fabricOf is the version of the fabric that a node speaks which registers. The first builds of version 4 did not say it; those of the versions
// before did not say what a loss of power leaves either.
func fabricOf(n *quarrypb.Node) uint32 {
	switch {
	case n.Fabric != 0:
		return n.Fabric
	case n.Persistence != nil:
		return wire.FabricOfLayout1 + 1
	}
	return wire.FabricOfLayout1
}

// suits says whether replicas of a durability may be made on a node: its memory is such, and clients and copiers of this version reach it.
func (n *node) suits(d quarrypb.Durability) bool {
	return fabricOf(n.rec) == wire.FabricVersion && (d != quarrypb.Durability_DURABILITY_PMEM || n.rec.Persistent)
}

// probeFormer calls the incarnation of n that registered before, and admits the new one of r unless the former
// answers the call or has sent a heartbeat meanwhile.
func (m *Machine) probeFormer(waiter uint64, r *quarrypb.RegisterNodeRequest, n *node) {
	n.registering = true
	since := m.now
	m.agents.callURL(Call{Node: n.rec.Id, URL: n.rec.AgentUrl, Msg: &quarrypb.PingRequest{}, Timeout: int64(pingTimeout)}, func(reply Reply) {
		n.registering = false
		if n.rec.State == nodeDown || m.nodeByName[n.rec.Name] != n {
			m.fail(waiter, errorf(Precondition, "node %s has been removed from the cluster", n.rec.Name))
			return
		}
		pong, _ := reply.Msg.(*quarrypb.PingResponse)
		if pong != nil && pong.Incarnation == n.rec.Incarnation || n.heard > since {
			m.fail(waiter, errorf(Exists, "node %s is running already at %s: give this one another name, or stop that one", n.rec.Name, n.rec.AgentUrl))
			return
		}
		m.admit(waiter, r)
	})
}

// sameAddresses says whether two registrations are of one place. Sockets of hosts come and go, where a node shares its device with other hosts: a
// registration that has shown the secret of the other may have others.
func sameAddresses(a, b *quarrypb.Node, proven bool) bool {
	ports := func(n *quarrypb.Node) []*quarrypb.Endpoint {
		return slices.DeleteFunc(slices.Clone(n.Endpoints), func(e *quarrypb.Endpoint) bool {
			return proven && e.Provider == quarrypb.Provider_PROVIDER_SHM && e.HostId != ""
		})
	}
	return a.AgentUrl == b.AgentUrl && slices.EqualFunc(ports(a), ports(b), func(x, y *quarrypb.Endpoint) bool { return proto.Equal(x, y) })
}

// admit takes a node in, new, again, or restarted.
func (m *Machine) admit(waiter uint64, r *quarrypb.RegisterNodeRequest) {
	n := m.nodeByName[r.Node.Name]
	rec := proto.CloneOf(r.Node)
	rec.State, rec.HostedBytes, rec.AvailableBytes = quarrypb.NodeState_NODE_STATE_UP, 0, nil
	var restarted bool
	if n == nil {
		c := m.editCluster()
		rec.Id = c.NextNode
		c.NextNode++
		n = &node{rec: rec, at: len(m.nodes)}
		m.nodes = append(m.nodes, n) // numbers rise
		m.nodeByName[rec.Name] = n
		m.stage(m.clusterChange(c), m.nodeChange(n, rec))
		m.note("node %s (%d) joined at %s in %s", rec.Name, rec.Id, rec.AgentUrl, rec.FailureDomain)
	} else {
		rec.Id = n.rec.Id
		if n.rec.State == draining {
			rec.State = n.rec.State
		}
		if restarted = n.rec.Incarnation != rec.Incarnation; !restarted {
			m.keepLosses(n, rec)
		}
		if !proto.Equal(n.rec, rec) {
			m.stage(m.nodeChange(n, rec))
		}
		if restarted {
			m.note("node %s (%d) restarted at %s", rec.Name, rec.Id, rec.AgentUrl)
			if len(rec.MissingRegions) > 0 {
				m.note("node %s has lost its memory of regions %v", rec.Name, rec.MissingRegions)
			}
		}
	}
	first := !n.seen // by this leader, or since it was taken back
	if first || restarted {
		n.upSince = m.now
	}
	if restarted {
		// The debts of probes are that incarnation's.
		n.lost, n.suspect, n.probing, n.fails, n.refusedUntil, n.fullUntil, n.drops = false, false, false, 0, 0, 0, nil
		n.complaints, n.sickUntil, n.unfit = nil, 0, ""
		n.goneAt, n.proved = m.now, false
		m.setStopping(n, false)
	}
	n.seen, n.found, n.keyIDs = true, r.Found, nil
	m.beaten(n, 0)
	n.heardOfMedium(r.Node.HostedBytes, r.Node.AvailableBytes)
	if restarted {
		// The former incarnation may still run, though a ping found no process.
		m.fences.exposeNode(n)
	}
	m.dropOrphans(n)
	m.reconfig.reassessNode(n)
	if restarted || first {
		m.fences.oweAll(n, restarted)
	}
	resp := &quarrypb.RegisterNodeResponse{
		Id: n.rec.Id, Cluster: m.cluster.Uuid, Keys: m.keys.public(), PulseKey: pulse.NodeSecret(m.keys.rec.PulseSecret, m.cluster.Uuid, n.rec.Incarnation),
		HeartbeatMs: uint32(m.cfg.NodeHeartbeat.Milliseconds()),
		NextSerial:  m.cluster.NextSerial, ControllerTerm: m.term,
	}
	for _, s := range m.sessions {
		if s.rec.State == stateLive {
			resp.LiveSerials = append(resp.LiveSerials, s.rec.Serial)
		} else {
			resp.FencedSerials = append(resp.FencedSerials, s.rec.Serial)
		}
	}
	m.answer(waiter, resp)
}

// dropOrphans gives back memory of regions that could not be made.
func (m *Machine) dropOrphans(n *node) {
	for _, f := range n.found {
		g := m.region(f.Region)
		switch {
		case g == nil && f.Region < m.cluster.NextRegion:
			m.note("node %s hosts memory of region %d, which is not in the table: dropping it", n.rec.Name, f.Region)
			m.agents.call(n, &quarrypb.DropRegionRequest{Region: f.Region, ControllerTerm: m.term, Epoch: f.Epoch}, callTimeout, func(Reply) {})
		case g == nil:
			m.note("node %s hosts region %d, which this cluster has not numbered yet: left alone; was the controller's store set back?", n.rec.Name, f.Region)
		case bytes.Equal(g.rec.Uuid, f.Uuid) && g.on(n.rec.Id) == nil && published(g.rec) && g.joining != n:
			m.note("node %s hosts memory of region %d, which is elsewhere now: dropping it", n.rec.Name, f.Region)
			m.reconfig.discard(g, n)
		case !bytes.Equal(g.rec.Uuid, f.Uuid):
			m.note("node %s hosts region %d as %x, which is not its: left alone", n.rec.Name, f.Region, f.Uuid)
		}
	}
}

// nodeChange is the change to a new record of a node, which the machine uses at once.
func (m *Machine) nodeChange(n *node, rec *quarrypb.Node) change {
	n.rec = rec
	return change{nodeKey(rec.Id), rec, func(rev uint64) {
		n.pub, n.rev = rec, rev
		m.log.add(rev, rec.Id, true)
	}}
}

// nodeHeartbeat takes a sign of life. pulsed says that the node's pulse is heard too.
func (m *Machine) nodeHeartbeat(waiter uint64, r *quarrypb.NodeHeartbeatRequest, pulsed bool) {
	n := m.node(r.Id)
	if n == nil || !n.seen || n.rec.Incarnation != r.Incarnation || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
		m.answer(waiter, &quarrypb.NodeHeartbeatResponse{Unknown: true})
		return
	}
	if sum := sha256.Sum256(r.Secret); !hmac.Equal(n.rec.SecretHash, sum[:]) {
		m.fail(waiter, errorf(Denied, "node %s: a heartbeat without the secret of its registration", n.rec.Name))
		return
	}
	silent := !m.up(n)
	m.beaten(n, 0)
	n.used = r.UsedBytes
	n.heardOfMedium(r.HostedBytes, r.AvailableBytes)
	if len(r.Connected) <= MaxEndpoints {
		n.connected = r.Connected
	}
	for _, serial := range r.EndedSessions[:min(len(r.EndedSessions), MaxEnded)] {
		if s := m.session(serial); s != nil {
			s.unconnected = true
			m.fences.maybeBegin(s)
		}
	}
	// One that is heard and does not answer is of no use: only probes bring it back.
	if silent && m.up(n) {
		m.note("node %s (%d) is heard again", n.rec.Name, n.rec.Id)
		m.reconfig.reassessNode(n)
	}
	m.setStopping(n, r.Stopping)
	resp := &quarrypb.NodeHeartbeatResponse{Lacking: uint32(m.reconfig.lacking), Keys: m.heardKeys(n, r.KeyIds)}
	if n.stopping {
		m.stopAnswer(n, resp)
	}
	if pulsed && m.calm(n) {
		m.beaten(n, m.cfg.CalmHeartbeat)
		resp.CalmMs = uint32(m.cfg.CalmHeartbeat.Milliseconds())
	}
	m.answer(waiter, resp)
}

// GoodNodeName says whether a node can have a name.
func GoodNodeName(name string) bool { return goodName(name) && !strings.ContainsAny(name, "/ ") }

// checkNode refuses registrations that no good node sends.
func (m *Machine) checkNode(r *quarrypb.RegisterNodeRequest) *Error {
	n := r.Node
	if n == nil || !GoodNodeName(n.Name) {
		return errorf(Invalid, "node name %q: want 1 to %d printable bytes without '/' or space", n.GetName(), MaxNameBytes)
	}
	if n.Incarnation == 0 {
		return errorf(Invalid, "node %s: incarnation 0", n.Name)
	}
	if len(r.Secret) != sha256.Size || len(n.Key) != len(keyring.Public{}) {
		return errorf(Invalid, "node %s: a secret of %d bytes and a public key of %d: want %d and %d (a node of an earlier version sends none)", n.Name, len(r.Secret), len(n.Key), sha256.Size, len(keyring.Public{}))
	}
	if err := checkPlace(n); err != nil {
		return err
	}
	if len(n.Endpoints) > MaxEndpoints || len(r.Found) > MaxFound || len(n.MissingRegions) > MaxFound {
		return errorf(Invalid, "node %s: %d endpoints and %d regions, above the limits %d and %d", n.Name, len(n.Endpoints), max(len(r.Found), len(n.MissingRegions)), MaxEndpoints, MaxFound)
	}
	if n.PageBytes&(n.PageBytes-1) != 0 || n.PageBytes > wire.MaxRegionBytes || len(n.Medium) > maxMediumBytes || !utf8.ValidString(n.Medium) {
		return errorf(Invalid, "node %s: pages of %d bytes in %q: want a power of two up to %d, and a short text", n.Name, n.PageBytes, n.Medium, wire.MaxRegionBytes)
	}
	for _, s := range []string{n.Persistence.GetKind(), n.Persistence.GetDomain(), n.Persistence.GetFlush(), n.Persistence.GetMethod(), n.Persistence.GetDdio()} {
		if len(s) > maxWordBytes || !utf8.ValidString(s) {
			return errorf(Invalid, "node %s: persistence %q: want short words", n.Name, s)
		}
	}
	if err := checkEndpoints(n); err != nil {
		return err
	}
	return m.checkFound(r)
}

// checkEndpoints refuses addresses that no node has.
func checkEndpoints(n *quarrypb.Node) *Error {
	addresses := 0
	for _, e := range n.Endpoints {
		if e.Provider == 0 || !goodName(e.Address) || len(e.HostId) > MaxNameBytes {
			return errorf(Invalid, "node %s: endpoint %v %q: want a provider and an address", n.Name, e.Provider, e.Address)
		}
		if e.Rail != "" && !rail.GoodName(e.Rail) {
			return errorf(Invalid, "node %s: endpoint %q on rail %q: want a name of 1 to %d letters, digits, . _ -", n.Name, e.Address, e.Rail, rail.MaxNameBytes)
		}
		if e.Provider == quarrypb.Provider_PROVIDER_TCP {
			addresses++
		}
	}
	if addresses > rail.MaxEnds {
		return errorf(Invalid, "node %s: %d addresses of the tcp fabric, above the limit %d", n.Name, addresses, rail.MaxEnds)
	}
	return checkAdapters(n)
}

// checkPlace refuses a failure domain or an agent's URL that no node has.
func checkPlace(n *quarrypb.Node) *Error {
	if !goodDomain(n.FailureDomain) {
		return errorf(Invalid, "node %s: failure domain %q: want /dc/rack/host", n.Name, n.FailureDomain)
	}
	if u, err := url.Parse(n.AgentUrl); err != nil || len(n.AgentUrl) > MaxNameBytes || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return errorf(Invalid, "node %s: agent URL %q: want http://host:port", n.Name, n.AgentUrl)
	}
	return nil
}

// checkFound refuses a node that brings memory of another cluster, or with impossible epochs.
func (m *Machine) checkFound(r *quarrypb.RegisterNodeRequest) *Error {
	n, foreign := r.Node, r.Cluster
	for _, f := range r.Found {
		if f.Epoch > maxEpoch {
			return errorf(Invalid, "node %s: region %d at epoch %d, above the limit %d: move its file out of the data folder", n.Name, f.Region, f.Epoch, uint64(maxEpoch))
		}
		if g := m.region(f.Region); g != nil && bytes.Equal(g.rec.Uuid, f.Uuid) && f.Epoch > g.rec.Epoch+maxAhead {
			return errorf(Invalid, "node %s: region %d at epoch %d, the table has %d: no node comes that far ahead of it; was the controller's store set back? Restore a later one, or move the region's file out of the data folder", n.Name, f.Region, f.Epoch, g.rec.Epoch)
		}
		if len(f.Cluster) > 0 && !bytes.Equal(f.Cluster, m.cluster.Uuid) {
			foreign = f.Cluster
		}
	}
	if len(foreign) > 0 && !bytes.Equal(foreign, m.cluster.Uuid) {
		return errorf(Precondition, "node %s holds regions of cluster %x, this is cluster %x: give it an empty data folder, or its own controller", n.Name, foreign, m.cluster.Uuid)
	}
	return nil
}

const (
	maxMediumBytes = 4096    // a path
	maxWordBytes   = 64      // of a node's persistence
	maxEpoch       = 1 << 43 // of memory that a node has found: a region's next epoch is above it, and no jump for the other nodes
	// maxAhead is how far the epoch of memory that a node has found may be above the table's. A node opens
	// one epoch before the record has it; the rest is for a controllers' store that was restored. Without this
	// limit one node would raise the epoch of a region to maxEpoch, and its other nodes could not register.
	maxAhead = 1 << 16
)

// goodName says whether s is printable text of a length that we keep.
func goodName(s string) bool {
	return len(s) > 0 && len(s) <= MaxNameBytes && utf8.ValidString(s) &&
		strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

// goodDomain says whether a failure domain has the form /dc/rack/host.
func goodDomain(s string) bool {
	parts := strings.Split(s, "/")
	if len(s) > MaxNameBytes || len(parts) != 4 || parts[0] != "" {
		return false
	}
	for _, p := range parts[1:] {
		if !goodName(p) {
			return false
		}
	}
	return true
}

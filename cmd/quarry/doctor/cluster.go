package doctor

import (
	"context"
	"crypto/tls"
	"fmt"
	"math"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/rail"
)

// VersionHeader of an answer of /healthz tells which version a service is.
const VersionHeader = quarrypb.VersionHeader

// Cluster is what is looked at from outside. Status is nil if no leader answers.
type Cluster struct {
	Controllers []string
	Status      *quarrypb.StatusResponse
	Err         error       // why Status is nil
	TLS         *tls.Config // for controllers
	NodeTLS     *tls.Config // for agents
	Version     string      // of this program
	Rails       []rail.Own  // that this process is on
}

const (
	reachTimeout = 2 * time.Second
	leastRoom    = 64 << 20         // of the smallest region that is made on demand
	wallSkew     = 30 * time.Second // certificates begin to be refused around here
)

// Check looks at controllers, nodes and regions.
func (c Cluster) Check(ctx context.Context) []Finding {
	versions := map[string][]string{}
	out := c.controllers(ctx, versions)
	if c.Status == nil {
		return append(out, found("leader", Error, "start one (quarry controller, or quarry dev to try things out), or name others with --controller; see whether etcd has a quorum", "no controller leads: %v", c.Err))
	}
	out = append(out, c.nodes(ctx, versions)...)
	out = append(out, c.regions()...)
	out = append(out, c.tenants()...)
	return append(out, c.versions(versions)...)
}

// nearQuota is the used part of a quota at which doctor warns.
const nearQuota = 0.9

// Quotas that are nearly used up: behind them a tenant's requests are refused.
func (c Cluster) tenants() (out []Finding) {
	for _, t := range c.Status.Tenants {
		for _, q := range t.Quotas() {
			if q.Most > 0 && float64(q.Used) >= nearQuota*float64(q.Most) {
				out = append(out, found("tenants", Warning, "free some, or raise it: quarry tenant set "+t.Name, "tenant %s uses %d of %d %s", t.Name, q.Used, q.Most, q.Resource))
			}
		}
	}
	return out
}

// Controllers that were named, and those that the status names: one that was forgotten in --controller is
// looked at too.
func (c Cluster) controllers(ctx context.Context, versions map[string][]string) (out []Finding) {
	const check = "controllers"
	urls := c.Controllers
	if c.Status != nil {
		for _, i := range c.Status.Controllers {
			if !contains(urls, i.Url) {
				urls = append(urls[:len(urls):len(urls)], i.Url)
			}
		}
	}
	if c.Status.GetInsecure() {
		out = append(out, found("security", Warning, "give controllers and nodes certificates (quarry cert) or a token, and leave --insecure out", "any host that reaches the controllers may do anything: --insecure was said"))
	}
	well := 0
	for _, u := range urls {
		took, err := c.healthy(ctx, u, c.TLS, versions, &out)
		if err != nil {
			out = append(out, found(check, Error, "start it, or take it out of --controller", "%s: %v", u, err))
			continue
		}
		well++
		out = append(out, ok(check, "%s is well and answers in %v", u, took.Round(10*time.Microsecond)))
		if strings.HasPrefix(u, "http://") && !loopback(u) {
			out = append(out, found("security", Warning, "give the controllers --tls-cert and --tls-key, and use https URLs", "%s has no TLS: tokens and tickets can be read on the way", u))
		}
	}
	if len(urls) == 1 && well == 1 {
		out = append(out, found(check, Info, "three controllers survive the loss of one", "one controller: while it is down nothing can be recovered, and clients stop after their leases"))
	}
	if len(urls)%2 == 0 && well > 0 {
		out = append(out, found(check, Info, "use three or five", "%d controllers survive no more failures than %d", len(urls), len(urls)-1))
	}
	return out
}

// healthy asks for /healthz.
func (c Cluster) healthy(ctx context.Context, base string, secured *tls.Config, versions map[string][]string, out *[]Finding) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(base, "/")+"/healthz", nil)
	if err != nil {
		return 0, err
	}
	h := &http.Client{Transport: userdir.Transport(&http.Transport{TLSClientConfig: secured.Clone(), ForceAttemptHTTP2: true, DisableKeepAlives: true})}
	start := time.Now()
	res, err := h.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	took := time.Since(start)
	if v := res.Header.Get(VersionHeader); v != "" {
		versions[v] = append(versions[v], base)
	}
	if at, err := http.ParseTime(res.Header.Get("Date")); err == nil && math.Abs(time.Since(at).Seconds()) > wallSkew.Seconds() {
		*out = append(*out, found("clocks", Warning, "run chrony or ntpd on both", "the wall clock of %s is %v off ours: certificates may be refused (leases do not use it)", base, time.Since(at).Round(time.Second)))
	}
	if res.StatusCode != http.StatusOK {
		return took, fmt.Errorf("answers %s: it knows of no leader; see its log and etcd", res.Status)
	}
	return took, nil
}

// Nodes by their states, and the agents of those that are up. Failure domains are counted over nodes that are up:
// replicas need different ones.
func (c Cluster) nodes(ctx context.Context, versions map[string][]string) (out []Finding) {
	list := c.Status.GetTable().GetNodes()
	if len(list) == 0 {
		return []Finding{found(nodesCheck, Error, "start storage nodes: quarry storage --controller ...", "the cluster has none")}
	}
	domains := map[string]bool{}
	for _, n := range list {
		findings, serves := nodeState(n)
		out = append(out, findings...)
		if n.State == quarrypb.NodeState_NODE_STATE_UP {
			domains[n.FailureDomain] = true
		}
		if serves {
			out = append(out, c.ports(ctx, n, versions)...)
			out = append(out, c.rails(n)...)
			out = append(out, memory(n)...)
		}
	}
	return append(out, ok(nodesCheck, "%d, in %d failure domains", len(list), len(domains)))
}

const nodesCheck = "nodes"

// nodeState is what the controllers know of a node; serves: it should answer.
func nodeState(n *quarrypb.Node) (out []Finding, serves bool) {
	if n.Trouble != "" {
		out = append(out, found(nodesCheck, Error, "see its log; free space there, or mend the disk", "%s answers, but cannot carry out fences: %s", n.Name, n.Trouble))
	}
	switch n.State {
	case quarrypb.NodeState_NODE_STATE_UP:
		return out, true
	case quarrypb.NodeState_NODE_STATE_DRAINING:
		return append(out, found(nodesCheck, Info, "", "%s is draining", n.Name)), true
	case quarrypb.NodeState_NODE_STATE_DOWN:
		return append(out, found(nodesCheck, Info, "quarry node forget "+n.Name+" takes it off the list, quarry node add "+n.Name+" takes it back", "%s (%s) is removed", n.Name, n.FailureDomain)), false
	}
	return append(out, found(nodesCheck, Error, "start it again, or replace it: see docs/OPERATIONS.md", "%s (%s) is %s", n.Name, n.FailureDomain, quarrypb.Word(n.State))), false
}

// ports connects to a node's agent and to its endpoints for other hosts.
func (c Cluster) ports(ctx context.Context, n *quarrypb.Node, versions map[string][]string) (out []Finding) {
	if took, err := c.healthy(ctx, n.AgentUrl, c.NodeTLS, versions, &out); err != nil {
		out = append(out, found("ports", Error, "open its port between controllers and nodes; is --advertise right?", "agent of %s: %v", n.Name, err))
	} else {
		out = append(out, ok("ports", "agent of %s answers in %v", n.Name, took.Round(10*time.Microsecond)))
	}
	for _, e := range n.Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_SHM {
			continue // only on its host
		}
		provider := quarrypb.Word(e.Provider)
		if e.Rail != "" {
			provider += " on rail " + e.Rail
		}
		took, err := reach(ctx, e.Address)
		if err != nil {
			out = append(out, found("ports", Error, "open its port between clients and nodes; is --advertise right?", "%s of %s at %s: %v", provider, n.Name, e.Address, err))
			continue
		}
		encrypted := ""
		if e.Tls != quarrypb.FabricTLS_FABRIC_TLS_OFF {
			encrypted = ", encryption is " + quarrypb.Word(e.Tls)
		} else if e.Provider == quarrypb.Provider_PROVIDER_TCP && !loopback("http://"+e.Address) {
			out = append(out, found("security", Warning, "give nodes and clients certificates (quarry cert) and --fabric-tls on or required, or use IPsec or MACsec", "tcp of %s at %s is not encrypted: objects can be read and changed on the way", n.Name, e.Address))
		}
		out = append(out, ok("ports", "%s of %s at %s connects in %v%s", provider, n.Name, e.Address, took.Round(10*time.Microsecond), encrypted))
	}
	return out
}

// rails says by which rail this process, as its --rail says, reaches a node.
func (c Cluster) rails(n *quarrypb.Node) []Finding {
	const check = "rails"
	ends := rail.Ends(n.Endpoints, quarrypb.Provider_PROVIDER_TCP)
	if len(c.Rails) == 0 || len(ends) == 0 {
		return nil
	}
	paths, err := rail.Choose(rail.Question{Own: c.Rails, Ends: ends, Memory: rail.Memory(n), Strict: true})
	if err != nil {
		return []Finding{found(check, Warning, "give the node an address there (quarry storage --listen RAIL=HOST:PORT), or this process a rail of the node (--rail)", "%s: %v", n.Name, err)}
	}
	name := paths[0].End.Rail
	if name == "" {
		name = "no named rail"
	}
	return []Finding{ok(check, "%s is reached at %s, %s; ways by the rails of this process: %d", n.Name, paths[0].End.Address, name, len(paths))}
}

// memory says how a node's regions are kept, where they lie, and whether more of them have room.
func memory(n *quarrypb.Node) (out []Finding) {
	if p := n.Persistence; p.GetMethod() != "" && p.Method != rdma.NoFlush.String() {
		out = append(out, durability(n))
	}
	if len(n.MissingRegions) > 0 {
		out = append(out, found("missing", Warning, "stop the node, restore their files in its folder and start it; without them the controllers make other replicas", "%s started without the files of regions %v, which it had", n.Name, n.MissingRegions))
	}
	if p := n.Numa; p != nil && p.Memory != nil && p.Adapter != nil && *p.Memory != *p.Adapter {
		out = append(out, found("numa", Warning, "quarry storage --numa auto, and a device DAX of the adapter's NUMA node", "%s: its regions lie on NUMA node %d, its adapter is on node %d: each access crosses between processors", n.Name, *p.Memory, *p.Adapter))
	}
	if left := n.AvailableBytes; left != nil && *left < leastRoom && n.CapacityBytes-min(n.CapacityBytes, n.HostedBytes) >= leastRoom {
		out = append(out, found("capacity", Error, "free some there, make it larger, or add a node", "%s has %s left in %s, where it may host %s more: no further region can be made there", n.Name, size(*left), n.Medium, size(n.CapacityBytes-n.HostedBytes)))
	}
	if n.CapacityBytes > 0 && float64(n.HostedBytes) > 0.9*float64(n.CapacityBytes) {
		out = append(out, found("capacity", Warning, "add a node, or raise its --capacity", "%s hosts %s of %s", n.Name, size(n.HostedBytes), size(n.CapacityBytes)))
	}
	return out
}

// durability says how a node's regions are made durable. A READ behind WRITEs proves nothing where these may stay in caches
// that do not survive: the node's operator has said that they do not.
func durability(n *quarrypb.Node) Finding {
	const check = "durability"
	p := n.Persistence
	if p.Method == rdma.ReadAfterWrite.String() && p.Flush != pmem.FenceAlone.String() && p.Ddio != host.DDIOOff.String() {
		return found(check, Warning, "--flush auto asks the node's processors, unless it can prove better", "%s has RDMA clients make changes durable by a READ behind them (appliance), on its operator's word that the adapter's WRITEs go past the processors' caches", n.Name)
	}
	text := ""
	if p.Ddio != "" {
		text = ", DDIO is " + p.Ddio
	}
	return ok(check, "%s: regions on %s are flushed by %s, for clients: %s%s", n.Name, p.Kind, p.Flush, p.Method, text)
}

func reach(ctx context.Context, address string) (time.Duration, error) {
	start := time.Now()
	conn, err := (&net.Dialer{Timeout: reachTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		return 0, err
	}
	return time.Since(start), conn.Close()
}

// Regions without enough replicas in sync. Degraded regions serve, and mend themselves where there are nodes; lost
// and unavailable ones do not serve.
func (c Cluster) regions() (out []Finding) {
	const check = "regions"
	short, well, below := 0, 0, 0
	standard := c.Status.DefaultReplicas
	for _, r := range c.Status.GetTable().GetRegions() {
		if r.WantReplicas < standard {
			below++
		}
		switch r.Shown() {
		case quarrypb.RegionState_REGION_STATE_OPEN:
			well++
		case quarrypb.RegionState_REGION_STATE_DEGRADED:
			short++
		case quarrypb.RegionState_REGION_STATE_LOST:
			out = append(out, found(check, Error, fmt.Sprintf("start the nodes that held it, with their data folders; if they are gone, quarry region remove %d --lost", r.Id), "region %d is lost: no replica in sync is left", r.Id))
		case quarrypb.RegionState_REGION_STATE_UNAVAILABLE:
			out = append(out, found(check, Error, "start the nodes that are silent; if one will never come back, quarry node remove NAME --force says what is lost with it", "region %d is unavailable: %s", r.Id, c.missing(r)))
		default:
			out = append(out, found(check, Error, "wait a few leases; then see the controllers' log", "region %d is %s", r.Id, quarrypb.Word(r.Shown())))
		}
	}
	if below > 0 {
		out = append(out, found(check, Warning, "objects keep the replicas that they were made with: write them again without --replicas and Config.Replicas, or choose the default with quarry region default", "%d regions have fewer replicas than the cluster's default of %d", below, standard))
	}
	if short > 0 {
		out = append(out, found(check, Warning, "start nodes in other failure domains; quarry status shows the progress", "%d regions are degraded: they have fewer replicas in sync than wanted", short))
	}
	return append(out, ok(check, "%d are open with every replica in sync", well))
}

// missing names the nodes of the replicas in sync of a region that is unavailable.
func (c Cluster) missing(r *quarrypb.Region) string {
	var nodes []string
	for _, p := range r.Replicas {
		if p.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC {
			continue
		}
		name := fmt.Sprintf("node %d", p.Node)
		for _, n := range c.Status.GetTable().GetNodes() {
			switch {
			case n.Id != p.Node:
			case n.State != quarrypb.NodeState_NODE_STATE_UP && n.State != quarrypb.NodeState_NODE_STATE_DRAINING:
				name = n.Name + " is " + quarrypb.Word(n.State)
			case n.Incarnation != p.Incarnation:
				name = n.Name + " has restarted"
			default:
				name = n.Name + " does not answer"
			}
		}
		nodes = append(nodes, name)
	}
	return "of its replicas in sync " + strings.Join(nodes, ", ")
}

// Versions that run side by side, with up to three processes of each. An upgrade passes through such a state.
func (c Cluster) versions(seen map[string][]string) []Finding {
	if c.Version != "" && len(seen) > 0 && seen[c.Version] == nil {
		seen[c.Version] = []string{"this program"}
	}
	if len(seen) < 2 {
		return []Finding{ok("versions", "all alike")}
	}
	var parts []string
	for v, who := range seen {
		parts = append(parts, v+" ("+strings.Join(who[:min(len(who), 3)], ", ")+")")
	}
	return []Finding{found("versions", Warning, "finish the upgrade: controllers first, then storage nodes, then clients", "%d run side by side: %s", len(seen), strings.Join(sorted(parts), "; "))}
}

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

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// VersionHeader of an answer of /healthz tells which version a service is.
const VersionHeader = quarrypb.VersionHeader

// Cluster is what is looked at from outside. Status is nil if no leader answers.
type Cluster struct {
	Controllers []string
	Status      *quarrypb.StatusResponse
	Err         error // why Status is nil
	TLS         *tls.Config
	Version     string // of the one who asks
}

const (
	reachTimeout = 2 * time.Second
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
	return append(out, c.versions(versions)...)
}

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
	well := 0
	for _, u := range urls {
		took, err := c.healthy(ctx, u, versions, &out)
		if err != nil {
			out = append(out, found(check, Error, "start it, or take it out of --controller", "%s: %v", u, err))
			continue
		}
		well++
		out = append(out, ok(check, "%s is well and answers in %v", u, took.Round(10*time.Microsecond)))
		if strings.HasPrefix(u, "http://") && !loopback(u) {
			out = append(out, found("security", Warning, "give the controllers --cert and --key, and use https URLs", "%s has no TLS: tokens and tickets can be read on the way", u))
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
func (c Cluster) healthy(ctx context.Context, base string, versions map[string][]string, out *[]Finding) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(base, "/")+"/healthz", nil)
	if err != nil {
		return 0, err
	}
	h := &http.Client{Transport: &http.Transport{TLSClientConfig: c.TLS, DisableKeepAlives: true}}
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

func (c Cluster) nodes(ctx context.Context, versions map[string][]string) (out []Finding) {
	const check = "nodes"
	list := c.Status.GetTable().GetNodes()
	if len(list) == 0 {
		return []Finding{found(check, Error, "start storage nodes: quarry storage --controller ...", "the cluster has none")}
	}
	domains := map[string]bool{}
	for _, n := range list {
		state := strings.ToLower(strings.TrimPrefix(n.State.String(), "NODE_STATE_"))
		switch n.State {
		case quarrypb.NodeState_NODE_STATE_UP:
			domains[n.FailureDomain] = true
		case quarrypb.NodeState_NODE_STATE_DRAINING:
			out = append(out, found(check, Info, "", "%s is draining", n.Name))
		default:
			out = append(out, found(check, Error, "start it again, or replace it: see docs/OPERATIONS.md", "%s (%s) is %s", n.Name, n.FailureDomain, state))
			continue
		}
		if took, err := c.healthy(ctx, n.AgentUrl, versions, &out); err != nil {
			out = append(out, found("ports", Error, "open its port between controllers and nodes; is --advertise right?", "agent of %s: %v", n.Name, err))
		} else {
			out = append(out, ok("ports", "agent of %s answers in %v", n.Name, took.Round(10*time.Microsecond)))
		}
		for _, e := range n.Endpoints {
			if e.Provider == quarrypb.Provider_PROVIDER_SHM {
				continue // only on its host
			}
			provider := strings.ToLower(strings.TrimPrefix(e.Provider.String(), "PROVIDER_"))
			took, err := reach(ctx, e.Address)
			if err != nil {
				out = append(out, found("ports", Error, "open its port between clients and nodes; is --advertise right?", "%s of %s at %s: %v", provider, n.Name, e.Address, err))
				continue
			}
			out = append(out, ok("ports", "%s of %s at %s connects in %v", provider, n.Name, e.Address, took.Round(10*time.Microsecond)))
		}
		if n.CapacityBytes > 0 && float64(n.HostedBytes) > 0.9*float64(n.CapacityBytes) {
			out = append(out, found("capacity", Warning, "add a node, or raise its --capacity", "%s hosts %s of %s", n.Name, size(n.HostedBytes), size(n.CapacityBytes)))
		}
	}
	return append(out, ok(check, "%d, in %d failure domains", len(list), len(domains)))
}

func reach(ctx context.Context, address string) (time.Duration, error) {
	start := time.Now()
	conn, err := (&net.Dialer{Timeout: reachTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		return 0, err
	}
	return time.Since(start), conn.Close()
}

func (c Cluster) regions() (out []Finding) {
	const check = "regions"
	short, well := 0, 0
	for _, r := range c.Status.GetTable().GetRegions() {
		inSync := 0
		for _, p := range r.Replicas {
			if p.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC {
				inSync++
			}
		}
		switch {
		case r.State == quarrypb.RegionState_REGION_STATE_LOST:
			out = append(out, found(check, Error, "start the nodes that held it, with their data folders", "region %d is lost: no replica in sync is left", r.Id))
		case r.State != quarrypb.RegionState_REGION_STATE_OPEN:
			out = append(out, found(check, Error, "wait a few leases; then see the controllers' log", "region %d is being recovered", r.Id))
		case inSync < int(r.WantReplicas):
			short++
		default:
			well++
		}
	}
	if short > 0 {
		out = append(out, found(check, Warning, "start nodes in other failure domains; quarry status shows the progress", "%d regions have fewer replicas in sync than they should", short))
	}
	return append(out, ok(check, "%d are whole", well))
}

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

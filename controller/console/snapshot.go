package console

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Snapshot is what the page draws.
type Snapshot struct {
	At          time.Time         `json:"at"`
	Error       string            `json:"error,omitempty"` // the controllers do not answer; the rest is older
	Cluster     string            `json:"cluster"`
	Version     string            `json:"version"`
	Revision    uint64            `json:"revision"`
	Sessions    uint32            `json:"sessions"`
	Fenced      uint32            `json:"fenced"`
	Controllers []Controller      `json:"controllers"`
	Nodes       []Node            `json:"nodes"`
	Regions     []Region          `json:"regions"`
	Rates       map[uint32][]Rate `json:"rates"` // by node, oldest first
	Events      []Event           `json:"events"`
	Jobs        []Job             `json:"jobs"`
	Tenants     []Tenant          `json:"tenants"`
}

// Tenant is a tenant with what it uses. A quota of 0 is none.
type Tenant struct {
	Name          string `json:"name"`
	Regions       uint32 `json:"regions"`
	Bytes         uint64 `json:"bytes"`
	QuotaBytes    uint64 `json:"quota_bytes"`
	Sessions      uint32 `json:"sessions"`
	QuotaSessions uint32 `json:"quota_sessions"`
	Lanes         uint32 `json:"lanes"`
	QuotaLanes    uint32 `json:"quota_lanes"`
}

// Controller is a controller that is there.
type Controller struct {
	Name   string `json:"name"`
	URL    string `json:"url"`
	Leader bool   `json:"leader"`
}

// Node is a storage node.
type Node struct {
	ID          uint32            `json:"id"`
	Name        string            `json:"name"`
	Domain      string            `json:"domain"`
	State       string            `json:"state"`
	Capacity    uint64            `json:"capacity"`
	Hosted      uint64            `json:"hosted"`
	Used        uint64            `json:"used"` // of Hosted, in blocks in use
	Resident    uint64            `json:"resident"`
	Lanes       map[string]uint32 `json:"lanes"`
	Rails       []string          `json:"rails"`             // networks at which it has addresses, as its operator calls them
	Persistence string            `json:"persistence"`       // of its memory, see quarrypb.Persistence.Text
	Missing     []uint32          `json:"missing,omitempty"` // regions that were in its folder and were not when it started
	Trouble     string            `json:"trouble,omitempty"` // why the controllers treat it as lost although it answers
	AnswerUS    int64             `json:"answer_us"`         // how long its agent took to answer, through the leader
	Asked       bool              `json:"asked"`             // false until the page has been open for a moment
	Answers     bool              `json:"answers"`
	incarnation uint64
}

// Region is a region with its replicas, the primary first.
type Region struct {
	ID       uint32    `json:"id"`
	State    string    `json:"state"`
	Bytes    uint64    `json:"bytes"`
	Epoch    uint64    `json:"epoch"`
	Want     uint32    `json:"want"`
	Holds    string    `json:"holds"`   // objects, objects with open words, or whose bytes
	Durable  bool      `json:"durable"` // acknowledged changes survive a loss of power at all nodes
	Tenant   string    `json:"tenant"`  // empty: no tenant's
	Replicas []Replica `json:"replicas"`
	// Rebuilt is how much of a joining replica is there, 0 to 1; -1 when none joins.
	Rebuilt float64 `json:"rebuilt"`
}

// Replica of a region.
type Replica struct {
	Node  uint32 `json:"node"`
	State string `json:"state"`
}

// Rate of a node over one interval.
type Rate struct {
	Verbs   float64 `json:"verbs"` // a second
	Read    float64 `json:"read"`  // bytes a second
	Written float64 `json:"written"`
}

// Event is something that has changed.
type Event struct {
	At   time.Time `json:"at"`
	Bad  bool      `json:"bad"`
	Text string    `json:"text"`
}

// gather asks once: for the status, and if the page is open for what nodes and jobs do.
func (c *Console) gather(ctx context.Context, open bool) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	st, err := ask(ctx, c, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.snap.Error == "" && c.known {
			c.event(true, "no controller answers")
		}
		c.snap.Error = err.Error()
		return
	}
	now := snapshotOf(st)
	looks := make([]*quarrypb.InspectNodeResponse, len(now.Nodes))
	if open {
		c.inspect(ctx, now.Nodes, looks)
	}
	if open && c.cfg.Jobs != nil {
		if jobs, err := c.cfg.Jobs(ctx, c.urls); err == nil && jobs != nil {
			now.Jobs = jobs
		}
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	c.events(&now)
	for i, n := range now.Nodes {
		if l := looks[i]; l != nil {
			c.rate(n.ID, l)
		} else {
			delete(c.before, n.ID)
		}
	}
	for id := range c.snap.Rates {
		if !slices.ContainsFunc(now.Nodes, func(n Node) bool { return n.ID == id }) {
			delete(c.snap.Rates, id)
		}
	}
	now.Rates, now.Events = c.snap.Rates, c.snap.Events
	c.snap, c.known = now, true
}

// snapshotOf is what the page shows of a status.
func snapshotOf(st *quarrypb.StatusResponse) Snapshot {
	now := Snapshot{At: time.Now(), Cluster: hex.EncodeToString(st.GetTable().GetCluster()), Version: st.Version, Revision: st.GetTable().GetRevision(),
		Sessions: st.LiveSessions, Fenced: st.FencedSessions, Jobs: []Job{}, Events: []Event{}}
	for _, k := range st.Controllers {
		now.Controllers = append(now.Controllers, Controller{k.Name, k.Url, k.Leader})
	}
	tenants := map[uint32]string{}
	for _, t := range st.Tenants {
		u := t.GetUse()
		tenants[t.Id] = t.Name
		now.Tenants = append(now.Tenants, Tenant{t.Name, u.GetRegions(), u.GetBytes(), t.QuotaBytes, u.GetSessions(), t.QuotaSessions, u.GetLanes(), t.QuotaLanes})
	}
	for _, n := range st.GetTable().GetNodes() {
		now.Nodes = append(now.Nodes, Node{ID: n.Id, Name: n.Name, Domain: n.FailureDomain, State: quarrypb.Word(n.State),
			Capacity: n.CapacityBytes, Hosted: n.HostedBytes, Used: n.UsedBytes, Persistence: n.Persistence.Text(), Missing: n.MissingRegions, Trouble: n.Trouble, Rails: rails(n), incarnation: n.Incarnation})
	}
	for _, r := range st.GetTable().GetRegions() {
		g := Region{ID: r.Id, State: quarrypb.Word(r.Shown()), Bytes: r.SizeBytes, Epoch: r.Epoch, Want: r.WantReplicas, Rebuilt: -1,
			Holds: holds(r), Durable: r.Durability == quarrypb.Durability_DURABILITY_PMEM, Tenant: tenants[r.Tenant]}
		for _, p := range r.Replicas {
			g.Replicas = append(g.Replicas, Replica{p.Node, quarrypb.Word(p.State)})
		}
		for _, p := range st.Progress {
			if p.Region == r.Id && p.Blocks > 0 {
				g.Rebuilt = float64(p.BlocksDone) / float64(p.Blocks)
			}
		}
		now.Regions = append(now.Regions, g)
	}
	slices.SortFunc(now.Nodes, func(a, b Node) int { return strings.Compare(a.Domain, b.Domain) })
	slices.SortFunc(now.Regions, func(a, b Region) int { return int(a.ID) - int(b.ID) })
	return now
}

// holds says what a region's memory is used for.
func holds(r *quarrypb.Region) string {
	switch {
	case r.Kind == quarrypb.RegionKind_REGION_KIND_OPEN_SLABS:
		return "objects, open words"
	case r.Kind == quarrypb.RegionKind_REGION_KIND_RAW && r.GetSpace().GetName() != "":
		return "bytes of " + r.GetSpace().GetName()
	case r.Kind == quarrypb.RegionKind_REGION_KIND_RAW:
		return "bytes"
	}
	return "objects"
}

// rails are the names of a node's networks.
func rails(n *quarrypb.Node) (all []string) {
	for _, e := range n.Endpoints {
		if e.Rail != "" && !slices.Contains(all, e.Rail) {
			all = append(all, e.Rail)
		}
	}
	return all
}

// inspect looks at all nodes at once, and stores what they answer in looks. Those that do not answer have nothing to show.
func (c *Console) inspect(ctx context.Context, nodes []Node, looks []*quarrypb.InspectNodeResponse) {
	ctx, cancel := context.WithTimeout(ctx, every)
	defer cancel()
	var wg sync.WaitGroup
	for i := range nodes {
		n := &nodes[i]
		if n.State == "removed" {
			continue
		}
		n.Asked = true
		wg.Go(func() {
			began := time.Now()
			l, err := ask(ctx, c, &quarrypb.InspectNodeRequest{Node: n.ID}, quarrypbconnect.ControllerClient.InspectNode)
			if err != nil {
				return
			}
			n.Answers, n.AnswerUS, n.Resident, n.Lanes = true, time.Since(began).Microseconds(), l.ResidentBytes, l.Lanes
			looks[i] = l
		})
	}
	wg.Wait()
}

// rate adds the rate since the last look. Call with mu held.
func (c *Console) rate(node uint32, l *quarrypb.InspectNodeResponse) {
	now := totals{time.Now(), l.Verbs, l.BytesRead, l.BytesWritten}
	old, ok := c.before[node]
	c.before[node] = now
	s := now.at.Sub(old.at).Seconds()
	if !ok || s <= 0 || now.verbs < old.verbs { // a new incarnation of the node counts from 0
		return
	}
	per := func(a, b uint64) float64 { return float64(a-min(a, b)) / s }
	all := append(c.snap.Rates[node], Rate{per(now.verbs, old.verbs), per(now.read, old.read), per(now.written, old.written)})
	c.snap.Rates[node] = slices.Clone(all[max(0, len(all)-maxRates):])
}

// event adds an event. Call with mu held.
func (c *Console) event(bad bool, format string, args ...any) {
	all := append([]Event{{time.Now(), bad, fmt.Sprintf(format, args...)}}, c.snap.Events...)
	c.snap.Events = all[:min(len(all), maxEvents)]
}

// events tells what is different from the last snapshot. Call with mu held.
func (c *Console) events(now *Snapshot) {
	if !c.known {
		return
	}
	if c.snap.Error != "" {
		c.event(false, "controllers answer again")
	}
	if was, is := c.snap.leader(), now.leader(); is != was && is != "" {
		c.event(false, "controller %s leads now", is)
	}
	name := c.nodeEvents(now)
	c.regionEvents(now, name)
	if now.Fenced > c.snap.Fenced {
		c.event(true, "%d sessions have been fenced", now.Fenced-c.snap.Fenced)
	}
}

// leader is the URL of the controller that leads; "" if none is known.
func (s *Snapshot) leader() string {
	for _, k := range s.Controllers {
		if k.Leader {
			return k.URL
		}
	}
	return ""
}

// nodeEvents tells what is different of nodes, and returns their names.
func (c *Console) nodeEvents(now *Snapshot) (name map[uint32]string) {
	name = map[uint32]string{}
	for _, n := range now.Nodes {
		name[n.ID] = n.Name
		i := slices.IndexFunc(c.snap.Nodes, func(o Node) bool { return o.ID == n.ID })
		switch {
		case i < 0:
			c.event(false, "node %s has joined (%s)", n.Name, n.Domain)
		case c.snap.Nodes[i].State != n.State:
			c.event(n.State == "silent", "node %s is %s, was %s", n.Name, n.State, c.snap.Nodes[i].State)
		case c.snap.Nodes[i].incarnation != n.incarnation:
			c.event(true, "node %s has been started again", n.Name)
		}
	}
	for _, o := range c.snap.Nodes {
		if name[o.ID] == "" {
			c.event(false, "node %s is forgotten", o.Name)
		}
	}
	return name
}

// regionEvents tells what is different of regions; name has the nodes' names.
func (c *Console) regionEvents(now *Snapshot, name map[uint32]string) {
	for _, r := range now.Regions {
		i := slices.IndexFunc(c.snap.Regions, func(o Region) bool { return o.ID == r.ID })
		if i < 0 {
			c.event(false, "region %d has been made", r.ID)
			continue
		}
		old := c.snap.Regions[i]
		if old.State != r.State || old.Epoch != r.Epoch {
			var where []string
			for _, p := range r.Replicas {
				where = append(where, name[p.Node]+" "+strings.ReplaceAll(p.State, "_", " "))
			}
			c.event(r.State != "open" || len(r.Replicas) < int(r.Want), "region %d is %s in epoch %d: %s", r.ID, r.State, r.Epoch, strings.Join(where, ", "))
		} else if old.Rebuilt >= 0 && r.Rebuilt < 0 {
			c.event(false, "region %d: a program over it has ended", r.ID)
		}
	}
	for _, o := range c.snap.Regions {
		if !slices.ContainsFunc(now.Regions, func(r Region) bool { return r.ID == o.ID }) {
			c.event(true, "region %d, which was %s, has been removed", o.ID, o.State)
		}
	}
}

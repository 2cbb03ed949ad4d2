package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/storagenode"
)

// statusCmd is quarry status. The views below are its JSON; their fields are stable.
type statusCmd struct {
	Wait bool `short:"w" help:"Return when every region is open and all its replicas are in sync, with a bar of the memory that programs have passed."`
}

// nodeView is a storage node.
type nodeView struct {
	ID        uint32   `json:"id"`
	Name      string   `json:"name"`
	Domain    string   `json:"failure_domain"` // /dc/rack/host
	State     string   `json:"state"`          // up, draining, down (removed), silent
	Capacity  uint64   `json:"capacity_bytes"` // most bytes of all its replicas
	Hosted    uint64   `json:"hosted_bytes"`   // reserved: the full size of the replicas on the node
	Used      uint64   `json:"used_bytes"`     // of that, the blocks in use, as the node reported last
	Agent     string   `json:"agent_url"`
	Endpoints []string `json:"endpoints"`
	// Rails are its addresses of the tcp fabric; see quarry storage --listen.
	Rails     []storagenode.Rail `json:"rails"`
	FabricTLS string             `json:"fabric_tls"` // encryption of its tcp fabric: off, on, required
	// Atomicity is the atomicity domain of its regions: "cpu" where its processors execute the atomics of all clients, "adapter" where
	// its adapter does.
	Atomicity string `json:"atomicity_domain"`
	// Persistence is what a loss of power leaves of its regions, how they are flushed, and how clients have that
	// done: volatile, "file, msync, processor", "devdax (memory_controller), clwb, agent", and so on; empty if the node does not say.
	Persistence string `json:"persistence"`
	// FlushMethod is the last of these: native, appliance, agent or processor, none of volatile regions; empty if the node
	// does not say.
	FlushMethod string `json:"flush_method"`
	// DDIO says where WRITEs of its adapter go first: into the processors' caches (on), past them (off), unknown; empty without
	// an adapter.
	DDIO string `json:"ddio,omitempty"`
	// NUMA says on which NUMA nodes the memory of its regions and its adapter are.
	NUMA *numaView `json:"numa,omitempty"`
	// MissingRegions were in its folder, and were not when it started.
	MissingRegions []uint32 `json:"missing_regions,omitempty"`
	// Connected is how many connections each provider carries.
	Connected map[string]uint32 `json:"connections"`
	// Trouble is why the controllers treat the node as lost although it answers.
	Trouble string `json:"trouble,omitempty"`
	// Pulse is its state in the failure detector: alive, suspect, silent, or none if it takes no
	// part.
	Pulse string `json:"pulse"`
	// SeenBy are the controllers that receive its pulse.
	SeenBy []string `json:"seen_by"`
}

// replicaView is a replica of a region.
type replicaView struct {
	Node  uint32 `json:"node"`
	Name  string `json:"name"`            // of the node
	State string `json:"state"`           // in_sync, rebuilding, out
	Moves bool   `json:"moves,omitempty"` // given up as soon as another is in sync
}

// progressView is a program that runs over a region at this moment.
type progressView struct {
	Region     uint32 `json:"region"`
	Work       string `json:"work"`
	Node       string `json:"node"`
	BlocksDone uint32 `json:"blocks_done"`
	Blocks     uint32 `json:"blocks"`
	Bytes      uint64 `json:"bytes"` // of objects copied, or of memory looked through
	// Of the memory of blocks that were in use when the program began.
	Used   uint64 `json:"used_bytes"`
	Passed uint64 `json:"passed_bytes"`
	Speed  uint64 `json:"bytes_per_second"` // of Passed, lately
	Left   *int64 `json:"left_ms"`          // at that speed; null while it is not known
}

// progressOf translates a program's progress; names are those of nodes by id.
func progressOf(p *quarrypb.Progress, names map[uint32]string) progressView {
	v := progressView{Region: p.Region, Work: quarrypb.Word(p.Kind), Node: names[p.Node], BlocksDone: p.BlocksDone, Blocks: p.Blocks, Bytes: p.Bytes,
		Used: p.UsedBytes, Passed: min(p.PassedBytes, p.UsedBytes), Speed: p.BytesPerSecond}
	if v.Speed > 0 {
		left := int64(float64(v.Used-v.Passed) / float64(v.Speed) * 1000)
		v.Left = &left
	}
	return v
}

// barText is a bar of the share that is done; "" if no block was in use.
func (p *progressView) barText() string {
	const width = 20
	if p.Used == 0 {
		return ""
	}
	n := int(width * float64(p.Passed) / float64(p.Used))
	return fmt.Sprintf("[%s%s] %d %%", strings.Repeat("#", n), strings.Repeat(".", width-n), int(100*float64(p.Passed)/float64(p.Used)))
}

// leftText is the remaining time, in seconds.
func (p *progressView) leftText() string {
	if p.Left == nil {
		return "-"
	}
	return (time.Duration(*p.Left) * time.Millisecond).Round(time.Second).String()
}

// regionView is a region. State is its condition: open, degraded, recovering, unavailable, lost.
type regionView struct {
	ID       uint32        `json:"id"`
	State    string        `json:"state"`
	Bytes    uint64        `json:"size_bytes"`
	Epoch    uint64        `json:"epoch"`
	Durable  bool          `json:"durable"`          // survives the loss of all power
	Open     bool          `json:"open_words"`       // its words may be open: replicated changes take one round less
	Tenant   string        `json:"tenant,omitempty"` // for operators and viewers
	Space    string        `json:"space,omitempty"`  // that the region is a part of; empty of regions with objects
	Replicas []replicaView `json:"replicas"`         // the first is the primary
}

// controllerView is a controller that is registered; one of them leads.
type controllerView struct {
	Name   string `json:"name"`
	URL    string `json:"url"`
	Leader bool   `json:"leader"`
}

// statusView is the answer of quarry status --json.
type statusView struct {
	Cluster        string           `json:"cluster"`  // uuid, in hex
	Insecure       bool             `json:"insecure"` // other hosts may do anything: --insecure was said
	Revision       uint64           `json:"revision"` // of the table
	Controllers    []controllerView `json:"controllers"`
	Nodes          []nodeView       `json:"nodes"`
	Regions        []regionView     `json:"regions"`
	Progress       []progressView   `json:"progress"`
	LiveSessions   uint32           `json:"live_sessions"`
	FencedSessions uint32           `json:"fenced_sessions"`
	// FencingSessions are those of FencedSessions whose fence is not complete, OldestFenceMS is
	// the age of the oldest such fence.
	FencingSessions uint32 `json:"fencing_sessions"`
	OldestFenceMS   uint64 `json:"oldest_fence_ms"`
	Version         string `json:"version"`
	// DefaultReplicas of regions and objects that are made without a number.
	DefaultReplicas uint32 `json:"default_replicas"`
	// Tenants with what they use; none for callers that are neither operators nor viewers.
	Tenants []tenantView `json:"tenants"`
}

// numaView is the NUMA nodes of a storage node; nil: the kernel does not say, or chooses for each page.
type numaView struct {
	Memory  *uint32 `json:"memory,omitempty"`
	Adapter *uint32 `json:"adapter,omitempty"`
}

func numaOf(n *quarrypb.Numa) *numaView {
	if n == nil || n.Memory == nil && n.Adapter == nil {
		return nil
	}
	return &numaView{n.Memory, n.Adapter}
}

// String is the node of the memory, and that of the adapter where they differ: each access then crosses between processors.
func (v *numaView) String() string {
	switch {
	case v == nil:
		return "-"
	case v.Adapter == nil:
		return fmt.Sprint(*v.Memory)
	case v.Memory == nil:
		return fmt.Sprintf("any, adapter %d", *v.Adapter)
	case *v.Memory == *v.Adapter:
		return fmt.Sprint(*v.Memory)
	}
	return fmt.Sprintf("%d, adapter %d (far)", *v.Memory, *v.Adapter)
}

// viewOf translates an answer of the controller. Lists are empty rather than null in JSON.
func viewOf(s *quarrypb.StatusResponse) statusView {
	v := statusView{Cluster: fmt.Sprintf("%x", s.GetTable().GetCluster()), Revision: s.GetTable().GetRevision(), LiveSessions: s.LiveSessions, Insecure: s.Insecure,
		FencedSessions: s.FencedSessions, FencingSessions: s.FencingSessions, OldestFenceMS: s.OldestFenceMs, Version: s.Version, DefaultReplicas: s.DefaultReplicas, Controllers: []controllerView{}, Nodes: []nodeView{}, Regions: []regionView{}, Progress: []progressView{}, Tenants: []tenantView{}}
	for _, c := range s.Controllers {
		v.Controllers = append(v.Controllers, controllerView{c.Name, c.Url, c.Leader})
	}
	names := map[uint32]string{}
	for _, n := range s.GetTable().GetNodes() {
		names[n.Id] = n.Name
		nv := nodeView{ID: n.Id, Name: n.Name, Domain: n.FailureDomain, State: quarrypb.Word(n.State), Capacity: n.CapacityBytes, Hosted: n.HostedBytes, Used: n.UsedBytes, Trouble: n.Trouble, Agent: n.AgentUrl, Endpoints: []string{}, Connected: map[string]uint32{}}
		nv.Persistence, nv.FlushMethod, nv.DDIO, nv.NUMA = n.Persistence.Text(), n.Persistence.GetMethod(), n.Persistence.GetDdio(), numaOf(n.Numa)
		nv.MissingRegions, nv.Atomicity = n.MissingRegions, proto.Domain(n.Domain).String()
		for _, c := range n.Connected {
			nv.Connected[quarrypb.Word(c.Provider)] = c.Lanes
		}
		for _, e := range n.Endpoints {
			nv.Endpoints = append(nv.Endpoints, quarrypb.Word(e.Provider)+":"+e.Address)
			if e.Provider == quarrypb.Provider_PROVIDER_TCP {
				nv.Rails = append(nv.Rails, storagenode.Rail{Rail: e.Rail, Address: e.Address, NUMA: e.Numa, Megabits: e.Megabits})
				nv.FabricTLS = quarrypb.Word(e.Tls)
			}
		}
		nv.Pulse, nv.SeenBy = "none", []string{}
		for _, m := range s.Members {
			if m.Node == n.Id && m.Incarnation == n.Incarnation {
				nv.Pulse, nv.SeenBy = m.State, append(nv.SeenBy, m.SeenBy...)
			}
		}
		v.Nodes = append(v.Nodes, nv)
	}
	for _, r := range s.GetTable().GetRegions() {
		v.Regions = append(v.Regions, regionViewOf(r, names))
	}
	for _, t := range s.Tenants {
		v.Tenants = append(v.Tenants, tenantOf(t))
		for i, r := range s.GetTable().GetRegions() {
			if r.Tenant == t.Id {
				v.Regions[i].Tenant = t.Name
			}
		}
	}
	for _, p := range s.Progress {
		v.Progress = append(v.Progress, progressOf(p, names))
	}
	return v
}

func regionViewOf(r *quarrypb.Region, names map[uint32]string) regionView {
	rv := regionView{ID: r.Id, State: quarrypb.Word(r.Shown()), Bytes: r.SizeBytes, Epoch: r.Epoch, Durable: r.Durability == quarrypb.Durability_DURABILITY_PMEM,
		Open: r.Kind == quarrypb.RegionKind_REGION_KIND_OPEN_SLABS, Space: r.GetSpace().GetName(), Replicas: []replicaView{}}
	for _, p := range r.Replicas {
		rv.Replicas = append(rv.Replicas, replicaView{p.Node, names[p.Node], quarrypb.Word(p.State), p.Leaving})
	}
	return rv
}

// pulseText is the pulse's state of a node. Where not all controllers receive the pulse of a node that
// is alive, it names those that do.
func (v *statusView) pulseText(n nodeView) string {
	if n.Pulse != "alive" || len(n.SeenBy) >= len(v.Controllers) {
		return n.Pulse
	}
	return fmt.Sprintf("%s to %s", n.Pulse, strings.Join(n.SeenBy, " "))
}

// status asks the controllers for the state of the cluster.
func (a *app) status(ctx context.Context) (statusView, error) {
	res, err := ask(ctx, a, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	if err != nil {
		return statusView{}, err
	}
	return viewOf(res), nil
}

// missing names the regions that are not open with all replicas in sync and where they
// are to be, a few of them; "" if there are none.
func (v *statusView) missing() string {
	var list []string
	for _, r := range v.Regions {
		state := r.State
		for _, p := range r.Replicas {
			if state == "open" && (p.State != "in_sync" || p.Moves) {
				state = "moved"
			}
		}
		if state != "open" {
			list = append(list, fmt.Sprintf("region %d is %s", r.ID, state))
		}
	}
	const most = 5
	if len(list) > most {
		list = append(list[:most], fmt.Sprintf("and %d more", len(list)-most))
	}
	return strings.Join(list, ", ")
}

// passed is the MiB that programs have passed of all that they have to pass; scrubs
// and reclaims are nothing to wait for.
func (v *statusView) passed() (done, total int) {
	for _, p := range v.Progress {
		if p.Work == "copy" || p.Work == "reconcile" {
			done, total = done+int(p.Passed>>20), total+int(p.Used>>20)
		}
	}
	return done, total
}

func (c *statusCmd) Run(ctx context.Context, a *app) error {
	v, err := a.status(ctx)
	if err != nil {
		return err
	}
	if c.Wait {
		b := a.progress("MiB copied")
		defer b.end()
		waiting, cancel := a.waiting(ctx)
		defer cancel()
		for missing := v.missing(); missing != ""; missing = v.missing() {
			b.set(v.passed())
			if err := a.pause(ctx, waiting, missing); err != nil {
				return err
			}
			next, err := a.status(waiting)
			switch {
			case err == nil:
				v = next
			case waiting.Err() == nil || ctx.Err() != nil:
				return err
			}
		}
		b.end()
	}
	return a.print(v, v.text)
}

func (v *statusView) text(w io.Writer) {
	fmt.Fprintf(w, "cluster %s, revision %d, %d sessions (%d fenced), version %s\n\n", v.Cluster, v.Revision, v.LiveSessions, v.FencedSessions, v.Version)
	if v.Insecure {
		fmt.Fprint(w, "INSECURE: any host that reaches the controllers may do anything: they ask for no certificate and no token\n\n")
	}
	if v.FencingSessions > 0 {
		fmt.Fprintf(w, "%d fences are not complete, the oldest for %v\n\n", v.FencingSessions, time.Duration(v.OldestFenceMS)*time.Millisecond)
	}
	fmt.Fprintln(w, "CONTROLLER\tURL\tROLE")
	for _, c := range v.Controllers {
		role := "standby"
		if c.Leader {
			role = "leader"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", c.Name, c.URL, role)
	}
	fmt.Fprintln(w, "\nNODE\tNAME\tSTATE\tPULSE\tFAILURE DOMAIN\tUSED\tRESERVED\tCAPACITY\tCONNECTIONS\tATOMICS\tFABRIC TLS\tENDPOINTS")
	for _, n := range v.Nodes {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", n.ID, n.Name, n.State, v.pulseText(n), n.Domain, bytesText(n.Used), bytesText(n.Hosted), bytesText(n.Capacity), providersInUse(n.Connected), n.Atomicity, cmp.Or(n.FabricTLS, "off"), n.endpointsText())
	}
	for _, n := range v.Nodes {
		if n.Trouble != "" {
			fmt.Fprintf(w, "\nnode %s answers, but %s\n", n.Name, n.Trouble)
		}
	}
	fmt.Fprintln(w)
	printRegions(w, v.Regions)
	if len(v.Tenants) > 1 {
		fmt.Fprintln(w)
		printTenants(w, v.Tenants)
	}
	if len(v.Progress) > 0 {
		fmt.Fprintln(w, "\nWORK\tREGION\tBY\tBLOCKS\tBYTES\tMEMORY PASSED\t\tSPEED\tLEFT")
		for _, p := range v.Progress {
			fmt.Fprintf(w, "%s\t%d\t%s\t%d of %d\t%s\t%s of %s\t%s\t%s/s\t%s\n", p.Work, p.Region, p.Node, p.BlocksDone, p.Blocks, bytesText(p.Bytes),
				bytesText(p.Passed), bytesText(p.Used), p.barText(), bytesText(p.Speed), p.leftText())
		}
	}
}

// providersInUse is connections by provider, the best first.
func providersInUse(lanes map[string]uint32) string {
	var parts []string
	for _, p := range []string{"verbs", "shm", "tcp"} {
		if n := lanes[p]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", p, n))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// One line a region, with the primary first. A replica's state is printed where it is not in sync, or moves.
func printRegions(w io.Writer, regions []regionView) {
	fmt.Fprintln(w, "REGION\tSTATE\tSIZE\tEPOCH\tREPLICAS (primary first)")
	for _, r := range regions {
		var reps []string
		for _, p := range r.Replicas {
			name := p.Name
			if name == "" {
				name = fmt.Sprintf("node %d", p.Node)
			}
			switch {
			case p.Moves:
				name += " (moves)"
			case p.State != "in_sync":
				name += " (" + p.State + ")"
			}
			reps = append(reps, name)
		}
		size := bytesText(r.Bytes)
		if r.Durable {
			size += " durable"
		}
		if r.Open {
			size += " open words"
		}
		if r.Space != "" {
			size += " of space " + r.Space
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%d\t%s\n", r.ID, r.State, size, r.Epoch, strings.Join(reps, ", "))
	}
}

type regionCmd struct {
	Default   regionDefaultCmd   `cmd:"" help:"Show or set the cluster's default number of replicas."`
	Create    regionCreateCmd    `cmd:"" help:"Create regions. Clients also do so when they need room."`
	List      regionListCmd      `cmd:"" help:"List regions."`
	Move      regionMoveCmd      `cmd:"" help:"Move a replica of a region to another node, while it is open."`
	Remove    regionRemoveCmd    `cmd:"" help:"Remove a lost region: its addresses name nothing from then on."`
	Rebalance regionRebalanceCmd `cmd:"" help:"Move replicas from the fullest nodes to the emptiest, while they are open."`
}

type regionCreateCmd struct {
	Replicas uint32   `short:"r" placeholder:"N" help:"Replicas, each in another failure domain: 1 to 3; default is the cluster's."`
	Size     sizeFlag `placeholder:"SIZE" help:"Bytes of a region: whole MiB, from 16MiB to 2GiB. Default: as much as the regions of the kind have together, at least 64MiB."`
	Count    uint32   `default:"1" short:"n" help:"How many."`
	Open     bool     `name:"open-words" help:"Regions with open words: a replicated change takes one round less, and clients read at any replica. Every node and client has to be of this version."`
	Durable  bool     `help:"Regions for durable objects, which survive a power failure of all nodes: only on nodes with persistent memory or disks."`
}

func (c *regionCreateCmd) Run(ctx context.Context, a *app) error {
	if c.Size != 0 {
		if _, err := proto.NewGeometry(uint64(c.Size)); err != nil {
			return usageError{err}
		}
	}
	q := &quarrypb.CreateRegionRequest{Replicas: c.Replicas, SizeBytes: uint64(c.Size), Count: c.Count, Durability: quarrypb.Durability_DURABILITY_MEM, OpenWords: c.Open}
	if c.Durable {
		q.Durability = quarrypb.Durability_DURABILITY_PMEM
	}
	res, err := ask(ctx, a, q, quarrypbconnect.ControllerClient.CreateRegion)
	if err != nil {
		return err
	}
	s, err := a.status(ctx)
	if err != nil {
		return err
	}
	if n := c.Replicas; n != 0 && n < s.DefaultReplicas {
		a.log.Warn("regions with fewer replicas than the cluster's default: only clients that ask for so few use them", "replicas", n, "default", s.DefaultReplicas)
	}
	names := map[uint32]string{}
	for _, n := range s.Nodes {
		names[n.ID] = n.Name
	}
	made := []regionView{}
	for _, r := range res.Regions {
		made = append(made, regionViewOf(r, names))
	}
	return a.print(made, func(w io.Writer) { printRegions(w, made) })
}

// createRegion makes a region of the controllers' default size.
func (a *app) createRegion(ctx context.Context, replicas uint32) (*quarrypb.CreateRegionResponse, error) {
	return ask(ctx, a, &quarrypb.CreateRegionRequest{Replicas: replicas, Count: 1, Durability: quarrypb.Durability_DURABILITY_MEM}, quarrypbconnect.ControllerClient.CreateRegion)
}

type regionListCmd struct{}

func (*regionListCmd) Run(ctx context.Context, a *app) error {
	v, err := a.status(ctx)
	if err != nil {
		return err
	}
	return a.print(v.Regions, func(w io.Writer) { printRegions(w, v.Regions) })
}

type sessionCmd struct {
	List   sessionListCmd   `cmd:"" help:"List sessions."`
	Revoke sessionRevokeCmd `cmd:"" help:"Fence a session: when it returns, no verb of that session changes a byte."`
}

type sessionListCmd struct{}

type sessionView struct {
	Session   uint32 `json:"session"`
	Name      string `json:"name"`
	State     string `json:"state"`
	Rights    string `json:"rights"`
	LeaseLeft uint32 `json:"lease_left_ms"`
}

func (*sessionListCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions)
	if err != nil {
		return err
	}
	list := []sessionView{}
	for _, s := range res.Sessions {
		rights := "read-write"
		if s.Rights == 1 {
			rights = "read-only"
		}
		list = append(list, sessionView{s.Session, s.Name, s.State, rights, s.LeaseLeftMs})
	}
	return a.print(list, func(w io.Writer) {
		fmt.Fprintln(w, "SESSION\tNAME\tSTATE\tRIGHTS\tLEASE LEFT")
		for _, s := range list {
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%d ms\n", s.Session, s.Name, s.State, s.Rights, s.LeaseLeft)
		}
	})
}

type sessionRevokeCmd struct {
	Session uint32 `arg:"" complete:"session" help:"Number of the session."`
	Reason  string `default:"revoked by an operator" help:"For the log."`
}

func (c *sessionRevokeCmd) Run(ctx context.Context, a *app) error {
	_, err := ask(ctx, a, &quarrypb.RevokeSessionRequest{Session: c.Session, Reason: c.Reason}, quarrypbconnect.ControllerClient.RevokeSession)
	if err != nil {
		return err
	}
	return a.print(map[string]any{"session": c.Session, "fenced": true}, func(w io.Writer) {
		fmt.Fprintf(w, "session %d is fenced\n", c.Session)
	})
}

// endpointsText is the node's endpoints, with the rails that they are on.
func (n nodeView) endpointsText() string {
	all := slices.Clone(n.Endpoints)
	for i, e := range all {
		for _, r := range n.Rails {
			if r.Rail != "" && e == client.TransportTCP+":"+r.Address {
				all[i] += "(" + r.Rail + ")"
			}
		}
	}
	return strings.Join(all, " ")
}

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type statusCmd struct {
	Wait bool `short:"w" help:"Return when every region is open and all its replicas are in sync, with a bar of the memory that programs have passed."`
}

type nodeView struct {
	ID        uint32   `json:"id"`
	Name      string   `json:"name"`
	Domain    string   `json:"failure_domain"`
	State     string   `json:"state"`
	Capacity  uint64   `json:"capacity_bytes"`
	Hosted    uint64   `json:"hosted_bytes"`
	Agent     string   `json:"agent_url"`
	Endpoints []string `json:"endpoints"`
	// Connected is how many connections each provider carries.
	Connected map[string]uint32 `json:"connections"`
	// Gossip is what other members hear of it: alive, silent, or none if it takes no part.
	Gossip string `json:"gossip"`
	// SeenBy are the controllers to which it is alive.
	SeenBy []string `json:"seen_by"`
}

type replicaView struct {
	Node  uint32 `json:"node"`
	Name  string `json:"name"`
	State string `json:"state"`
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
	Left   *int64 `json:"left_ms"`          // at that speed; null while nobody can tell
}

func progressOf(p *quarrypb.Progress, names map[uint32]string) progressView {
	v := progressView{Region: p.Region, Work: word(p.Kind, "WORK_KIND_"), Node: names[p.Node], BlocksDone: p.BlocksDone, Blocks: p.Blocks, Bytes: p.Bytes,
		Used: p.UsedBytes, Passed: min(p.PassedBytes, p.UsedBytes), Speed: p.BytesPerSecond}
	if v.Speed > 0 {
		left := int64(float64(v.Used-v.Passed) / float64(v.Speed) * 1000)
		v.Left = &left
	}
	return v
}

// barText is a bar of the part that has been passed.
func (p *progressView) barText() string {
	const width = 20
	if p.Used == 0 {
		return ""
	}
	n := int(width * float64(p.Passed) / float64(p.Used))
	return fmt.Sprintf("[%s%s] %d %%", strings.Repeat("#", n), strings.Repeat(".", width-n), int(100*float64(p.Passed)/float64(p.Used)))
}

// leftText is how long it will take.
func (p *progressView) leftText() string {
	if p.Left == nil {
		return "-"
	}
	return (time.Duration(*p.Left) * time.Millisecond).Round(time.Second).String()
}

type regionView struct {
	ID       uint32        `json:"id"`
	State    string        `json:"state"`
	Bytes    uint64        `json:"size_bytes"`
	Epoch    uint64        `json:"epoch"`
	Replicas []replicaView `json:"replicas"` // the first is the primary
}

type controllerView struct {
	Name   string `json:"name"`
	URL    string `json:"url"`
	Leader bool   `json:"leader"`
}

type statusView struct {
	Cluster        string           `json:"cluster"`
	Revision       uint64           `json:"revision"`
	Controllers    []controllerView `json:"controllers"`
	Nodes          []nodeView       `json:"nodes"`
	Regions        []regionView     `json:"regions"`
	Progress       []progressView   `json:"progress"`
	LiveSessions   uint32           `json:"live_sessions"`
	FencedSessions uint32           `json:"fenced_sessions"`
	Version        string           `json:"version"`
}

// word is the name of an enum value without its type: NODE_STATE_UP -> up.
func word(s fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), prefix))
}

func viewOf(s *quarrypb.StatusResponse) statusView {
	v := statusView{Cluster: fmt.Sprintf("%x", s.GetTable().GetCluster()), Revision: s.GetTable().GetRevision(), LiveSessions: s.LiveSessions,
		FencedSessions: s.FencedSessions, Version: s.Version, Controllers: []controllerView{}, Nodes: []nodeView{}, Regions: []regionView{}, Progress: []progressView{}}
	for _, c := range s.Controllers {
		v.Controllers = append(v.Controllers, controllerView{c.Name, c.Url, c.Leader})
	}
	names := map[uint32]string{}
	for _, n := range s.GetTable().GetNodes() {
		names[n.Id] = n.Name
		nv := nodeView{ID: n.Id, Name: n.Name, Domain: n.FailureDomain, State: word(n.State, "NODE_STATE_"), Capacity: n.CapacityBytes, Hosted: n.HostedBytes, Agent: n.AgentUrl, Endpoints: []string{}, Connected: map[string]uint32{}}
		for _, c := range n.Connected {
			nv.Connected[word(c.Provider, "PROVIDER_")] = c.Lanes
		}
		for _, e := range n.Endpoints {
			nv.Endpoints = append(nv.Endpoints, word(e.Provider, "PROVIDER_")+":"+e.Address)
		}
		nv.Gossip, nv.SeenBy = "none", []string{}
		for _, m := range s.Members {
			if m.Node == n.Id && m.Life == n.Incarnation {
				nv.Gossip, nv.SeenBy = m.State, append(nv.SeenBy, m.SeenBy...)
			}
		}
		v.Nodes = append(v.Nodes, nv)
	}
	for _, r := range s.GetTable().GetRegions() {
		v.Regions = append(v.Regions, regionViewOf(r, names))
	}
	for _, p := range s.Progress {
		v.Progress = append(v.Progress, progressOf(p, names))
	}
	return v
}

func regionViewOf(r *quarrypb.Region, names map[uint32]string) regionView {
	rv := regionView{ID: r.Id, State: word(r.State, "REGION_STATE_"), Bytes: r.SizeBytes, Epoch: r.Epoch, Replicas: []replicaView{}}
	for _, p := range r.Replicas {
		rv.Replicas = append(rv.Replicas, replicaView{p.Node, names[p.Node], word(p.State, "REPLICA_STATE_"), p.Leaving})
	}
	return rv
}

// gossipText is what gossip says of a node, and which of the controllers do not see
// what most see.
func (v *statusView) gossipText(n nodeView) string {
	if n.Gossip != "alive" || len(n.SeenBy) >= len(v.Controllers) {
		return n.Gossip
	}
	return fmt.Sprintf("%s to %s", n.Gossip, strings.Join(n.SeenBy, " "))
}

func (a *app) status(ctx context.Context) (statusView, error) {
	res, err := ask(ctx, a, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	if err != nil {
		return statusView{}, err
	}
	return viewOf(res), nil
}

// calm says whether every region is open, with all its replicas in sync and where they are to be.
func (v *statusView) calm() bool {
	for _, r := range v.Regions {
		if r.State != "open" {
			return false
		}
		for _, p := range r.Replicas {
			if p.State != "in_sync" || p.Moves {
				return false
			}
		}
	}
	return true
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
		for !v.calm() {
			b.set(v.passed())
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
			if v, err = a.status(ctx); err != nil {
				return err
			}
		}
		b.end()
	}
	return a.print(v, v.text)
}

func (v *statusView) text(w io.Writer) {
	fmt.Fprintf(w, "cluster %s, revision %d, %d sessions (%d fenced), version %s\n\n", v.Cluster, v.Revision, v.LiveSessions, v.FencedSessions, v.Version)
	fmt.Fprintln(w, "CONTROLLER\tURL\tROLE")
	for _, c := range v.Controllers {
		role := "standby"
		if c.Leader {
			role = "leader"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", c.Name, c.URL, role)
	}
	fmt.Fprintln(w, "\nNODE\tNAME\tSTATE\tGOSSIP\tFAILURE DOMAIN\tHOSTED\tCAPACITY\tCONNECTIONS\tENDPOINTS")
	for _, n := range v.Nodes {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", n.ID, n.Name, n.State, v.gossipText(n), n.Domain, bytesText(n.Hosted), bytesText(n.Capacity), providersInUse(n.Connected), strings.Join(n.Endpoints, " "))
	}
	fmt.Fprintln(w)
	printRegions(w, v.Regions)
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
		fmt.Fprintf(w, "%d\t%s\t%s\t%d\t%s\n", r.ID, r.State, bytesText(r.Bytes), r.Epoch, strings.Join(reps, ", "))
	}
}

type regionCmd struct {
	Create    regionCreateCmd    `cmd:"" help:"Create regions. Clients also do so when they need room."`
	List      regionListCmd      `cmd:"" help:"List regions."`
	Move      regionMoveCmd      `cmd:"" help:"Move a replica of a region to another node, while it is open."`
	Rebalance regionRebalanceCmd `cmd:"" help:"Move replicas from the fullest nodes to the emptiest, while they are open."`
}

type regionCreateCmd struct {
	Replicas uint32   `default:"1" short:"r" help:"Replicas, each in another failure domain: 1 to 3."`
	Size     sizeFlag `placeholder:"SIZE" help:"Bytes of a region: whole MiBs from 16MiB to 2GiB; default is the controllers'."`
	Count    uint32   `default:"1" short:"n" help:"How many."`
	Durable  bool     `help:"Only on nodes whose memory survives a loss of power."`
}

func (c *regionCreateCmd) Run(ctx context.Context, a *app) error {
	if c.Size != 0 {
		if _, err := proto.NewGeometry(uint64(c.Size)); err != nil {
			return usageError{err}
		}
	}
	q := &quarrypb.CreateRegionRequest{Replicas: c.Replicas, SizeBytes: uint64(c.Size), Count: c.Count, Durability: quarrypb.Durability_DURABILITY_MEM}
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
	Session uint32 `arg:"" help:"Number of the session."`
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

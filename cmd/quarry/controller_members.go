package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// memberView is a controller as the command shows it.
type memberView struct {
	Name  string   `json:"name"`
	ID    string   `json:"id,omitempty"`
	State string   `json:"state"`
	Vote  string   `json:"vote,omitempty"` // leader, voter, learner: in etcd
	URL   string   `json:"url,omitempty"`
	Peers []string `json:"etcd_peers,omitempty"`
}

type controllerListCmd struct{}

// controllersView is all controllers, with the size of their etcd.
type controllersView struct {
	Embedded    bool         `json:"etcd_embedded"`
	Controllers []memberView `json:"controllers"`
	FileBytes   uint64       `json:"etcd_file_bytes"`
	UsedBytes   uint64       `json:"etcd_used_bytes"`
	QuotaBytes  uint64       `json:"etcd_quota_bytes"`
}

// controllersOf translates the controllers' answer. A member of etcd whose controller is not registered is down,
// or not started if etcd has no name for it yet.
func controllersOf(r *quarrypb.ListControllersResponse) controllersView {
	v := controllersView{Embedded: r.Embedded, Controllers: []memberView{}, FileBytes: r.EtcdFileBytes, UsedBytes: r.EtcdUsedBytes, QuotaBytes: r.EtcdQuotaBytes}
	for _, m := range r.Members {
		c := memberView{Name: m.Name, URL: m.Url, Peers: m.PeerUrls}
		switch {
		case m.Leader:
			c.State = "leader"
		case m.Url != "":
			c.State = "standby"
		case m.Name == "":
			c.State = "not started"
		default:
			c.State = "down"
		}
		if r.Embedded {
			c.ID = strconv.FormatUint(m.Id, 16)
			switch {
			case m.Learner:
				c.Vote = "learner"
			case m.EtcdLeader:
				c.Vote = "leader"
			default:
				c.Vote = "voter"
			}
		}
		v.Controllers = append(v.Controllers, c)
	}
	return v
}

func (*controllerListCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.ListControllersRequest{}, quarrypbconnect.ControllerClient.ListControllers)
	if err != nil {
		return err
	}
	v := controllersOf(res)
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "CONTROLLER\tSTATE\tETCD\tURL\tETCD PEER\tID")
		for _, c := range v.Controllers {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", dash(c.Name), c.State, dash(c.Vote), dash(c.URL), dash(strings.Join(c.Peers, ",")), dash(c.ID))
		}
		fmt.Fprintf(w, "\netcd: %s used, %s on disk, quota %s\n", bytesText(v.UsedBytes), bytesText(v.FileBytes), bytesText(v.QuotaBytes))
	})
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

type controllerAddCmd struct {
	Name string `arg:"" help:"Name of the new controller."`
	Peer string `name:"etcd-peer" required:"" placeholder:"URL" help:"Where the etcds of other controllers will reach it, such as https://10.0.0.4:7424."`
}

func (c *controllerAddCmd) Run(ctx context.Context, a *app) error {
	return a.addController(ctx, &quarrypb.AddControllerRequest{Name: c.Name, PeerUrl: c.Peer}, c.Peer)
}

type controllerReplaceCmd struct {
	Name string `arg:"" complete:"controller" help:"Name of the controller whose disk is lost. Its successor has the same name."`
	Peer string `name:"etcd-peer" placeholder:"URL" help:"Where the successor will be reached; default where the lost one was."`
}

func (c *controllerReplaceCmd) Run(ctx context.Context, a *app) error {
	return a.addController(ctx, &quarrypb.AddControllerRequest{Name: c.Name, PeerUrl: c.Peer, Replaces: c.Name}, c.Peer)
}

// addController asks for a new member and shows how to start it.
func (a *app) addController(ctx context.Context, q *quarrypb.AddControllerRequest, peer string) error {
	res, err := ask(ctx, a, q, quarrypbconnect.ControllerClient.AddController)
	if err != nil {
		return err
	}
	for _, part := range strings.Split(res.InitialCluster, ",") {
		if name, url, _ := strings.Cut(part, "="); name == q.Name {
			peer = url
		}
	}
	start := fmt.Sprintf("quarry controller --name %s --etcd-peer %s --initial-cluster %s --data DIR --listen HOST:7420", q.Name, peer, res.InitialCluster)
	v := map[string]string{"name": q.Name, "etcd_peer": peer, "initial_cluster": res.InitialCluster, "start": start}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintf(w, "controller %s may join at %s. Start it with an empty data folder:\n\n  %s\n\nIt has a vote when it has copied the log: quarry controller list\n", q.Name, peer, start)
	})
}

type controllerRemoveCmd struct {
	Name string `arg:"" complete:"controller" help:"Name of the controller, or the id of one that has never started."`
}

// Run removes the member and the controller's registration; the controller finds that and ends.
func (c *controllerRemoveCmd) Run(ctx context.Context, a *app) error {
	if _, err := ask(ctx, a, &quarrypb.RemoveControllerRequest{Name: c.Name}, quarrypbconnect.ControllerClient.RemoveController); err != nil {
		return err
	}
	return a.print(map[string]string{"name": c.Name, "state": "removed"}, func(w io.Writer) {
		fmt.Fprintf(w, "controller %s is removed: it ends by itself; its data folder is of no use any more\n", c.Name)
	})
}

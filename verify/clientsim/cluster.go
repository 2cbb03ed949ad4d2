package clientsim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/storagenode"
)

const (
	controllers = 2
	nodes       = 3
	lease       = 3 * time.Second
	// replaceAfter is shorter than a user's, so that rebuilding replicas are part of most schedules.
	replaceAfter = 4 * time.Second
	nodeCapacity = 256 << 20
)

// Cluster is the processes of a schedule: controllers, storage nodes and clients.
type Cluster struct {
	*World
	ctls    [controllers]*ctlProc // written under World.mu, by the goroutine of servers' faults
	nodes   [nodes]*nodeProc      // as ctls; nil: it is dead
	admin   *Proc
	urls    []string
	clients [controllers]quarrypbconnect.ControllerClient // of the harness itself
}

type ctlProc struct {
	*Proc
	ctl *controller.Controller
}

type nodeProc struct {
	*Proc
	node *storagenode.Node
}

// errStart: the cluster has not come up.
var errStart = errors.New("the cluster has not started")

// Start starts controllers and storage nodes, and makes regions. Nothing is hurt yet.
func Start(seed uint64, o Options) (*Cluster, error) {
	c := &Cluster{World: newWorld(seed, o)}
	for i := range controllers {
		c.urls = append(c.urls, fmt.Sprintf("http://ctl%d", i+1))
	}
	c.admin = c.proc("admin")
	for i := range c.ctls {
		c.startController(i)
	}
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	if err := c.ctls[0].ctl.WaitLeader(ctx); err != nil {
		return c, err
	}
	for i := range c.nodes {
		if err := c.startNode(i); err != nil {
			return c, err
		}
	}
	_, err := ask(c, ctx, &quarrypb.CreateRegionRequest{Replicas: uint32(o.replicas()), Count: uint32(o.Regions), OpenWords: o.Open}, quarrypbconnect.ControllerClient.CreateRegion)
	return c, err
}

func (c *Cluster) startController(i int) {
	p := c.proc(fmt.Sprintf("ctl%d", i+1))
	ctl, err := controller.Start(p.ctx, controller.Config{
		Etcd: c.etcd.client(p.ctx, p), Advertise: c.urls[i], Name: p.Name, GossipListen: controller.NoGossip, Lease: lease,
		RegionBytes: proto.MinRegionBytes, ReplaceAfter: replaceAfter, Logger: c.log.With("at", p.Name), Wire: c.wire(p),
	})
	if err != nil {
		c.fail("controller %d does not start: %v", i+1, err)
		return
	}
	c.World.mu.Lock()
	defer c.World.mu.Unlock()
	c.ctls[i] = &ctlProc{p, ctl}
}

func (c *Cluster) startNode(i int) error {
	p := c.proc(fmt.Sprintf("node%d", i+1))
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	n, err := storagenode.Start(ctx, storagenode.Config{
		Controllers: c.urls, Name: p.Name, FailureDomain: fmt.Sprintf("/dc/rack/host%d", i+1), CapacityBytes: nodeCapacity, Socket: "none",
		GossipListen: storagenode.NoGossip, RDMA: storagenode.RDMA{Fabric: storagenode.FabricTCP}, Logger: c.log.With("at", p.Name), Wire: c.wire(p),
	})
	if err != nil {
		return fmt.Errorf("%w: node %d: %w", errStart, i+1, err)
	}
	c.World.mu.Lock()
	defer c.World.mu.Unlock()
	c.nodes[i] = &nodeProc{p, n}
	return nil
}

// rpc is a client of the controllers for the harness itself.
func (c *Cluster) rpc(i int) quarrypbconnect.ControllerClient {
	c.World.mu.Lock()
	defer c.World.mu.Unlock()
	if c.clients[i] == nil {
		c.clients[i] = quarrypbconnect.NewControllerClient(&http.Client{Transport: transport{c.World, c.admin}}, c.urls[i])
	}
	return c.clients[i]
}

// ask calls the controllers in turn until one answers.
func ask[Q, A any](c *Cluster, ctx context.Context, q *Q, method func(quarrypbconnect.ControllerClient, context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (*A, error) {
	for i := 0; ; i++ {
		cctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		res, err := method(c.rpc(i%controllers), cctx, connect.NewRequest(q))
		cancel()
		if err == nil {
			return res.Msg, nil
		}
		c.log.Debug("asked", "error", err)
		if code := connect.CodeOf(err); code != connect.CodeUnavailable && code != connect.CodeDeadlineExceeded && code != connect.CodeUnknown && code != connect.CodeResourceExhausted {
			return nil, err
		}
		if c.pause(ctx, 50*time.Millisecond) != nil {
			return nil, err
		}
	}
}

// config completes the Config of a client process.
func (c *Cluster) config(p *Proc, cfg client.Config) client.Config {
	cfg.Controllers, cfg.Name, cfg.Transport, cfg.Logger, cfg.Wire = c.urls, p.Name, client.TransportTCP, c.log.With("at", p.Name), c.wire(p)
	return cfg
}

// keys are those of payloads, nil in schedules without encryption.
func (c *Cluster) keys() client.Keys {
	if !c.opt.Encrypt {
		return nil
	}
	return oneKey{}
}

// oneKey is a key for every tenant.
type oneKey struct{}

func (oneKey) PayloadKeys(context.Context, string) ([]client.PayloadKey, error) {
	return []client.PayloadKey{{1}}, nil
}

// Client connects a client process.
func (c *Cluster) Client(ctx context.Context, name string, cfg client.Config) (*Proc, *client.Client, error) {
	p := c.proc(name)
	cfg.Keys = c.keys()
	cl, err := client.Connect(ctx, c.config(p, cfg))
	if err != nil {
		p.cancel()
		return nil, nil, err
	}
	return p, cl, nil
}

// fsckConfig is a check by a process of its own.
func (c *Cluster) fsckConfig(p *Proc, found func(fsck.Object)) fsck.Config {
	return fsck.Config{Controllers: c.urls, Transport: client.TransportTCP, Object: found, Wire: c.wire(p)}
}

// killNode kills a storage node, whose memory is lost.
func (c *Cluster) killNode(i int) {
	n := c.nodes[i]
	if n == nil {
		return
	}
	c.World.mu.Lock()
	c.Counts.NodeKills++
	c.nodes[i] = nil
	c.World.mu.Unlock()
	n.Kill()
	go n.node.Close()
}

// servers are the processes of the nodes that live, and of the controllers.
func (c *Cluster) servers() (nodes, ctls []*Proc) {
	c.World.mu.Lock()
	defer c.World.mu.Unlock()
	for _, n := range c.nodes {
		if n != nil {
			nodes = append(nodes, n.Proc)
		}
	}
	for _, p := range c.ctls {
		if p != nil { // else it has not started
			ctls = append(ctls, p.Proc)
		}
	}
	return nodes, ctls
}

func (c *Cluster) killController(i int) {
	p := c.ctls[i]
	c.count(&c.Counts.CtlKills)
	p.Kill()
	go p.ctl.Close()
}

// status is the leader's view, nil if there is none in time.
func (c *Cluster) status() *quarrypb.StatusResponse {
	ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
	defer cancel()
	res, err := ask(c, ctx, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	if err != nil {
		return nil
	}
	return res
}

// whole says whether every region is open with two replicas in sync.
func whole(s *quarrypb.StatusResponse) bool {
	for _, r := range s.GetTable().GetRegions() {
		n := 0
		for _, p := range r.Replicas {
			if p.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC && !p.Leaving {
				n++
			} else if p.State != quarrypb.ReplicaState_REPLICA_STATE_OUT {
				return false
			}
		}
		if r.State != quarrypb.RegionState_REGION_STATE_OPEN || n != int(r.WantReplicas) {
			return false
		}
	}
	return s != nil
}

// close ends every process. Nothing may be judged after it.
func (c *Cluster) close() {
	for i := range c.nodes {
		if n := c.nodes[i]; n != nil {
			n.Kill()
			n.node.Close()
		}
	}
	for _, p := range c.ctls {
		if p != nil {
			p.Kill()
			p.ctl.Close()
		}
	}
	c.cancel()
	c.etcd.stop()
}

// describe shows the table for a report.
func describe(s *quarrypb.StatusResponse) string {
	var b strings.Builder
	for _, r := range s.GetTable().GetRegions() {
		fmt.Fprintf(&b, "region %d epoch %d %s:", r.Id, r.Epoch, strings.TrimPrefix(r.State.String(), "REGION_STATE_"))
		for _, p := range r.Replicas {
			fmt.Fprintf(&b, " node%d/%s", p.Node, strings.TrimPrefix(p.State.String(), "REPLICA_STATE_"))
		}
		b.WriteString("; ")
	}
	return b.String()
}

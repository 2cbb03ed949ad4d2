package main

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type nodeCmd struct {
	List   nodeListCmd   `cmd:"" help:"List storage nodes."`
	Add    nodeAddCmd    `cmd:"" help:"End a drain, or admit a removed node again. New nodes join by themselves when they start."`
	Drain  nodeDrainCmd  `cmd:"" help:"Move every replica of a node elsewhere, while work goes on."`
	Remove nodeRemoveCmd `cmd:"" help:"Remove a drained node from the cluster, or with --force one that is gone for good."`
	Ping   nodePingCmd   `cmd:"" help:"Have a storage node answer messages over the fabric, and show how long that takes."`
	Forget nodeForgetCmd `cmd:"" help:"Delete the record of a removed node: no list shows it any more."`
	DDIO   nodeDDIOCmd   `cmd:"" name:"ddio" help:"Show whether nodes' adapters write into the processors' caches (Intel's DDIO), or switch it on this host."`
}

type nodeListCmd struct{}

// nodeLine is a node with what it holds.
type nodeLine struct {
	nodeView
	Replicas  int `json:"replicas"`
	Primaries int `json:"primaries"`
}

func nodeLines(v statusView) []nodeLine {
	list := []nodeLine{}
	for _, n := range v.Nodes {
		l := nodeLine{nodeView: n}
		for _, r := range v.Regions {
			for i, p := range r.Replicas {
				if p.Node == n.ID && p.State != "out" {
					l.Replicas++
					if i == 0 {
						l.Primaries++
					}
				}
			}
		}
		list = append(list, l)
	}
	return list
}

func (*nodeListCmd) Run(ctx context.Context, a *app) error {
	v, err := a.status(ctx)
	if err != nil {
		return err
	}
	list := nodeLines(v)
	return a.print(list, func(w io.Writer) {
		fmt.Fprintln(w, "NODE\tNAME\tSTATE\tPULSE\tFAILURE DOMAIN\tREPLICAS\tPRIMARIES\tUSED\tRESERVED\tCAPACITY\tATOMICS\tFABRIC TLS\tNUMA\tSURVIVES")
		for _, n := range list {
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", n.ID, n.Name, n.State, v.pulseText(n.nodeView), n.Domain, n.Replicas, n.Primaries, bytesText(n.Used), bytesText(n.Hosted), bytesText(n.Capacity), n.Atomicity, cmp.Or(n.FabricTLS, "off"), n.NUMA, cmp.Or(n.Persistence, "-"))
		}
	})
}

// printNode shows what has become of a node.
func (a *app) printNode(n *quarrypb.Node, what string) error {
	v := map[string]any{"id": n.Id, "name": n.Name, "state": quarrypb.Word(n.State)}
	return a.print(v, func(w io.Writer) { fmt.Fprintf(w, "node %s (%d) %s\n", n.Name, n.Id, what) })
}

type nodeAddCmd struct {
	Name string `arg:"" complete:"node" help:"Name of the node."`
}

func (c *nodeAddCmd) Run(ctx context.Context, a *app) error {
	n, err := ask(ctx, a, &quarrypb.AddNodeRequest{Name: c.Name}, quarrypbconnect.ControllerClient.AddNode)
	if err != nil {
		return err
	}
	return a.printNode(n, "takes replicas")
}

type nodeRemoveCmd struct {
	Name  string `arg:"" complete:"node" help:"Name of the node."`
	Force bool   `help:"The node is gone and will not come back: give up its replicas. Refused where it has the last replica in sync; the refusal names what would be lost."`
	// AcceptLoss is the confirmation that the refusal asks for.
	AcceptLoss bool `help:"With --force: give up the last replicas in sync, too. A region goes on with what restarted nodes have found of it, or is lost."`
}

// Help is shown by --help.
func (*nodeRemoveCmd) Help() string {
	return "Example: quarry node remove n3 --force prints what would be lost, quarry node remove n3 --force --accept-loss does it. quarry node add takes a removed node back."
}

func (c *nodeRemoveCmd) Run(ctx context.Context, a *app) error {
	if c.AcceptLoss && !c.Force {
		return usagef("--accept-loss goes with --force: a node that is not gone is drained")
	}
	n, err := ask(ctx, a, &quarrypb.RemoveNodeRequest{Name: c.Name, Force: c.Force, AcceptLoss: c.AcceptLoss}, quarrypbconnect.ControllerClient.RemoveNode)
	if err != nil {
		return err
	}
	return a.printNode(n, "is removed")
}

type nodeForgetCmd struct {
	Name string `arg:"" complete:"node" help:"Name of the node."`
}

func (c *nodeForgetCmd) Run(ctx context.Context, a *app) error {
	if _, err := ask(ctx, a, &quarrypb.ForgetNodeRequest{Name: c.Name}, quarrypbconnect.ControllerClient.ForgetNode); err != nil {
		return err
	}
	return a.print(map[string]any{"name": c.Name, "state": "forgotten"}, func(w io.Writer) { fmt.Fprintf(w, "node %s is forgotten\n", c.Name) })
}

type nodeDrainCmd struct {
	Name string `arg:"" complete:"node" help:"Name of the node."`
	Wait bool   `short:"w" help:"Return when the node is empty, with a bar of progress."`
}

// Run starts the drain and, with --wait, follows it until no replica is left. The drain goes on without
// the command.
func (c *nodeDrainCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.DrainNodeRequest{Name: c.Name}, quarrypbconnect.ControllerClient.DrainNode)
	if err != nil {
		return err
	}
	total := res.Replicas
	b := a.progress("draining " + c.Name)
	defer b.end()
	waiting, cancel := a.waiting(ctx)
	defer cancel()
	goesOn := func(err error) error {
		return ifInterrupted(ctx, err, "the drain of node %s goes on, %d replicas are still there: quarry node drain %s --wait follows it, quarry node add %s ends it", c.Name, res.Replicas, c.Name, c.Name)
	}
	for c.Wait && res.Replicas > 0 {
		// Status changes nothing: another DrainNode would start a drain anew that somebody has ended meanwhile.
		v, err := a.status(waiting)
		if err != nil && (waiting.Err() == nil || ctx.Err() != nil) {
			return goesOn(err)
		}
		if err == nil {
			left, draining := v.draining(res.Node.Id)
			if !draining {
				return fmt.Errorf("node %s is not being drained any more, and %d replicas are on it: somebody has ended the drain", c.Name, left)
			}
			res.Replicas, total = uint32(left), max(total, uint32(left))
			b.set((int(total)-left)*100+v.copied(res.Node.Id), int(total)*100)
			if left == 0 {
				break
			}
		}
		if err := a.pause(ctx, waiting, fmt.Sprintf("node %s still holds %d replicas; it goes on being drained", c.Name, res.Replicas)); err != nil {
			return goesOn(err)
		}
	}
	b.end()
	v := map[string]any{"id": res.Node.Id, "name": res.Node.Name, "state": quarrypb.Word(res.Node.State), "replicas": res.Replicas}
	return a.print(v, func(w io.Writer) {
		if res.Replicas == 0 {
			fmt.Fprintf(w, "node %s (%d) is empty\n", res.Node.Name, res.Node.Id)
		} else {
			fmt.Fprintf(w, "node %s (%d) is being drained, %d replicas are still there\n", res.Node.Name, res.Node.Id, res.Replicas)
		}
	})
}

// draining says how many replicas are on a node, and whether it is being drained.
func (v *statusView) draining(node uint32) (replicas int, draining bool) {
	for _, n := range nodeLines(*v) {
		if n.ID == node {
			return n.Replicas, n.State == quarrypb.Word(quarrypb.NodeState_NODE_STATE_DRAINING)
		}
	}
	return 0, false
}

// copied is how many hundredths of regions of a node have been copied elsewhere by now.
func (v *statusView) copied(node uint32) (sum int) {
	on := map[uint32]bool{}
	for _, r := range v.Regions {
		for _, p := range r.Replicas {
			on[r.ID] = on[r.ID] || p.Node == node
		}
	}
	for _, p := range v.Progress {
		if p.Work == "copy" && on[p.Region] && p.Blocks > 0 {
			sum += int(p.BlocksDone) * 100 / int(p.Blocks)
		}
	}
	return sum
}

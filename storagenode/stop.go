package storagenode

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// silentFor is how long a stopping node waits for a controller. When all controllers are
// gone for longer, the whole cluster is being stopped.
const silentFor = 15 * time.Second

// need is what the cluster needs of the node, as the controller's last answer says.
type need struct {
	at                         time.Time
	lacking, held, last, stuck uint32
}

// ending is the state of Leave. Heartbeats fill in the need of each answer.
type ending struct {
	stopping atomic.Bool
	now      atomic.Pointer[need]
	answered chan struct{} // of capacity 1: an answer has come
}

// told records the need in a controller's answer to a heartbeat.
func (e *ending) told(r *quarrypb.NodeHeartbeatResponse) {
	if r.Unknown {
		return
	}
	e.now.Store(&need{time.Now(), r.Lacking, r.Held, r.Last, r.Stuck})
	select {
	case e.answered <- struct{}{}:
	default:
	}
}

// Leave tells the cluster that the node is about to stop, and returns when no region needs
// it: each region that has a replica here has gone on without it, with another replica in sync.
// Clients notice a short pause, and nothing is lost by a later Close. Until Close the node serves
// on. A region without another replica is rebuilt on another node first. Regions kept in files
// (Config.Dir) do not move for want of another replica: they come back with their node.
//
// Leave returns an error when ctx ends first, when there is no other node, or when no
// controller answers for 15 s; then Close may lose the regions that the error counts.
func (n *Node) Leave(ctx context.Context) error {
	n.ending.stopping.Store(true)
	select {
	case n.pulse.hurry <- struct{}{}: // a heartbeat reports it at once
	default:
	}
	began, told := time.Now(), ""
	quiet := time.NewTimer(silentFor)
	defer quiet.Stop()
	for {
		var at need
		if p := n.ending.now.Load(); p != nil && p.at.After(began) {
			at = *p
			kept := n.keeper != nil
			switch {
			case at.held == 0 || kept && at.held == at.last:
				return nil
			case at.stuck > 0 && at.held == at.last:
				return fmt.Errorf("storage node %s: %d regions have their last replica here, in memory, and the cluster has no other node: they are lost when it stops", n.cfg.Name, at.last)
			}
			if text := fmt.Sprintf("%d/%d", at.held, at.last); text != told {
				told = text
				n.cfg.Logger.Info("storage node: waits for regions that need it before it stops", "node", n.cfg.Name, "replicas", at.held, "last_replicas", at.last)
			}
		}
		select {
		case <-n.ending.answered:
			quiet.Reset(silentFor)
		case <-quiet.C:
			return fmt.Errorf("storage node %s: no controller answers, so it is not known which regions need this node", n.cfg.Name)
		case <-n.ctx.Done():
			return nil // closed meanwhile
		case <-ctx.Done():
			return fmt.Errorf("storage node %s: %d replicas are still needed here, %d of them are the last of their region: %w", n.cfg.Name, at.held, at.last, context.Cause(ctx))
		}
	}
}

// ready answers /readyz: whether the next node may be restarted after this one. It is
// when a controller has answered lately and no region of the cluster lacks replicas.
func (n *Node) ready(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(quarrypb.VersionHeader, Version)
	p := n.ending.now.Load()
	switch {
	case n.ending.stopping.Load():
		http.Error(w, "not ready: the node is about to stop", http.StatusServiceUnavailable)
	case p == nil || time.Since(p.at) > 2*beatTimeout:
		http.Error(w, "not ready: no controller knows this node, or none answers", http.StatusServiceUnavailable)
	case p.lacking > 0:
		http.Error(w, fmt.Sprintf("not ready: %d regions lack replicas: quarry status shows them", p.lacking), http.StatusServiceUnavailable)
	default:
		fmt.Fprintln(w, "ok")
	}
}

package clientsim

import (
	"context"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
)

// hurtClients plans one fault of a client after the other until the context ends.
func (r *run) hurtClients(ctx context.Context) {
	most := 3 * time.Second
	if r.opt.Stuck {
		most *= 3
	}
	for r.pause(ctx, r.fate.between(100*time.Millisecond, most)) == nil {
		w := r.workers[r.fate.intn(len(r.workers))]
		l := w.now()
		r.mu.Lock()
		if n := len(r.extras); n > 0 && r.fate.chance(2) {
			l = r.extras[r.fate.intn(n)]
		}
		r.mu.Unlock()
		if l.cl == nil {
			continue
		}
		if r.opt.Stuck {
			r.StrikeAt(l.p, 4, isClaim, func() { r.hurtClient(w, l) })
			continue
		}
		r.Strike(l.p, 1<<r.fate.intn(7), func() { r.hurtClient(w, l) })
	}
}

// hurtClient injects a fault of a client process: the one of the schedule's theme, or a random one.
// It may be called while locks are held.
func (r *run) hurtClient(w *worker, l *incarnation) {
	if r.ctx.Err() != nil || r.hurtByTheme(w, l) {
		return
	}
	p := l.p
	up, ctls := r.servers()
	switch r.fate.intn(10) {
	case 8:
		r.revoke(l)
	case 9:
		if p == w.now().p {
			w.leave()
		}
	case 0, 1, 2, 3: // it stands still, often for longer than its lease
		r.Pause(p, r.fate.span(3*lease))
	case 4:
		if p == w.now().p {
			w.kill()
		}
	case 5, 6:
		if n := r.fate.intn(nodes); n < len(up) { // else it is dead
			r.cutSome(p, up[n], r.fate.span(lease))
		}
	case 7:
		d := r.fate.span(2 * lease)
		for _, ctl := range ctls {
			r.cutSome(p, ctl, d)
		}
	}
}

// hurtByTheme injects the fault of the schedule's theme. False: the theme asks for none this time.
func (r *run) hurtByTheme(w *worker, l *incarnation) bool {
	p := l.p
	up, ctls := r.servers()
	switch {
	case r.opt.Stuck:
		for _, n := range up {
			r.Cut(p, n, r.fate.between(settleTime, 3*settleTime))
		}
	case r.opt.Leave:
		if p == w.now().p {
			w.leave()
		}
	case r.opt.End:
		for _, n := range up {
			for _, ctl := range ctls {
				if r.fate.chance(2) {
					r.Cut(ctl, n, r.fate.between(100*time.Millisecond, lease/2))
				}
			}
		}
		r.revoke(l)
	case r.opt.Loads && r.fate.chance(2):
		r.revoke(l)
	case r.opt.Eager && !r.fate.chance(4):
		// Its lease ends, and a fence begins only if another client waits for it.
		r.Pause(p, r.fate.between(lease*9/10, lease*21/10))
	default:
		return false
	}
	return true
}

// revoke has an operator end the session of a client, which learns of it from refusals
// and from its next heartbeat.
func (r *run) revoke(l *incarnation) {
	r.count(&r.Counts.Revokes)
	q := &quarrypb.RevokeSessionRequest{Session: l.cl.SessionID(), Reason: "by order"}
	r.background.Go(func() {
		ctx, cancel := context.WithTimeout(r.ctx, 5*time.Second)
		defer cancel()
		if _, err := ask(r.Cluster, ctx, q, quarrypbconnect.ControllerClient.RevokeSession); err != nil {
			r.log.Debug("revoke", "error", err)
		}
	})
}

// isClaim says whether a chain claims slabs: a CAS of a map word, and a READ of the header.
func isClaim(ch *rdma.Chain) bool {
	return len(ch.Verbs) == 2 && ch.Verbs[0].Op == rdma.CompareSwap && ch.Verbs[1].Op == rdma.Read && len(ch.Verbs[1].Buf) == 8
}

// settleTime is what a call that is over has to settle what it has posted.
const settleTime = time.Second

// hurtServers plans faults of controllers and storage nodes. At most one node is in
// trouble at a time: with two replicas no acknowledged change may be lost.
func (r *run) hurtServers(ctx context.Context) {
	for !r.opt.Well && r.pause(ctx, r.fate.between(300*time.Millisecond, 6*time.Second)) == nil {
		if r.fate.chance(3) {
			r.hurtController(ctx)
		} else {
			r.hurtNode(ctx)
		}
	}
}

// cutSome cuts a link in one direction or both.
func (c *Cluster) cutSome(a, b *Proc, d time.Duration) {
	way := c.fate.intn(3)
	if way != 1 {
		c.Cut(a, b, d)
	}
	if way != 2 {
		c.Cut(b, a, d)
	}
}

func (c *Cluster) hurtController(ctx context.Context) {
	i := c.fate.intn(controllers)
	switch c.fate.intn(3) {
	case 0:
		c.Pause(c.ctls[i].Proc, c.fate.span(lease))
	case 1:
		c.cutSome(c.ctls[i].Proc, c.etcdProc, c.fate.span(lease))
	case 2:
		c.killController(i)
		_ = c.pause(ctx, c.fate.span(lease))
		c.startController(i)
		c.World.mu.Lock()
		c.cures(time.Now().Add(electionTime))
		c.World.mu.Unlock()
	}
}

// electionTime is how long it takes until another controller leads.
const electionTime = 3 * time.Second

// hurtNode hurts a storage node, if all replicas are well, and mends it.
func (r *run) hurtNode(ctx context.Context) {
	c := r.Cluster
	if !whole(c.status()) {
		return
	}
	i := c.fate.intn(nodes)
	n := c.nodes[i]
	if n == nil {
		return
	}
	d := c.fate.span(3 * lease)
	fault := c.fate.intn(4)
	if c.opt.Mute && fault != 3 {
		fault = 1
	}
	switch fault {
	case 0:
		c.Pause(n.Proc, d)
	case 1: // clients still reach it
		for _, p := range c.ctls {
			c.cutSome(n.Proc, p.Proc, d)
		}
		if c.opt.Mute && c.fate.chance(2) { // it is left while it owes a fence
			_ = c.pause(ctx, c.fate.between(0, lease/2))
			if l := r.workers[c.fate.intn(len(r.workers))].now(); l.cl != nil {
				r.revoke(l)
			}
		}
	case 2: // from another node
		if o := c.nodes[(i+1)%nodes]; o != nil {
			c.cutSome(n.Proc, o.Proc, d)
		}
	case 3:
		c.killNode(i)
		_ = c.pause(ctx, d)
		c.restart(i)
		return
	}
	_ = c.pause(ctx, d)
}

// restart starts a node that was killed.
func (c *Cluster) restart(i int) {
	for c.nodes[i] == nil && c.ctx.Err() == nil {
		if err := c.startNode(i); err != nil {
			c.log.Warn("node not started", "error", err)
		}
	}
}

func pick[T any](c *Cluster, list []*T) *T {
	if len(list) == 0 {
		return nil
	}
	return list[c.fate.intn(len(list))]
}

package client

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// Held is a lane in the middle of a call, for tests that look between two verbs.
type Held struct{ l *lane }

// Hold begins a call.
func Hold(ctx context.Context, c *Client) (*Held, error) {
	l, err := c.lane(ctx, KindOther)
	return &Held{l}, err
}

func (h *Held) Release()                                   { h.l.session.client.done(h.l, nil) }
func (h *Held) Region(id uint32) (*slab.Region, error)     { return h.l.Region(id) }
func (h *Held) Do(r *rdma.Round)                           { h.l.Do(r) }
func (h *Held) Settle(r *slab.Region, d *rdma.Round) error { return h.l.Settle(r, d) }
func (h *Held) Pause() error                               { return h.l.Pause(spins + 1) }

// Acknowledged is what the present session would acknowledge now.
func Acknowledged(c *Client) (table, reclaim uint64) { return c.current.Load().settled() }

// Table is a copy of the table of the present session.
func Table(c *Client) *quarrypb.Table {
	t := c.current.Load().now.Load().table
	out := &quarrypb.Table{Cluster: t.Cluster(), Revision: t.Revision(), ReclaimEpoch: t.ReclaimEpoch(), Whole: true}
	for _, n := range t.Nodes() {
		out.Nodes = append(out.Nodes, proto.CloneOf(n))
	}
	for _, r := range t.Regions() {
		out.Regions = append(out.Regions, proto.CloneOf(r))
	}
	return out
}

// Install gives the present session a table, as if a controller had sent it.
func Install(c *Client, t *quarrypb.Table) error { return c.current.Load().install(t) }

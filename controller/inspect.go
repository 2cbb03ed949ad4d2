package controller

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// InspectNode asks the node's agent, which answers the leader only.
func (s *service) InspectNode(ctx context.Context, r *connect.Request[quarrypb.InspectNodeRequest]) (*connect.Response[quarrypb.InspectNodeResponse], error) {
	table, err := do[quarrypb.Table](ctx, s, &quarrypb.ReadTableRequest{}, nil)
	if err != nil {
		return nil, err
	}
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	for _, n := range table.Msg.Nodes {
		if n.Id != r.Msg.Node {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
		defer cancel()
		cl := t.agent(n.Id, n.AgentUrl)
		res, err := cl.Inspect(ctx, connect.NewRequest(r.Msg))
		if err != nil {
			return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("node %s: %w", n.Name, err))
		}
		return connect.NewResponse(res.Msg), nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no storage node has the number %d", r.Msg.Node))
}

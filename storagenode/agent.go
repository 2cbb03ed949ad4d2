package storagenode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/storagenode/state"
)

// This file answers the controllers' calls: each becomes an event of the agent's machine.

// agent answers the controllers' calls.
type agent struct{ n *Node }

var codes = map[state.Code]connect.Code{
	state.Invalid: connect.CodeInvalidArgument, state.NotHosted: connect.CodeNotFound, state.Conflict: connect.CodeAlreadyExists,
	state.Stale: connect.CodeFailedPrecondition, state.Served: connect.CodeFailedPrecondition, state.NoSpace: connect.CodeResourceExhausted,
	state.Busy: connect.CodeUnavailable, state.NotOfCluster: connect.CodePermissionDenied,
	state.NoAdapter: connect.CodeFailedPrecondition,
}

// command carries out a command to its end, also when its caller has given up: a command that
// stopped half-way would leave a replica that neither serves nor is closed.
func command[A any](ctx context.Context, n *Node, ev state.Event) (*connect.Response[A], error) {
	err := n.do(context.WithoutCancel(ctx), ev)
	var se *state.Error
	switch {
	case errors.As(err, &se):
		return nil, connect.NewError(codes[se.Code], fmt.Errorf("node %s: %s", n.cfg.Name, se.Text))
	case errors.Is(err, errStopping):
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("node %s: %w", n.cfg.Name, err))
	case err != nil:
		level := slog.LevelError
		if n.ctx.Err() != nil {
			level = slog.LevelDebug // cut short because the node stops
		}
		n.cfg.Logger.Log(ctx, level, "storage node: command failed", "command", fmt.Sprintf("%T", ev), "error", err)
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("node %s: %w", n.cfg.Name, err))
	}
	return connect.NewResponse(new(A)), nil
}

// thisIncarnation refuses calls that mean another incarnation of the node: a controller that has
// not heard of a restart must not open what this incarnation has found.
func (n *Node) thisIncarnation() connect.Interceptor {
	return connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
			if incarnation := r.Header().Get(quarrypb.IncarnationHeader); incarnation != "" && incarnation != strconv.FormatUint(n.incarnation, 10) {
				return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("node %s: a call for incarnation %s of the node, this is %d", n.cfg.Name, incarnation, n.incarnation))
			}
			return next(ctx, r)
		}
	})
}

// uuid checks the length of a uuid.
func uuid(b []byte) (u [16]byte, err error) {
	if len(b) != 16 {
		return u, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("uuid of %d bytes, want 16", len(b)))
	}
	return [16]byte(b), nil
}

// HostRegion makes, zeroes or confirms the memory of a replica.
func (a *agent) HostRegion(ctx context.Context, r *connect.Request[quarrypb.HostRegionRequest]) (*connect.Response[quarrypb.HostRegionResponse], error) {
	m := r.Msg
	u, err := uuid(m.Uuid)
	if err != nil {
		return nil, err
	}
	c, err := uuid(m.Cluster)
	if err != nil {
		return nil, err
	}
	return command[quarrypb.HostRegionResponse](ctx, a.n, state.Host{
		Term: m.ControllerTerm, Region: m.Region, UUID: u, Cluster: c, Kind: proto.RegionKind(m.Kind), Bytes: m.SizeBytes,
		Persistent: m.Durability == quarrypb.Durability_DURABILITY_PMEM, Zero: m.Zero, MustExist: m.MustExist, Epoch: m.Epoch,
	})
}

// OpenRegion serves a replica under an epoch.
func (a *agent) OpenRegion(ctx context.Context, r *connect.Request[quarrypb.OpenRegionRequest]) (*connect.Response[quarrypb.OpenRegionResponse], error) {
	return command[quarrypb.OpenRegionResponse](ctx, a.n, state.Open{Term: r.Msg.ControllerTerm, Region: r.Msg.Region, Epoch: r.Msg.Epoch, Tenant: r.Msg.Tenant, Adapter: r.Msg.Adapter})
}

// CloseRegion ends the epochs of a replica up to one. When it returns no verb of theirs executes.
func (a *agent) CloseRegion(ctx context.Context, r *connect.Request[quarrypb.CloseRegionRequest]) (*connect.Response[quarrypb.CloseRegionResponse], error) {
	return command[quarrypb.CloseRegionResponse](ctx, a.n, state.Close{Term: r.Msg.ControllerTerm, Region: r.Msg.Region, Epoch: r.Msg.Epoch})
}

// DropRegion gives a replica's memory back.
func (a *agent) DropRegion(ctx context.Context, r *connect.Request[quarrypb.DropRegionRequest]) (*connect.Response[quarrypb.DropRegionResponse], error) {
	return command[quarrypb.DropRegionResponse](ctx, a.n, state.Drop{Term: r.Msg.ControllerTerm, Region: r.Msg.Region, Epoch: r.Msg.Epoch})
}

// Fence ends sessions. When it returns no verb of theirs changes a byte here, and none is
// admitted.
func (a *agent) Fence(ctx context.Context, r *connect.Request[quarrypb.FenceRequest]) (*connect.Response[quarrypb.FenceResponse], error) {
	return command[quarrypb.FenceResponse](ctx, a.n, state.Fence{Term: r.Msg.ControllerTerm, Serials: r.Msg.Serials})
}

// Ping answers probes, and says whether the node can carry out commands.
func (a *agent) Ping(context.Context, *connect.Request[quarrypb.PingRequest]) (*connect.Response[quarrypb.PingResponse], error) {
	unfit := a.n.unfit()
	a.n.mu.Lock()
	defer a.n.mu.Unlock()
	return connect.NewResponse(&quarrypb.PingResponse{Id: a.n.state.Node, Incarnation: a.n.incarnation, Unfit: unfit}), nil
}

package controller

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// This file has the RPCs that the machine answers: a handler checks what the caller may do, fills
// in what the caller must not choose (tenant, job, random bytes), and passes the request on with
// do. proto/quarrypb says what each call promises. A standby answers with the leader's URL.

// service answers the RPCs of quarrypb.Controller.
type service struct {
	quarrypbconnect.UnimplementedControllerHandler
	c *Controller
}

// compressFromBytes: smaller answers go as they are. Most are a few hundred bytes, and
// to compress one takes longer than all else that is done for it.
const compressFromBytes = 4096

// options of all handlers: compression of long answers, and a panic that becomes an error.
func options() []connect.HandlerOption {
	return []connect.HandlerOption{connect.WithCompressMinBytes(compressFromBytes), connect.WithRecover(
		func(_ context.Context, spec connect.Spec, _ http.Header, p any) error {
			return connect.NewError(connect.CodeInternal, fmt.Errorf("%s: %v", spec.Procedure, p))
		})}
}

// notLeading is a standby's answer; it names the leader.
func (s *service) notLeading() error {
	leader := s.c.leader.Load().URL
	err := connect.NewError(connect.CodeUnavailable, fmt.Errorf("controller %s does not lead; the leader is %q", s.c.url, leader))
	// Set even if the leader is not known: the header says that nothing was done.
	if leader == s.c.url {
		leader = ""
	}
	err.Meta().Set(quarrypb.LeaderHeader, leader)
	return err
}

// do puts a request to the machine of the leader.
func do[A any](ctx context.Context, s *service, msg any, random []byte) (*connect.Response[A], error) {
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	out, err := t.ask(ctx, msg, random)
	if err != nil {
		return nil, s.coded(err)
	}
	a, ok := out.(*A)
	if !ok {
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("answer of type %T", out))
	}
	return connect.NewResponse(a), nil
}

var codes = map[state.Code]connect.Code{
	state.Invalid: connect.CodeInvalidArgument, state.NotFound: connect.CodeNotFound, state.Exists: connect.CodeAlreadyExists,
	state.Precondition: connect.CodeFailedPrecondition, state.Exhausted: connect.CodeResourceExhausted, state.Denied: connect.CodePermissionDenied,
	state.Busy: connect.CodeAborted, state.Internal: connect.CodeInternal,
}

// coded gives a decision's error its code.
func (s *service) coded(err error) error {
	var se *state.Error
	if !errors.As(err, &se) {
		return err
	}
	if se.Code == state.NotLeader {
		return s.notLeading()
	}
	return connect.NewError(codes[se.Code], errors.New(se.Text))
}

// OpenSession opens a session in the tenant of the call. Sessions of node programs are opened by
// their node only; those of workers by the rights of the job's submitter.
func (s *service) OpenSession(ctx context.Context, r *connect.Request[quarrypb.OpenSessionRequest]) (*connect.Response[quarrypb.OpenSessionResponse], error) {
	if err := mayOpen(rights.From(ctx), r.Msg); err != nil {
		return nil, err
	}
	tenant := ""
	r.Msg.Job, r.Msg.Bounded = 0, false
	if p := r.Msg.Program; p != nil {
		if err := s.c.maySpeak(rights.From(ctx), p.Node); err != nil {
			return nil, err
		}
	} else if !r.Msg.Agent {
		in, err := s.c.acting(ctx, r.Header())
		if err == nil {
			err = in.mayOpen(r.Msg.Rights)
		}
		if err != nil {
			return nil, err
		}
		r.Msg.Tenant, r.Msg.Job, r.Msg.Bounded, tenant = in.id, in.job, !in.all, in.name
	}
	if r.Msg.Job != 0 {
		s.c.jobs.opened.Store(true)
	}
	res, err := do[quarrypb.OpenSessionResponse](ctx, s, r.Msg, nil)
	if err == nil && r.Msg.Job != 0 {
		err = s.openedForJob(ctx, r.Header(), res.Msg)
	}
	if err != nil {
		return nil, err
	}
	res.Msg.Tenant = tenant
	s.c.sessionHeartbeat(ctx, res.Msg.Ticket.GetSerial()) // the first one
	return res, nil
}

// openedForJob ends a new session whose delegation has ended beside it: the end has listed the sessions before.
func (s *service) openedForJob(ctx context.Context, h http.Header, res *quarrypb.OpenSessionResponse) error {
	s.c.jobs.opened.Store(true) // tendDelegations may have looked before the session was there
	_, err := s.c.acting(ctx, h)
	if connect.CodeOf(err) != connect.CodePermissionDenied || err == nil {
		return nil // if that is unknown, tendDelegations finds out
	}
	_, revoked := do[quarrypb.RevokeSessionResponse](ctx, s, &quarrypb.RevokeSessionRequest{Session: res.Ticket.GetSession(), Reason: "its delegation has ended"}, nil)
	return errors.Join(err, revoked)
}

// Heartbeat also records the connection, whose end may be the end of the client, and adds how far names have changed.
func (s *service) Heartbeat(ctx context.Context, r *connect.Request[quarrypb.HeartbeatRequest]) (*connect.Response[quarrypb.HeartbeatResponse], error) {
	res, err := do[quarrypb.HeartbeatResponse](ctx, s, r.Msg, nil)
	if err == nil {
		if t := s.c.term.Load(); t != nil { // the one that has answered, or a later one
			t.latestName(res.Msg)
		}
		s.c.sessionHeartbeat(ctx, r.Msg.Serial)
	}
	return res, err
}

// CloseSession needs the session's proof.
func (s *service) CloseSession(ctx context.Context, r *connect.Request[quarrypb.CloseSessionRequest]) (*connect.Response[quarrypb.CloseSessionResponse], error) {
	return do[quarrypb.CloseSessionResponse](ctx, s, r.Msg, nil)
}

// RevokeSession needs the session's proof, or an operator.
func (s *service) RevokeSession(ctx context.Context, r *connect.Request[quarrypb.RevokeSessionRequest]) (*connect.Response[quarrypb.RevokeSessionResponse], error) {
	if c := rights.From(ctx); r.Msg.Session != 0 && !c.Is(identity.Operator) {
		return nil, denied("%s ends sessions by their serial alone; by id, operators do", c.Name)
	}
	return do[quarrypb.RevokeSessionResponse](ctx, s, r.Msg, nil)
}

// Pass needs the proof of the session that asks.
func (s *service) Pass(ctx context.Context, r *connect.Request[quarrypb.PassRequest]) (*connect.Response[quarrypb.PassResponse], error) {
	return do[quarrypb.PassResponse](ctx, s, r.Msg, nil)
}

// CertifyFence needs the proof of the session that asks.
func (s *service) CertifyFence(ctx context.Context, r *connect.Request[quarrypb.CertifyFenceRequest]) (*connect.Response[quarrypb.CertifyFenceResponse], error) {
	return do[quarrypb.CertifyFenceResponse](ctx, s, r.Msg, nil)
}

// ListSessions answers the sessions of the tenants that the caller is shown.
func (s *service) ListSessions(ctx context.Context, r *connect.Request[quarrypb.ListSessionsRequest]) (*connect.Response[quarrypb.ListSessionsResponse], error) {
	res, err := do[quarrypb.ListSessionsResponse](ctx, s, r.Msg, nil)
	if err == nil {
		err = s.c.ownSessions(ctx, r.Header(), res.Msg)
	}
	if err != nil {
		return nil, err
	}
	return res, nil
}

// ReadTable answers the rows that the caller is shown.
func (s *service) ReadTable(ctx context.Context, r *connect.Request[quarrypb.ReadTableRequest]) (*connect.Response[quarrypb.Table], error) {
	seen, err := s.c.sees(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	res, err := do[quarrypb.Table](ctx, s, r.Msg, nil)
	if err == nil {
		res = connect.NewResponse(seen.table(res.Msg))
	}
	return res, err
}

// CreateRegion makes regions in the tenant of the call; the caller needs the right to write
// there.
func (s *service) CreateRegion(ctx context.Context, r *connect.Request[quarrypb.CreateRegionRequest]) (*connect.Response[quarrypb.CreateRegionResponse], error) {
	in, err := s.c.acting(ctx, r.Header())
	switch space := r.Msg.Space; {
	case err != nil:
		return nil, err
	case space == nil && !in.some(mayWrite):
		return nil, in.lacks(mayWrite, "a region")
	case space != nil && !r.Msg.Grow:
		err = in.check(mayCreate, space.Name)
	case space != nil:
		err = in.check(mayWrite, space.Name)
	}
	if err != nil {
		return nil, err
	}
	r.Msg.Tenant = in.id
	random := make([]byte, 16*max(1, min(int(r.Msg.Count), state.MaxCount)))
	rand.Read(random)
	return do[quarrypb.CreateRegionResponse](ctx, s, r.Msg, random)
}

// DeleteSpace removes a space. The caller needs the right to delete the space's name.
func (s *service) DeleteSpace(ctx context.Context, r *connect.Request[quarrypb.DeleteSpaceRequest]) (*connect.Response[quarrypb.DeleteSpaceResponse], error) {
	in, err := s.c.acting(ctx, r.Header())
	if err == nil {
		err = in.check(mayDelete, r.Msg.Name)
	}
	if err != nil {
		return nil, err
	}
	r.Msg.Tenant = in.id
	return do[quarrypb.DeleteSpaceResponse](ctx, s, r.Msg, nil)
}

// RegisterNode is for nodes under their own name; the answer adds the addresses of the pulse.
func (s *service) RegisterNode(ctx context.Context, r *connect.Request[quarrypb.RegisterNodeRequest]) (*connect.Response[quarrypb.RegisterNodeResponse], error) {
	caller := rights.From(ctx)
	if err := s.c.mayRegister(caller, r.Msg.Node); err != nil {
		return nil, err
	}
	res, err := do[quarrypb.RegisterNodeResponse](ctx, s, r.Msg, nil)
	if err == nil {
		res.Msg.Pulse = s.c.pulses()
		s.c.owners.Store(res.Msg.Id, r.Msg.Node.Name)
	}
	return res, err
}

// NodeHeartbeat is for the node itself. A node whose pulse is heard may send it rarely.
func (s *service) NodeHeartbeat(ctx context.Context, r *connect.Request[quarrypb.NodeHeartbeatRequest]) (*connect.Response[quarrypb.NodeHeartbeatResponse], error) {
	if err := s.c.maySpeak(rights.From(ctx), r.Msg.Id); err != nil {
		return nil, err
	}
	var msg any = r.Msg
	if s.c.pulsed(r.Msg.Incarnation) {
		msg = state.Pulsed{NodeHeartbeatRequest: r.Msg}
	}
	res, err := do[quarrypb.NodeHeartbeatResponse](ctx, s, msg, nil)
	if err == nil && !res.Msg.Unknown {
		heartbeatOf(ctx, r.Msg.Id, r.Msg.Incarnation)
		res.Msg.Pulse = s.c.pulses()
	}
	return res, err
}

// AddNode and the following calls are for operators; internal/rights has the table.
func (s *service) AddNode(ctx context.Context, r *connect.Request[quarrypb.AddNodeRequest]) (*connect.Response[quarrypb.Node], error) {
	return do[quarrypb.Node](ctx, s, r.Msg, nil)
}

func (s *service) DrainNode(ctx context.Context, r *connect.Request[quarrypb.DrainNodeRequest]) (*connect.Response[quarrypb.DrainNodeResponse], error) {
	return do[quarrypb.DrainNodeResponse](ctx, s, r.Msg, nil)
}

func (s *service) RemoveNode(ctx context.Context, r *connect.Request[quarrypb.RemoveNodeRequest]) (*connect.Response[quarrypb.Node], error) {
	return do[quarrypb.Node](ctx, s, r.Msg, nil)
}

func (s *service) SetDefaults(ctx context.Context, r *connect.Request[quarrypb.SetDefaultsRequest]) (*connect.Response[quarrypb.SetDefaultsResponse], error) {
	return do[quarrypb.SetDefaultsResponse](ctx, s, r.Msg, nil)
}

// RotateKey adds the random seed of the new key, because the machine draws no random numbers.
func (s *service) RotateKey(ctx context.Context, r *connect.Request[quarrypb.RotateKeyRequest]) (*connect.Response[quarrypb.KeysResponse], error) {
	random := make([]byte, keyring.SeedBytes)
	rand.Read(random)
	return do[quarrypb.KeysResponse](ctx, s, r.Msg, random)
}

func (s *service) ListKeys(ctx context.Context, r *connect.Request[quarrypb.ListKeysRequest]) (*connect.Response[quarrypb.KeysResponse], error) {
	return do[quarrypb.KeysResponse](ctx, s, r.Msg, nil)
}

func (s *service) ForgetNode(ctx context.Context, r *connect.Request[quarrypb.ForgetNodeRequest]) (*connect.Response[quarrypb.ForgetNodeResponse], error) {
	return do[quarrypb.ForgetNodeResponse](ctx, s, r.Msg, nil)
}

func (s *service) RemoveRegion(ctx context.Context, r *connect.Request[quarrypb.RemoveRegionRequest]) (*connect.Response[quarrypb.RemoveRegionResponse], error) {
	return do[quarrypb.RemoveRegionResponse](ctx, s, r.Msg, nil)
}

func (s *service) MoveRegion(ctx context.Context, r *connect.Request[quarrypb.MoveRegionRequest]) (*connect.Response[quarrypb.Region], error) {
	return do[quarrypb.Region](ctx, s, r.Msg, nil)
}

func (s *service) Rebalance(ctx context.Context, r *connect.Request[quarrypb.RebalanceRequest]) (*connect.Response[quarrypb.RebalanceResponse], error) {
	return do[quarrypb.RebalanceResponse](ctx, s, r.Msg, nil)
}

// Status answers what the caller is shown, and adds what the pulse shows of all processes.
func (s *service) Status(ctx context.Context, r *connect.Request[quarrypb.StatusRequest]) (*connect.Response[quarrypb.StatusResponse], error) {
	seen, err := s.c.sees(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	res, err := do[quarrypb.StatusResponse](ctx, s, r.Msg, nil)
	if err == nil {
		seen.status(res.Msg)
		res.Msg.Controllers, res.Msg.Insecure = s.c.candidates(ctx), s.c.cfg.Insecure
		if !rights.From(ctx).Is(identity.Operator, identity.Viewer, identity.Controller) {
			res.Msg.Tenants = nil
		}
		names := map[uint32]string{}
		for _, n := range res.Msg.Table.GetNodes() {
			names[n.Id] = n.Name
		}
		res.Msg.Members = s.c.members(names)
	}
	return res, err
}

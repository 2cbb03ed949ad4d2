package controller

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Which controllers there are: where etcd runs inside them, its members. A new member is a
// learner first: it has no vote, so that a controller that never starts costs no quorum.
// The leader makes it a voter when it has copied the log.

const (
	// etcd changes members only while those that it has have been connected for 5 s.
	memberPatience = 8 * time.Second
	memberRetry    = 300 * time.Millisecond
)

// errNotEmbedded is the answer to a change of members where the operator runs etcd.
var errNotEmbedded = connect.NewError(connect.CodeFailedPrecondition, errors.New("the controllers use an etcd of yours: change its members with etcdctl member; controllers themselves join by starting"))

// ListControllers lists the controllers and the members of their etcd, with the size of etcd.
func (s *service) ListControllers(ctx context.Context, _ *connect.Request[quarrypb.ListControllersRequest]) (*connect.Response[quarrypb.ListControllersResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	out := &quarrypb.ListControllersResponse{Embedded: s.c.cfg.Embedded}
	if size := s.c.upkeep.size.Load(); size != nil {
		out.EtcdFileBytes, out.EtcdUsedBytes, out.EtcdQuotaBytes = size.FileBytes, size.UsedBytes, size.QuotaBytes
	}
	stand := s.c.candidacies(ctx)
	if !s.c.cfg.Embedded {
		for i, k := range stand {
			out.Members = append(out.Members, &quarrypb.ControllerMember{Name: k.Name, Url: k.URL, Leader: i == 0})
		}
		return connect.NewResponse(out), nil
	}
	res, err := s.c.cfg.Etcd.MemberList(ctx)
	if err != nil {
		return nil, etcdError(err)
	}
	st, err := s.c.cfg.Etcd.Status(ctx, s.c.endpoints()[0])
	if err != nil {
		return nil, etcdError(err)
	}
	for _, m := range res.Members {
		e := &quarrypb.ControllerMember{Id: m.ID, Name: m.Name, PeerUrls: m.PeerURLs, Learner: m.IsLearner, EtcdLeader: m.ID == st.Leader}
		if i := slices.IndexFunc(stand, func(k candidacy) bool { return k.Name == m.Name || len(res.Members) == 1 }); i >= 0 {
			e.Url, e.Leader = stand[i].URL, i == 0
			if len(res.Members) == 1 {
				e.Name = stand[i].Name // one member has a name of etcd's choice
			}
		}
		out.Members = append(out.Members, e)
	}
	slices.SortFunc(out.Members, func(a, b *quarrypb.ControllerMember) int { return strings.Compare(a.Name, b.Name) })
	return connect.NewResponse(out), nil
}

// checkController checks a new controller's name and the URL of its etcd.
func checkController(name, peer string) error {
	if name == "" || len(name) > state.MaxNameBytes || strings.ContainsAny(name, "=, \n") {
		return invalid("controller %q: want a name of 1 to %d bytes without spaces, commas and equal signs", name, state.MaxNameBytes)
	}
	u, err := url.Parse(peer)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() == "" || strings.Trim(u.Path, "/") != "" {
		return invalid("controller %s: --etcd-peer %q: want a URL such as https://10.0.0.4:7424", name, peer)
	}
	return nil
}

// AddController adds a member to the embedded etcd, as a learner, and answers with the value of
// --initial-cluster for it. replaces removes that member first: an etcd of two voters of which
// one is gone could not commit the addition. A request that is repeated gets the same answer.
func (s *service) AddController(ctx context.Context, r *connect.Request[quarrypb.AddControllerRequest]) (*connect.Response[quarrypb.AddControllerResponse], error) {
	name, peer, replaces := r.Msg.Name, strings.TrimSuffix(r.Msg.PeerUrl, "/"), r.Msg.Replaces
	members, err := s.changeableMembers(ctx)
	if err != nil {
		return nil, err
	}
	old := findMember(members, replaces)
	if old != nil && peer == "" && len(old.PeerURLs) > 0 {
		peer = old.PeerURLs[0]
	}
	if replaces != "" && old == nil && peer == "" {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no controller %q to replace; quarry controller list shows them. If it was removed already, give the successor's --etcd-peer", replaces))
	}
	if err := checkController(name, peer); err != nil {
		return nil, err
	}
	if added, err := alreadyAdded(members, old, name, peer); err != nil {
		return nil, err
	} else if added {
		return connect.NewResponse(&quarrypb.AddControllerResponse{InitialCluster: initialCluster(members, name, peer)}), nil
	}
	if old == nil && replaces != "" {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no controller %q to replace; quarry controller list shows them", replaces))
	}
	if old != nil {
		if err := s.removeMember(ctx, members, old); err != nil {
			return nil, err
		}
	}
	err = patiently(ctx, func(ctx context.Context) error {
		res, err := s.c.cfg.Etcd.MemberAddAsLearner(ctx, []string{peer})
		if err == nil {
			members = res.Members
		}
		return err
	})
	switch {
	case errors.Is(err, rpctypes.ErrTooManyLearners):
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("another controller that was added has not copied the log yet: start it, or remove it (quarry controller list)"))
	case err != nil:
		return nil, memberError("add controller "+name, err)
	}
	s.c.cfg.Logger.Info("controller: a controller was added", "name", name, "peer", peer, "replaces", replaces)
	return connect.NewResponse(&quarrypb.AddControllerResponse{InitialCluster: initialCluster(members, name, peer)}), nil
}

// alreadyAdded says whether an earlier AddController has added this controller, which has not started
// yet: it gets the same answer again. The error: another member than old has the name or the URL.
func alreadyAdded(members []*etcdserverpb.Member, old *etcdserverpb.Member, name, peer string) (bool, error) {
	for _, m := range members {
		switch {
		case m == old:
		case m.Name == "" && slices.Contains(m.PeerURLs, peer):
			return true, nil
		case m.Name == name || slices.Contains(m.PeerURLs, peer):
			return false, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("controller %s at %s is a member. If its disk is lost: quarry controller replace %s", m.Name, strings.Join(m.PeerURLs, ","), m.Name))
		}
	}
	return false, nil
}

// RemoveController removes a member of the embedded etcd. The last voter stays.
func (s *service) RemoveController(ctx context.Context, r *connect.Request[quarrypb.RemoveControllerRequest]) (*connect.Response[quarrypb.RemoveControllerResponse], error) {
	members, err := s.changeableMembers(ctx)
	if err != nil {
		return nil, err
	}
	m := findMember(members, r.Msg.Name)
	if m == nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no controller %q; quarry controller list shows them", r.Msg.Name))
	}
	if err := s.removeMember(ctx, members, m); err != nil {
		return nil, err
	}
	return connect.NewResponse(&quarrypb.RemoveControllerResponse{}), nil
}

// changeableMembers are the members of an etcd that this leader may change.
func (s *service) changeableMembers(ctx context.Context) ([]*etcdserverpb.Member, error) {
	if s.c.term.Load() == nil {
		return nil, s.notLeading()
	}
	if !s.c.cfg.Embedded {
		return nil, errNotEmbedded
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	res, err := s.c.cfg.Etcd.MemberList(ctx)
	if err != nil {
		return nil, etcdError(err)
	}
	for _, m := range res.Members {
		if slices.ContainsFunc(m.PeerURLs, func(u string) bool { return strings.HasPrefix(u, "unix:") }) {
			return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this controller is alone and has no address for others: start it again with --name NAME --etcd-peer URL, then add controllers"))
		}
	}
	return res.Members, nil
}

// findMember finds a member by its name, or by its id where it has none.
func findMember(members []*etcdserverpb.Member, name string) *etcdserverpb.Member {
	if name == "" {
		return nil
	}
	for _, m := range members {
		if m.Name == name || m.Name == "" && strconv.FormatUint(m.ID, 16) == name {
			return m
		}
	}
	return nil
}

// removeMember removes a member from etcd; no error if it is gone already.
func (s *service) removeMember(ctx context.Context, members []*etcdserverpb.Member, m *etcdserverpb.Member) error {
	voters := 0
	for _, o := range members {
		if !o.IsLearner {
			voters++
		}
	}
	if voters == 1 && !m.IsLearner {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("controller %s is the only one: the cluster's tables are in its etcd", m.Name))
	}
	err := patiently(ctx, func(ctx context.Context) error {
		_, err := s.c.cfg.Etcd.MemberRemove(ctx, m.ID)
		return err
	})
	if err != nil && !errors.Is(err, rpctypes.ErrMemberNotFound) {
		return memberError("remove controller "+m.Name, err)
	}
	s.c.cfg.Logger.Info("controller: a controller was removed", "name", m.Name, "id", strconv.FormatUint(m.ID, 16))
	return nil
}

// patiently tries a change of members again while etcd does not consider itself healthy.
func patiently(ctx context.Context, change func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, memberPatience)
	defer cancel()
	for {
		err := change(ctx)
		if !errors.Is(err, rpctypes.ErrUnhealthy) && !errors.Is(err, rpctypes.ErrMemberNotEnoughStarted) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(memberRetry):
		}
	}
}

// memberError explains an error of etcd's membership: not done, or unknown.
func memberError(what string, err error) error {
	if errors.Is(err, rpctypes.ErrUnhealthy) || errors.Is(err, rpctypes.ErrMemberNotEnoughStarted) {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%s: not done: too few of the other controllers are connected (%w); start them, or replace the ones that are lost first", what, err))
	}
	return connect.NewError(connect.CodeUnknown, fmt.Errorf("%s: done or not, look with quarry controller list: etcd: %w", what, err))
}

// initialCluster is what a new controller is started with.
func initialCluster(members []*etcdserverpb.Member, name, peer string) string {
	var parts []string
	for _, m := range members {
		for _, u := range m.PeerURLs {
			switch {
			case u == peer:
				parts = append(parts, name+"="+u)
			case m.Name == "":
				parts = append(parts, fmt.Sprintf("member-%x=%s", m.ID, u))
			default:
				parts = append(parts, m.Name+"="+u)
			}
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

// promoteLearners makes voters of the learners that have copied the log.
func (c *Controller) promoteLearners(ctx context.Context) error {
	res, err := c.cfg.Etcd.MemberList(ctx)
	if err != nil {
		return fmt.Errorf("members of etcd: %w", err)
	}
	for _, m := range res.Members {
		if !m.IsLearner || m.Name == "" {
			continue
		}
		if _, err := c.cfg.Etcd.MemberPromote(ctx, m.ID); err == nil {
			c.cfg.Logger.Info("controller: a controller has copied the log and votes now", "name", m.Name)
		} else if !errors.Is(err, rpctypes.ErrMemberLearnerNotReady) {
			return fmt.Errorf("promote %s: %w", m.Name, err)
		}
	}
	return nil
}

package controller

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	layout "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// The placement library is a key range of etcd: a name is a record, its revision
// is etcd's. Any controller looks names up. A change is one transaction of the
// leader, guarded by the leader's key like every other.

const (
	maxKindBytes  = 32
	maxNotes      = 16
	maxNoteBytes  = 4096
	maxOwnerBytes = 255
	maxListNames  = 1000
)

// nameKey is the key of a name. Names of the tenant "default" lie where all names lay before there were tenants.
func (c *Controller) nameKey(tenant uint32, name string) string {
	if tenant == 0 {
		return c.cfg.Prefix + "names/" + name
	}
	return c.cfg.Prefix + state.NamesOf(tenant) + name
}

// invalid is the error for a request that can never succeed.
func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// checkName refuses what no name can be.
func checkName(name string) error {
	switch {
	case name == "" || len(name) > state.MaxNameBytes:
		return invalid("a name has 1 to %d bytes, not %d", state.MaxNameBytes, len(name))
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return invalid("a name is printable UTF-8")
	}
	return nil
}

// checkEntry refuses an entry beyond the limits.
func checkEntry(n *quarrypb.Name) error {
	if n == nil {
		return invalid("no name given")
	}
	if err := checkName(n.Name); err != nil {
		return err
	}
	notes := 0
	for k, v := range n.Notes {
		notes += len(k) + len(v)
	}
	switch {
	case n.Kind == "" || len(n.Kind) > maxKindBytes:
		return invalid("the kind of name %q has 1 to %d bytes, not %d", n.Name, maxKindBytes, len(n.Kind))
	case len(n.Ref) != layout.RefBytes || !layout.DecodeRef(n.Ref).Valid():
		return invalid("name %q: %x is not a reference", n.Name, n.Ref)
	case len(n.Notes) > maxNotes || notes > maxNoteBytes:
		return invalid("name %q: at most %d notes of at most %d bytes together", n.Name, maxNotes, maxNoteBytes)
	case len(n.Owner) > maxOwnerBytes:
		return invalid("name %q: the owner has at most %d bytes", n.Name, maxOwnerBytes)
	}
	return nil
}

// etcdTimeout bounds a request to an etcd that may have no quorum.
const etcdTimeout = 5 * time.Second

// etcdError is the error where etcd does not answer.
func etcdError(err error) error {
	return connect.NewError(connect.CodeUnavailable, fmt.Errorf("etcd: %w", err))
}

// unknown is the third answer. Its code is not one that clients try again after:
// the second try would find the result of the first one and take it for another client's.
func unknown(name string, err error) error {
	return connect.NewError(connect.CodeUnknown, fmt.Errorf("name %q may have been changed or not, look it up: etcd: %w", name, err))
}

// encodeName is the value of a name's record.
func encodeName(n *quarrypb.Name) (string, error) {
	n = proto.Clone(n).(*quarrypb.Name)
	n.Revision = 0 // etcd's
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(n)
	return string(b), err
}

// decodeName reads a name's record; rev is its revision.
func decodeName(value []byte, rev int64) (*quarrypb.Name, error) {
	var n quarrypb.Name
	if err := proto.Unmarshal(value, &n); err != nil {
		return nil, connect.NewError(connect.CodeDataLoss, fmt.Errorf("a name's record is damaged: %w", err))
	}
	n.Revision = uint64(rev)
	return &n, nil
}

// admitName applies the limits that hold for every change but a deletion.
func (s *service) admitName(peer connect.Peer, bytes int) error {
	if err := s.c.roomForNames(bytes); err != nil {
		return err
	}
	return s.c.nameRates.allow(peer.Addr, bytes+recordOverhead, s.c.cfg.Names.BytesPerSecond)
}

// changeName carries out one change of a name if this controller leads and all cmps hold.
// Otherwise the first response of the transaction has the name's record.
func (s *service) changeName(ctx context.Context, tenant uint32, name string, op clientv3.Op, cmps ...clientv3.Cmp) (*clientv3.TxnResponse, error) {
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	res, err := s.c.cfg.Etcd.Txn(ctx).If(append(cmps, guard(t.key, t.rev))...).Then(op).
		Else(clientv3.OpGet(s.c.nameKey(tenant, name)), clientv3.OpGet(t.key, clientv3.WithKeysOnly())).Commit()
	if err != nil {
		return nil, unknown(name, err)
	}
	if !res.Succeeded {
		if kvs := res.Responses[1].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != t.rev {
			return nil, s.notLeading()
		}
		return res, nil
	}
	t.pushes.acknowledge(tenant, res.Header.Revision)
	return res, nil
}

// CreateName makes a name that does not exist. With a serial it does so only while that session
// is live: see slab.Survey for the reason. Linearizes at: the transaction of etcd.
func (s *service) CreateName(ctx context.Context, r *connect.Request[quarrypb.CreateNameRequest]) (*connect.Response[quarrypb.Name], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	n := r.Msg.Name
	if err := checkEntry(n); err != nil {
		return nil, err
	}
	tenant, err := s.c.tenantFor(ctx, r.Header(), mayCreate, n.Name)
	if err != nil {
		return nil, err
	}
	n.CreatedUnixS = time.Now().Unix() // for people; nothing is decided by it
	value, err := encodeName(n)
	if err != nil {
		return nil, invalid("name %q: %v", n.Name, err)
	}
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	key := s.c.nameKey(tenant, n.Name)
	cmps := append(s.c.whileTenant(tenant), clientv3.Compare(clientv3.ModRevision(key), "=", 0))
	if r.Msg.Serial != 0 {
		cmp, err := s.whileLive(ctx, t, tenant, r.Msg.Serial, r.Msg.Proof)
		if err != nil {
			return nil, err
		}
		cmps = append(cmps, cmp)
	}
	if err := s.admitName(r.Peer(), len(value)); err != nil {
		return nil, err
	}
	if err := t.names.reserve(ctx, s.c, 1); err != nil {
		return nil, err
	}
	res, err := s.changeName(ctx, tenant, n.Name, clientv3.OpPut(key, value), cmps...)
	switch {
	case err != nil:
		t.names.lost()
		return nil, err
	case !res.Succeeded && len(res.Responses[0].GetResponseRange().Kvs) == 0:
		t.names.gone(1)
		return nil, nothingMade(tenant, r.Msg.Serial)
	case !res.Succeeded:
		t.names.gone(1)
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("name %q exists", n.Name))
	}
	n.Revision = uint64(res.Header.Revision)
	return connect.NewResponse(n), nil
}

// whileLive makes a transaction fail unless a session is live then, and refuses a caller that
// does not show the session's proof, and a session of another tenant. A session's record changes when it is
// live no longer, and not before.
func (s *service) whileLive(ctx context.Context, t *term, tenant uint32, serial uint64, proof []byte) (clientv3.Cmp, error) {
	if err := t.keys.Load().Holds(serial, proof); err != nil {
		return clientv3.Cmp{}, s.coded(err)
	}
	key := s.c.cfg.Prefix + state.SessionKey(serial)
	res, err := s.c.cfg.Etcd.Get(ctx, key)
	if err != nil {
		return clientv3.Cmp{}, etcdError(err)
	}
	var rec quarrypb.Session
	if len(res.Kvs) > 0 {
		if err := proto.Unmarshal(res.Kvs[0].Value, &rec); err != nil {
			return clientv3.Cmp{}, connect.NewError(connect.CodeDataLoss, fmt.Errorf("a session's record is damaged: %w", err))
		}
	}
	if !state.IsLive(&rec) {
		return clientv3.Cmp{}, sessionEnded(serial)
	}
	if rec.Tenant != tenant {
		return clientv3.Cmp{}, denied("the session with serial %d is of another tenant than the name: make the name in the session's tenant (--tenant)", serial)
	}
	return clientv3.Compare(clientv3.ModRevision(key), "=", res.Kvs[0].ModRevision), nil
}

// nothingMade is the error when a transaction has not made a name although the name does not
// exist: the tenant has been deleted, or the session has ended.
func nothingMade(tenant uint32, serial uint64) error {
	if serial == 0 {
		return tenantGone(tenant)
	}
	return sessionEnded(serial)
}

// sessionEnded is the error for a name that is created under a session that is over.
func sessionEnded(serial uint64) error {
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("the session with serial %d has ended", serial))
}

// LookupName reads a name. Any controller answers it.
func (s *service) LookupName(ctx context.Context, r *connect.Request[quarrypb.LookupNameRequest]) (*connect.Response[quarrypb.Name], error) {
	tenant, err := s.c.tenantFor(ctx, r.Header(), mayRead, r.Msg.Name)
	if err != nil {
		return nil, err
	}
	n, err := s.lookup(ctx, tenant, r.Msg.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(n), nil
}

// lookup reads a name from etcd, with quorum.
func (s *service) lookup(ctx context.Context, tenant uint32, name string) (*quarrypb.Name, error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	if err := checkName(name); err != nil {
		return nil, err
	}
	res, err := s.c.cfg.Etcd.Get(ctx, s.c.nameKey(tenant, name))
	switch {
	case err != nil:
		return nil, etcdError(err)
	case len(res.Kvs) == 0:
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no name %q", name))
	}
	return decodeName(res.Kvs[0].Value, res.Kvs[0].ModRevision)
}

// SwapName changes a name that is still at a revision. Linearizes at: the transaction of etcd.
func (s *service) SwapName(ctx context.Context, r *connect.Request[quarrypb.SwapNameRequest]) (*connect.Response[quarrypb.Name], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	n := r.Msg.Name
	if err := checkEntry(n); err != nil {
		return nil, err
	}
	tenant, err := s.c.tenantFor(ctx, r.Header(), mayWrite, n.Name)
	if err != nil {
		return nil, err
	}
	now, err := s.lookup(ctx, tenant, n.Name)
	if err != nil {
		return nil, err
	}
	n.CreatedUnixS = now.CreatedUnixS
	value, err := encodeName(n)
	if err != nil {
		return nil, invalid("name %q: %v", n.Name, err)
	}
	if err := s.admitName(r.Peer(), len(value)); err != nil {
		return nil, err
	}
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	key := s.c.nameKey(tenant, n.Name)
	cmps := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", int64(r.Msg.Revision))}
	if r.Msg.Serial != 0 {
		cmp, err := s.whileLive(ctx, t, tenant, r.Msg.Serial, r.Msg.Proof)
		if err != nil {
			return nil, err
		}
		cmps = append(cmps, cmp)
	}
	res, err := s.changeName(ctx, tenant, n.Name, clientv3.OpPut(key, value), cmps...)
	if err != nil {
		return nil, err
	}
	if !res.Succeeded {
		if kvs := res.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 && uint64(kvs[0].ModRevision) == r.Msg.Revision {
			return nil, sessionEnded(r.Msg.Serial)
		}
		return nil, connect.NewError(connect.CodeAborted, fmt.Errorf("name %q is at revision %d, not %d", n.Name, now.Revision, r.Msg.Revision))
	}
	n.Revision = uint64(res.Header.Revision)
	return connect.NewResponse(n), nil
}

// DeleteName deletes a name, at a revision if one is given.
func (s *service) DeleteName(ctx context.Context, r *connect.Request[quarrypb.DeleteNameRequest]) (*connect.Response[quarrypb.DeleteNameResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	name := r.Msg.Name
	if err := checkName(name); err != nil {
		return nil, err
	}
	tenant, err := s.c.tenantFor(ctx, r.Header(), mayDelete, name)
	if err != nil {
		return nil, err
	}
	key := s.c.nameKey(tenant, name)
	cmp := clientv3.Compare(clientv3.ModRevision(key), ">", 0)
	if r.Msg.Revision != 0 {
		cmp = clientv3.Compare(clientv3.ModRevision(key), "=", int64(r.Msg.Revision))
	}
	res, err := s.changeName(ctx, tenant, name, clientv3.OpDelete(key), cmp)
	switch {
	case err != nil:
		return nil, err
	case res.Succeeded:
		if t := s.c.term.Load(); t != nil {
			t.names.gone(1)
		}
		return connect.NewResponse(&quarrypb.DeleteNameResponse{}), nil
	case len(res.Responses[0].GetResponseRange().Kvs) == 0:
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no name %q", name))
	}
	return nil, connect.NewError(connect.CodeAborted, fmt.Errorf("name %q is not at revision %d", name, r.Msg.Revision))
}

// ListNames lists names in their order; the caller continues behind the last one.
func (s *service) ListNames(ctx context.Context, r *connect.Request[quarrypb.ListNamesRequest]) (*connect.Response[quarrypb.ListNamesResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	limit := int(r.Msg.Limit)
	if limit == 0 || limit > maxListNames {
		limit = maxListNames
	}
	if len(r.Msg.Prefix) > state.MaxNameBytes || len(r.Msg.After) > state.MaxNameBytes {
		return nil, invalid("a prefix has at most %d bytes", state.MaxNameBytes)
	}
	in, err := s.c.acting(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	from, end := s.c.nameKey(in.id, r.Msg.Prefix), clientv3.GetPrefixRangeEnd(s.c.nameKey(in.id, r.Msg.Prefix))
	if after := s.c.nameKey(in.id, r.Msg.After) + "\x00"; r.Msg.After != "" && after > from {
		from = after
	}
	out := &quarrypb.ListNamesResponse{}
	for {
		if from >= end {
			return connect.NewResponse(out), nil
		}
		res, err := s.c.cfg.Etcd.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(int64(limit+1)), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
		if err != nil {
			return nil, etcdError(err)
		}
		for _, kv := range res.Kvs {
			n, err := decodeName(kv.Value, kv.ModRevision)
			if err != nil {
				return nil, err
			}
			from = string(kv.Key) + "\x00"
			if r.Msg.Kind != "" && n.Kind != r.Msg.Kind || !in.may(mayRead, n.Name) {
				continue
			}
			if len(out.Names) == limit {
				out.More = true
				return connect.NewResponse(out), nil
			}
			out.Names = append(out.Names, n)
		}
		if !res.More {
			return connect.NewResponse(out), nil
		}
	}
}

// candidates are the controllers that lead or stand by.
func (c *Controller) candidates(ctx context.Context) (out []*quarrypb.ControllerInfo) {
	for i, k := range c.candidacies(ctx) {
		out = append(out, &quarrypb.ControllerInfo{Name: k.Name, Url: k.URL, Leader: i == 0})
	}
	return out
}

// candidacies are the controllers that lead or stand by, as the election has them, the leader first.
func (c *Controller) candidacies(ctx context.Context) []candidacy {
	out, err := c.candidaciesOf(ctx)
	if err != nil {
		c.cfg.Logger.Debug("controllers not listed", "error", err)
	}
	return out
}

// candidaciesOf reads the candidates of the election, the leader first.
func (c *Controller) candidaciesOf(ctx context.Context, opts ...clientv3.OpOption) (out []candidacy, err error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	opts = append(opts, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	res, err := c.cfg.Etcd.Get(ctx, c.electionPrefix()+"/", opts...)
	if err != nil {
		return nil, err
	}
	for _, kv := range res.Kvs {
		out = append(out, decodeCandidacy(kv.Value))
	}
	return out, nil
}

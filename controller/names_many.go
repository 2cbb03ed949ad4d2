package controller

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// maxNamesOnce bounds the names of one request: a transaction of etcd takes 128 operations.
const maxNamesOnce = 100

// checkMany refuses too many names, and one that is named twice.
func checkMany(n int, name func(i int) string) error {
	if n > maxNamesOnce {
		return invalid("%d names at once, at most %d", n, maxNamesOnce)
	}
	seen := map[string]bool{}
	for i := range n {
		if seen[name(i)] {
			return invalid("name %q is named twice", name(i))
		}
		seen[name(i)] = true
	}
	return nil
}

// LookupNames reads several names at one revision of etcd.
func (s *service) LookupNames(ctx context.Context, r *connect.Request[quarrypb.LookupNamesRequest]) (*connect.Response[quarrypb.LookupNamesResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	names := r.Msg.Names
	if err := checkMany(len(names), func(i int) string { return names[i] }); err != nil {
		return nil, err
	}
	in, err := s.c.acting(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	var gets []clientv3.Op
	for _, n := range names {
		if err := checkName(n); err != nil {
			return nil, err
		}
		if err := in.check(mayRead, n); err != nil {
			return nil, err
		}
		gets = append(gets, clientv3.OpGet(s.c.nameKey(in.id, n)))
	}
	out := &quarrypb.LookupNamesResponse{}
	if len(gets) == 0 {
		return connect.NewResponse(out), nil
	}
	res, err := s.c.cfg.Etcd.Txn(ctx).Then(gets...).Commit()
	if err != nil {
		return nil, etcdError(err)
	}
	for _, r := range res.Responses {
		for _, kv := range r.GetResponseRange().Kvs {
			n, err := decodeName(kv.Value, kv.ModRevision)
			if err != nil {
				return nil, err
			}
			out.Names = append(out.Names, n)
		}
	}
	return connect.NewResponse(out), nil
}

// CreateNames makes all of the names or none.
func (s *service) CreateNames(ctx context.Context, r *connect.Request[quarrypb.CreateNamesRequest]) (*connect.Response[quarrypb.CreateNamesResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	names := r.Msg.Names
	if err := checkMany(len(names), func(i int) string { return names[i].GetName() }); err != nil {
		return nil, err
	}
	in, err := s.c.acting(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	cmps := append(s.c.whileTenant(in.id), guard(t.key, t.rev))
	if r.Msg.Serial != 0 {
		cmp, err := s.whileLive(ctx, t, in.id, r.Msg.Serial, r.Msg.Proof)
		if err != nil {
			return nil, err
		}
		cmps = append(cmps, cmp)
	}
	var puts, gets []clientv3.Op
	now := time.Now().Unix() // for people; nothing is decided by it
	for _, n := range names {
		if err := checkEntry(n); err != nil {
			return nil, err
		}
		if err := in.check(mayCreate, n.Name); err != nil {
			return nil, err
		}
		n.CreatedUnixS = now
		value, err := encodeName(n)
		if err != nil {
			return nil, invalid("name %q: %v", n.Name, err)
		}
		if err := s.admitName(r.Peer(), len(value)); err != nil {
			return nil, err
		}
		key := s.c.nameKey(in.id, n.Name)
		cmps = append(cmps, clientv3.Compare(clientv3.ModRevision(key), "=", 0))
		puts = append(puts, clientv3.OpPut(key, value))
		gets = append(gets, clientv3.OpGet(key, clientv3.WithKeysOnly()))
	}
	out := &quarrypb.CreateNamesResponse{Names: names}
	if len(names) == 0 {
		return connect.NewResponse(out), nil
	}
	if err := t.names.reserve(ctx, s.c, len(names)); err != nil {
		return nil, err
	}
	res, err := s.c.cfg.Etcd.Txn(ctx).If(cmps...).Then(puts...).Else(append(gets, clientv3.OpGet(t.key, clientv3.WithKeysOnly()))...).Commit()
	if err != nil {
		t.names.lost()
		return nil, unknown(names[0].Name, err)
	}
	if !res.Succeeded {
		t.names.gone(len(names))
		if kvs := res.Responses[len(names)].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != t.rev {
			return nil, s.notLeading()
		}
		for i, n := range names {
			if len(res.Responses[i].GetResponseRange().Kvs) > 0 {
				return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("name %q exists, and none of the %d names was made", n.Name, len(names)))
			}
		}
		return nil, nothingMade(in.id, r.Msg.Serial)
	}
	t.pushes.acknowledge(in.id, res.Header.Revision)
	for _, n := range names {
		n.Revision = uint64(res.Header.Revision)
	}
	return connect.NewResponse(out), nil
}

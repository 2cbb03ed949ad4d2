package controller_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// lossy is an etcd whose leader is lost with a transaction that changes records.
type lossy struct {
	clientv3.KV
	lose atomic.Pointer[func(commit func(), keys []string)] // what becomes of the next one
}

type lossyTxn struct {
	clientv3.Txn
	kv   *lossy
	keys []string // that it changes
}

func (l *lossy) Txn(ctx context.Context) clientv3.Txn { return &lossyTxn{Txn: l.KV.Txn(ctx), kv: l} }

func (x *lossyTxn) If(c ...clientv3.Cmp) clientv3.Txn { x.Txn.If(c...); return x }

func (x *lossyTxn) Then(o ...clientv3.Op) clientv3.Txn {
	for _, op := range o {
		x.keys = append(x.keys, string(op.KeyBytes()))
	}
	x.Txn.Then(o...)
	return x
}

func (x *lossyTxn) Else(o ...clientv3.Op) clientv3.Txn { x.Txn.Else(o...); return x }

func (x *lossyTxn) Commit() (*clientv3.TxnResponse, error) {
	if slices.ContainsFunc(x.keys, func(key string) bool { return strings.HasPrefix(key, "/quarry/session") }) {
		if lose := x.kv.lose.Swap(nil); lose != nil {
			(*lose)(func() { _, _ = x.Txn.Commit() }, x.keys)
			return nil, rpctypes.ErrTimeoutDueToLeaderFail
		}
	}
	return x.Txn.Commit()
}

// TestCommitIsTriedAgain: a transaction whose answer is lost with etcd's leader is tried again,
// and counts as done if the first try did it; the leadership goes on. It ends if another writer
// has changed a record meanwhile.
func TestCommitIsTriedAgain(t *testing.T) {
	srv, etcd := store(t)
	own := etcdClient(t, srv)
	kv := &lossy{KV: own.KV}
	own.KV = kv
	c, rpc := start(t, controller.Config{Etcd: own, GossipListen: controller.NoGossip})
	lead(t, c)
	sessions := func() []string {
		res, err := etcd.Get(t.Context(), "/quarry/session", clientv3.WithPrefix())
		require.NoError(t, err)
		var keys []string
		for _, kv := range res.Kvs {
			keys = append(keys, string(kv.Key))
		}
		return keys
	}
	do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{})
	terms := c.Stats(t.Context()).Terms
	for name, lose := range map[string]func(commit func(), keys []string){
		"not done": func(func(), []string) {},
		"done":     func(commit func(), _ []string) { commit() },
	} {
		before := len(sessions())
		kv.lose.Store(&lose)
		s := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{})
		require.Nil(t, kv.lose.Load(), name)
		require.Len(t, sessions(), before+1, name)
		// Its record has the revision that the machine takes it to have.
		do(t, rpc.CloseSession, &quarrypb.CloseSessionRequest{Serial: s.Ticket.Serial})
	}
	require.Equal(t, terms, c.Stats(t.Context()).Terms)

	overtaken := func(_ func(), keys []string) {
		for _, key := range keys {
			_, err := etcd.Put(t.Context(), key, "of another writer")
			require.NoError(t, err)
		}
	}
	kv.lose.Store(&overtaken)
	_, err := rpc.OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Key: publicKey[:]}))
	require.Error(t, err)
}

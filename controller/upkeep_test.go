package controller_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/etcdembed"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// smallStore is an etcd that is soon full.
func smallStore(t *testing.T, quota int64) *clientv3.Client {
	srv, err := etcdembed.Start(t.Context(), etcdembed.Config{NoSync: true, Log: slog.New(slog.DiscardHandler), QuotaBytes: quota})
	require.NoError(t, err)
	t.Cleanup(srv.Close)
	return etcdClient(t, srv)
}

const smallQuota = 8 << 20

// unlimited rates let a test fill etcd in seconds.
var unlimited = controller.NameLimits{BytesPerSecond: 1 << 30}

// leadsAnew shows that elections can still be won: a second controller takes over.
func leadsAnew(t *testing.T, etcd *clientv3.Client, old *controller.Controller) (*controller.Controller, rpc) {
	t.Helper()
	require.NoError(t, old.Close())
	next, rpc := start(t, controller.Config{Etcd: etcd, Embedded: true, Names: unlimited})
	lead(t, next)
	return next, rpc
}

// trySteady is try, again while a starved leader is not sure for a moment that it leads. A
// call whose answer was lost in that moment may find its own work done.
func trySteady[Q, A any](t *testing.T, c *controller.Controller, call func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), q *Q) (*A, error) {
	for {
		a, err := try(t, call, q)
		if connect.CodeOf(err) != connect.CodeUnavailable {
			return a, err
		}
		lead(t, c)
	}
}

// TestNamesLeaveRoomForElections: names of a client do not fill etcd, whether they are
// many or change often.
func TestNamesLeaveRoomForElections(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: thousands of calls, one after the other")
	}
	t.Run("many", func(t *testing.T) {
		etcd := smallStore(t, smallQuota)
		c, rpc := start(t, controller.Config{Etcd: etcd, Embedded: true, Names: unlimited})
		lead(t, c)
		var err error
		i := 0
		for ; err == nil; i++ {
			n := goodName(fmt.Sprintf("name-%d", i))
			n.Notes = manyNotes(1, 4000)
			_, err = trySteady(t, c, rpc.CreateName, &quarrypb.CreateNameRequest{Name: n})
			if connect.CodeOf(err) == connect.CodeAlreadyExists {
				err = nil
			}
			require.Less(t, i, 5*smallQuota/4000, "nothing is refused")
		}
		require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "control plane")
		c, rpc = leadsAnew(t, etcd, c)
		// The new leader compacts what is in use, unless the file alone was too large: a
		// defragmentation makes room in it, and names are accepted again without a compaction.
		more := goodName("more")
		more.Notes = manyNotes(1, 4000)
		require.Eventually(t, func() bool {
			_, compacted := etcd.Get(t.Context(), "k", clientv3.WithRev(1))
			_, accepted := try(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: more})
			return errors.Is(compacted, rpctypes.ErrCompacted) || accepted == nil || connect.CodeOf(accepted) == connect.CodeAlreadyExists
		}, 2*time.Minute, 50*time.Millisecond, "neither compacted nor accepted")
		deleted := 0
		makesRoom := func(upTo int) { // what was accepted can be deleted, and makes room
			for ; deleted < upTo; deleted++ {
				_, err := trySteady(t, c, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: fmt.Sprintf("name-%d", deleted)})
				require.True(t, err == nil || connect.CodeOf(err) == connect.CodeNotFound, "%v", err)
			}
			require.EventuallyWithT(t, func(t *assert.CollectT) {
				n := goodName(fmt.Sprintf("after-%d", upTo))
				n.Notes = manyNotes(1, 4000)
				_, err := rpc.CreateName(context.Background(), connect.NewRequest(&quarrypb.CreateNameRequest{Name: n}))
				assert.NoError(t, err)
			}, 2*time.Minute, 50*time.Millisecond)
		}
		makesRoom((i - 1) / 10)
		makesRoom(i - 1)
	})
	t.Run("swaps", func(t *testing.T) {
		const quota = 2 * smallQuota // keepRevisions of 4 kB are most of smallQuota
		etcd := smallStore(t, quota)
		c, rpc := start(t, controller.Config{Etcd: etcd, Embedded: true, Names: unlimited})
		lead(t, c)
		n := goodName("name")
		n.Notes = manyNotes(1, 4000)
		rev := do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: n}).Revision
		for done := 0; done < quota+quota/4; {
			res, err := try(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: n, Revision: rev})
			switch connect.CodeOf(err) {
			case connect.CodeResourceExhausted: // for a moment, until the history is compacted
				require.ErrorContains(t, err, "control plane")
				continue
			case connect.CodeUnavailable: // a starved leader is not sure for a moment that it leads
				lead(t, c)
				rev = do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: n.Name}).Revision
				continue
			}
			require.NoError(t, err)
			rev = res.Revision
			done += 4000
		}
		leadsAnew(t, etcd, c)
	})
}

// TestFullEtcdIsRepaired: a controller finds an etcd that refuses to write, and leads soon.
func TestFullEtcdIsRepaired(t *testing.T) {
	etcd := smallStore(t, smallQuota)
	var err error
	for range 5 * smallQuota / 4000 {
		if _, err = etcd.Put(t.Context(), "k", strings.Repeat("x", 4000)); err != nil {
			break
		}
	}
	require.ErrorIs(t, err, rpctypes.ErrNoSpace)
	c, rpc := start(t, controller.Config{Etcd: etcd, Embedded: true})
	lead(t, c)
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("n")})
}

// TestMostNames: the number of names has a limit, which deletions and a new leader keep.
func TestMostNames(t *testing.T) {
	_, etcd := store(t)
	cfg := controller.Config{Etcd: etcd, Names: controller.NameLimits{Most: 3}}
	c, rpc := start(t, cfg)
	lead(t, c)
	for i := range 3 {
		do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName(fmt.Sprint(i))})
	}
	refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("more")}, connect.CodeResourceExhausted, "--max-names")
	do(t, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: "0"})
	refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("1")}, connect.CodeAlreadyExists, `"1"`)
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("more")})
	require.NoError(t, c.Close())
	next, rpc := start(t, cfg)
	lead(t, next)
	refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("again")}, connect.CodeResourceExhausted, "--max-names")
}

// TestNameRate: one client host changes names at a bounded rate, and deletes at any.
func TestNameRate(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Names: controller.NameLimits{BytesPerSecond: 512}})
	lead(t, c)
	var err error
	made := 0
	for ; err == nil; made++ {
		require.Less(t, made, 100, "nothing is refused")
		_, err = try(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName(fmt.Sprint(made))})
	}
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "--name-rate")
	for i := range made - 1 {
		do(t, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: fmt.Sprint(i)})
	}
}

// bounded lists what a controller writes into etcd, and what bounds the number of records. A
// prefix that is not listed here can fill etcd.
var bounded = map[string]string{
	"cluster":       "one",
	"keys":          "one",
	"nodes/":        "nodes that registered: state.MaxNodes",
	"regions/":      "state.MaxRegions",
	"sessions/":     "state.MaxSessions live ones, and ids of 16 bits in all",
	"names/":        "NameLimits.Most, and a part of the quota",
	"tenants/":      "state.MaxTenants, with state.MaxGrants each",
	"tenant-names/": "as names/, together",
	"leader/":       "controllers, each with a lease",
	"deposed/":      "leaderships that were deposed since the last one that won removed them",
	"defragments":   "one, with a lease",
}

// TestEveryRecordIsBounded finds keys whose number nothing bounds.
func TestEveryRecordIsBounded(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Embedded: true})
	lead(t, c)
	a := newAgent(t, "n1", "/a/b/c", 1)
	a.join(rpc)
	do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Name: "s"})
	do(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("n")})
	res, err := etcd.Get(context.Background(), "", clientv3.WithFromKey(), clientv3.WithKeysOnly())
	require.NoError(t, err)
	require.NotEmpty(t, res.Kvs)
	for _, kv := range res.Kvs {
		key, ok := strings.CutPrefix(string(kv.Key), "/quarry/")
		require.True(t, ok, "key %q outside the prefix", kv.Key)
		found := false
		for p := range bounded {
			found = found || strings.HasPrefix(key, p)
		}
		require.True(t, found, "nothing bounds the number of keys like %q: say here what does", key)
	}
}

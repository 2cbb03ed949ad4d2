package client_test

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// add adds one to a counter.
func add(old []byte) ([]byte, error) {
	return binary.LittleEndian.AppendUint64(nil, binary.LittleEndian.Uint64(old)+1), nil
}

// TestHelpCountsOnce: many clients change one object by their own verbs and by the node, as they find it, and every change is there
// once.
func TestHelpCountsOnce(t *testing.T) {
	for _, o := range []struct {
		transport string
		replicas  int
		slab      client.SlabKind
	}{
		{client.TransportSHM, 1, client.PairSlab}, {client.TransportSHM, 2, client.PairSlab}, {client.TransportTCP, 1, client.PairSlab},
		{client.TransportTCP, 2, client.PairSlab}, {client.TransportTCP, 1, client.StagedSlab},
	} {
		t.Run(fmt.Sprintf("%s/%d/%v", o.transport, o.replicas, o.slab), func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: o.replicas})
			var clients []*client.Client
			for i := range 6 {
				clients = append(clients, cluster.Connect(client.Config{Transport: o.transport, Replicas: o.replicas, Slab: o.slab, HelpFromNodes: i != 0, Timeout: patience})) // the first goes by verbs alone
			}
			ref, err := clients[0].Alloc(t.Context(), make([]byte, 8), client.AllocOptions{})
			require.NoError(t, err)
			const threads, each = 3, 150
			total := 0
			for round := 0; helped(clients) == 0 || round == 0; round++ {
				require.Less(t, round, 100, "no node has helped")
				countUp(t, clients, ref, threads, each)
				total += len(clients) * threads * each
				b, err := clients[0].Read(t.Context(), ref, nil)
				require.NoError(t, err)
				require.EqualValues(t, total, binary.LittleEndian.Uint64(b), "changes are lost, or were done twice")
			}
			t.Logf("%d of %d changes were executed by the node", helped(clients), total)
			require.Zero(t, clients[0].Stats().Events.Helped)
		})
	}
}

// countUp has threads of each client add to a counter.
func countUp(t *testing.T, clients []*client.Client, ref client.Ref, threads, each int) {
	var wg sync.WaitGroup
	for _, c := range clients {
		for range threads {
			wg.Go(func() {
				for range each {
					if err := c.Update(t.Context(), ref, add); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

func helped(clients []*client.Client) (n uint64) {
	for _, c := range clients {
		n += c.Stats().Events.Helped
	}
	return n
}

// asker asks the nodes of a cluster for objects.
type asker struct {
	t       *testing.T
	cluster *testcluster.Cluster
	c       *client.Client
}

// ask asks a node, again while it prepares for the region.
func (k asker) ask(node string, q msg.ObjectRequest) (a msg.ObjectAnswer) {
	k.t.Helper()
	if q.Wait == 0 {
		q.Wait = time.Second
	}
	if q.Epoch == 0 {
		q.Epoch = epochOf(k.cluster, q.Ref)
	}
	require.Eventually(k.t, func() bool {
		var err error
		a, err = client.AskNode(k.t.Context(), k.c, node, q)
		require.NoError(k.t, err)
		return a.Reason != msg.Elsewhere || string(a.Payload) != "the node prepares for the region"
	}, patience, time.Millisecond)
	return a
}

func epochOf(c *testcluster.Cluster, ref client.Ref) uint64 {
	for _, r := range c.Table().Regions {
		if r.Id == ref.Addr.Region() {
			return r.Epoch
		}
	}
	return 0
}

// primaryName is the node that has the primary of an object.
func primaryName(c *testcluster.Cluster, ref client.Ref) (primary, other string) {
	t := c.Table()
	for _, r := range t.Regions {
		for _, n := range t.Nodes {
			switch {
			case r.Id != ref.Addr.Region():
			case n.Id == r.Replicas[0].Node:
				primary = n.Name
			default:
				other = n.Name
			}
		}
	}
	return primary, other
}

// TestNodeExecutes: what a node does for a client, and what it refuses.
func TestNodeExecutes(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2, Timeout: patience})
	k := asker{t, cluster, c}
	ref, err := c.Alloc(t.Context(), []byte("first"), client.AllocOptions{Tag: 7, Capacity: 100})
	require.NoError(t, err)
	node, backup := primaryName(cluster, ref)

	a := k.ask(node, msg.ObjectRequest{Op: msg.ObjectRead, Ref: ref})
	require.Equal(t, msg.ObjectAnswer{Has: true, Version: 1, Tag: 7, Payload: []byte("first")}, a)
	a = k.ask(node, msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Version: 1, Payload: []byte("second")})
	require.Equal(t, msg.Done, a.Outcome)
	require.EqualValues(t, 2, a.Version)
	b, info, err := c.ReadInfo(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "second", string(b))
	require.EqualValues(t, 7, info.Tag)
	a = k.ask(node, msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Version: 1, Turn: true, Payload: []byte("late")})
	require.NotZero(t, a.Turn)
	a.Turn = 0
	require.Equal(t, msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Conflict, Has: true, Version: 2, Tag: 7, Payload: []byte("second")}, a)
	a = k.ask(node, msg.ObjectRequest{Op: msg.ObjectRelease, Ref: ref})
	require.Equal(t, msg.Done, a.Outcome)

	refused := func(want msg.Reason, node string, q msg.ObjectRequest) {
		t.Helper()
		a := k.ask(node, q)
		require.Equal(t, msg.NotDone, a.Outcome)
		require.Equal(t, want, a.Reason, "%s", a.Payload)
	}
	write := msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Payload: []byte("x")}
	refused(msg.Elsewhere, backup, write)
	late := write
	late.Epoch = epochOf(cluster, ref) + 1
	refused(msg.Elsewhere, node, late)
	refused(msg.TooLarge, node, msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Payload: payload(3000)})
	other := ref
	other.Incarnation = proto.MakeIncarnation(ref.Incarnation.Generation(), 5)
	refused(msg.Freed, node, msg.ObjectRequest{Op: msg.ObjectWrite, Ref: other, Payload: []byte("x")})
	for _, o := range []struct {
		what    string
		payload int
		options client.AllocOptions
		want    msg.Reason
	}{
		{"write-once", 10, client.AllocOptions{WriteOnce: true}, msg.Immutable},
		{"large", 2 << 20, client.AllocOptions{}, msg.Indirect},
	} {
		ref, err := c.Alloc(t.Context(), payload(o.payload), o.options)
		require.NoError(t, err)
		node, _ := primaryName(cluster, ref)
		refused(o.want, node, msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Payload: []byte("x")})
		if o.want == msg.Indirect {
			refused(o.want, node, msg.ObjectRequest{Op: msg.ObjectRead, Ref: ref})
			refused(o.want, node, msg.ObjectRequest{Op: msg.ObjectFree, Ref: ref})
		}
		b, err := c.Read(t.Context(), ref, nil)
		require.NoError(t, err)
		require.Equal(t, payload(o.payload), b, o.what)
	}
	encrypted := cluster.Connect(client.Config{Replicas: 2, Keys: keys{{1}}, HelpFromNodes: true})
	secret, err := encrypted.Alloc(t.Context(), []byte("secret"), client.AllocOptions{})
	require.NoError(t, err)
	node, _ = primaryName(cluster, secret)
	refused(msg.Encrypted, node, msg.ObjectRequest{Op: msg.ObjectRead, Ref: secret})
	refused(msg.Encrypted, node, msg.ObjectRequest{Op: msg.ObjectWrite, Ref: secret, Payload: []byte("x")})

	_, err = cluster.Control().CreateTenant(t.Context(), connect.NewRequest(&quarrypb.CreateTenantRequest{Name: "b"}))
	require.NoError(t, err)
	k.c = cluster.Connect(client.Config{Tenant: "b", Timeout: patience})
	node, _ = primaryName(cluster, ref)
	a = k.ask(node, write)
	require.Equal(t, msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Elsewhere, Payload: []byte("the region belongs to another tenant")}, a)
	k.c = c

	refused(msg.Conflict, node, msg.ObjectRequest{Op: msg.ObjectFree, Ref: ref, Version: 9})
	a = k.ask(node, msg.ObjectRequest{Op: msg.ObjectFree, Ref: ref})
	require.Equal(t, msg.Done, a.Outcome)
	_, err = c.Read(t.Context(), ref, nil)
	require.ErrorIs(t, err, client.ErrFreed)
	refused(msg.Freed, node, msg.ObjectRequest{Op: msg.ObjectFree, Ref: ref})
}

// TestNodeReleases: a node waits for a session that holds an object and lives, and takes the object over from one that is fenced: what
// that one has begun is not done.
func TestNodeReleases(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2, Timeout: patience})
	k := asker{t, cluster, c}
	holder := cluster.Connect(client.Config{Replicas: 2})
	ref, err := c.Alloc(t.Context(), []byte("first"), client.AllocOptions{Capacity: 100})
	require.NoError(t, err)
	node, _ := primaryName(cluster, ref)
	holds, ends := make(chan struct{}), make(chan struct{})
	updated := make(chan error)
	go func() {
		updated <- holder.Update(t.Context(), ref, func([]byte) ([]byte, error) {
			close(holds)
			<-ends
			return []byte("never"), nil
		})
	}()
	<-holds
	release := msg.ObjectRequest{Op: msg.ObjectRelease, Ref: ref, Wait: 20 * time.Millisecond}
	a := k.ask(node, release)
	require.Equal(t, msg.NotDone, a.Outcome)
	require.Equal(t, msg.Busy, a.Reason, "%s", a.Payload)
	require.Zero(t, executed(cluster).Takeovers)
	_, err = cluster.Control().RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: holder.SessionID(), Reason: "test"}))
	require.NoError(t, err)
	release.Wait = time.Second
	require.Eventually(t, func() bool { return k.ask(node, release).Outcome == msg.Done }, patience, time.Millisecond)
	require.NotZero(t, executed(cluster).Takeovers)
	require.NoError(t, c.Write(t.Context(), ref, []byte("second")))
	close(ends)
	require.Error(t, <-updated)
	b, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "second", string(b))
}

// executed sums what the nodes have executed.
func executed(c *testcluster.Cluster) (sum storagenode.Executed) {
	for _, n := range c.Nodes {
		e := n.Stats().Executed
		sum.Done, sum.Unknown, sum.Takeovers = sum.Done+e.Done, sum.Unknown+e.Unknown, sum.Takeovers+e.Takeovers
	}
	return sum
}

// BenchmarkContended: 16 clients change one object, by their own verbs or by the node where they find it held.
func BenchmarkContended(b *testing.B) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for _, change := range []string{"update", "write"} {
			for _, by := range []string{"verbs", "node"} {
				b.Run(transport+"/"+change+"/"+by, func(b *testing.B) { benchContended(b, transport, change, by == "node") })
			}
		}
	}
}

func benchContended(b *testing.B, transport, change string, help bool) {
	cluster := testcluster.New(b, testcluster.Options{})
	var clients []*client.Client
	for range 16 {
		clients = append(clients, cluster.Connect(client.Config{Transport: transport, Lanes: 1, HelpFromNodes: help}))
	}
	ref, err := clients[0].Alloc(b.Context(), make([]byte, 8), client.AllocOptions{})
	require.NoError(b, err)
	payload := make([]byte, 8)
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	b.ResetTimer()
	for _, c := range clients {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				err := error(nil)
				if change == "write" {
					err = c.Write(b.Context(), ref, payload)
				} else {
					err = c.Update(b.Context(), ref, add)
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(helped(clients))/float64(b.N), "helped/op")
	refused, waited := uint64(0), uint64(0)
	for _, c := range clients {
		refused += c.Stats().Events.HelpRefused
		waited += c.Stats().Events.WaitedNS
	}
	b.ReportMetric(float64(refused)/float64(b.N), "refused/op")
	b.Log(cluster.Nodes[0].Stats().Executed)
}

// TestHelpLeavesLargeObjects: clients that ask nodes change a large object by their own verbs, and wait for each other as others do.
func TestHelpLeavesLargeObjects(t *testing.T) {
	for _, change := range []string{"update", "write"} {
		t.Run(change, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{})
			var clients []*client.Client
			for range 4 {
				clients = append(clients, cluster.Connect(client.Config{Transport: client.TransportTCP, HelpFromNodes: true, Timeout: patience}))
			}
			ref, err := clients[0].Alloc(t.Context(), make([]byte, 2<<20), client.AllocOptions{})
			require.NoError(t, err)
			var wg sync.WaitGroup
			for i, c := range clients {
				wg.Go(func() {
					for range 8 {
						err := error(nil)
						if change == "write" {
							err = c.Write(t.Context(), ref, []byte{byte(i)})
						} else {
							err = c.Update(t.Context(), ref, func(old []byte) ([]byte, error) { return append(old[:0:0], old...), nil })
						}
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			require.Zero(t, helped(clients))
		})
	}
}

// TestNeverDoneWaitsForTheEpoch: while the epoch of a write without an answer lasts the write may still be done; behind it, it never is if the
// object is at the version that the write has named.
func TestNeverDoneWaitsForTheEpoch(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2, Timeout: patience})
	ref, err := c.Alloc(t.Context(), []byte("first"), client.AllocOptions{})
	require.NoError(t, err)
	q := msg.ObjectRequest{Op: msg.ObjectWrite, Ref: ref, Epoch: epochOf(cluster, ref), Version: 1, Payload: []byte("never")}
	type found struct {
		never bool
		err   error
	}
	done := make(chan found)
	go func() {
		never, err := client.NeverDone(t.Context(), c, q)
		done <- found{never, err}
	}()
	_, backup := primaryName(cluster, ref)
	for i, n := range cluster.Nodes {
		if cluster.NodeConfig(i).Name == backup {
			require.NoError(t, n.Close())
		}
	}
	require.Equal(t, found{never: true}, <-done)
	require.Greater(t, epochOf(cluster, ref), q.Epoch)
	require.NoError(t, c.Write(t.Context(), ref, []byte("second")))
	never, err := client.NeverDone(t.Context(), c, q)
	require.NoError(t, err)
	require.False(t, never, "the version has passed")
}

package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// TestCallsGoOnOverARestart: a node restarts under calls. The survivor opens the
// region again when every call has acknowledged the table that leaves the node;
// calls that wait for that count as having done so.
func TestCallsGoOnOverARestart(t *testing.T) {
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
			c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
			ref, err := c.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
			require.NoError(t, err)
			stop := make(chan struct{})
			last := make([]int, 4)
			var wg sync.WaitGroup
			for g := range last {
				wg.Go(func() {
					for i := 1; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						// Far longer than a restart, so that a call that is in its way fails.
						ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
						err := c.Write(ctx, ref, fmt.Appendf(nil, "%d", i))
						if err == nil || errors.Is(err, client.ErrUnknown) { // others may have written since
							_, err = c.Read(ctx, ref, nil)
						}
						cancel()
						if err != nil {
							t.Errorf("call %d: %v", i, err)
							return
						}
						last[g] = i
					}
				})
			}
			require.NoError(t, cluster.Nodes[1].Close())
			cluster.StartNode(1)
			require.Eventually(t, func() bool {
				for _, r := range client.Table(c).Regions {
					if r.Epoch < 2 || r.State != quarrypb.RegionState_REGION_STATE_OPEN {
						return false
					}
				}
				return true
			}, patience, 10*time.Millisecond, "the region opens again")
			close(stop)
			wg.Wait()
			require.NoError(t, c.Free(t.Context(), ref))
		})
	}
}

// TestLossOfANodeLowersNoPromise: what is written while a region lacks a replica
// goes where as many are wanted, or nowhere.
func TestLossOfANodeLowersNoPromise(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 3})
	c := cluster.Connect(client.Config{Replicas: 2})
	ref, err := c.Alloc(t.Context(), payload(1<<20), client.AllocOptions{Capacity: 2 << 20})
	require.NoError(t, err)
	lost := client.Table(c).Regions[0].Replicas[1].Node
	for _, n := range cluster.Nodes {
		if n.Stats().ID == lost {
			require.NoError(t, n.Close())
		}
	}
	require.Eventually(t, func() bool {
		r := client.Table(c).Regions[0]
		return r.Epoch > 1 && r.State == quarrypb.RegionState_REGION_STATE_OPEN
	}, patience, 10*time.Millisecond)
	want := payload(2 << 20)
	require.NoError(t, c.Write(t.Context(), ref, want))
	got, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
	for _, r := range client.Table(c).Regions {
		require.EqualValues(t, 2, r.WantReplicas, "region %d", r.Id)
	}
}

// moveOn is the client's table with one region in recovery under the next epoch.
func moveOn(c *client.Client, region uint32) *quarrypb.Table {
	next := client.Table(c)
	next.Revision++
	for _, r := range next.Regions {
		if r.Id == region {
			r.Epoch++
			r.State = quarrypb.RegionState_REGION_STATE_RECOVERING
		}
	}
	return next
}

// TestWaitingCallHoldsUpNoTable: docs/DESIGN.md#failover, one epoch per operation. A call holds
// up the acknowledgement of a new table until it waits; from then on no verb of it
// goes to what it had open before, and the reclaim epoch stays its own.
func TestWaitingCallHoldsUpNoTable(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP})
	ctx := t.Context()
	ref, err := c.Alloc(ctx, []byte("as it was"), client.AllocOptions{})
	require.NoError(t, err)
	call, err := client.Hold(ctx, c)
	require.NoError(t, err)
	defer call.Release()
	reg, err := call.Region(ref.Addr.Region())
	require.NoError(t, err)
	read := func() (*rdma.Round, error) {
		r := &rdma.Round{}
		r.Chain(reg.P()).Read(0, make([]byte, 64))
		call.Do(r)
		return r, r.At(0).Err
	}
	_, err = read()
	require.NoError(t, err)
	before, reclaim := client.Acknowledged(c)

	next := moveOn(c, reg.ID)
	next.ReclaimEpoch++
	require.NoError(t, client.Install(c, next))
	acked, _ := client.Acknowledged(c)
	require.Equal(t, before, acked, "a call under way works by the table that it began with")
	_, err = read()
	require.NoError(t, err)

	require.NoError(t, call.Pause())
	acked, ackedReclaim := client.Acknowledged(c)
	require.Equal(t, next.Revision, acked, "it has waited, and goes on by the new one")
	require.Equal(t, reclaim, ackedReclaim, "headers and references that it has seen must live on")
	r, err := read()
	require.ErrorIs(t, err, rdma.ErrKey, "the node would still serve it; the session must not")
	require.Zero(t, r.At(0).Done)

	// While the region is in recovery, a call that needs it waits and holds up nothing.
	waiting := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := c.Read(ctx, ref, nil)
		waiting <- err
	}()
	again := moveOn(c, reg.ID)
	require.Eventually(t, func() bool {
		if again.Revision > next.Revision+1 {
			acked, _ := client.Acknowledged(c)
			return acked >= next.Revision+1
		}
		again.Revision++
		return client.Install(c, again) == nil && call.Pause() == nil && false
	}, patience, time.Millisecond)
	require.ErrorIs(t, <-waiting, context.DeadlineExceeded)
	lost := moveOn(c, reg.ID) // so that closing the client waits for nothing
	for _, r := range lost.Regions {
		r.State = quarrypb.RegionState_REGION_STATE_LOST
	}
	require.NoError(t, client.Install(c, lost))
	_, err = c.Read(ctx, ref, nil)
	require.ErrorIs(t, err, client.ErrUnreachable)
}

// TestAnotherIncarnationIsNotTakenForThisOne: hazard 32. The node at the address of the
// table answers, but it is not the incarnation that the table means.
func TestAnotherIncarnationIsNotTakenForThisOne(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	was, next := client.Table(c), client.Table(c)
	next.Revision++
	for _, n := range next.Nodes {
		n.Incarnation++
	}
	for _, r := range next.Regions {
		for _, rep := range r.Replicas {
			rep.Incarnation++
		}
	}
	require.NoError(t, client.Install(c, next))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = c.Read(ctx, ref, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	was.Revision = next.Revision + 1
	require.NoError(t, client.Install(c, was))
	_, err = c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
}

// heartbeats lets everything through to a controller and keeps what heartbeats report.
type heartbeats struct {
	mu       sync.Mutex
	count    int
	troubles [][]*quarrypb.NodeTrouble
}

func (h *heartbeats) proxy(t *testing.T, to string) string {
	return proxy(t, to, func(r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/Heartbeat") {
			return
		}
		b, err := io.ReadAll(r.Body)
		m := &quarrypb.HeartbeatRequest{}
		if err == nil && proto.Unmarshal(b, m) == nil {
			h.mu.Lock()
			h.count++
			if len(m.Troubles) > 0 {
				h.troubles = append(h.troubles, m.Troubles)
			}
			h.mu.Unlock()
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
	})
}

// TestHeartbeatsHaveConnectionsOfTheirOwn: a call that meets its deadline closes its connection,
// and controllers take the end of the connection of the last heartbeat for a sign of death.
func TestHeartbeatsHaveConnectionsOfTheirOwn(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	var mu sync.Mutex
	beat, other := map[string]int{}, map[string]int{} // requests by address of the connection
	controller := proxy(t, cluster.Controller.URL(), func(r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if strings.HasSuffix(r.URL.Path, "/Heartbeat") || strings.HasSuffix(r.URL.Path, "/OpenSession") {
			beat[r.RemoteAddr]++
		} else {
			other[r.RemoteAddr]++
		}
	})
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{controller}, Transport: client.TransportTCP})
	require.NoError(t, err)
	defer c.Close()
	sum := func(m map[string]int) (n int) {
		for _, k := range m {
			n += k
		}
		return n
	}
	require.Eventually(t, func() bool {
		err := c.Names().List(t.Context(), "", "", func(client.Name) error { return nil })
		require.NoError(t, err)
		mu.Lock()
		defer mu.Unlock()
		return sum(beat) > 2 && sum(other) > 2
	}, 3*time.Minute, 5*time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	for address := range beat {
		require.Zero(t, other[address], "a heartbeat and a call share the connection %s", address)
	}
}

// proxy passes requests on to a controller, each behind look. It returns its own address.
func proxy(t *testing.T, to string, look func(*http.Request)) string {
	u, err := url.Parse(to)
	require.NoError(t, err)
	p := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(u) }, FlushInterval: -1}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		look(r)
		p.ServeHTTP(w, r)
	}))
	t.Cleanup(s.CloseClientConnections)
	t.Cleanup(s.Close)
	return s.URL
}

// connectBy connects by the address of one controller, or of a proxy of it.
func connectBy(t *testing.T, url string) *client.Client {
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{url}, Replicas: 1, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// stall waits until the caller of a request has given up.
func stall(r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // only then is the end of the connection noticed
	<-r.Context().Done()
}

// TestTroubleIsReported: what breaks under calls reaches the controller with the
// next heartbeat, each node once.
func TestTroubleIsReported(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	seen := &heartbeats{}
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{seen.proxy(t, cluster.Controller.URL())},
		Transport: client.TransportTCP, Replicas: 2})
	require.NoError(t, err)
	defer c.Close()
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	require.NoError(t, cluster.Nodes[1].Close())
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_ = c.Write(ctx, ref, []byte("y"))
	require.Eventually(t, func() bool {
		seen.mu.Lock()
		defer seen.mu.Unlock()
		return len(seen.troubles) > 0
	}, patience, time.Millisecond)
	seen.mu.Lock()
	defer seen.mu.Unlock()
	sick := uint32(0)
	for _, n := range client.Table(c).Nodes {
		if n.Name == "node2" {
			sick = n.Id
		}
	}
	for _, rows := range seen.troubles {
		require.Len(t, rows, 1, "one row for a node")
		require.Equal(t, sick, rows[0].Node)
		require.NotZero(t, rows[0].BrokenRounds+rows[0].Timeouts)
	}
}

// TestUnreachableControllersInOneLine: the error names each once, and the cause.
func TestUnreachableControllersInOneLine(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := client.Connect(ctx, client.Config{Controllers: []string{"http://127.0.0.1:1", "http://127.0.0.1:2"}})
	require.ErrorIs(t, err, client.ErrUnreachable)
	require.Equal(t, "open a session: unreachable: no controller answers at http://127.0.0.1:1, http://127.0.0.1:2: connect: connection refused", err.Error())
}

package client_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestAFullNodeIsNotATroubledOne: a node that has no room for another session refuses
// it at once with an error that names the limit. Clients do not report trouble of that node:
// the sessions that it serves go on, and the programs of other nodes get in.
func TestAFullNodeIsNotATroubledOne(t *testing.T) {
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: testcluster.NoNodes})
			for i := range 2 {
				cfg := cluster.NodeConfig(i)
				cfg.MaxSessions = 2
				n, err := storagenode.Start(t.Context(), cfg)
				require.NoError(t, err)
				t.Cleanup(func() { n.Close() })
			}
			first := cluster.Connect(client.Config{Transport: transport, Replicas: 2, Lanes: 1})
			ref, err := first.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
			require.NoError(t, err)
			second := cluster.Connect(client.Config{Transport: transport, Lanes: 1})
			_, err = second.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			_ = second.Write(t.Context(), ref, []byte("y"))

			const refusals = 10
			seen := &heartbeats{}
			third, err := client.Connect(t.Context(), client.Config{Controllers: []string{seen.proxy(t, cluster.Controller.URL())}, Transport: transport, Lanes: 1})
			require.NoError(t, err)
			defer third.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // far more than there is to wait for
			defer cancel()
			for range refusals {
				_, err = third.Read(ctx, ref, nil)
				require.ErrorIs(t, err, client.ErrUnreachable)
				require.ErrorIs(t, err, rdma.ErrFull)
				require.False(t, errors.Is(err, context.DeadlineExceeded), "%v", err)
				require.ErrorContains(t, err, "--max-sessions")
			}
			// Heartbeats that would report it go by.
			beats := func() int { seen.mu.Lock(); defer seen.mu.Unlock(); return seen.count }
			before := beats()
			require.Eventually(t, func() bool { return beats() >= before+3 }, patience, time.Millisecond)
			seen.mu.Lock()
			// A starved machine may break some other round.
			troubles := uint32(0)
			for _, rows := range seen.troubles {
				for _, row := range rows {
					troubles += row.BrokenRounds + row.Timeouts
				}
			}
			require.Less(t, troubles, uint32(refusals), "a node that is full is well")
			seen.mu.Unlock()
			for i := range 100 {
				require.NoError(t, first.Write(t.Context(), ref, fmt.Append(nil, i)))
			}
			// Room again: the next call gets in.
			require.NoError(t, second.Close())
			require.Eventually(t, func() bool { _, err = third.Read(t.Context(), ref, nil); return err == nil }, patience, 5*time.Millisecond, "%v", err)
		})
	}
}

// TestEndOfAContextRefusesNoOther: the context of a call ends while it asks for a region.
// That is no refusal for the calls of others.
func TestEndOfAContextRefusesNoOther(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	c := connectBy(t, proxy(t, cluster.Controller.URL(), func(r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/CreateRegion") && ctx.Err() == nil {
			cancel()
			stall(r)
		}
	}))
	_, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{})
	require.ErrorIs(t, err, context.Canceled)
	_, err = c.Alloc(t.Context(), []byte("y"), client.AllocOptions{})
	require.NoError(t, err)
}

// TestARegionIsAskedForAgain: a controller that could not make a region, because a node of
// it restarted meanwhile, says that it is to be tried again. The allocation does so.
func TestARegionIsAskedForAgain(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	to, err := url.Parse(cluster.Controller.URL())
	require.NoError(t, err)
	pass := httputil.NewSingleHostReverseProxy(to)
	pass.FlushInterval = -1
	var asked atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/CreateRegion") && asked.Add(1) <= 2 {
			_ = connect.NewErrorWriter().Write(w, r, connect.NewError(connect.CodeAborted, errors.New("a storage node restarted; try again")))
			return
		}
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(s.CloseClientConnections)
	t.Cleanup(s.Close)
	c := connectBy(t, s.URL)
	_, err = c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 3, asked.Load())
}

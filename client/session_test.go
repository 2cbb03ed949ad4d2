package client_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func admin(cluster *testcluster.Cluster) quarrypbconnect.ControllerClient {
	return quarrypbconnect.NewControllerClient(http.DefaultClient, cluster.Controller.URL())
}

// TestRevokedSessionIsReplaced: a fenced client answers nothing under the old
// session and goes on under a new one; its objects are where they were.
func TestRevokedSessionIsReplaced(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
		ctx := t.Context()
		ref, err := c.Alloc(ctx, []byte("before"), client.AllocOptions{})
		require.NoError(t, err)
		old := c.SessionID()
		_, err = admin(cluster).RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: old, Reason: "test"}))
		require.NoError(t, err)
		// The first call may be the one that learns of the fence: it says not done.
		require.Eventually(t, func() bool { return c.Write(ctx, ref, []byte("after")) == nil }, patience, time.Millisecond)
		require.NotEqual(t, old, c.SessionID())
		b, err := c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.Equal(t, "after", string(b))
		require.NoError(t, c.Free(ctx, ref))
	}
	_, err := admin(cluster).RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: 4242}))
	require.Equal(t, connect.CodeNotFound, connect.CodeOf(err))
}

// TestCloseOfAnEndedSession: the controller ends a session just before its client closes it. All
// was given back, so that is no error.
func TestCloseOfAnEndedSession(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	var c *client.Client
	asked := false
	url := proxy(t, cluster.Controller.URL(), func(r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/CloseSession") {
			asked = true
			_, err := admin(cluster).RevokeSession(r.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: c.SessionID(), Reason: "test"}))
			require.NoError(t, err)
		}
	})
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{url}})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.True(t, asked)
}

// TestNextSessionWaitsForNoFence: a revocation has no answer while a node that must fence
// the session is gone. The next session begins all the same.
func TestNextSessionWaitsForNoFence(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	next, late := make(chan struct{}), atomic.Bool{}
	var opened atomic.Int32
	url := proxy(t, cluster.Controller.URL(), func(r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/OpenSession"):
			if opened.Add(1) == 2 {
				close(next)
			}
		case strings.HasSuffix(r.URL.Path, "/RevokeSession"):
			ctx := r.Context()
			b, _ := io.ReadAll(r.Body) // only then is the end of the connection noticed
			r.Body = io.NopCloser(bytes.NewReader(b))
			select {
			case <-next:
			case <-ctx.Done():
				late.Store(true)
			}
		}
	})
	c := connectBy(t, url)
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	session := c.SessionID()
	client.Suspend(c, 10*time.Second)
	_, err = c.Read(t.Context(), ref, nil)
	if err != nil { // the heartbeats' goroutine may have been first
		require.True(t, errors.Is(err, client.ErrLease) || errors.Is(err, client.ErrFenced), "%v", err)
	}
	b, err := c.Read(t.Context(), ref, nil) // waits for the next session
	require.NoError(t, err)
	require.Equal(t, "x", string(b))
	require.NotEqual(t, session, c.SessionID())
	require.False(t, late.Load(), "the revocation was given up before the next session was asked for")
}

// TestControllerRestart: the data path goes on without a controller until the
// lease ends, answers nothing after that, and goes on when the controller is back.
func TestControllerRestart(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: time.Second})
	c := cluster.Connect(client.Config{Replicas: 2})
	ctx := t.Context()
	ref, err := c.Alloc(ctx, []byte("kept"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = c.Names().Create(ctx, "kept", "object", ref)
	require.NoError(t, err)
	u, err := url.Parse(cluster.Controller.URL())
	require.NoError(t, err)
	require.NoError(t, cluster.Controller.Close())

	require.NoError(t, c.Write(ctx, ref, []byte("while it is down")))
	require.Eventually(t, func() bool {
		_, err := c.Read(ctx, ref, nil)
		if err != nil {
			require.ErrorIs(t, err, client.ErrLease)
		}
		return err != nil
	}, patience, 10*time.Millisecond, "a lease that nobody renews ends")

	cluster.StartController(u.Host)
	require.Eventually(t, func() bool {
		b, err := c.Read(ctx, ref, nil)
		return err == nil && string(b) == "while it is down"
	}, patience, 10*time.Millisecond)
	n, err := c.Names().Lookup(ctx, "kept")
	require.NoError(t, err)
	require.Equal(t, ref, n.Ref)
	_, err = c.Alloc(ctx, make([]byte, 400_000), client.AllocOptions{})
	require.NoError(t, err)
}

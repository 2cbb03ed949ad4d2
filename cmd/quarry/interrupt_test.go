package main

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// holding is a cluster with one region, and the name of the node that has its only replica.
func holding(t *testing.T) (c *testcluster.Cluster, holder string) {
	c = testcluster.New(t, testcluster.Options{Nodes: 2})
	_, err := c.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 1, Durability: quarrypb.Durability_DURABILITY_MEM}))
	require.NoError(t, err)
	for _, n := range c.Table().Nodes {
		if n.Id == c.Table().Regions[0].Replicas[0].Node {
			holder = n.Name
		}
	}
	return c, holder
}

// TestInterruptedDrain: Ctrl-C ends node drain --wait and not the drain, and the message says so, and how to end it.
func TestInterruptedDrain(t *testing.T) {
	c, holder := holding(t)
	// The command asks for the drain and then how far it is, which gets no answer.
	target, err := url.Parse(c.Controller.URL())
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	follows, end := make(chan struct{}), make(chan struct{})
	announce := sync.OnceFunc(func() { close(follows) })
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == quarrypbconnect.ControllerStatusProcedure {
			announce()
			<-end
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	defer front.Close()
	defer close(end)

	ctx, interrupt := context.WithCancel(t.Context())
	var out, errOut bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		ended <- dispatch(ctx, []string{"-C", front.URL, "node", "drain", holder, "--wait"}, nil, &out, &errOut)
	}()
	select {
	case <-follows:
	case err := <-ended:
		t.Fatalf("the command ended by itself: %v %s", err, errOut.String())
	}
	interrupt()
	err = <-ended
	require.Equal(t, exitInterrupted, exitCode(err))
	require.ErrorContains(t, err, "interrupted: the drain of node "+holder+" goes on, ")
	require.ErrorContains(t, err, "quarry node add "+holder+" ends it")
	for _, n := range c.Table().Nodes {
		require.Equal(t, n.Name == holder, n.State == quarrypb.NodeState_NODE_STATE_DRAINING, n.Name)
	}
}

// TestDrainEndedByAnother: a command that follows a drain does not start it anew when another operator has ended it.
func TestDrainEndedByAnother(t *testing.T) {
	c, holder := holding(t)
	target, err := url.Parse(c.Controller.URL())
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == quarrypbconnect.ControllerStatusProcedure {
			_, err := c.Control().AddNode(r.Context(), connect.NewRequest(&quarrypb.AddNodeRequest{Name: holder}))
			assert.NoError(t, err)
		}
		proxy.ServeHTTP(w, r)
	}))
	defer front.Close()
	var out, errOut bytes.Buffer
	err = dispatch(t.Context(), []string{"-C", front.URL, "node", "drain", holder, "--wait"}, nil, &out, &errOut)
	require.ErrorContains(t, err, "node "+holder+" is not being drained any more, and ")
	for _, n := range c.Table().Nodes {
		require.Equal(t, quarrypb.NodeState_NODE_STATE_UP, n.State, n.Name)
	}
}

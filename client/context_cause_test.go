package client_test

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestContextEndsInAControllerCall: the caller's context ends while a controller is asked.
// The error is that of the context and does not call the controller unreachable. A change
// that may have arrived is ErrUnknown as well.
func TestContextEndsInAControllerCall(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	line := cluster.Line()
	cfg := client.Config{Controllers: []string{line.URL}, Transport: client.TransportTCP, Lanes: 2, Replicas: 1}
	c, err := client.Connect(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { line.Lose(nil); require.NoError(t, c.Close()) })
	ref, err := cluster.Connect(client.Config{}).Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	names := c.Names()
	unknown := map[string]bool{"CreateName": true, "CreateNames": true, "SwapName": true, "DeleteName": true}
	for method, call := range map[string]func(ctx context.Context) error{
		"OpenSession":  func(ctx context.Context) error { _, err := client.Connect(ctx, cfg); return err },
		"ListSessions": func(ctx context.Context) error { _, err := c.SessionStates(ctx); return err },
		"LookupName":   func(ctx context.Context) error { _, err := names.Lookup(ctx, "a"); return err },
		"LookupNames":  func(ctx context.Context) error { _, err := names.LookupMany(ctx, []string{"a"}); return err },
		"CreateName":   func(ctx context.Context) error { _, err := names.Create(ctx, "a", "object", ref); return err },
		"CreateNames": func(ctx context.Context) error {
			_, err := names.CreateMany(ctx, []client.Name{{Name: "a"}})
			return err
		},
		"DeleteName": func(ctx context.Context) error { return names.Delete(ctx, "a", 0) },
		"SwapName": func(ctx context.Context) error {
			line.Lose(nil)
			n, err := names.Create(t.Context(), "b", "object", ref)
			require.NoError(t, err)
			loseAnd(line, "SwapName", ctx)
			_, err = names.Swap(ctx, "b", n.Revision, ref)
			return err
		},
		"ListNames": func(ctx context.Context) error {
			return names.List(ctx, "", "", func(client.Name) error { return nil })
		},
		"CreateRegion": func(ctx context.Context) error {
			_, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{Replicas: 2}) // no region has two
			return err
		},
		"ReadTable": func(ctx context.Context) error { // of a region that the table at hand does not have
			_, err := c.Read(ctx, client.Ref{Addr: 99 << 32}, nil)
			return err
		},
	} {
		t.Run(method, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			ctx = context.WithValue(ctx, cancelKey{}, cancel)
			defer cancel()
			loseAnd(line, method, ctx)
			err := call(ctx)
			line.Lose(nil)
			require.ErrorIs(t, err, context.Canceled)
			require.NotErrorIs(t, err, client.ErrUnreachable)
			require.NotErrorIs(t, err, client.ErrNoSpace)
			require.NotErrorIs(t, err, client.ErrNoRegion)
			require.NotContains(t, err.Error(), "no controller answers")
			if unknown[method] {
				require.ErrorIs(t, err, client.ErrUnknown)
			} else {
				require.NotErrorIs(t, err, client.ErrUnknown)
			}
		})
	}
}

// cancelKey is the key of a context's own cancel function.
type cancelKey struct{}

// loseAnd cancels ctx when a request of a method comes in, and does not answer it.
func loseAnd(line *testcluster.Line, method string, ctx context.Context) {
	cancel := ctx.Value(cancelKey{}).(context.CancelFunc)
	line.Lose(func(m string) bool {
		if m == method {
			cancel()
		}
		return m == method
	})
}

// TestContextEndsWhileANodeIsConnected: the caller's context ends while its lane waits for
// a node to accept a connection. The error does not call the node unreachable.
func TestContextEndsWhileANodeIsConnected(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	ref, err := cluster.Connect(client.Config{Transport: client.TransportTCP}).Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 1})
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never says anything
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		if in, err := l.Accept(); err == nil {
			cancel()
			<-t.Context().Done()
			in.Close()
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	next := client.Table(c)
	next.Revision++
	for _, e := range next.Nodes[0].Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_TCP {
			e.Address = l.Addr().String()
		}
	}
	require.NoError(t, client.Install(c, next))
	_, err = c.Read(ctx, ref, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, client.ErrUnreachable)
	require.NotErrorIs(t, err, client.ErrUnknown)
}

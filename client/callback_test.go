package client_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// callbacks are the calls that run a callback, each with one that blocks: it is given
// to block, once.
func callbacks(c *client.Client, small, large client.Ref) map[string]func(t *testing.T, block func()) error {
	return map[string]func(t *testing.T, block func()) error{
		"View": func(t *testing.T, block func()) error {
			return c.View(t.Context(), small, func([]byte) error { block(); return nil })
		},
		"View/large": func(t *testing.T, block func()) error {
			return c.View(t.Context(), large, func([]byte) error { block(); return nil })
		},
		"ReadMany": func(t *testing.T, block func()) error {
			var bad error
			err := c.ReadMany(t.Context(), []client.Ref{large, small, small}, func(_ int, _ []byte, err error) {
				bad = errors.Join(bad, err)
				block()
			})
			return errors.Join(err, bad)
		},
		"Update": func(t *testing.T, block func()) error {
			return c.Update(t.Context(), small, func([]byte) ([]byte, error) { block(); return []byte("changed"), nil })
		},
		"Update/refused": func(t *testing.T, block func()) error {
			refusal := errors.New("no")
			err := c.Update(t.Context(), small, func([]byte) ([]byte, error) { block(); return nil, refusal })
			if errors.Is(err, refusal) {
				return nil
			}
			return errors.Join(err, errors.New("the refusal is not the answer"))
		},
		"Update/large": func(t *testing.T, block func()) error {
			return c.Update(t.Context(), large, func(old []byte) ([]byte, error) { block(); return old[:len(old)-1], nil })
		},
	}
}

// TestCallbackHoldsUpNoTable: while a callback runs the session acknowledges the newest
// table, and no verb goes by the earlier one afterwards.
func TestCallbackHoldsUpNoTable(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport, Lanes: 1}) // no other lane gives claims back meanwhile
		small, err := c.Alloc(t.Context(), []byte("small"), client.AllocOptions{})
		require.NoError(t, err)
		large, err := c.Alloc(t.Context(), payload(2<<20), client.AllocOptions{})
		require.NoError(t, err)
		for name, call := range callbacks(c, small, large) {
			t.Run(transport+"/"+name, func(t *testing.T) {
				ran := false
				require.NoError(t, call(t, func() {
					if ran {
						return
					}
					ran = true
					for range 2 { // nothing changes but the revision
						next := client.Table(c)
						next.Revision++
						next.ReclaimEpoch++
						assert.NoError(t, client.Install(c, next))
						acked, _ := client.Acknowledged(c)
						assert.Equal(t, next.Revision, acked)
					}
				}))
				require.True(t, ran)
				acked, reclaim := client.Acknowledged(c)
				now := client.Table(c)
				require.Equal(t, now.Revision, acked)
				require.Equal(t, now.ReclaimEpoch, reclaim, "the lane is idle again")
			})
		}
	}
}

// TestCallbackHoldsUpNoFailover: a node is lost while a callback runs. Others go on
// before the callback comes back; then its call ends well under the new table.
func TestCallbackHoldsUpNoFailover(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for name := range callbacks(nil, client.Ref{}, client.Ref{}) {
			t.Run(transport+"/"+name, func(t *testing.T) {
				t.Parallel()
				cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
				c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
				other := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
				small, err := c.Alloc(t.Context(), []byte("small"), client.AllocOptions{})
				require.NoError(t, err)
				large, err := c.Alloc(t.Context(), payload(2<<20), client.AllocOptions{})
				require.NoError(t, err)
				beside, err := other.Alloc(t.Context(), []byte("beside"), client.AllocOptions{})
				require.NoError(t, err)
				require.Equal(t, small.Addr.Region(), beside.Addr.Region())
				session, ran := c.SessionID(), false
				require.NoError(t, callbacks(c, small, large)[name](t, func() {
					if ran {
						return
					}
					ran = true
					assert.NoError(t, cluster.Nodes[0].Close())
					assert.NoError(t, other.Write(t.Context(), beside, []byte("goes on")), "while the callback runs")
				}))
				require.True(t, ran)
				require.Equal(t, session, c.SessionID())
				require.NoError(t, other.Write(t.Context(), small, []byte("free")))
			})
		}
	}
}

// TestCallbackBehindAnOpenHoldsUpNoTable: ReadMany opens a region between two callbacks
// with no round between them. The second callback holds up no table either.
func TestCallbackBehindAnOpenHoldsUpNoTable(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{RegionBytes: 16 << 20})
	maker := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 1})
	first, err := maker.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	second := first
	for second.Addr.Region() == first.Addr.Region() {
		second, err = maker.Alloc(t.Context(), make([]byte, 60<<10), client.AllocOptions{})
		require.NoError(t, err)
	}
	// Of two lanes one opens the second region, so that its headers are known.
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 2})
	hold := func() *client.HeldLane {
		h, err := client.Hold(t.Context(), c)
		require.NoError(t, err)
		return h
	}
	fresh := hold()
	_, err = c.Read(t.Context(), second, nil)
	require.NoError(t, err)
	used := hold()
	fresh.Release()
	var refs []client.Ref
	for range 130 { // more than one batch
		refs = append(refs, first)
	}
	bad := first
	bad.Addr++ // is answered before the round
	refs = append(refs, second, bad)
	told := 0
	require.NoError(t, c.ReadMany(t.Context(), refs, func(i int, _ []byte, err error) {
		told++
		if i < len(refs)-1 {
			assert.NoError(t, err)
			return
		}
		assert.Error(t, err)
		assert.Equal(t, 129, told, "before the second round")
		used.Release()
		for range 2 {
			next := client.Table(c)
			next.Revision++
			assert.NoError(t, client.Install(c, next))
			acked, _ := client.Acknowledged(c)
			assert.Equal(t, next.Revision, acked)
		}
	}))
	require.Equal(t, len(refs), told)
}

package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestReadsOfAnUnavailableRegionFailFast: the only node of a region dies. The call that
// is under way and every later one end with ErrUnreachable as soon as the table says
// that no node has the region; no call waits for its deadline. Allocation uses other regions,
// though the lane holds claims in that region.
func TestReadsOfAnUnavailableRegionFailFast(t *testing.T) {
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: 2, RegionBytes: 16 << 20})
			c := cluster.Connect(client.Config{Transport: transport, Lanes: 1})
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // far more than there is to wait for
			defer cancel()
			ref, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{})
			require.NoError(t, err)
			other, err := c.Alloc(ctx, []byte("y"), client.AllocOptions{})
			require.NoError(t, err)
			require.Equal(t, ref.Addr.Region(), other.Addr.Region())

			holder := client.Table(c).Regions[0].Replicas[0].Node
			for _, n := range cluster.Nodes {
				if n.Stats().ID == holder {
					require.NoError(t, n.Close())
				}
			}
			fails := func(err error) {
				t.Helper()
				require.ErrorIs(t, err, client.ErrUnreachable)
				require.False(t, errors.Is(err, client.ErrUnknown), "%v", err)
				require.False(t, errors.Is(err, context.DeadlineExceeded), "%v", err)
			}
			_, err = c.Read(ctx, ref, nil) // begun before the controller knows
			fails(err)
			require.Equal(t, quarrypb.RegionState_REGION_STATE_UNAVAILABLE, client.Table(c).Regions[0].Shown())
			_, err = c.Read(ctx, ref, nil)
			fails(err)
			fails(c.Write(ctx, ref, []byte("z")))
			fails(c.Free(ctx, other))
			told := 0
			require.NoError(t, c.ReadMany(ctx, []client.Ref{ref, other}, func(_ int, _ []byte, err error) { told++; fails(err) }))
			require.Equal(t, 2, told)

			again, err := c.Alloc(ctx, []byte("z"), client.AllocOptions{})
			require.NoError(t, err)
			require.NotEqual(t, ref.Addr.Region(), again.Addr.Region())
			b, err := c.Read(ctx, again, nil)
			require.NoError(t, err)
			require.Equal(t, "z", string(b))
		})
	}
}

// regionWithoutNodes is a cluster of two nodes and a client with one lane. The only node
// of the region of its first object has been closed, and the table says so.
func regionWithoutNodes(t *testing.T) (*client.Client, client.Ref) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, RegionBytes: 16 << 20})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 1})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	holder := client.Table(c).Regions[0].Replicas[0].Node
	for _, n := range cluster.Nodes {
		if n.Stats().ID == holder {
			require.NoError(t, n.Close())
		}
	}
	_, err = c.Read(t.Context(), ref, nil)
	require.ErrorIs(t, err, client.ErrUnreachable)
	require.Equal(t, quarrypb.RegionState_REGION_STATE_UNAVAILABLE, client.Table(c).Regions[0].Shown())
	return c, ref
}

// TestClaimsInAnUnavailableRegionAreKept: the reclaim epoch rises while a client has claims
// in a region that cannot be used. It gives back the others and keeps its session.
func TestClaimsInAnUnavailableRegionAreKept(t *testing.T) {
	c, _ := regionWithoutNodes(t)
	kept := c.Stats().Claims
	require.NotZero(t, kept)
	_, err := c.Alloc(t.Context(), []byte("y"), client.AllocOptions{})
	require.NoError(t, err)
	all, session := c.Stats().Claims, c.SessionID()
	require.Greater(t, all, kept)
	next := client.Table(c)
	next.Revision++
	next.ReclaimEpoch++
	require.NoError(t, client.Install(c, next))
	require.Eventually(t, func() bool { return c.Stats().Claims < all }, patience, time.Millisecond)
	_, err = c.Alloc(t.Context(), []byte("z"), client.AllocOptions{}) // behind the trim: there is one lane
	require.NoError(t, err)
	require.Equal(t, session, c.SessionID())
	require.GreaterOrEqual(t, c.Stats().Claims, kept)
}

// TestBitsLeftInAnUnavailableRegionEndTheSession: slabs are freed in a region that is gone
// before their map bits are cleared. Their session does not end in good order, after which
// no scrub would clear the bits.
func TestBitsLeftInAnUnavailableRegionEndTheSession(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, RegionBytes: 16 << 20})
	maker := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 1})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 1})
	large := make([]byte, 100<<10)
	alloc := func(c *client.Client) client.Ref {
		ref, err := c.Alloc(t.Context(), large, client.AllocOptions{WriteOnce: true})
		require.NoError(t, err)
		return ref
	}
	var refs []client.Ref // of the first region
	for range 20 {
		refs = append(refs, alloc(maker))
	}
	first := refs[0].Addr.Region()
	require.Equal(t, first, refs[19].Addr.Region())
	require.NoError(t, maker.Close())
	// The magazine is full of claims in another region: what is freed in the first one
	// does not go there.
	var far []client.Ref
	for len(far) < 20 {
		if ref := alloc(c); ref.Addr.Region() != first {
			far = append(far, ref)
		}
	}
	full := -1
	for _, ref := range far {
		require.NoError(t, c.Free(t.Context(), ref))
		if full == c.Stats().Claims {
			break
		}
		full = c.Stats().Claims
	}
	for _, ref := range refs {
		require.NoError(t, c.Free(t.Context(), ref))
	}
	require.Equal(t, full, c.Stats().Claims)
	holder, _ := c.Where(refs[0])
	for _, n := range cluster.Nodes {
		if n.Stats().ID == holder {
			require.NoError(t, n.Close())
		}
	}
	_, err := c.Read(t.Context(), refs[0], nil)
	require.ErrorIs(t, err, client.ErrUnreachable)
	require.ErrorIs(t, c.Close(), client.ErrUnreachable)
}

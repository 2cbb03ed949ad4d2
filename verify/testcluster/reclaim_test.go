package testcluster_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestReclaim: a store that is full of small objects, which are then freed, takes
// large ones: their blocks are taken back. Blocks with an object in them stay as they are.
func TestReclaim(t *testing.T) {
	for replicas := 1; replicas <= 2; replicas++ {
		t.Run(fmt.Sprintf("R=%d", replicas), func(t *testing.T) {
			c := testcluster.New(t, testcluster.Options{Nodes: replicas, Capacity: 2 * proto.MinRegionBytes, Lease: 5 * time.Second})
			cl := c.Connect(client.Config{})
			o := client.AllocOptions{Replicas: replicas}
			small, large := make([]byte, 3000), make([]byte, 200_000)
			fill := func(object []byte) (refs []proto.Ref) {
				for {
					ref, err := cl.Alloc(t.Context(), object, o)
					if errors.Is(err, client.ErrNoSpace) {
						return refs
					}
					require.NoError(t, err)
					refs = append(refs, ref)
				}
			}
			refs := fill(small)
			require.Greater(t, len(refs), 3000)
			_, err := cl.Alloc(t.Context(), large, o)
			require.ErrorIs(t, err, client.ErrNoSpace)

			copy(small, "stays")
			stays := refs[len(refs)/2]
			err = cl.Update(t.Context(), stays, func([]byte) ([]byte, error) { return small, nil })
			require.NoError(t, err)
			for _, ref := range refs {
				if ref != stays {
					require.NoError(t, cl.Free(t.Context(), ref))
				}
			}
			got := 0
			require.Eventually(t, func() bool {
				got += len(fill(large))
				return got >= 20 // of a whole store's 30 blocks, an object each but for what magazines hold
			}, patience, 100*time.Millisecond)
			b, err := cl.Read(t.Context(), stays, nil)
			require.NoError(t, err)
			require.Equal(t, small, b)
			freed := 0
			for _, ref := range refs {
				if _, err := cl.Read(t.Context(), ref, nil); ref != stays {
					require.ErrorIs(t, err, client.ErrFreed)
					freed++
				}
			}
			require.Equal(t, len(refs)-1, freed)
			report, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}})
			require.NoError(t, err)
			require.Empty(t, report.Findings)
			require.NotZero(t, c.Nodes[0].Stats().Settled.Reclaimed+c.Nodes[replicas-1].Stats().Settled.Reclaimed)
		})
	}
}

// TestIdleLanesGiveClaimsBack: whoever looks for room raises the reclaim epoch.
func TestIdleLanesGiveClaimsBack(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Lease: 5 * time.Second})
	cl := c.Connect(client.Config{})
	ref, err := cl.Alloc(t.Context(), []byte("stays"), client.AllocOptions{})
	require.NoError(t, err)
	require.NotZero(t, cl.Stats().Claims)
	key := rdma.NewCredentials()
	res, err := c.Control().OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "looks for room", Rights: uint32(rdma.ReadWrite), Key: key.Holder[:]}))
	require.NoError(t, err)
	_, err = c.Control().Pass(t.Context(), connect.NewRequest(&quarrypb.PassRequest{Serial: res.Msg.Ticket.Serial, Proof: res.Msg.Proof}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return cl.Stats().Claims == 0 }, patience, time.Millisecond)
	b, err := cl.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "stays", string(b))
	_, err = cl.Alloc(t.Context(), []byte("again"), client.AllocOptions{})
	require.NoError(t, err)
}

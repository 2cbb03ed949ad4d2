package fsck_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A slab that is BAD on every replica has a kind of its own, is listed alone on request, and no repair changes it. Its
// readers get ErrCorrupt.
func TestBadSlabsAreListed(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	var refs []client.Ref
	for range 2 {
		ref, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	require.NoError(t, c.Close())
	check := func(only fsck.Kind) []fsck.Finding {
		rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp", Only: only})
		require.NoError(t, err)
		return rep.Findings
	}
	require.Empty(t, check(""))

	v := newVandal(t, cluster)
	s, _, _, _ := v.slab(refs[0])
	for i := range 2 {
		v.spoil(i, refs[0])
	}
	for i := range 2 {
		v.swap(i, s.VOff(), func(w uint64) uint64 { return uint64(proto.MakeV(proto.StateBad, proto.V(w).Version())) })
	}
	v.spoil(0, refs[1])
	require.Len(t, check(""), 2)
	bad := check(fsck.KindBad)
	require.Len(t, bad, 1)
	require.Equal(t, fsck.KindBad, bad[0].Kind)
	require.Equal(t, refs[0].Addr.String(), bad[0].Where)

	c = cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	_, err := c.Read(ctx, refs[0], nil)
	require.ErrorIs(t, err, client.ErrCorrupt)
	done, err := fsck.Repair(ctx, c, bad)
	require.NoError(t, err)
	require.Len(t, done.Left, 1)
	require.NoError(t, c.Close())
	require.Equal(t, bad[0].What, check(fsck.KindBad)[0].What)
}

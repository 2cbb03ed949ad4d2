package client_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A program chooses STAGED slabs for objects with one replica. Objects that are larger than such a slab have PAIR
// slabs, and chunks beyond.
func TestStagedObjects(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2})
	ctx := t.Context()
	staged := client.AllocOptions{Slab: client.StagedSlab, Replicas: 1}

	o := staged
	o.Replicas = 2
	_, err := c.Alloc(ctx, nil, o)
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorIs(t, err, alloc.ErrStagedReplicas)
	require.ErrorContains(t, err, "not 2")
	o = staged
	o.Replicas = 0 // that of the Config
	_, err = c.Alloc(ctx, nil, o)
	require.ErrorIs(t, err, alloc.ErrStagedReplicas)
	o = staged
	o.WriteOnce = true
	_, err = c.Alloc(ctx, nil, o)
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = c.Alloc(ctx, nil, client.AllocOptions{Slab: client.SingleSlab})
	require.ErrorIs(t, err, client.ErrArgument)

	byConfig := cluster.Connect(client.Config{Replicas: 1, Slab: client.StagedSlab})
	for o, kind := range map[client.AllocOptions]client.SlabKind{{}: client.StagedSlab, {Slab: client.PairSlab}: client.PairSlab, {WriteOnce: true}: client.SingleSlab} {
		ref, err := byConfig.Alloc(ctx, nil, o)
		require.NoError(t, err)
		info, err := c.Stat(ctx, ref)
		require.NoError(t, err)
		require.Equal(t, kind, info.Slab, "%+v", o)
	}

	of := map[client.Ref]client.SlabKind{}
	for _, x := range []struct {
		bytes int
		kind  client.SlabKind
	}{{0, client.StagedSlab}, {200, client.StagedSlab}, {proto.MaxPayloadBytes(proto.Staged), client.StagedSlab}, {proto.MaxPayloadBytes(proto.Staged) + 1, client.PairSlab}, {1 << 20, client.PairSlab}} {
		ref, err := c.Alloc(ctx, make([]byte, x.bytes), staged)
		require.NoError(t, err)
		of[ref] = x.kind
		info, err := c.Stat(ctx, ref)
		require.NoError(t, err)
		require.Equal(t, x.kind, info.Slab)
		require.False(t, info.WriteOnce)
		next := bytes.Repeat([]byte{7}, x.bytes)
		require.NoError(t, c.Write(ctx, ref, next))
		require.NoError(t, c.Update(ctx, ref, func(old []byte) ([]byte, error) {
			require.Equal(t, next, old)
			return append(old[:0:0], next...), nil
		}))
		got, err := c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(next, got))
		b, err := json.Marshal(info)
		require.NoError(t, err)
		require.Contains(t, string(b), `"slab":"`+x.kind.String()+`"`)
		var again client.Info
		require.NoError(t, json.Unmarshal(b, &again))
		require.Equal(t, info, again)
	}
	rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Object: func(s fsck.Object) {
		if k, ok := of[s.Ref]; ok {
			require.Equal(t, k.String(), s.Kind.String())
			delete(of, s.Ref)
		}
	}})
	require.NoError(t, err)
	require.Empty(t, rep.Findings)
	require.Empty(t, of)
}

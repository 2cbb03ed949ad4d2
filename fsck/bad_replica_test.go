package fsck_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// badCluster is a cluster in which objects are lost.
type badCluster struct {
	*testing.T
	*testcluster.Cluster
	replicas int
}

func (b badCluster) check() []fsck.Finding {
	rep, err := fsck.Cluster(b.T.Context(), fsck.Config{Controllers: []string{b.Controller.URL()}, Transport: "tcp"})
	require.NoError(b, err)
	return rep.Findings
}

// with calls f with a client that nobody else's check meets.
func (b badCluster) with(f func(c *client.Client)) {
	c := b.Connect(client.Config{Transport: client.TransportTCP, Replicas: b.replicas})
	f(c)
	require.NoError(b, c.Close())
}

// repair repairs what a check finds, and returns what is found then.
func (b badCluster) repair() (found []fsck.Finding) {
	b.with(func(c *client.Client) {
		_, err := fsck.Repair(b.T.Context(), c, b.check())
		require.NoError(b, err)
	})
	return b.check()
}

// lose damages an object at all replicas, and has it marked.
func (b badCluster) lose(ref client.Ref) (mark client.Ref) {
	v := newVandal(b.T, b.Cluster)
	for i := range b.replicas {
		v.spoil(i, ref)
	}
	for _, f := range b.repair() {
		if f.Kind == fsck.KindBad && f.Where == ref.Addr.String() {
			return f.Mark
		}
	}
	b.Fatalf("%v is not marked", ref)
	return mark
}

// V of the backup of a slab that is marked is damaged. The check finds both; the mark is not taken away before a repair has made the replicas alike.
func TestMarkWithAnotherVAtTheBackup(t *testing.T) {
	b := badCluster{t, testcluster.New(t, testcluster.Options{Nodes: 2}), 2}
	ctx := t.Context()
	var ref client.Ref
	b.with(func(c *client.Client) {
		var err error
		ref, err = c.Alloc(ctx, []byte("x"), client.AllocOptions{})
		require.NoError(t, err)
	})
	mark := b.lose(ref)
	v := newVandal(t, b.Cluster)
	s, _, _, _ := v.slab(ref)
	for _, now := range []uint64{0, 1<<60 | 7} {
		v.swap(1, s.VOff(), func(uint64) uint64 { return now })
		found := b.check()
		require.Len(t, found, 2)
		require.Equal(t, fsck.KindBad, found[0].Kind)
		require.Equal(t, fsck.KindReplica, found[1].Kind)
		b.with(func(c *client.Client) {
			require.ErrorIs(t, c.FreeBad(ctx, mark), client.ErrCorrupt)
			require.ErrorIs(t, c.Restore(ctx, mark, ref, []byte("x"), 0), client.ErrCorrupt)
			_, err := c.Names().Lookup(ctx, "bad/"+ref.Addr.String())
			require.NoError(t, err, "it is listed")
		})
		found = b.repair()
		require.Len(t, found, 1)
		require.Equal(t, mark, found[0].Mark)
	}
	b.with(func(c *client.Client) {
		unlisted := func(want int) {
			gone, err := c.UnlistBad(ctx)
			require.NoError(t, err)
			require.Len(t, gone, want)
		}
		unlisted(0)
		require.NoError(t, c.FreeBad(ctx, mark))
		unlisted(0)
		later := mark
		later.Incarnation++
		require.NoError(t, c.ListBad(ctx, mark), "as if the name could not be deleted")
		require.NoError(t, c.ListBad(ctx, later))
		require.NoError(t, c.ListBad(ctx, mark), "of a check that ended before the later mark")
		n, err := c.Names().Lookup(ctx, "bad/"+ref.Addr.String())
		require.NoError(t, err)
		require.Equal(t, later, n.Ref)
		unlisted(1)
	})
	require.Empty(t, b.check())
}

// Objects of all kinds are restored: written once, in a STAGED slab, and large ones, whose payload gets new chunks. Nothing is left behind.
func TestObjectsOfAllKindsAreRestored(t *testing.T) {
	b := badCluster{t, testcluster.New(t, testcluster.Options{Nodes: 2}), 2}
	ctx := t.Context()
	large := bytes.Repeat([]byte("large"), 200_000)
	for name, c := range map[string]struct {
		o         client.AllocOptions
		was, then []byte
	}{
		"once":             {client.AllocOptions{WriteOnce: true}, []byte("x"), []byte("y")},
		"large, once":      {client.AllocOptions{WriteOnce: true}, large, large[5:]},
		"small, then more": {client.AllocOptions{Capacity: 3000}, []byte("x"), large},
	} {
		t.Run(name, func(t *testing.T) {
			var ref client.Ref
			b.with(func(cl *client.Client) {
				var err error
				ref, err = cl.Alloc(ctx, c.was, c.o)
				require.NoError(t, err)
			})
			mark := b.lose(ref)
			b.with(func(cl *client.Client) {
				require.ErrorIs(t, cl.Restore(ctx, mark, ref, make([]byte, client.MaxObjectBytes+1), 0), client.ErrTooLarge)
				require.NoError(t, cl.Restore(ctx, mark, ref, c.then, 5))
				got, info, err := cl.ReadInfo(ctx, ref, nil)
				require.NoError(t, err)
				require.True(t, bytes.Equal(c.then, got))
				require.EqualValues(t, 5, info.Tag)
				info, err = cl.Stat(ctx, ref)
				require.NoError(t, err)
				require.Equal(t, c.o.WriteOnce, info.WriteOnce)
				require.NoError(t, cl.Free(ctx, ref))
				_, err = cl.Read(ctx, ref, nil)
				require.ErrorIs(t, err, client.ErrFreed)
			})
		})
	}
}

func TestStagedObjectIsRestored(t *testing.T) {
	b := badCluster{t, testcluster.New(t, testcluster.Options{Nodes: 1}), 1}
	ctx := t.Context()
	var ref client.Ref
	b.with(func(c *client.Client) {
		var err error
		ref, err = c.Alloc(ctx, []byte("x"), client.AllocOptions{Slab: client.StagedSlab})
		require.NoError(t, err)
	})
	mark := b.lose(ref)
	b.with(func(c *client.Client) {
		require.NoError(t, c.Restore(ctx, mark, ref, []byte("y"), 0))
		require.NoError(t, c.Update(ctx, ref, func(old []byte) ([]byte, error) { return append(old, 'z'), nil }))
		got, err := c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.Equal(t, "yz", string(got))
		info, err := c.Stat(ctx, ref)
		require.NoError(t, err)
		require.Equal(t, client.StagedSlab, info.Slab)
	})
	require.Empty(t, b.check())
}

// A chunk of a large object is lost. It is not restored; the object is written anew, and the mark discarded.
func TestLostChunk(t *testing.T) {
	b := badCluster{t, testcluster.New(t, testcluster.Options{Nodes: 2}), 2}
	ctx := t.Context()
	payload := make([]byte, 1<<20)
	var ref, chunk client.Ref
	b.with(func(c *client.Client) {
		var err error
		ref, err = c.Alloc(ctx, payload, client.AllocOptions{})
		require.NoError(t, err)
	})
	v := newVandal(t, b.Cluster)
	s, _, _, _ := v.slab(ref)
	bytesOf := v.read(0, s.Off, s.Class.Bytes())
	_, w := s.Words(bytesOf)
	chunk = proto.DecodeRef(s.Image(bytesOf, w.Version())[proto.ImageHeaderBytes+16:]) // behind the header of the index
	mark := b.lose(chunk)
	named := false
	for _, f := range b.check() {
		named = named || f.Kind == fsck.KindChunk && f.Where == ref.String()
	}
	require.True(t, named, "fsck names the object")
	b.with(func(c *client.Client) {
		require.ErrorIs(t, c.Restore(ctx, mark, chunk, payload[:100], 0), client.ErrImmutable)
		require.NoError(t, c.Write(ctx, ref, payload))
		require.NoError(t, c.FreeBad(ctx, mark))
		got, err := c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(payload, got))
	})
	require.Empty(t, b.check())
}

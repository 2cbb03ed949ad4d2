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

// A check finds objects that are damaged at all replicas. Repair marks and lists them; what one replica has whole is mended, whatever else is
// lost. One lost object is restored, the other given up: then nothing is found, and nothing is listed.
func TestLostObjectsAreMarked(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	var refs []client.Ref
	for range 3 {
		ref, err := c.Alloc(ctx, []byte("old"), client.AllocOptions{Tag: 5})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	require.NoError(t, c.Close())
	check := func(only fsck.Kind) []fsck.Finding {
		rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp", Only: only})
		require.NoError(t, err)
		return rep.Findings
	}
	v := newVandal(t, cluster)
	for i := range 2 {
		v.spoil(i, refs[0])
		v.spoil(i, refs[1])
	}
	v.spoil(0, refs[2])
	found := check("")
	require.Len(t, found, 3)

	c = cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	listed := func() map[string]client.Ref {
		all := map[string]client.Ref{}
		require.NoError(t, c.Names().List(ctx, client.BadPrefix, client.BadKind, func(n client.Name) error { all[n.Name] = n.Ref; return nil }))
		return all
	}
	_, err := c.MarkBad(ctx, refs[2].Addr)
	require.ErrorIs(t, err, client.ErrWhole)
	for range 2 { // the second finds marks
		done, err := fsck.Repair(ctx, c, found)
		require.NoError(t, err)
		require.Len(t, done.Left, 2)
		found = check("")
		require.Len(t, found, 2)
		require.Equal(t, map[string]client.Ref{"bad/" + found[0].Where: found[0].Mark, "bad/" + found[1].Where: found[1].Mark}, listed())
	}
	require.Equal(t, found, check(fsck.KindBad))
	mark := map[client.Ref]client.Ref{}
	for _, f := range found {
		for _, ref := range refs {
			if f.Where == ref.Addr.String() {
				mark[ref] = f.Mark
			}
		}
	}
	require.Len(t, mark, 2)
	require.NoError(t, c.Names().Delete(ctx, "bad/"+refs[0].Addr.String(), 0))
	_, err = fsck.Repair(ctx, c, found)
	require.NoError(t, err)
	require.Len(t, listed(), 2, "listed again")

	before := c.Stats().Events.Damaged
	require.ErrorIs(t, c.Write(ctx, refs[0], []byte("new")), client.ErrBad)
	require.ErrorIs(t, c.Free(ctx, refs[0]), client.ErrBad)
	_, err = c.Read(ctx, refs[0], nil)
	require.ErrorIs(t, err, client.ErrBad)
	require.EqualValues(t, 3, c.Stats().Events.Damaged-before)

	require.ErrorIs(t, c.Restore(ctx, mark[refs[1]], refs[0], []byte("new"), 5), client.ErrArgument)
	require.ErrorIs(t, c.FreeBad(ctx, refs[0]), client.ErrFreed, "the reference of the object is no mark")
	require.NoError(t, c.Restore(ctx, mark[refs[0]], refs[0], []byte("new"), 5))
	got, info, err := c.ReadInfo(ctx, refs[0], nil)
	require.NoError(t, err)
	require.Equal(t, "new", string(got))
	require.EqualValues(t, 5, info.Tag)
	require.NoError(t, c.FreeBad(ctx, mark[refs[1]]))
	_, err = c.Read(ctx, refs[1], nil)
	require.ErrorIs(t, err, client.ErrFreed)
	require.Empty(t, listed())
	require.NoError(t, c.Close())
	require.Empty(t, check(""))
}

// However many slabs are marked, a report has room for what can be repaired.
func TestMarksDoNotHideOtherFindings(t *testing.T) {
	var rep fsck.Report
	for range 2 * fsck.MaxFindings {
		rep.Add(fsck.Finding{Kind: fsck.KindBad})
	}
	rep.Add(fsck.Finding{Kind: fsck.KindReplica})
	require.Len(t, rep.Findings, fsck.MaxBad+1)
	require.Equal(t, fsck.KindReplica, rep.Findings[fsck.MaxBad].Kind)
	require.Equal(t, 2*fsck.MaxFindings-fsck.MaxBad, rep.More)
}

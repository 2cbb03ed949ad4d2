package kv_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// between is a Store that stops behind its allocations of a tag.
type between struct {
	client.Operation
	c    *client.Client
	ctx  context.Context
	tag  uint32
	stop func() // called once
}

func (b *between) Begin() { b.Operation = b.c.Operation() }

func (b *between) Read(ref btree.Ref, dst []byte) ([]byte, error) { return b.c.Read(b.ctx, ref, dst) }

func (b *between) View(ref btree.Ref, fn func([]byte) error) error { return b.c.View(b.ctx, ref, fn) }

func (b *between) ReadMany(refs []btree.Ref, fn func(int, []byte, error)) error {
	return b.c.ReadMany(b.ctx, refs, fn)
}

func (b *between) Update(ref btree.Ref, f func([]byte) ([]byte, error)) error {
	return b.Operation.Update(b.ctx, ref, f)
}

func (b *between) Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (btree.Ref, error) {
	ref, err := b.Operation.Alloc(b.ctx, payload, client.AllocOptions{Tag: tag, Capacity: capacity, WriteOnce: writeOnce})
	if err == nil && tag == b.tag && b.stop != nil {
		stop := b.stop
		b.stop = nil
		stop()
	}
	return ref, err
}

func (b *between) Free(ref btree.Ref) error { return b.c.Free(b.ctx, ref) }

// collect is a collection as the command runs it.
func collect(t *testing.T, cluster *testcluster.Cluster, c *client.Client) kv.Collected {
	o, err := kv.Collect(t.Context(), c, false, func(ctx context.Context, found func(kv.Stray)) error {
		_, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Object: found})
		return err
	})
	require.NoError(t, err)
	return o
}

// TestCollectLeavesWhatAnExpiredSessionMade: a writer has made the right node of a split
// when its lease runs out. A collection runs, the writer renews its lease and commits.
// Every acknowledged key is still there.
func TestCollectLeavesWhatAnExpiredSessionMade(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Lease: 2 * time.Second})
	line, other := cluster.Line(), cluster.Connect(client.Config{})
	c, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer c.Close()
	tree, err := kv.Create(ctx, other, "expired", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	st := &between{c: c, ctx: ctx, tag: btree.TagLeaf}
	st.Begin()
	sh, err := btree.Attach(st, tree.Root(), btree.Config{})
	require.NoError(t, err)
	p := btree.NewProgram(sh, st)
	var keys [][]byte
	put := func() {
		key := fmt.Appendf(nil, "key%04d", len(keys))
		if _, err := p.Put(key, make([]byte, 60), btree.Cond{}); err == nil {
			keys = append(keys, key)
		}
	}
	for len(keys) < 40 {
		put() // the root has grown: the next leaf is made by a split
	}
	stopped := false
	st.stop = func() {
		stopped = true
		line.Cut()
		cluster.AwaitSession(c.SessionID(), "expired")
		t.Logf("collected beside it: %+v", collect(t, cluster, other))
		line.Restore()
		for id := c.SessionID(); cluster.SessionState(id) == "expired"; {
		}
	}
	for !stopped {
		put()
	}
	for _, key := range keys {
		_, err := tree.Get(ctx, key, nil)
		require.NoError(t, err, "%s", key)
	}
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

// revoke ends a client's session and waits until nothing is left of it and the client has another.
func revoke(t *testing.T, cluster *testcluster.Cluster, c *client.Client) {
	id := c.SessionID()
	_, err := cluster.Control().RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: id, Reason: "test"}))
	require.NoError(t, err)
	cluster.AwaitSession(id, "")
	require.Eventually(t, func() bool { return c.SessionID() != id }, patience, time.Millisecond)
}

// TestLoadEndsWithItsSession: the session of a Load ends in the middle and a collection
// frees what it has made. The Load fails; it does not name freed values.
func TestLoadEndsWithItsSession(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Lease: time.Second})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "loaded", btree.Config{})
	require.NoError(t, err)
	n := 0
	_, err = tree.LoadFrom(ctx, func() (key, value []byte, err error) {
		if n++; n > 40 {
			return nil, nil, io.EOF
		}
		if n == 20 {
			revoke(t, cluster, c)
			t.Logf("collected beside it: %+v", collect(t, cluster, other))
		}
		return fmt.Appendf(nil, "key%04d", n), make([]byte, 1000), nil
	})
	readable := 0
	for i := range n {
		if _, gerr := tree.Get(ctx, fmt.Appendf(nil, "key%04d", i), nil); gerr == nil {
			readable++
		}
	}
	t.Logf("Load: %v; %d keys can be read", err, readable)
	require.ErrorIs(t, err, client.ErrFenced)
	require.NotErrorIs(t, err, client.ErrUnknown)
	require.Zero(t, readable)
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
	// What it had made, it has freed with its next session, or nobody needs it.
	collect(t, cluster, other)
	n = 0
	loaded, err := tree.LoadFrom(ctx, func() (key, value []byte, err error) {
		if n++; n > 40 {
			return nil, nil, io.EOF
		}
		return fmt.Appendf(nil, "key%04d", n), make([]byte, 1000), nil
	})
	require.NoError(t, err)
	require.Equal(t, 40, loaded)
}

// TestPutEndsWithItsSession: the session ends between the value of its own slab and the
// leaf. The operation does not name the value any more; a Put of a Tree makes it again.
func TestPutEndsWithItsSession(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Lease: time.Second})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	tree, err := kv.Create(ctx, other, "put", btree.Config{})
	require.NoError(t, err)
	st := &between{c: c, ctx: ctx, tag: btree.TagValue}
	st.Begin()
	sh, err := btree.Attach(st, tree.Root(), btree.Config{})
	require.NoError(t, err)
	st.stop = func() {
		revoke(t, cluster, c)
		t.Logf("collected beside it: %+v", collect(t, cluster, other))
	}
	_, err = btree.NewProgram(sh, st).Put([]byte("key"), make([]byte, 1000), btree.Cond{})
	t.Logf("Put: %v", err)
	_, gerr := tree.Get(ctx, []byte("key"), nil)
	require.ErrorIs(t, err, client.ErrFenced)
	require.ErrorIs(t, gerr, btree.ErrNoKey)
}

// TestNameEndsWithItsSession: a tree whose root was made by a session that has ended gets no name.
func TestNameEndsWithItsSession(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Lease: time.Second})
	line := cluster.Line()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer c.Close()
	op := c.Operation()
	root, err := op.Alloc(ctx, []byte("root"), client.AllocOptions{Tag: btree.TagRoot})
	require.NoError(t, err)
	_, err = cluster.Control().RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: c.SessionID(), Reason: "test"}))
	require.NoError(t, err)
	// The client may or may not have heard of it: the controller decides.
	_, err = op.CreateName(ctx, "late", kv.NameKind, root)
	require.ErrorIs(t, err, client.ErrFenced)
	_, err = c.Names().Lookup(ctx, "late")
	require.ErrorIs(t, err, client.ErrNoName)
	again := c.Operation()
	require.Eventually(t, func() bool {
		root, err = again.Alloc(ctx, []byte("root"), client.AllocOptions{Tag: btree.TagRoot})
		return err == nil
	}, patience, time.Millisecond, "with its next session")
	_, err = again.CreateName(ctx, "late", kv.NameKind, root)
	require.NoError(t, err)
	_, err = again.CreateName(ctx, "late", kv.NameKind, root)
	require.ErrorIs(t, err, client.ErrNameExists)
}

package pool_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// nearAndFar runs a test with a pool of the client's cluster, and with one that a host reaches.
func nearAndFar(t *testing.T, test func(t *testing.T, far bool)) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%v", far), func(t *testing.T) { test(t, far) })
	}
}

// byHost has the pools of a set, and of its file, reached by a host.
func byHost(t *testing.T, c *testcluster.Cluster, s *pool.Set) {
	h, _ := hostOf(t, c)
	for _, name := range s.Pools {
		s.Remotes = append(s.Remotes, pool.RemotePool{Host: h.Name, Name: name})
	}
	s.Pools, s.SSH, s.Agent = nil, h.SSH, h.Agent
	text, err := os.ReadFile(s.Path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.Path, []byte(strings.ReplaceAll(string(text), pool.Cluster, h.Name)), 0o600))
}

// hostSet creates a set with pools "first" and "second", which a host reaches, and no mirror.
func hostSet(t *testing.T) (c *testcluster.Cluster, s *pool.Set, h pool.Host, o pool.Options, m *pool.Memory) {
	c = testcluster.New(t, testcluster.Options{Nodes: 1})
	s = newSet(t, "first", 0)
	s.Pools = append(s.Pools, "second")
	byHost(t, c, s)
	h = s.Host(s.Remotes[0].Host)
	o = options(false)
	o.Replicas = 1
	m, err := s.Create(t.Context(), nil, o, pool.MemoryOptions{})
	require.NoError(t, err)
	copy(m.Bytes(), "persisted")
	require.NoError(t, m.Persist(0, 9))
	return c, s, h, o, m
}

// TestHostMakesTornPool: a pool that Sync makes by way of a host is torn until that has returned, also if it ends in the middle; Restore takes the other one.
func TestHostMakesTornPool(t *testing.T) {
	_, s, h, o, m := hostSet(t)
	require.NoError(t, m.Close(t.Context()))
	require.NoError(t, h.Remove(t.Context(), "second"))
	ctx, cancel := context.WithCancel(t.Context())
	seen := 0
	_, err := s.Sync(ctx, nil, o, func(uint64) {
		if seen++; seen == 2 { // of the second pool
			cancel()
		}
	})
	require.ErrorIs(t, err, context.Canceled)
	var i pool.Info
	torn := func(name string) bool {
		require.Eventually(t, func() bool { // its agent may not have closed it yet
			i, err = h.Stat(t.Context(), name)
			require.NoError(t, err)
			return i.Owner == 0
		}, patience, time.Millisecond)
		return i.Torn
	}
	require.False(t, torn("first"))
	require.True(t, torn("second"))
	require.True(t, i.Dirty)

	want := restored(t, s.Part.Path)
	lose := func() { require.NoError(t, os.Remove(s.Part.Path)) }
	lose()
	s.Remotes[0], s.Remotes[1] = s.Remotes[1], s.Remotes[0] // the torn one comes first
	_, err = s.Restore(t.Context(), nil, "", nil)
	require.NoError(t, err)
	require.Equal(t, want, restored(t, s.Part.Path))
	lose()
	whole := s.Remotes
	s.Remotes = whole[:1]
	_, err = s.Restore(t.Context(), nil, "", nil)
	require.ErrorIs(t, err, pool.ErrTorn)
	require.NoFileExists(t, s.Part.Path)
	require.True(t, torn("second"), "a Restore that is refused leaves it so")
	_, err = s.Restore(t.Context(), nil, whole[0].String(), nil)
	require.NoError(t, err)
	lose()

	// A host that does not answer is not a replica that is missing.
	s.Remotes = append(whole, pool.RemotePool{Host: "missing@host", Name: "third"})
	_, err = s.Restore(t.Context(), nil, "", nil)
	require.ErrorIs(t, err, pool.ErrAgent)
	require.NoFileExists(t, s.Part.Path)
	s.Remotes = whole
	_, err = s.Restore(t.Context(), nil, "", nil)
	require.NoError(t, err)
	m, err = s.Open(t.Context(), nil, pool.MemoryOptions{})
	require.NoError(t, err)
	require.NoError(t, m.Close(t.Context()))
	require.False(t, torn("second"), "Open has brought it up")
	require.False(t, i.Dirty)
}

// TestHostTearsPoolThatFails: a pool by way of a host, one of whose Persists has failed, is torn before that is answered, and the others go on.
func TestHostTearsPoolThatFails(t *testing.T) {
	ctx := t.Context()
	c, _, h, _, m := hostSet(t)
	cl := c.Connect(client.Config{})
	i, err := h.Stat(ctx, "first")
	require.NoError(t, err)
	require.NoError(t, space.Delete(ctx, cl, i.Space)) // the pool cannot be written any more, and its name can
	copy(m.Bytes()[100:], "fails")
	require.ErrorIs(t, m.Persist(100, 5), pool.ErrBehind)
	i, _ = pool.Stat(ctx, cl, "first") // its space is not there
	require.True(t, i.Torn)
	copy(m.Bytes()[200:], "later")
	require.ErrorIs(t, m.Persist(200, 5), pool.ErrBehind)
	want := string(m.Bytes())
	require.NoError(t, m.Close(ctx))
	i, err = h.Stat(ctx, "second")
	require.NoError(t, err)
	require.Equal(t, []bool{false, false}, []bool{i.Torn, i.Dirty})
	i, _ = pool.Stat(ctx, cl, "first")
	require.Equal(t, []bool{true, true}, []bool{i.Torn, i.Dirty})
	back := make([]byte, mib)
	p, err := h.Open(ctx, "second", back, nil)
	require.NoError(t, err)
	require.NoError(t, p.Read(back, 0))
	require.Equal(t, want, string(back))
	require.NoError(t, p.Close(ctx))
}

// TestHostHasUnfinishedPool: a pool that was not made whole is no source of Restore, and Open refuses it.
func TestHostHasUnfinishedPool(t *testing.T) {
	ctx := t.Context()
	c, s, h, _, m := hostSet(t)
	require.NoError(t, m.Close(ctx))
	names := c.Connect(client.Config{}).Names()
	e, err := names.Lookup(ctx, "first")
	require.NoError(t, err)
	e.Notes["pool"] = strings.ReplaceAll(e.Notes["pool"], pool.Ready, pool.Making)
	_, err = names.Change(ctx, e)
	require.NoError(t, err)
	_, err = s.Open(ctx, nil, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrUnfinished)
	_, err = h.Check(ctx, "first", make([]byte, mib), nil)
	require.ErrorIs(t, err, pool.ErrUnfinished)
	want := restored(t, s.Part.Path)
	require.NoError(t, os.Remove(s.Part.Path))
	_, err = s.Restore(ctx, nil, s.Remotes[0].String(), nil)
	require.ErrorIs(t, err, pool.ErrUnfinished)
	_, err = s.Restore(ctx, nil, "", nil)
	require.NoError(t, err)
	require.Equal(t, want, restored(t, s.Part.Path))
	require.NoError(t, s.Remove(ctx, nil))
	_, err = h.Stat(ctx, "first")
	require.ErrorIs(t, err, client.ErrNoName)
}

// TestSetWithoutClient: a set with a pool of the client's cluster wants a client, and changes nothing without one.
func TestSetWithoutClient(t *testing.T) {
	ctx := t.Context()
	s := newSet(t, "ledger", 0)
	_, created := s.Create(ctx, nil, options(false), pool.MemoryOptions{})
	_, opened := s.Open(ctx, nil, pool.MemoryOptions{})
	_, synced := s.Sync(ctx, nil, options(false), nil)
	_, restored := s.Restore(ctx, nil, "", nil)
	_, checked := s.Check(ctx, nil, nil)
	for i, err := range []error{created, opened, synced, restored, checked, s.Remove(ctx, nil)} {
		require.ErrorIs(t, err, client.ErrArgument, "%d", i)
		require.ErrorContains(t, err, "there is no client", "%d", i)
	}
	require.NoFileExists(t, s.Part.Path)
}

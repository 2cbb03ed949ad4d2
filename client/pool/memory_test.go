package pool_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// never is a progress that is not called.
func never(t *testing.T) pool.MemoryOptions {
	return pool.MemoryOptions{Progress: func(uint64) { t.Error("replicas are compared") }}
}

// TestSet: a memory with a mirror and two pools is made, used, lost in part, and removed.
func TestSet(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	s := newSet(t, "ledger", 1)
	s.Pools = append(s.Pools, "second")
	m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	require.Equal(t, make([]byte, mib), m.Bytes())
	copy(m.Bytes()[1000:], "what is persisted")
	require.NoError(t, m.Persist(1000, 17))
	require.NoError(t, m.Persist(mib, 0))
	for _, r := range [][2]uint64{{mib, 1}, {mib + 1, 0}, {8, 1<<64 - 4}} {
		require.ErrorIs(t, m.Persist(r[0], r[1]), pool.ErrRange)
	}
	require.NoError(t, m.Drain(ctx))
	require.False(t, m.Dirty())
	rep, err := s.Check(ctx, c.Connect(client.Config{ReadOnly: true}), nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: 3 * mib}, rep)
	m.Bytes()[0] = 1 // and nothing persists it
	rep, err = s.Check(ctx, cl, nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: 3 * mib, Differ: 3 * pool.PartBytes}, rep)
	_, err = s.Open(ctx, cl, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrOpen)
	require.ErrorIs(t, s.Remove(ctx, cl), pool.ErrOpen)
	rep, err = m.Sync(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: 3 * mib, Differ: 3 * pool.PartBytes}, rep)
	require.True(t, s.Info()[0].Dirty)
	require.NoError(t, m.Close(ctx))
	require.NoError(t, m.Close(ctx))
	require.ErrorIs(t, m.Persist(0, 1), pool.ErrClosed)
	require.ErrorIs(t, m.Drain(ctx), pool.ErrClosed)
	_, err = m.Sync(ctx, nil)
	require.ErrorIs(t, err, pool.ErrClosed)
	for _, i := range s.Info() {
		require.Equal(t, pool.PartInfo{Path: i.Path, Bytes: mib, State: pool.Ready, Durable: i.Durable, Problem: i.Problem}, i)
	}

	// It was closed in order: nothing is compared.
	m, err = s.Open(ctx, cl, never(t))
	require.NoError(t, err)
	require.Equal(t, "what is persisted", string(m.Bytes()[1000:1017]))
	require.NoError(t, m.Close(ctx))

	// Each replica is lost, and made again from the local part.
	require.NoError(t, os.Remove(s.Mirrors[0].Path))
	require.NoError(t, pool.Remove(ctx, cl, "second"))
	_, err = s.Open(ctx, cl, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrNoPart)
	rep, err = s.Sync(ctx, cl, options(false), nil)
	require.NoError(t, err)
	require.Equal(t, pool.Report{Bytes: 3 * mib, Differ: 2 * pool.PartBytes}, rep)
	rep, err = s.Check(ctx, cl, nil)
	require.NoError(t, err)
	require.True(t, rep.Same())

	// The local part is lost, and made again from each of them.
	want := restored(t, s.Part.Path)
	for _, from := range []string{"", s.Mirrors[0].Path, "ledger", "second"} {
		_, err = s.Restore(ctx, cl, from, nil)
		require.ErrorIs(t, err, os.ErrExist)
		require.NoError(t, os.Remove(s.Part.Path))
		_, err = s.Restore(ctx, cl, from, nil)
		require.NoError(t, err, "from %q", from)
		require.Equal(t, want, restored(t, s.Part.Path))
		m, err = s.Open(ctx, cl, pool.MemoryOptions{})
		require.NoError(t, err)
		require.NoError(t, m.Close(ctx))
	}
	require.NoError(t, os.Remove(s.Part.Path))
	_, err = s.Restore(ctx, cl, "another", nil)
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorIs(t, s.Remove(ctx, cl), pool.ErrNoPart)
	_, err = s.Restore(ctx, cl, "", nil)
	require.NoError(t, err)
	require.NoError(t, s.Remove(ctx, cl))
	spaces, err := space.List(ctx, cl)
	require.NoError(t, err)
	require.Empty(t, spaces)
	left, err := os.ReadDir(filepath.Dir(s.Part.Path))
	require.NoError(t, err)
	require.Len(t, left, 1, "the poolset file")
}

// TestRefusedReplicas: what is not of the set is not opened, and nothing is changed by that.
func TestRefusedReplicas(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	s, other := newSet(t, "ledger", 1), newSet(t, "other", 0)
	for _, x := range []*pool.Set{s, other} {
		m, err := x.Create(ctx, cl, options(false), pool.MemoryOptions{})
		require.NoError(t, err)
		copy(m.Bytes(), x.Path)
		require.NoError(t, m.Persist(0, 100))
		require.NoError(t, m.Close(ctx))
	}
	plain, err := pool.Create(ctx, cl, "plain", make([]byte, mib), options(false))
	require.NoError(t, err)
	require.NoError(t, plain.Close(ctx))
	elsewhere := testcluster.New(t, testcluster.Options{Nodes: 2}).Connect(client.Config{})
	same := *s
	same.Part.Path, same.Mirrors = filepath.Join(t.TempDir(), "memory"), nil
	m, err := same.Create(ctx, elsewhere, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	require.NoError(t, m.Close(ctx))

	open := func(cl *client.Client, change func(*pool.Set), o pool.MemoryOptions) error {
		x := *s
		x.Mirrors, x.Pools = append([]pool.Part(nil), s.Mirrors...), append([]string(nil), s.Pools...)
		change(&x)
		_, err := x.Open(ctx, cl, o)
		return err
	}
	as := func(*pool.Set) {}
	wrong := attr("WRONG")
	damaged, foreign, short := *s, *s, *s
	damaged.Part.Path = filepath.Join(filepath.Dir(s.Part.Path), "damaged")
	require.NoError(t, os.WriteFile(damaged.Part.Path, []byte(strings.Repeat("no header", setBytes)[:setBytes]), 0o600))
	foreign.Part.Path = other.Part.Path
	short.Part.Bytes -= pool.HeaderBytes
	short.Mirrors = []pool.Part{{Path: s.Mirrors[0].Path, Bytes: short.Part.Bytes}}
	uneven := *s
	uneven.Part.Bytes -= pool.HeaderBytes
	link := s.Part.Path + ".link"
	require.NoError(t, os.Link(s.Part.Path, link))
	for name, x := range map[string]struct{ is, err error }{
		"another cluster's pool":    {pool.ErrMismatch, open(elsewhere, as, pool.MemoryOptions{})},
		"another set's pool":        {pool.ErrMismatch, open(cl, func(x *pool.Set) { x.Pools[0] = "other" }, pool.MemoryOptions{})},
		"a pool of no set":          {pool.ErrMismatch, open(cl, func(x *pool.Set) { x.Pools[0] = "plain" }, pool.MemoryOptions{})},
		"no such pool":              {client.ErrNoName, open(cl, func(x *pool.Set) { x.Pools[0] = "none" }, pool.MemoryOptions{})},
		"other attributes":          {pool.ErrMismatch, open(cl, as, pool.MemoryOptions{Attr: &wrong})},
		"another size":              {pool.ErrMismatch, open(cl, func(x *pool.Set) { *x = short }, pool.MemoryOptions{})},
		"a mirror of another size":  {client.ErrArgument, open(cl, func(x *pool.Set) { *x = uneven }, pool.MemoryOptions{})},
		"a mirror of Restore's":     {client.ErrArgument, open(cl, func(x *pool.Set) { x.Mirrors[0].Path = x.Part.Path + pool.Restoring }, pool.MemoryOptions{})},
		"no pool":                   {client.ErrArgument, open(cl, func(x *pool.Set) { x.Pools = nil }, pool.MemoryOptions{})},
		"another set's part":        {pool.ErrMismatch, open(cl, func(x *pool.Set) { x.Part = other.Part }, pool.MemoryOptions{})},
		"another set's mirror":      {pool.ErrMismatch, open(cl, func(x *pool.Set) { x.Mirrors[0] = other.Part }, pool.MemoryOptions{})},
		"a damaged header":          {pool.ErrNotPart, open(cl, func(x *pool.Set) { x.Part = damaged.Part }, pool.MemoryOptions{})},
		"the part as its mirror":    {pool.ErrOpen, open(cl, func(x *pool.Set) { x.Mirrors[0].Path = link }, pool.MemoryOptions{})},
		"a folder":                  {nil, open(cl, func(x *pool.Set) { x.Part.Path = filepath.Dir(x.Part.Path) }, pool.MemoryOptions{})},
		"a queue that is too short": {client.ErrArgument, open(cl, as, pool.MemoryOptions{Queue: pool.MinQueue - 1})},
		"a queue that is too long":  {client.ErrArgument, open(cl, as, pool.MemoryOptions{Queue: pool.MaxQueue + 1})},
		"a client that reads":       {client.ErrReadOnly, open(c.Connect(client.Config{ReadOnly: true}), as, pool.MemoryOptions{})},
		"made already":              {os.ErrExist, func() error { _, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{}); return err }()},
		"removed by another":        {pool.ErrMismatch, func() error { x := *s; x.Pools = other.Pools; return x.Remove(ctx, cl) }()},
	} {
		if x.is == nil {
			require.Error(t, x.err, name)
		} else {
			require.ErrorIs(t, x.err, x.is, name)
		}
	}
	// A pool that is there keeps a set of its name from being made, and nothing is left of that.
	again := *other
	again.Part.Path += "2"
	_, err = again.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.ErrorIs(t, err, client.ErrNameExists)
	require.NoFileExists(t, again.Part.Path)

	right := attr("OBJ")
	o := never(t)
	o.Attr = &right
	for _, x := range []*pool.Set{s, other} {
		m, err = x.Open(ctx, cl, o)
		require.NoError(t, err, "nothing has changed")
		require.True(t, strings.HasPrefix(string(m.Bytes()), x.Path))
		require.NoError(t, m.Close(ctx))
	}
}

// TestPartOfBefore: a local part that is not the last owner's does not take away what that has persisted.
func TestPartOfBefore(t *testing.T) { nearAndFar(t, testPartOfBefore) }

func testPartOfBefore(t *testing.T, far bool) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	s := newSet(t, "ledger", 0)
	if far {
		byHost(t, c, s)
	}
	m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	require.NoError(t, m.Close(ctx))
	before, err := os.ReadFile(s.Part.Path)
	require.NoError(t, err)
	m, err = s.Open(ctx, cl, never(t))
	require.NoError(t, err)
	copy(m.Bytes(), "persisted")
	require.NoError(t, m.Persist(0, 9))
	require.NoError(t, m.Close(ctx))

	back := func() {
		require.NoError(t, os.Remove(s.Part.Path))
		require.NoError(t, os.WriteFile(s.Part.Path, before, 0o600))
	}
	now, err := os.ReadFile(s.Part.Path)
	require.NoError(t, err)
	back()
	for range 2 { // the refused Open has not made itself the last owner
		_, err = s.Open(ctx, cl, pool.MemoryOptions{})
		require.ErrorIs(t, err, pool.ErrMismatch)
		require.ErrorContains(t, err, "move the part away and restore the set")
	}
	require.NoError(t, os.Remove(s.Part.Path))
	_, err = s.Restore(ctx, cl, "", nil)
	require.NoError(t, err)
	require.Equal(t, now[pool.HeaderBytes:], restored(t, s.Part.Path))

	// A program that has the pool as a plain pool, and changes nothing, does not matter; one that does is noticed.
	memory := make([]byte, mib)
	for _, change := range []bool{false, true} {
		p, err := pool.Open(ctx, cl, "ledger", memory, nil)
		require.NoError(t, err)
		_, err = p.Restore(ctx, nil)
		require.NoError(t, err)
		if change {
			memory[5]++
			require.NoError(t, p.Persist(5, 1))
		}
		require.NoError(t, p.Close(ctx))
		m, err = s.Open(ctx, cl, pool.MemoryOptions{})
		if !change {
			require.NoError(t, err)
			require.NoError(t, m.Close(ctx))
			continue
		}
		require.ErrorIs(t, err, pool.ErrMismatch)
	}
	_, err = s.Sync(ctx, cl, pool.Options{}, nil)
	require.NoError(t, err)
	m, err = s.Open(ctx, cl, never(t))
	require.NoError(t, err)
	require.Equal(t, "persisted", string(m.Bytes()[:9]))
	require.NoError(t, m.Close(ctx))
}

// TestCopyOfAnOpenPart: a copy of a local part that was made while a program had it open does not take away what that has persisted later, under the same token.
func TestCopyOfAnOpenPart(t *testing.T) { nearAndFar(t, testCopyOfAnOpenPart) }

func testCopyOfAnOpenPart(t *testing.T, far bool) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	s := newSet(t, "ledger", 0)
	if far {
		byHost(t, c, s)
	}
	m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	copied, err := os.ReadFile(s.Part.Path)
	require.NoError(t, err)
	copy(m.Bytes(), "later")
	require.NoError(t, m.Persist(0, 5))
	require.NoError(t, m.Close(ctx))
	require.NoError(t, os.Remove(s.Part.Path))
	require.NoError(t, os.WriteFile(s.Part.Path, copied, 0o600))
	_, err = s.Open(ctx, cl, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrMismatch)
	require.ErrorContains(t, err, "it is a copy")
	require.NoError(t, os.Remove(s.Part.Path))
	_, err = s.Restore(ctx, cl, "", nil)
	require.NoError(t, err)
	require.Equal(t, "later", string(restored(t, s.Part.Path)[:5]))
}

// TestCreateWithoutRoom: a part for which there is no room is an error, and leaves nothing.
func TestCreateWithoutRoom(t *testing.T) {
	ctx := t.Context()
	cl := testcluster.New(t, testcluster.Options{Nodes: 2}).Connect(client.Config{})
	s := newSet(t, "ledger", 0)
	s.Part.Bytes = pool.MaxPartBytes
	_, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.ErrorIs(t, err, host.ErrNoSpace)
	require.NoFileExists(t, s.Part.Path)
	_, err = pool.Stat(ctx, cl, "ledger")
	require.ErrorIs(t, err, client.ErrNoName)
}

// TestPowerIsLost: what Persist has answered is in the local part when the host loses its power, and Open brings it to the pool.
func TestPowerIsLost(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	ledgers, err := pmem.UseLedgers(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ledgers.Close()) })
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	cl := c.Connect(client.Config{})
	s := &pool.Set{Part: pool.Part{Path: filepath.Join(dir, "memory"), Bytes: setBytes}, Pools: []string{"ledger"}}
	o := options(false)
	o.Replicas = 1
	m, err := s.Create(ctx, cl, o, pool.MemoryOptions{})
	require.NoError(t, err)
	if !m.Durable() {
		t.Skip("temporary files are on a file system that keeps nothing: set TMPDIR")
	}
	for sure := uint64(0); sure < 40; {
		for range 4 {
			sure++
			persistNumber(m.Bytes(), sure)
			off, n := rangeOf(sure)
			require.NoError(t, m.Persist(8*off, 8*n))
		}
		persistNumber(m.Bytes(), sure+1) // and nothing persists it
		survives := []func() bool{pmem.None, pmem.All, pmem.Half(sure)}[sure/4%3]
		cut := ledgers.Cut(survives)
		require.NoError(t, m.Close(ctx))
		ledgers.Restore(cut)
		m, err = s.Open(ctx, cl, pool.MemoryOptions{})
		require.NoError(t, err)
		matches(t, m.Bytes(), sure)
		rep, err := s.Check(ctx, cl, nil)
		require.NoError(t, err)
		require.True(t, rep.Same(), "%+v", rep)
	}
	require.NoError(t, m.Close(ctx))
}

// TestSeenBehindOpen: what a program that was killed has stored and not persisted, and the next one sees, survives a loss of power.
func TestSeenBehindOpen(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	ledgers, err := pmem.UseLedgers(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ledgers.Close()) })
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	s := &pool.Set{Part: pool.Part{Path: filepath.Join(dir, "memory"), Bytes: setBytes}, Pools: []string{"ledger"}}
	a, b := c.Connect(client.Config{}), c.Connect(client.Config{})
	m, err := s.Create(ctx, a, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	if !m.Durable() {
		t.Skip("temporary files are on a file system that keeps nothing: set TMPDIR")
	}
	copy(m.Bytes()[500:], "seen")
	bound, session, err := a.Bind(ctx)
	require.NoError(t, err)
	end(t, c, bound, session)
	require.Error(t, m.Close(ctx))
	require.NoError(t, whenFenced(t, func() (err error) { m, err = s.Open(ctx, b, pool.MemoryOptions{}); return err }))
	require.Equal(t, "seen", string(m.Bytes()[500:504]))
	cut := ledgers.Cut(pmem.None)
	require.NoError(t, m.Close(ctx))
	ledgers.Restore(cut)
	m, err = s.Open(ctx, b, pool.MemoryOptions{})
	require.NoError(t, err)
	require.Equal(t, "seen", string(m.Bytes()[500:504]))
	require.NoError(t, m.Close(ctx))
}

// TestBehind: a program whose replicas fail goes on with its local part, knows, and brings them up again.
func TestBehind(t *testing.T) {
	for _, queue := range []int{0, pool.MinQueue} {
		t.Run(fmt.Sprintf("queue=%d", queue), func(t *testing.T) {
			ctx := t.Context()
			c := testcluster.New(t, testcluster.Options{Nodes: 2})
			cl := c.Connect(client.Config{})
			s := newSet(t, "ledger", 1)
			m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{Queue: queue})
			require.NoError(t, err)
			bound, session, err := cl.Bind(ctx)
			require.NoError(t, err)
			end(t, c, bound, session)
			copy(m.Bytes(), "more")
			if err := m.Persist(0, 4); queue == 0 {
				require.ErrorIs(t, err, pool.ErrBehind)
				require.ErrorIs(t, err, client.ErrFenced)
			} else {
				require.NoError(t, err)
				require.ErrorIs(t, m.Drain(ctx), pool.ErrBehind)
				require.ErrorIs(t, m.Persist(0, 4), pool.ErrBehind)
			}
			require.True(t, m.Dirty())
			_, err = m.Sync(ctx, nil)
			require.ErrorIs(t, err, client.ErrFenced)
			require.Error(t, m.Close(ctx), "the pool is not this session's any more")
			require.NoError(t, whenFenced(t, func() (err error) {
				m, err = s.Open(ctx, c.Connect(client.Config{}), pool.MemoryOptions{Queue: queue})
				return err
			}))
			require.Equal(t, "more", string(m.Bytes()[:4]))
			rep, err := s.Check(ctx, c.Connect(client.Config{}), nil)
			require.NoError(t, err)
			require.True(t, rep.Same())
			require.NoError(t, m.Persist(0, 4))
			require.NoError(t, m.Drain(ctx))
			require.NoError(t, m.Close(ctx))
		})
	}
}

// TestOpenThatFails: an Open that ends in its Sync leaves a pool that is told to be torn, and that the next Open knows as its own, although it has not all that the local part has.
func TestOpenThatFails(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	s := newSet(t, "ledger", 0)
	s.Part.Bytes = 3*mib + pool.HeaderBytes
	a := c.Connect(client.Config{})
	m, err := s.Create(t.Context(), a, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	copy(m.Bytes(), "first")
	copy(m.Bytes()[3*mib-4:], "last")
	bound, session, err := a.Bind(t.Context())
	require.NoError(t, err)
	end(t, c, bound, session) // as if the program had died before Persist
	require.Error(t, m.Close(t.Context()))

	b := c.Connect(client.Config{})
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		require.ErrorIs(t, whenFenced(t, func() error {
			_, err := s.Open(ctx, b, pool.MemoryOptions{Progress: func(uint64) { cancel() }}) // behind the first MiB
			return err
		}), context.Canceled)
		i, err := pool.Stat(t.Context(), b, "ledger")
		require.NoError(t, err)
		require.Equal(t, []bool{true, true}, []bool{i.Torn, i.Dirty})
	}
	away := s.Part.Path + ".away"
	require.NoError(t, os.Rename(s.Part.Path, away))
	_, err = s.Restore(t.Context(), b, "", nil)
	require.ErrorIs(t, err, pool.ErrTorn)
	require.NoFileExists(t, s.Part.Path)
	require.NoFileExists(t, s.Part.Path+pool.Restoring)
	_, err = s.Restore(t.Context(), b, "ledger", nil)
	require.NoError(t, err)
	got := restored(t, s.Part.Path)
	require.Equal(t, "first\x00\x00\x00\x00", string(got[:5])+string(got[3*mib-4:]))

	aside := s.Part.Path + ".aside"
	require.NoError(t, os.Rename(s.Part.Path, aside))
	require.NoError(t, os.Rename(away, s.Part.Path))
	m, err = s.Open(t.Context(), b, pool.MemoryOptions{})
	require.NoError(t, err, "it is the last owner's part")
	require.Equal(t, "last", string(m.Bytes()[3*mib-4:]))
	rep, err := s.Check(t.Context(), b, nil)
	require.NoError(t, err)
	require.True(t, rep.Same())
	require.NoError(t, m.Close(t.Context()))
	i, err := pool.Stat(t.Context(), b, "ledger")
	require.NoError(t, err)
	require.Equal(t, []bool{false, false}, []bool{i.Torn, i.Dirty})

	// The part that Restore has made has the token of the Open that had failed. Nobody has persisted under that.
	require.NoError(t, os.Rename(aside, s.Part.Path))
	_, err = s.Open(t.Context(), b, pool.MemoryOptions{})
	require.ErrorIs(t, err, pool.ErrMismatch)
}

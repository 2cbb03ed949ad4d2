package pool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

const (
	mib      = 1 << 20
	size     = 5*mib/2 + 100 // three regions of a MiB, and a last part that is short
	patience = 3 * time.Minute
)

// options of the tests' pools.
func options(durable bool) pool.Options {
	return pool.Options{Attr: attr("OBJ"), Replicas: 2, RegionBytes: mib, Durable: durable}
}

func attr(signature string) (a pool.Attr) {
	copy(a.Signature[:], signature)
	a.Major, a.Incompat, a.UUID[3] = 5, 1<<31, 7
	return a
}

// random is memory of n bytes.
func random(n int) []byte {
	b, r := make([]byte, n), rand.NewChaCha8([32]byte{1})
	r.Read(b)
	return b
}

// end ends the session of a client as an operator does, and waits until the client knows.
func end(t *testing.T, c *testcluster.Cluster, bound context.Context, s client.Session) {
	_, err := c.Control().RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: s.Number, Reason: "of a test"}))
	require.NoError(t, err)
	select {
	case <-bound.Done():
	case <-time.After(patience):
		t.Fatal("the client does not learn that its session has ended")
	}
}

// TestPool: a program's memory is kept, found by another one, and removed.
func TestPool(t *testing.T) {
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%v", durable), func(t *testing.T) {
			ctx := t.Context()
			c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: durable})
			cl := c.Connect(client.Config{Transport: client.TransportTCP})
			local := random(size)
			p, err := pool.Create(ctx, cl, "ledger", local, options(durable))
			require.NoError(t, err)
			require.True(t, p.Dirty())
			var seen []uint64
			rep, err := p.Sync(ctx, func(done uint64) { seen = append(seen, done) })
			require.NoError(t, err)
			require.Equal(t, pool.Report{Bytes: size, Differ: size}, rep)
			require.Equal(t, []uint64{mib, 2 * mib, 5 * mib / 2, size}, seen)
			require.False(t, p.Dirty())

			// A range over the border of regions, the last byte, and nothing.
			copy(local[mib-3:], "over the border")
			local[size-1]++
			require.NoError(t, p.Persist(mib-3, 15))
			require.NoError(t, p.Persist(size-1, 1))
			require.NoError(t, p.Persist(size, 0))
			back := make([]byte, size)
			require.NoError(t, p.Read(back, 0))
			require.Equal(t, local, back)
			if durable {
				require.NoError(t, p.DeepPersist(0, size))
			} else {
				require.ErrorIs(t, p.DeepPersist(0, size), pool.ErrNotDurable)
			}
			require.NoError(t, p.SetAttr(attr("OTHER")))
			require.Equal(t, attr("OTHER"), p.Attr())
			require.NoError(t, p.Close(ctx))
			require.NoError(t, p.Close(ctx))
			require.ErrorIs(t, p.Persist(0, 1), pool.ErrClosed)
			require.ErrorIs(t, p.Read(back, 0), pool.ErrClosed)
			require.ErrorIs(t, p.SetAttr(attr("")), pool.ErrClosed)
			_, err = p.Sync(ctx, nil)
			require.ErrorIs(t, err, pool.ErrClosed)

			// Another program, with empty memory.
			other := c.Connect(client.Config{Transport: client.TransportSHM})
			want := attr("OTHER")
			empty := make([]byte, size)
			rep, err = pool.Check(ctx, other, "ledger", empty, nil)
			require.NoError(t, err)
			require.Equal(t, pool.Report{Bytes: size, Differ: size}, rep)
			q, err := pool.Open(ctx, other, "ledger", empty, &want)
			require.NoError(t, err)
			require.False(t, q.Dirty())
			rep, err = q.Restore(ctx, nil)
			require.NoError(t, err)
			require.EqualValues(t, size, rep.Differ)
			require.Equal(t, local, empty)
			rep, err = pool.Check(ctx, cl, "ledger", local, nil)
			require.NoError(t, err)
			require.True(t, rep.Same())

			// A Sync that finds everything alike sends nothing, and flushes: a former owner may have died before its flush.
			flushes := func() (n uint64) {
				for _, k := range other.Stats().Kinds {
					n += k.Verbs["FLUSH"]
				}
				return n
			}
			before := flushes()
			rep, err = q.Sync(ctx, nil)
			require.NoError(t, err)
			require.True(t, rep.Same())
			if durable {
				require.EqualValues(t, 3*2, flushes()-before, "regions and replicas")
			} else {
				require.Equal(t, before, flushes())
			}

			// Only the part that differs is sent.
			empty[pool.PartBytes+5]++
			rep, err = q.Sync(ctx, nil)
			require.NoError(t, err)
			require.Equal(t, pool.Report{Bytes: size, Differ: pool.PartBytes}, rep)

			list, err := pool.List(ctx, cl)
			require.NoError(t, err)
			require.Len(t, list, 1)
			require.Equal(t, pool.Info{Name: "ledger", State: pool.Ready, Bytes: size, Replicas: 2, Durable: durable, Dirty: true, Owner: other.SessionID(), Space: list[0].Space, Attr: want}, list[0])
			require.ErrorIs(t, pool.Remove(ctx, cl, "ledger"), pool.ErrOpen)
			require.NoError(t, q.Close(ctx))
			info, err := pool.Stat(ctx, cl, "ledger")
			require.NoError(t, err)
			require.False(t, info.Dirty)
			require.NoError(t, pool.Remove(ctx, cl, "ledger"))
			require.ErrorIs(t, pool.Remove(ctx, cl, "ledger"), client.ErrNoName)
			spaces, err := space.List(ctx, cl)
			require.NoError(t, err)
			require.Empty(t, spaces)
		})
	}
}

// TestRefused: bad input changes nothing.
func TestRefused(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	local := make([]byte, size)
	p, err := pool.Create(ctx, cl, "p", local, options(false))
	require.NoError(t, err)
	for _, r := range [][2]uint64{{size, 1}, {size + 1, 0}, {0, size + 1}, {1 << 63, 1 << 63}, {8, 1<<64 - 4}} {
		require.ErrorIs(t, p.Persist(r[0], r[1]), pool.ErrRange, "%d", r)
		require.ErrorIs(t, p.DeepPersist(r[0], r[1]), client.ErrArgument, "%d", r)
	}
	require.ErrorIs(t, p.Read(make([]byte, 2), size-1), pool.ErrRange)

	create := func(name string, local []byte, o pool.Options) error {
		_, err := pool.Create(ctx, cl, name, local, o)
		return err
	}
	require.ErrorIs(t, create("p", local, options(false)), client.ErrNameExists)
	require.ErrorIs(t, create("", local, options(false)), client.ErrBadName)
	require.ErrorIs(t, create(strings.Repeat("n", pool.MaxNameBytes+1), local, options(false)), client.ErrArgument)
	require.ErrorIs(t, create("q", nil, options(false)), client.ErrArgument)
	odd := options(false)
	odd.RegionBytes = mib + 1
	require.ErrorIs(t, create("q", local, odd), client.ErrArgument)
	many := options(false)
	many.Replicas = 3
	require.ErrorIs(t, create("q", local, many), client.ErrNoSpace)
	ref, err := cl.Alloc(ctx, []byte("an object"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = cl.Names().Create(ctx, "object", "object", ref)
	require.NoError(t, err)
	_, err = cl.Names().Create(ctx, "damaged", "pool", ref)
	require.NoError(t, err)

	open := func(name string, local []byte, a *pool.Attr) error {
		_, err := pool.Open(ctx, cl, name, local, a)
		return err
	}
	require.NoError(t, p.Close(ctx))
	wrong := attr("WRONG")
	require.ErrorIs(t, open("p", local[:size-1], nil), pool.ErrMismatch)
	require.ErrorIs(t, open("p", local, &wrong), pool.ErrMismatch)
	require.ErrorIs(t, open("q", local, nil), client.ErrNoName)
	for _, name := range []string{"object", "damaged"} {
		require.ErrorIs(t, open(name, local, nil), pool.ErrNotPool)
		require.ErrorIs(t, pool.Remove(ctx, cl, name), pool.ErrNotPool)
		_, err = pool.Check(ctx, cl, name, local, nil)
		require.ErrorIs(t, err, pool.ErrNotPool)
	}
	_, err = pool.Check(ctx, cl, "p", local[1:], nil)
	require.ErrorIs(t, err, pool.ErrMismatch)

	ro := c.Connect(client.Config{ReadOnly: true})
	_, err = pool.Open(ctx, ro, "p", local, nil)
	require.ErrorIs(t, err, client.ErrReadOnly)
	_, err = pool.Create(ctx, ro, "q", local, pool.Options{})
	require.ErrorIs(t, err, client.ErrReadOnly)
	require.ErrorIs(t, pool.Remove(ctx, ro, "p"), client.ErrReadOnly)
	rep, err := pool.Check(ctx, ro, "p", local, nil)
	require.NoError(t, err)
	require.True(t, rep.Same(), "an empty pool and empty memory: %v", rep)
	require.NoError(t, open("p", local, nil), "what was refused has left the pool as it was")

	spaces, err := space.List(ctx, cl)
	require.NoError(t, err)
	require.Len(t, spaces, 1, "a pool that could not be made has left nothing")
}

// TestOneOwner: nobody opens a pool whose owner lives; of one whose session has ended no byte arrives behind the next Open.
func TestOneOwner(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	a, b := c.Connect(client.Config{}), c.Connect(client.Config{})
	local := random(size)
	bound, s, err := a.Bind(ctx)
	require.NoError(t, err)
	p, err := pool.Create(ctx, a, "p", local, options(false))
	require.NoError(t, err)
	_, err = p.Sync(ctx, nil)
	require.NoError(t, err)
	for _, cl := range []*client.Client{a, b} {
		_, err = pool.Open(ctx, cl, "p", make([]byte, size), nil)
		require.ErrorIs(t, err, pool.ErrOpen)
	}

	var acknowledged atomic.Uint64
	var wg sync.WaitGroup
	wg.Go(func() { // an owner that goes on until it is told
		for i := uint64(0); ; i++ {
			local[0], local[mib] = byte(i), byte(i)
			if err := p.Persist(0, mib+1); err != nil {
				require.True(t, errors.Is(err, client.ErrFenced) || errors.Is(err, client.ErrUnknown), "%v", err)
				if errors.Is(err, client.ErrFenced) {
					return
				}
				continue
			}
			acknowledged.Store(i)
		}
	})
	require.Eventually(t, func() bool { return acknowledged.Load() > 3 }, patience, time.Millisecond)
	end(t, c, bound, s)
	var q *pool.Pool
	require.Eventually(t, func() bool {
		q, err = pool.Open(ctx, b, "p", make([]byte, size), nil)
		if err != nil {
			require.ErrorIs(t, err, pool.ErrOpen)
		}
		return err == nil
	}, patience, time.Millisecond)
	before := make([]byte, mib+1)
	require.NoError(t, q.Read(before, 0))
	wg.Wait()
	require.ErrorIs(t, p.Persist(0, 1), client.ErrFenced)
	require.ErrorIs(t, p.SetAttr(attr("late")), client.ErrFenced)
	require.Error(t, p.Close(ctx), "it is not this session's any more")
	_, err = pool.Open(ctx, a, "p", local, nil)
	require.ErrorIs(t, err, pool.ErrOpen, "under the client's next session")

	require.True(t, q.Dirty())
	after := make([]byte, mib+1)
	require.NoError(t, q.Read(after, 0))
	require.Equal(t, before, after)
	_, err = q.Restore(ctx, nil)
	require.NoError(t, err)
	require.False(t, q.Dirty())
	require.NoError(t, q.Close(ctx))
	p, err = pool.Open(ctx, a, "p", local, nil)
	require.NoError(t, err)
	require.False(t, p.Dirty())
	require.NoError(t, p.Close(ctx))

	// A former owner whose number this session has now is fenced: the controllers do not certify the fence of a caller's own number.
	e, err := b.Names().Lookup(ctx, "p")
	require.NoError(t, err)
	e.Notes["pool"] = strings.ReplaceAll(e.Notes["pool"], `"owner":{"number":0,"serial":0}`, fmt.Sprintf(`"owner":{"number":%d,"serial":%d}`, b.SessionID(), s.Serial))
	_, err = b.Names().Change(ctx, e)
	require.NoError(t, err)
	p, err = pool.Open(ctx, b, "p", local, nil)
	require.NoError(t, err)
	require.True(t, p.Dirty())
	require.NoError(t, p.Close(ctx))
}

// TestReplicasThatDiffer: what an owner that died has left at one replica only is made alike by Sync and by Restore, so that a failover shows nothing else.
func TestReplicasThatDiffer(t *testing.T) {
	for _, how := range []string{"sync", "restore", "reconcile"} {
		t.Run(how, func(t *testing.T) {
			restore := how != "sync"
			ctx := t.Context()
			c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: true})
			cl := c.Connect(client.Config{})
			local := random(size)
			marks := []string{"what is persisted here", "what is persisted there"}
			copy(local[100:], marks[0])
			copy(local[2*mib:], marks[1])
			p, err := pool.Create(ctx, cl, "p", local, options(true))
			require.NoError(t, err)
			_, err = p.Sync(ctx, nil)
			require.NoError(t, err)
			// The first at one node, the second at the other: at a primary and at a backup, whichever these are, or both at one of the two kinds.
			for i, mark := range marks {
				spoil(t, c.Dir(i), mark)
			}
			if restore {
				copy(local[100:], make([]byte, len(marks[0])))
				copy(local[2*mib:], make([]byte, len(marks[1])))
			}
			rep, err := pool.Check(ctx, cl, "p", local, nil)
			require.NoError(t, err)
			require.EqualValues(t, 2*pool.PartBytes, rep.Unalike)
			require.False(t, rep.Same())
			switch how {
			case "restore":
				_, err = p.Restore(ctx, nil)
			case "sync":
				_, err = p.Sync(ctx, nil)
			default:
				require.NoError(t, p.Close(ctx))
				reconcile(t, c, cl, local, marks)
				p, err = pool.Open(ctx, cl, "p", local, nil)
			}
			require.NoError(t, err)
			rep, err = pool.Check(ctx, cl, "p", local, nil)
			require.NoError(t, err)
			require.True(t, rep.Same(), "%+v", rep)
			want := bytes.Clone(local)
			require.NoError(t, c.Nodes[0].Close())
			got := make([]byte, size)
			require.Eventually(t, func() bool { return p.Read(got, 0) == nil }, patience, 10*time.Millisecond)
			require.Equal(t, want, got)
		})
	}
}

// reconcile makes the replicas of a pool alike without its memory, by an agent, and reads it into the memory. What was there at the primary counts.
func reconcile(t *testing.T, c *testcluster.Cluster, cl *client.Client, local []byte, marks []string) {
	ctx := t.Context()
	h, _ := hostOf(t, c)
	p, err := h.OpenBare(ctx, "p")
	require.NoError(t, err)
	rep, err := p.Reconcile(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 2*pool.PartBytes, rep.Unalike)
	for _, refused := range []func() error{
		func() error { return p.Persist(0, 1) }, func() error { return p.DeepPersist(0, 1) },
		func() error { _, err := p.Sync(ctx, nil); return err }, func() error { _, err := p.Restore(ctx, nil); return err },
	} {
		require.ErrorIs(t, refused(), client.ErrArgument, "it has no local memory")
	}
	require.NoError(t, p.Close(ctx))
	q, err := pool.OpenBare(ctx, cl, "p")
	require.NoError(t, err)
	require.False(t, q.Dirty())
	rep, err = q.Reconcile(ctx)
	require.NoError(t, err)
	require.Zero(t, rep.Unalike)
	require.EqualValues(t, size, q.Bytes())
	for _, refused := range []func() error{
		func() error { return q.Persist(0, 1) }, func() error { return q.DeepPersist(0, 1) },
		func() error { _, err := q.Sync(ctx, nil); return err }, func() error { _, err := q.Restore(ctx, nil); return err },
	} {
		require.ErrorIs(t, refused(), client.ErrArgument, "it has no local memory")
	}
	require.NoError(t, q.Read(local, 0))
	for i, at := range []int{100, 2 * mib} {
		require.Equal(t, marks[i][1:], string(local[at+1:][:len(marks[i])-1]))
		require.NoError(t, q.Write(local[at:at+1], uint64(at)))
		require.NoError(t, q.DeepWrite(local[at:at+1], uint64(at)))
	}
	require.NoError(t, q.Close(ctx))
}

// spoil changes the first byte of a text in the region files of a node.
func spoil(t *testing.T, dir, text string) {
	paths, err := filepath.Glob(filepath.Join(dir, "region-*"))
	require.NoError(t, err)
	for _, path := range paths {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		if at := bytes.Index(b, []byte(text)); at >= 0 {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			_, err = f.WriteAt([]byte{b[at] ^ 1}, int64(at))
			require.NoError(t, errors.Join(err, f.Close()))
			return
		}
	}
	t.Fatalf("%q is in none of %v", text, paths)
}

// TestFailover: nodes are lost under an owner that persists counters by many goroutines; what was acknowledged is there.
func TestFailover(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 3, ReplaceAfter: 1})
	cl := c.Connect(client.Config{})
	local := make([]byte, size)
	p, err := pool.Create(ctx, cl, "p", local, options(false))
	require.NoError(t, err)
	const writers = 4
	var stop atomic.Bool
	var acknowledged [writers]atomic.Uint32
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			at := w * (size / writers)
			for i := uint32(1); !stop.Load(); i++ {
				for k := range 200 { // over many lines, so that a torn range is seen
					local[at+64*k] = byte(i)
				}
				// The other answers leave the range to the next round of this loop.
				if p.Persist(uint64(at), 200*64) == nil {
					acknowledged[w].Store(i)
				}
			}
		})
	}
	advance := func() {
		from := [writers]uint32{}
		for w := range writers {
			from[w] = acknowledged[w].Load()
		}
		require.Eventually(t, func() bool {
			for w := range writers {
				if acknowledged[w].Load() < from[w]+3 {
					return false
				}
			}
			return true
		}, patience, time.Millisecond)
	}
	advance()
	require.NoError(t, c.Nodes[0].Close())
	advance()
	c.WaitInSync(2)
	require.NoError(t, c.Nodes[1].Close())
	advance()
	stop.Store(true)
	wg.Wait()
	for w := range writers {
		if byte(acknowledged[w].Load()) != local[w*(size/writers)] {
			require.NoError(t, p.Persist(uint64(w*(size/writers)), 200*64))
		}
	}
	got := make([]byte, size)
	require.NoError(t, p.Read(got, 0))
	require.Equal(t, local, got)
}

// TestUnfinished: a pool whose Create or Remove did not return is not opened, and is removed.
func TestUnfinished(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	a, b := c.Connect(client.Config{}), c.Connect(client.Config{})
	local := make([]byte, size)
	p, err := pool.Create(ctx, a, "p", local, options(false))
	require.NoError(t, err)
	require.NoError(t, p.Close(ctx))
	e, err := a.Names().Lookup(ctx, "p")
	require.NoError(t, err)
	for _, state := range []string{pool.Making, pool.Removing} {
		bound, s, err := a.Bind(ctx)
		require.NoError(t, err)
		e.Notes["pool"] = strings.ReplaceAll(e.Notes["pool"], pool.Ready, state)
		e.Notes["pool"] = strings.ReplaceAll(e.Notes["pool"], `"owner":{"number":0,"serial":0}`, fmt.Sprintf(`"owner":{"number":%d,"serial":%d}`, s.Number, s.Serial))
		e, err = a.Names().Change(ctx, e)
		require.NoError(t, err)
		_, err = pool.Open(ctx, b, "p", local, nil)
		require.ErrorIs(t, err, pool.ErrUnfinished)
		_, err = pool.Check(ctx, b, "p", local, nil)
		require.ErrorIs(t, err, pool.ErrUnfinished)
		list, err := pool.List(ctx, b)
		require.NoError(t, err)
		require.Equal(t, state, list[0].State)
		require.ErrorIs(t, pool.Remove(ctx, b, "p"), pool.ErrOpen, "the one that makes or removes it may be at it")
		end(t, c, bound, s)
		require.Eventually(t, func() bool {
			fenced, err := b.Fenced(ctx, s)
			require.NoError(t, err)
			return fenced
		}, patience, time.Millisecond)
		require.NoError(t, pool.Remove(ctx, b, "p"))
		spaces, err := space.List(ctx, b)
		require.NoError(t, err)
		require.Empty(t, spaces)
		p, err = pool.Create(ctx, a, "p", local, options(false))
		require.NoError(t, err)
		require.NoError(t, p.Close(ctx))
		e, err = a.Names().Lookup(ctx, "p")
		require.NoError(t, err)
	}
}

// lined connects a client by a line to the controller.
func lined(t *testing.T, c *testcluster.Cluster) (*client.Client, *testcluster.Line) {
	line := c.Line()
	cl, err := client.Connect(t.Context(), client.Config{Controllers: []string{line.URL}, Replicas: 2, Timeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { cl.Close() })
	return cl, line
}

// TestCloseWithoutAnAnswer: an owner whose Close may have been carried out writes nothing any more, and can find out.
func TestCloseWithoutAnAnswer(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	a, line := lined(t, c)
	b := c.Connect(client.Config{})
	local := make([]byte, size)
	p, err := pool.Create(t.Context(), a, "p", local, options(false))
	require.NoError(t, err)
	for _, carried := range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		line.Break(carried, func(method string) bool { return method == "SwapName" })
		if carried { // the look-up behind the lost answer fails too, and the caller does not wait for it
			line.Lose(func(method string) bool {
				if method == "LookupName" {
					cancel()
				}
				return method == "LookupName"
			})
		}
		err := p.Close(ctx)
		cancel()
		require.Error(t, err)
		require.ErrorIs(t, p.Persist(0, 1), pool.ErrClosed)
		require.ErrorIs(t, p.SetAttr(attr("late")), pool.ErrClosed)
		line.Break(false, nil)
		line.Lose(nil)
		if carried {
			q, err := pool.Open(t.Context(), b, "p", local, nil)
			require.NoError(t, err)
			require.NoError(t, p.Close(t.Context()), "another one has it")
			require.NoError(t, q.Persist(0, 1))
			require.NoError(t, q.Close(t.Context()))
		} else {
			_, err := pool.Open(t.Context(), b, "p", local, nil)
			require.ErrorIs(t, err, pool.ErrOpen)
			require.NoError(t, p.Close(t.Context()))
		}
		p, err = pool.Open(t.Context(), a, "p", local, nil)
		require.NoError(t, err)
	}
}

// TestCallerGivesUp: a Remove, and an Open, whose context ends in the middle do not keep the pool.
func TestCallerGivesUp(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	a, line := lined(t, c)
	b := c.Connect(client.Config{})
	local := make([]byte, size)
	p, err := pool.Create(t.Context(), a, "p", local, options(false))
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))

	stopAt := func(wanted string, call func(ctx context.Context) error) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var once atomic.Bool
		line.Break(true, func(method string) bool {
			if method != wanted || once.Swap(true) {
				return false
			}
			cancel()
			return true
		})
		require.Error(t, call(ctx))
		require.True(t, once.Load())
		line.Break(false, nil)
	}
	stopAt("SwapName", func(ctx context.Context) error { _, err := pool.Open(ctx, a, "p", local, nil); return err })
	p, err = pool.Open(t.Context(), b, "p", local, nil)
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))

	stopAt("DeleteSpace", func(ctx context.Context) error { return pool.Remove(ctx, a, "p") })
	list, err := pool.List(t.Context(), b)
	require.NoError(t, err)
	require.Equal(t, []any{pool.Removing, uint32(0)}, []any{list[0].State, list[0].Owner})
	require.NoError(t, pool.Remove(t.Context(), b, "p"))
	require.ErrorIs(t, pool.Remove(t.Context(), b, "p"), client.ErrNoName)
}

// TestOpenWhoseRequestIsLate: the request of an Open that has returned an error does not take the pool, however late it
// arrives.
func TestOpenWhoseRequestIsLate(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	a, line := lined(t, c)
	b := c.Connect(client.Config{})
	local := make([]byte, size)
	p, err := pool.Create(t.Context(), a, "p", local, options(false))
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))

	held, arrive := line.Late("SwapName")
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-held; cancel() }()
	_, err = pool.Open(ctx, a, "p", local, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, client.ErrUnknown)
	arrive()
	p, err = pool.Open(t.Context(), b, "p", local, nil)
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))
}

// TestListOfDamagedPools: one pool that cannot be described does not hide the others.
func TestListOfDamagedPools(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	for _, name := range []string{"a", "b"} {
		p, err := pool.Create(ctx, cl, name, make([]byte, mib), options(false))
		require.NoError(t, err)
		require.NoError(t, p.Close(ctx))
	}
	i, err := pool.Stat(ctx, cl, "a")
	require.NoError(t, err)
	require.NoError(t, space.Delete(ctx, cl, i.Space))
	e, err := cl.Names().Lookup(ctx, "b")
	require.NoError(t, err)
	_, err = cl.Names().Create(ctx, "c", "pool", e.Ref)
	require.NoError(t, err)
	list, err := pool.List(ctx, cl)
	require.NoError(t, err)
	require.Len(t, list, 3)
	require.Contains(t, list[0].Problem, "no such name")
	require.Empty(t, list[1].Problem)
	require.Contains(t, list[2].Problem, "note is damaged")
	require.NoError(t, pool.Remove(ctx, cl, "a"))
}

// TestContextsThatHaveEnded: no call does anything then.
func TestContextsThatHaveEnded(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	local := make([]byte, mib)
	p, err := pool.Create(t.Context(), cl, "p", local, options(false))
	require.NoError(t, err)
	never := func(uint64) { t.Error("a callback is called") }
	set := newSet(t, "set", 1)
	m, err := set.Create(t.Context(), cl, options(false), pool.MemoryOptions{Queue: pool.MinQueue})
	require.NoError(t, err)
	h, _ := hostOf(t, c)
	far, err := h.Create(t.Context(), "far", local, options(false))
	require.NoError(t, err)
	testcluster.ContextCalls(t, []any{p, set, m, h, far}, map[string]func(context.Context) error{
		"Create": func(ctx context.Context) error {
			_, err := pool.Create(ctx, cl, "another", local, options(false))
			return err
		},
		"OpenBare": func(ctx context.Context) error { _, err := pool.OpenBare(ctx, cl, "p"); return err },
		"Serve":    func(ctx context.Context) error { return pool.Serve(ctx, cl, strings.NewReader(""), io.Discard) },
		"Open":     func(ctx context.Context) error { _, err := pool.Open(ctx, cl, "p", local, nil); return err },
		"Remove":   func(ctx context.Context) error { return pool.Remove(ctx, cl, "p") },
		"Stat":     func(ctx context.Context) error { _, err := pool.Stat(ctx, cl, "p"); return err },
		"List":     func(ctx context.Context) error { _, err := pool.List(ctx, cl); return err },
		"Check":    func(ctx context.Context) error { _, err := pool.Check(ctx, cl, "p", local, never); return err },
	}, never)
	require.NoError(t, p.Persist(0, 1), "it is open")
	require.NoError(t, m.Persist(0, 1), "it is open")
	require.NoError(t, far.Persist(0, 1), "it is open")
	require.NoError(t, far.Close(t.Context()))
	require.NoError(t, m.Close(t.Context()))
}

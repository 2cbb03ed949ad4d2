package testcluster_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// writer changes objects of its own, one after the other, and notes what was acknowledged.
type writer struct {
	name  string
	cl    *client.Client
	refs  []client.Ref
	bytes []int

	mu           sync.Mutex
	off          bool     // power is lost: answers that come now were never given
	acknowledged []uint64 // by object: the newest value whose answer came before the last loss of power
	tried        []uint64 // by object: the newest value that may be there
	writes       int      // acknowledged
	unknown      int      // without an answer
}

// whileDown is what a write may answer that meets a loss of power.
var whileDown = []error{client.ErrUnknown, client.ErrUnreachable, client.ErrLease, client.ErrFenced, client.ErrNoRegion}

// payload of a value: every word of it.
func payload(value uint64, n int) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, value), n/8)
}

func newWriter(t *testing.T, c *testcluster.Cluster, transport string) *writer {
	w := &writer{name: transport, cl: c.Connect(client.Config{Transport: transport, Replicas: 2, Durability: client.Durable, Timeout: time.Minute})}
	for i := range 6 {
		n := []int{64, 512, 6144}[i%3] // the last one goes past the caches
		ref, err := w.cl.Alloc(t.Context(), payload(1, n), client.AllocOptions{})
		require.NoError(t, err)
		w.refs, w.bytes = append(w.refs, ref), append(w.bytes, n)
		w.acknowledged, w.tried = append(w.acknowledged, 1), append(w.tried, 1)
	}
	return w
}

func (w *writer) run(ctx context.Context) error {
	for i := 0; ctx.Err() == nil; i = (i + 1) % len(w.refs) {
		w.mu.Lock()
		w.tried[i]++
		value := w.tried[i]
		w.mu.Unlock()
		err := w.cl.Write(ctx, w.refs[i], payload(value, w.bytes[i]))
		w.mu.Lock()
		switch {
		case err != nil:
			w.unknown++
		case !w.off:
			w.acknowledged[i] = value
			w.writes++
		}
		w.mu.Unlock()
		if err != nil && ctx.Err() == nil && !slices.ContainsFunc(whileDown, func(e error) bool { return errors.Is(err, e) }) {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	return nil
}

// check reads each object, and says how many values there are.
func (w *writer) check(t *testing.T, cl *client.Client) int {
	for i, ref := range w.refs {
		got, err := cl.Read(t.Context(), ref, nil)
		require.NoError(t, err)
		require.Len(t, got, w.bytes[i])
		value := binary.LittleEndian.Uint64(got)
		require.Equal(t, payload(value, w.bytes[i]), got, "%s: object %d is torn", w.name, i)
		w.mu.Lock()
		low, high := w.acknowledged[i], w.tried[i]
		w.mu.Unlock()
		require.GreaterOrEqual(t, value, low, "%s: an acknowledged value of object %d is lost", w.name, i)
		require.LessOrEqual(t, value, high, "%s: object %d", w.name, i)
	}
	return len(w.refs)
}

// Real nodes, a real controller, writers over tcp, for whom the nodes flush, and over shm, who flush themselves. All nodes lose
// power at once, at any moment of a write: lines that were not flushed and fenced are as before, word by word. They come
// back, and every value that was acknowledged before is there.
func TestPowerCut(t *testing.T) {
	if fs, err := host.FileSystemOf(t.TempDir()); err != nil || fs.Volatile != nil {
		t.Skipf("folders of tests do not survive a loss of power: %v %v", err, fs.Volatile)
	}
	rounds := 8
	if testing.Short() {
		rounds = 3
		t.Log("-short: 3 losses of power in place of 8")
	}
	ledgers, err := pmem.UseLedgers(filepath.Dir(t.TempDir()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ledgers.Close()) })
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: true, Lease: 5 * time.Second, Log: testing.Verbose()})
	writers := []*writer{newWriter(t, c, client.TransportTCP), newWriter(t, c, client.TransportSHM)}
	coins := map[string]func(uint64) func() bool{
		"none": func(uint64) func() bool { return pmem.None }, "half": pmem.Half, "all": func(uint64) func() bool { return pmem.All },
	}
	lost, checked := 0, 0
	for round, name := range []string{"none", "half", "none", "half", "all", "half", "none", "half"}[:rounds] {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		failed := make(chan error, len(writers)+len(c.Nodes))
		goal := map[*writer]int{}
		for _, w := range writers {
			goal[w] = w.writes + 50 + 13*round
			running.Go(func() { failed <- w.run(ctx) })
		}
		require.Eventually(t, func() bool {
			for _, w := range writers {
				w.mu.Lock()
				reached := w.writes >= goal[w]
				w.mu.Unlock()
				if !reached {
					return false
				}
			}
			return true
		}, 3*time.Minute, time.Millisecond)
		power := func(off bool) {
			for _, w := range writers {
				w.mu.Lock()
				w.off = off
				w.mu.Unlock()
			}
		}
		power(true)
		cut := ledgers.Cut(coins[name](uint64(round)))
		lost += cut.Lost
		cancel()
		var closing sync.WaitGroup
		for _, n := range c.Nodes {
			closing.Go(func() { failed <- n.Close() })
		}
		closing.Wait()
		running.Wait()
		for range len(writers) + len(c.Nodes) {
			require.NoError(t, <-failed)
		}
		ledgers.Restore(cut)
		power(false)
		for i := range c.Nodes {
			c.RestartNode(i)
		}
		c.WaitInSync(2)
		reader := c.Connect(client.Config{Replicas: 2})
		for _, w := range writers {
			checked += w.check(t, reader)
		}
		require.NoError(t, reader.Close())
	}
	flushed, needless := ledgers.Lines()
	acknowledged, unknown := 0, 0
	for _, w := range writers {
		acknowledged, unknown = acknowledged+w.writes, unknown+w.unknown
	}
	require.NotZero(t, lost, "the losses of power have lost nothing: they show nothing")
	t.Logf("%d losses of power, %d lines lost; %d writes acknowledged, %d without an answer, %d objects checked, none lost; %d lines flushed, %d of them needlessly",
		rounds, lost, acknowledged, unknown, checked, flushed, needless)
}

package testcluster_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// load is writers that each own some objects: the value of an object is a count
// that only rises, so that a value below one that was acknowledged is a lost write.
type load struct {
	c       *testcluster.Cluster
	clients []*client.Client
	refs    [][]client.Ref
	acked   [][]atomic.Uint64
	stop    chan struct{}
	wg      sync.WaitGroup

	mu     sync.Mutex
	gap    time.Duration // the longest time in which no write of any writer succeeded
	last   time.Time
	writes int
	errs   map[string]int
}

func startLoad(c *testcluster.Cluster, replicas, writers, objects int) *load {
	l := &load{c: c, stop: make(chan struct{}), errs: map[string]int{}, last: time.Now()}
	transports := []string{client.TransportTCP, client.TransportSHM}
	for w := range writers {
		cl := c.Connect(client.Config{Replicas: replicas, Lanes: 2, Transport: transports[w%2]})
		refs := make([]client.Ref, objects)
		for i := range refs {
			ref, err := cl.Alloc(c.T.Context(), value(0), client.AllocOptions{})
			require.NoError(c.T, err)
			refs[i] = ref
		}
		l.clients, l.refs, l.acked = append(l.clients, cl), append(l.refs, refs), append(l.acked, make([]atomic.Uint64, objects))
	}
	for w := range writers {
		l.wg.Go(func() { l.write(w) })
	}
	return l
}

func value(n uint64) []byte {
	b := make([]byte, 200)
	binary.LittleEndian.PutUint64(b, n)
	binary.LittleEndian.PutUint64(b[192:], ^n)
	return b
}

func (l *load) write(w int) {
	for n := uint64(1); ; n++ {
		select {
		case <-l.stop:
			return
		default:
		}
		i := int(n) % len(l.refs[w])
		ctx, cancel := context.WithTimeout(l.c.T.Context(), 10*time.Second)
		err := l.clients[w].Write(ctx, l.refs[w][i], value(n))
		cancel()
		l.mu.Lock()
		now := time.Now()
		if err == nil {
			l.gap = max(l.gap, now.Sub(l.last))
			l.last = now
			l.writes++
			l.acked[w][i].Store(n)
		} else {
			l.errs[fmt.Sprint(err)]++
		}
		l.mu.Unlock()
	}
}

// mark starts the measuring of the gap anew and returns the writes so far.
func (l *load) mark() (gap time.Duration, writes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	gap, l.gap = max(l.gap, time.Since(l.last)), 0
	return gap, l.writes
}

// end stops the writers and checks that nothing acknowledged is lost.
func (l *load) end() {
	t := l.c.T
	close(l.stop)
	l.wg.Wait()
	for text, n := range l.errs {
		t.Logf("%d times: %s", n, text)
	}
	for w := range l.refs {
		for i, ref := range l.refs[w] {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			b, err := l.clients[w].Read(ctx, ref, nil)
			cancel()
			require.NoError(t, err, "object %d of writer %d", i, w)
			n := binary.LittleEndian.Uint64(b)
			require.Equal(t, value(n), b)
			require.GreaterOrEqual(t, n, l.acked[w][i].Load(), "an acknowledged write of object %d of writer %d is lost", i, w)
		}
	}
	for _, cl := range l.clients {
		require.NoError(t, cl.Close())
	}
}

// progress waits until so many more writes have succeeded.
func (l *load) progress(more int) {
	l.c.T.Helper()
	l.mu.Lock()
	from := l.writes
	l.mu.Unlock()
	require.Eventually(l.c.T, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.writes >= from+more
	}, patience, 5*time.Millisecond, "writes go on")
}

// primaries is how many regions have their primary on node i.
func primaries(c *testcluster.Cluster, i int) (n int) {
	for _, r := range c.Table().Regions {
		if len(r.Replicas) > 0 && r.Replicas[0].Node == c.Nodes[i].Stats().ID {
			n++
		}
	}
	return n
}

func check(c *testcluster.Cluster) {
	c.T.Helper()
	ctx, cancel := context.WithTimeout(c.T.Context(), time.Minute)
	defer cancel()
	report, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{c.Controller.URL()}})
	require.NoError(c.T, err)
	require.Empty(c.T, report.Findings)
}

// TestKilledNode: a node that holds a primary goes, and another that holds a
// backup. The service resumes by itself and nothing acknowledged is lost; the node
// that comes back, with what it had or with nothing, is rebuilt.
func TestKilledNode(t *testing.T) {
	for _, k := range []struct {
		replicas int
		dir      bool
	}{{2, false}, {3, true}} {
		if testing.Short() && k.replicas == 3 {
			t.Log("-short: without three replicas")
			continue
		}
		t.Run(fmt.Sprintf("replicas=%d,files=%v", k.replicas, k.dir), func(t *testing.T) {
			c := testcluster.New(t, testcluster.Options{Nodes: 3, Dir: k.dir, Log: testing.Verbose()})
			l := startLoad(c, k.replicas, 4, 20)
			l.progress(200)
			victim := 0
			for i := range c.Nodes {
				if primaries(c, i) > 0 {
					victim = i
				}
			}
			for _, role := range []string{"primary", "backup"} {
				if testing.Short() && role == "backup" {
					t.Log("-short: the primary alone")
					break
				}
				l.mark()
				require.NoError(t, c.Nodes[victim].Close())
				l.progress(500)
				gap, _ := l.mark()
				t.Logf("the node of the %s killed: longest gap without a write %v", role, gap)
				c.RestartNode(victim)
				c.WaitInSync(k.replicas)
				l.progress(200)
				gap, _ = l.mark()
				t.Logf("rejoined: longest gap without a write %v", gap)
			}
			l.end()
			check(c)
		})
	}
}

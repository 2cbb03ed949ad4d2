//go:build cgo && verbs

package beside

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/verify/teststop"
)

// Time limits are generous: the machine may emulate its processors, and a millisecond of work
// can take seconds.
const patience = 5 * time.Minute

// persist repeats f until it succeeds, because leaders and leases run out on a starved machine.
func persist(t *testing.T, f func(ctx context.Context) error) {
	var err error
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), patience/4)
		defer cancel()
		err = f(ctx)
		return err == nil
	}, patience, 100*time.Millisecond, "%v", &err)
}

// free frees ref; an answer that was lost may have freed it.
func free(t *testing.T, c *client.Client, ref client.Ref) {
	persist(t, func(ctx context.Context) error {
		if err := c.Free(ctx, ref); !errors.Is(err, client.ErrFreed) {
			return err
		}
		return nil
	})
}

func binaryPath(t *testing.T) string {
	if os.Getenv("RXE_DEVICE") == "" || os.Getenv("QUARRY_BINARY") == "" {
		t.Skip("no RDMA device, or no quarry with verbs: run verify/rxevm/test-rdma.sh")
	}
	return os.Getenv("QUARRY_BINARY")
}

func connect(t *testing.T, c *local.Cluster, transport string, change func(*client.Config)) *client.Client {
	cfg := client.Config{Controllers: []string{c.URL}, Transport: transport, Lanes: 4, Replicas: 2,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	if change != nil {
		change(&cfg)
	}
	var cl *client.Client
	persist(t, func(ctx context.Context) (err error) {
		cl, err = client.Connect(ctx, cfg)
		return err
	})
	return cl
}

// userTicks is the processor time that a process has used outside of the kernel.
func userTicks(t *testing.T, pid int) uint64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	n, err := strconv.ParseUint(f[11], 10, 64)
	require.NoError(t, err)
	return n
}

func count(b []byte) ([]byte, error) {
	out := make([]byte, 8)
	var n uint64
	if len(b) == 8 {
		n = binary.LittleEndian.Uint64(b)
	}
	binary.LittleEndian.PutUint64(out, n+1)
	return out, nil
}

// adding increments a counter in an object from one client until it is stopped. It counts the
// acknowledged updates and those with an unknown outcome.
type adding struct {
	yes, unknown atomic.Uint64
	err          atomic.Pointer[error]
}

func (a *adding) run(ctx context.Context, c *client.Client, ref client.Ref, stop func() bool) {
	for !stop() {
		octx, cancel := context.WithTimeout(ctx, patience)
		err := c.Update(octx, ref, count)
		cancel()
		switch {
		case err == nil:
			a.yes.Add(1)
		case errors.Is(err, client.ErrUnknown):
			a.unknown.Add(1)
		case errors.Is(err, client.ErrFreed), errors.Is(err, client.ErrCorrupt), errors.Is(err, client.ErrNoRegion), ctx.Err() != nil:
			a.err.Store(&err)
			return
		default: // not done: leases run out on a starved machine
		}
	}
}

// settle compares the counter with the clients' counts.
func settle(t *testing.T, sums []adding, got uint64) {
	var yes, unknown uint64
	for i := range sums {
		if err := sums[i].err.Load(); err != nil {
			require.NoError(t, *err)
		}
		yes, unknown = yes+sums[i].yes.Load(), unknown+sums[i].unknown.Load()
	}
	require.GreaterOrEqual(t, got, yes, "an acknowledged update is lost")
	require.LessOrEqual(t, got, yes+unknown, "an update was done twice, or two at a time")
	t.Logf("updates: %d acknowledged, %d unknown, counter %d", yes, unknown, got)
}

// One cluster has two nodes in the adapter's atomicity domain and one in the processors'.
// Clients on verbs and on tcp change the same objects while a node is killed.
func TestClusterOnVerbs(t *testing.T) {
	bin := binaryPath(t)
	require.Equal(t, verbs.Objects{}, verbs.Live())
	c, err := local.Start(t.Context(), local.Config{Binary: bin, Nodes: 2, RegionBytes: "16MiB", Capacity: "256MiB", Lease: "15s"})
	require.NoError(t, err)
	stopped := false
	defer func() {
		if !stopped {
			c.Stop()
		}
		if t.Failed() {
			for _, p := range append(c.Nodes, c.Controller) {
				t.Logf("%s: %s", p.Name, p.Log())
			}
		}
	}()
	for _, n := range c.Nodes {
		require.NotEmpty(t, n.Ready["verbs"], "auto takes the adapter")
		require.Empty(t, n.Ready["shm"], "no shm into the adapter's domain")
	}
	near, far := connect(t, c, client.TransportAuto, nil), connect(t, c, client.TransportTCP, nil)

	one := func(cl *client.Client) client.Ref {
		var ref client.Ref
		persist(t, func(ctx context.Context) (err error) {
			ref, err = cl.Alloc(ctx, make([]byte, 8), client.AllocOptions{Replicas: 2})
			return err
		})
		return ref
	}
	value := func(cl *client.Client, ref client.Ref) uint64 {
		var b []byte
		persist(t, func(ctx context.Context) (err error) {
			b, err = cl.Read(ctx, ref, nil)
			return err
		})
		return binary.LittleEndian.Uint64(b)
	}
	ref := one(near)
	require.Zero(t, value(far, ref))
	for _, p := range near.Stats().Providers {
		require.Equal(t, "verbs", p)
	}
	for _, p := range far.Stats().Providers {
		require.Equal(t, "tcp", p)
	}
	t.Logf("providers: auto %v, tcp %v", near.Stats().Providers, far.Stats().Providers)

	t.Run("OneWordOneDomain", func(t *testing.T) {
		const each = 50
		var all sync.WaitGroup
		sums := make([]adding, 4)
		for i, cl := range []*client.Client{near, near, far, far} {
			a := &sums[i]
			all.Go(func() { a.run(t.Context(), cl, ref, func() bool { return a.yes.Load() == each }) })
		}
		all.Wait()
		settle(t, sums, value(near, ref))
	})

	t.Run("NoProcessorOfTheNode", func(t *testing.T) {
		value(near, ref)
		const reads = 500
		for _, n := range c.Nodes {
			require.NoError(t, teststop.Stop(n.PID()))
		}
		var before, after uint64
		for _, n := range c.Nodes {
			before += userTicks(t, n.PID())
		}
		start := time.Now()
		buf := make([]byte, 0, 64)
		done := 0
		// A second, and longer on a machine that is too slow for a few reads in that time.
		for ; done < reads && (done <= 10 || time.Since(start) < time.Second); done++ {
			persist(t, func(ctx context.Context) error {
				_, err := near.Read(ctx, ref, buf)
				if err == nil && done%10 == 0 {
					err = near.Update(ctx, ref, count)
				}
				return err
			})
		}
		took := time.Since(start)
		for _, n := range c.Nodes {
			after += userTicks(t, n.PID())
			require.NoError(t, n.Signal(syscall.SIGCONT))
		}
		fmt.Printf("one-sided: %d reads and %d updates in %v with both nodes' processes stopped; their user CPU: %d ticks\n", done, (done+9)/10, took.Round(time.Millisecond), after-before)
		require.Zero(t, after-before)
		require.Greater(t, done, 10)
	})

	t.Run("Refusals", func(t *testing.T) {
		shm := connect(t, c, client.TransportSHM, nil)
		persist(t, func(ctx context.Context) error {
			if _, err := shm.Read(ctx, ref, nil); !errors.Is(err, rdma.ErrDomain) {
				return fmt.Errorf("shm into the adapter's domain: %v", err)
			}
			return nil
		})
		require.NoError(t, shm.Close())
		rd := connect(t, c, client.TransportAuto, func(cfg *client.Config) { cfg.RequireRDMA = true })
		require.NotZero(t, value(rd, ref))
		require.NoError(t, rd.Close())
		_, err = client.Connect(t.Context(), client.Config{Controllers: []string{c.URL}, Transport: client.TransportVerbs, RDMADevice: "mlx5_99"})
		require.ErrorContains(t, err, "mlx5_99")
	})

	t.Run("MixedNodes", func(t *testing.T) {
		require.NoError(t, c.AddNode(t.Context(), "plain", "--fabric", "tcp"))
		plain := c.Nodes[len(c.Nodes)-1]
		require.Empty(t, plain.Ready["verbs"])
		require.NotEmpty(t, plain.Ready["shm"])
		// Regions of three replicas are on all nodes: the client chooses a provider for each.
		three := connect(t, c, client.TransportAuto, func(cfg *client.Config) { cfg.Replicas = 3 })
		var ref client.Ref
		persist(t, func(ctx context.Context) (err error) { // the region is made on demand, which takes long here
			ref, err = three.Alloc(ctx, make([]byte, 8), client.AllocOptions{Replicas: 3})
			return err
		})
		persist(t, func(ctx context.Context) error { return three.Write(ctx, ref, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }) // may be done twice
		require.Equal(t, uint64(1), value(far, ref))
		by := map[string]int{}
		for _, p := range three.Stats().Providers {
			by[p]++
		}
		require.Equal(t, map[string]int{"verbs": 2, "shm": 1}, by)
		free(t, three, ref)
		require.NoError(t, three.Close())
	})

	t.Run("NodeKilled", func(t *testing.T) {
		var stop atomic.Bool
		var writers sync.WaitGroup
		sums := make([]adding, 2)
		hot := one(near)
		for i, cl := range []*client.Client{near, far} {
			writers.Go(func() { sums[i].run(t.Context(), cl, hot, stop.Load) })
		}
		moved := func(by uint64) {
			a, b := sums[0].yes.Load(), sums[1].yes.Load()
			require.Eventually(t, func() bool { return sums[0].yes.Load() >= a+by && sums[1].yes.Load() >= b+by }, patience, 10*time.Millisecond,
				"both clients get answers")
		}
		moved(3)
		require.NoError(t, c.Nodes[0].Signal(syscall.SIGKILL))
		c.Nodes[0].Wait()
		start := time.Now()
		moved(3)
		fmt.Printf("node killed: both clients go on after %v\n", time.Since(start).Round(time.Millisecond))
		stop.Store(true)
		writers.Wait()
		settle(t, sums, value(near, hot))
	})

	require.NoError(t, near.Close())
	require.NoError(t, far.Close())
	require.Equal(t, verbs.Objects{}, verbs.Live())
	fmt.Printf("verbs objects of the clients after tear-down: %+v\n", verbs.Live())
	var rep *fsck.Report
	require.Eventually(t, func() bool { // regions that lost a node are opened again one after the other
		rep, err = fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.URL}})
		return err == nil
	}, 2*patience, time.Second, "%v", err)
	require.True(t, rep.OK(), "%v", rep.Findings)
	stopped = true
	require.NoError(t, c.Stop())
}

package job_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// waits is a plugin that says that it has begun, and goes on when it may.
type waitsFor struct{}

type waiting struct {
	began chan<- struct{}
	gate  <-chan struct{}
}

var waits atomic.Pointer[waiting]

func (waitsFor) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	if w := waits.Load(); w != nil {
		select {
		case w.began <- struct{}{}:
		default:
		}
		select {
		case <-w.gate:
		case <-env.Context().Done():
			return env.Context().Err()
		}
	}
	return emit(key, value)
}

func init() {
	coproc.Register("waits", "waits for a gate", func() coproc.Plugin { return waitsFor{} })
}

func TestWorkersCountWhatTheyDo(t *testing.T) {
	r := newRig(t)
	entries, _ := texts(300)
	r.tree("texts", entries)
	bytes := 0
	for k, v := range entries {
		bytes += len(k) + len(v)
	}
	var tally job.Tally
	require.Empty(t, tally.Stats().Worker, "nobody works yet")
	c, err := tally.Census(t.Context())
	require.NoError(t, err)
	require.Zero(t, c.Running)
	r.worker("a", func(c *job.Config) { c.Tally = &tally })
	r.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "texts"}, Output: "counts", MapParts: 5, ReduceParts: 2})
	require.Equal(t, job.Failed, r.run(job.Spec{Plugin: "odd", Input: job.Source{Tree: "texts"}, Output: "none", MapParts: 1, Args: map[string]string{"do": "panic"}}).State)

	require.Eventually(t, func() bool {
		s := tally.Stats()
		return s.Ended[job.Done] == 1 && s.Ended[job.Failed] == 1 && s.Busy == 0
	}, patience, 5*time.Millisecond)
	s := tally.Stats()
	require.Equal(t, "a", s.Worker)
	require.Equal(t, 2, s.Slots)
	require.EqualValues(t, 2, s.Attempts["plan"]["done"])
	require.EqualValues(t, 5, s.Attempts["map"]["done"])
	require.EqualValues(t, 4, s.Attempts["map"]["failed"])
	require.EqualValues(t, 3, s.Retries)
	require.Zero(t, s.Takeovers)
	require.EqualValues(t, 2, s.Attempts["reduce"]["done"])
	took := s.Took["map"]
	require.EqualValues(t, 9, took.Count())
	require.EqualValues(t, len(entries)+4, s.Read["tree"].Records, "and one for each attempt that failed")
	require.GreaterOrEqual(t, s.Read["tree"].Bytes, uint64(bytes))
	require.Positive(t, s.Read["runs"].Records)
	require.Positive(t, s.Read["runs"].Objects)
	require.Positive(t, s.Shuffled)
	require.GreaterOrEqual(t, s.Shuffled, s.Read["runs"].Bytes)
	require.Positive(t, s.Emitted)
	names := map[string]uint64{}
	for _, tree := range s.Trees {
		names[tree.Name] = tree.Cache.Hits + tree.Cache.Misses
	}
	require.Contains(t, names, "texts", "although its job has ended")
	require.Contains(t, names, "counts")
	require.Contains(t, names, job.StateTree)
}

// What a part reads is counted while it runs, and a job without a worker is seen
// to stand still.
func TestCensusOfRunningJobs(t *testing.T) {
	r := newRig(t)
	r.tree("in", map[string]string{"a": "1", "b": "2"})
	began, gate := make(chan struct{}, 1), make(chan struct{})
	waits.Store(&waiting{began, gate})
	t.Cleanup(func() { waits.Store(nil) })
	var tally job.Tally
	r.worker("a", func(c *job.Config) { c.Tally = &tally })
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "waits", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 1})
	require.NoError(t, err)
	<-began
	c, err := tally.Census(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, c.Running)
	require.Equal(t, 1, c.Workers)
	require.Equal(t, map[job.State]int{job.Pending: 0, job.Running: 1, job.Done: 1, job.Failed: 0, job.Cancelled: 0}, c.Parts)
	require.Equal(t, 1, tally.Stats().Busy)
	require.Eventually(t, func() bool {
		c, err := tally.Census(t.Context())
		require.NoError(t, err)
		return c.Quiet > 0
	}, patience, 5*time.Millisecond)
	close(gate)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	c, err = tally.Census(t.Context())
	require.NoError(t, err)
	require.Zero(t, c.Running)
	require.Zero(t, c.Quiet)
}

// Each part runs on the node that has the primary of what it reads, over shared
// memory, as long as there are workers beside all of them.
func TestPartsRunBesideTheirMemory(t *testing.T) {
	r := newRig(t)
	_, err := r.cluster.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 1, Count: 2}))
	require.NoError(t, err)
	on, large := map[uint32]int{}, make([]byte, 400<<10) // so that a region is soon full
	for i := 0; len(on) < 2 || i < 24; i++ {
		require.Less(t, i, 90, "all objects are on one node")
		var ref coproc.Ref
		require.Eventually(t, func() bool {
			ref, err = r.c.Alloc(t.Context(), large, client.AllocOptions{WriteOnce: true})
			return err == nil
		}, patience, 5*time.Millisecond)
		_, err = r.c.Names().Create(t.Context(), fmt.Sprintf("o/%04d", i), "object", ref)
		require.NoError(t, err)
		node, ok := r.c.Where(ref)
		require.True(t, ok)
		on[node]++
	}
	tallies := [2]job.Tally{}
	clients := [2]*client.Client{}
	node := map[string]uint32{}
	for i := range 2 {
		name := r.cluster.NodeConfig(i).Name
		clients[i] = r.cluster.Connect(client.Config{})
		r.worker("beside "+name, func(c *job.Config) {
			c.Node, c.Tally, c.Patience, c.Client = name, &tallies[i], time.Minute, clients[i]
		})
		id, ok := r.c.Node(name)
		require.True(t, ok)
		node["beside "+name] = id
	}
	// Until each knows of the other: before, it would take what lies elsewhere at once.
	for i := range 2 {
		require.Eventually(t, func() bool {
			c, err := tallies[i].Census(t.Context())
			require.NoError(t, err)
			return c.Workers == 2 && tallies[i].Stats().Staff == 2
		}, patience, 5*time.Millisecond)
	}
	j := r.done(job.Spec{Plugin: "odd", Input: job.Source{Objects: "o/"}, Output: "out", MapParts: 12})
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	ran := map[uint32]int{}
	for _, p := range parts {
		require.Equal(t, p.Node, node[p.Worker], "%v of node %d ran %s", p, p.Node, p.Worker)
		ran[p.Node]++
	}
	require.Len(t, ran, 2)
	for i := range 2 {
		s := tallies[i].Stats()
		require.Zero(t, s.Places["elsewhere"])
		require.Positive(t, s.Places["near"])
		for _, way := range clients[i].Stats().Providers {
			require.Equal(t, client.TransportSHM, way)
		}
	}
}

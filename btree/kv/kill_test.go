package kv_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// asClient makes the test binary a client process that is going to be killed.
const asClient = "QUARRYTEST_KV_CLIENT"

func TestMain(m *testing.M) {
	if job := os.Getenv(asClient); job != "" {
		if err := clientProcess(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if job := os.Getenv(asFeed); job != "" {
		if err := feedProcess(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// job of a client process.
type job struct {
	URL  string
	Tree string
	Seed uint64
	ID   int
	Ops  int
	Keys int
}

// event is one line of a client process: an operation begins, or has ended.
type event struct {
	At    int64 // CLOCK_MONOTONIC, the same for all processes
	End   bool
	N     int
	Op    string
	Key   string
	Value string
	Found string // what Get found; "" for nothing
	OK    bool
	Err   string // the outcome is unknown
}

func now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

func killKey(i int) string {
	if i%3 == 0 {
		return fmt.Sprintf("long/%0300d", i/6) + fmt.Sprint(i)
	}
	return fmt.Sprintf("key%04d", i)
}

// clientProcess does random operations and says what it does before and after each.
func clientProcess(spec string) error {
	var j job
	if err := json.Unmarshal([]byte(spec), &j); err != nil {
		return err
	}
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{j.URL}, Replicas: 2, Timeout: patience, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer c.Close()
	tree, err := kv.Open(ctx, c, j.Tree, btree.Config{})
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(j.Seed, uint64(j.ID)))
	out := json.NewEncoder(os.Stdout)
	for n := range j.Ops {
		// All clients move over the keys together, filling and emptying leaves.
		e := event{N: n, Key: killKey(rng.IntN(j.Keys)), Value: fmt.Sprintf("%d.%d", j.ID, n)}
		e.Op = []string{"get", "put", "delete", "absent"}[[]int{0, 0, 1, 1, 1, 2, 2, 2, 3}[rng.IntN(9)]]
		pad := strings.Repeat(".", []int{0, 100, 100, 400}[rng.IntN(4)])
		e.At = now()
		if err := out.Encode(e); err != nil {
			return err
		}
		var b []byte
		switch e.Op {
		case "get":
			b, err = tree.Get(ctx, []byte(e.Key), nil)
			e.Found, _, _ = strings.Cut(string(b), "/")
		case "put":
			err = tree.Put(ctx, []byte(e.Key), []byte(e.Value+"/"+pad))
		case "delete":
			err = tree.Delete(ctx, []byte(e.Key))
		case "absent":
			err = tree.PutIfAbsent(ctx, []byte(e.Key), []byte(e.Value+"/"+pad))
		}
		e.End, e.At, e.OK = true, now(), err == nil
		if err != nil && !errors.Is(err, btree.ErrNoKey) && !errors.Is(err, btree.ErrKeyExists) {
			e.Err = err.Error()
		}
		if err := out.Encode(e); err != nil {
			return err
		}
	}
	return nil
}

// killModel is a key: a register with PutIfAbsent and Delete.
var killModel = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(string), input.(event), output.(event)
		unknown := !out.End || out.Err != ""
		switch in.Op {
		case "get":
			return unknown || out.Found == s, s
		case "put":
			return true, in.Value
		case "delete":
			return unknown || out.OK == (s != ""), ""
		}
		if s != "" {
			return unknown || !out.OK, s
		}
		return unknown || out.OK, in.Value
	},
	Equal: func(a, b any) bool { return a == b },
}

// TestClientsKilledAtWork: processes work on a tree with two replicas and are killed
// with SIGKILL in the middle, others take their place. Each key stays linearizable, the
// tree stays whole, and what the dead have left is found and freed.
func TestClientsKilledAtWork(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Nodes: 3, Lease: 10 * time.Second, Dir: true})
	c := cluster.Connect(client.Config{Replicas: 2})
	tree, err := kv.Create(ctx, c, "killed", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	rounds, keys := 8, 48
	if testing.Short() {
		t.Log("-short: one round")
		rounds = 1
	}
	var mu sync.Mutex
	history := map[string][]porcupine.Operation{}
	kills, unknown := 0, 0
	rng := rand.New(rand.NewPCG(7, 7))
	id := 0
	first, ok := c.Where(tree.Root())
	require.True(t, ok)
	for round := range rounds {
		if round == rounds/2 && rounds > 1 {
			// The primary of the root goes while clients start and work.
			for i, node := range cluster.Nodes {
				if id, ok := c.Node(fmt.Sprintf("node%d", i+1)); ok && id == first {
					time.AfterFunc(150*time.Millisecond, func() { node.Close() })
				}
			}
		}
		var wg sync.WaitGroup
		for i := range 4 {
			spec, err := json.Marshal(job{URL: cluster.Controller.URL(), Tree: "killed", Seed: 11, ID: id, Ops: 400, Keys: keys})
			require.NoError(t, err)
			id++
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), asClient+"="+string(spec))
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			killAfter := -1 // lines
			if i < 2 {
				killAfter = 20 + rng.IntN(400)
			}
			who := id
			wg.Go(func() {
				var begun event
				add := func(end event) {
					op := porcupine.Operation{ClientId: who, Input: begun, Output: end, Call: begun.At, Return: end.At}
					if !end.End || end.Err != "" {
						op.Return = 1 << 62 // at any later time, or never
						mu.Lock()
						unknown++
						mu.Unlock()
					}
					mu.Lock()
					history[begun.Key] = append(history[begun.Key], op)
					mu.Unlock()
				}
				r := bufio.NewReader(out)
				open := false
				for n := 0; ; n++ {
					if n == killAfter {
						_ = cmd.Process.Kill()
						mu.Lock()
						kills++
						mu.Unlock()
					}
					line, err := r.ReadBytes('\n')
					if err != nil {
						if err != io.EOF {
							t.Error(err)
						}
						break
					}
					var e event
					if err := json.Unmarshal(line, &e); err != nil {
						t.Error(err)
						break
					}
					if open = !e.End; open {
						begun = e
						continue
					}
					add(e)
				}
				if open {
					add(event{})
				}
				err := cmd.Wait()
				if killAfter < 0 && err != nil {
					t.Errorf("client %d: %v", who, err)
				}
			})
		}
		wg.Wait()
		rep, err := tree.Survey(ctx)
		require.NoError(t, err)
		t.Logf("round %d: %+v", round, rep)
	}
	require.NotZero(t, kills)
	ops := 0
	for key, h := range history {
		ops += len(h)
		require.Equal(t, porcupine.Ok, porcupine.CheckOperationsTimeout(killModel, h, 10*time.Minute), "key %s: %d operations", key, len(h))
	}
	// A write repairs what stands in its way; after that the tree is whole.
	for i := range keys {
		require.NoError(t, tree.Put(ctx, []byte(killKey(i)), []byte("end/")))
	}
	if rounds > 1 {
		now, ok := c.Where(tree.Root())
		require.True(t, ok)
		require.NotEqual(t, first, now, "the node was killed and is still the primary")
	}
	rep, err := tree.Check(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, keys, rep.Keys)
	// What the dead have left: one object certainly, made by a session that is over.
	gone, err := client.Connect(ctx, client.Config{Controllers: []string{cluster.Controller.URL()}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	stray, err := gone.Alloc(ctx, []byte("never linked"), client.AllocOptions{Tag: btree.TagLeaf})
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	collect := func() kv.Collected {
		o, err := kv.Collect(ctx, c, false, func(ctx context.Context, found func(kv.Stray)) error {
			_, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Object: found})
			return err
		})
		require.NoError(t, err)
		return o
	}
	total := 0
	require.Eventually(t, func() bool {
		// Until the controller has settled the session, its objects are left alone.
		total += collect().Strays
		_, err := c.Read(ctx, stray, nil)
		return errors.Is(err, client.ErrFreed)
	}, patience, 50*time.Millisecond)
	t.Logf("%d objects of the dead collected", total)
	again, err := tree.Check(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, rep, again, "nothing of the tree was collected")
	t.Logf("%d operations, %d clients killed, %d outcomes unknown: %+v", ops, kills, unknown, rep)
}

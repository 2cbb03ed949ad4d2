package testcluster_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestObjectsLiveInRegionsOfTheirKind: clients make, grow and free objects and trees of every
// number of replicas and both durabilities beside each other. Every slab, those of chunks,
// tree nodes and values included, lies in a region of the kind that was asked for, so that
// durable regions hold all that is durable and nothing else.
func TestObjectsLiveInRegionsOfTheirKind(t *testing.T) {
	if fs, err := host.FileSystemOf(t.TempDir()); err != nil || fs.Volatile != nil {
		t.Skipf("folders of tests do not survive a loss of power: %v %v", err, fs.Volatile)
	}
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: true, Capacity: 1 << 30})
	kindOf := func(r *quarrypb.Region) alloc.Home {
		return alloc.Home{Replicas: int(r.WantReplicas), Durable: r.Durability == quarrypb.Durability_DURABILITY_PMEM}
	}
	var mu sync.Mutex
	live := map[alloc.Home]int{} // slabs of objects
	var wg sync.WaitGroup
	for _, standard := range []client.Durability{client.Volatile, client.Durable} {
		cl := c.Connect(client.Config{Durability: standard, Lanes: 2})
		for worker := range 4 {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(worker), uint64(standard)))
				type object struct {
					ref  client.Ref
					home alloc.Home
				}
				var mine []object
				for i := range 60 {
					o := client.AllocOptions{Replicas: 1 + rnd.IntN(2), Durability: client.Durability(rnd.IntN(3)), WriteOnce: rnd.IntN(3) == 0}
					home := alloc.Home{Replicas: o.Replicas, Durable: o.Durability == client.Durable || o.Durability == 0 && standard == client.Durable}
					bytesOf := func() []byte { return make([]byte, []int{10, 300, 5000, 100_000, 1<<20 + 5}[rnd.IntN(5)]) }
					ref, err := cl.Alloc(t.Context(), bytesOf(), o)
					if err == nil && !o.WriteOnce && rnd.IntN(2) == 0 {
						// One that is too large for its slab does not change it.
						if err = cl.Write(t.Context(), ref, bytesOf()); err != nil {
							err = nil
						}
					}
					if err == nil && i%3 == 2 { // its slab goes into a magazine
						gone := rnd.IntN(len(mine) + 1)
						if gone < len(mine) {
							err = cl.Free(t.Context(), mine[gone].ref)
							mine[gone] = mine[len(mine)-1]
							mine = mine[:len(mine)-1]
						}
					}
					if err != nil {
						t.Errorf("%v: %v", home, err)
						return
					}
					mine = append(mine, object{ref, home})
				}
				mu.Lock()
				defer mu.Unlock()
				for _, o := range mine {
					_, info, err := cl.ReadInfo(t.Context(), o.ref, nil)
					if err != nil {
						t.Error(err)
					}
					live[o.home] += 1 + info.Chunks
				}
			})
		}
		wg.Go(func() {
			tree, err := kv.Create(t.Context(), cl, fmt.Sprint("tree-", standard), btree.Config{NodeBytes: 1 << 10})
			for i := 0; err == nil && i < 200; i++ {
				err = tree.Put(t.Context(), []byte(fmt.Sprint("key", i)), bytes.Repeat([]byte("v"), 1+i*11))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.False(t, t.Failed())

	kinds := map[uint32]alloc.Home{}
	for _, r := range c.Table().Regions {
		kinds[r.Id] = kindOf(r)
	}
	trees := map[bool]int{}                          // slabs of trees, by durability of their regions
	found := map[alloc.Home]int{}                    // slabs of objects, chunks too
	restart := func() { clear(trees); clear(found) } // a primary may move beside a check
	report, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}, Restart: restart, Object: func(o fsck.Object) {
		mu.Lock()
		defer mu.Unlock()
		h := kinds[o.Ref.Addr.Region()]
		if ofTree(o.Tag) {
			trees[h.Durable]++
			found[h]--
		}
	}})
	require.NoError(t, err)
	require.Empty(t, report.Findings)
	for _, r := range report.Regions {
		found[kinds[r.Region]] += r.Live
	}
	require.Equal(t, live, found)
	require.InDelta(t, trees[false], trees[true], 5, "both trees hold the same")
	require.NotZero(t, trees[true])

	// A tree that another client changes keeps its kind.
	other := c.Connect(client.Config{})
	tree, err := kv.Open(t.Context(), other, fmt.Sprint("tree-", client.Durable), btree.Config{})
	require.NoError(t, err)
	require.Equal(t, client.Durable, other.Durability(tree.Root()))
	for i := range 50 {
		err = tree.Put(t.Context(), []byte(fmt.Sprint("more", i)), make([]byte, 2000))
		require.NoError(t, err)
	}
	before := trees[false]
	clear(trees)
	_, err = fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}, Restart: restart, Object: func(o fsck.Object) {
		mu.Lock()
		defer mu.Unlock()
		if ofTree(o.Tag) {
			trees[kinds[o.Ref.Addr.Region()].Durable]++
		}
	}})
	require.NoError(t, err)
	require.Equal(t, before, trees[false])

	// Where no memory is persistent, durable objects are refused and others are not.
	c = testcluster.New(t, testcluster.Options{Lease: time.Second})
	cl := c.Connect(client.Config{})
	_, err = cl.Alloc(t.Context(), []byte("x"), client.AllocOptions{Durability: client.Durable})
	require.ErrorIs(t, err, client.ErrNoSpace)
	require.ErrorContains(t, err, "persistent memory")
	_, err = cl.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = cl.Alloc(t.Context(), []byte("x"), client.AllocOptions{Durability: 3})
	require.ErrorIs(t, err, client.ErrArgument)
}

func ofTree(tag uint32) bool { return tag >= btree.TagRoot && tag <= btree.TagLayer }

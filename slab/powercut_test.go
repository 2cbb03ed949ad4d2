package slab_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// content is what differs in a memory from what it had before, by the offset of the word of 8 bytes.
type content map[int][8]byte

func differing(base, now []byte) content {
	c := content{}
	for page := 0; page < len(base); page += 4096 {
		if bytes.Equal(base[page:page+4096], now[page:page+4096]) {
			continue
		}
		for off := page; off < page+4096; off += 8 {
			if word := [8]byte(now[off:]); word != [8]byte(base[off:]) {
				c[off] = word
			}
		}
	}
	return c
}

// cut is what all nodes have at a moment: what is durable, and what processors see.
type cut struct{ durable, live []content }

func cutOf(w *slabtest.World, base [][]byte) (c cut) {
	for k, n := range w.Nodes {
		c.durable = append(c.durable, differing(base[k], n.Ledger.Cut(pmem.None)))
		c.live = append(c.live, differing(base[k], n.Ledger.Cut(pmem.All)))
		for off := range c.durable[k] {
			if _, known := c.live[k][off]; !known {
				c.live[k][off] = [8]byte(base[k][off:]) // as it was, again
			}
		}
	}
	return c
}

// images calls f with what a loss of power at this moment may leave: of the words that are not durable a first part, or a last one, of many
// lengths, and seeded halves.
func (c cut) images(f func(images []content)) {
	type word struct{ node, off int }
	var words []word
	for node, live := range c.live {
		for _, off := range slices.Sorted(maps.Keys(live)) {
			if d, known := c.durable[node][off]; !known || d != live[off] {
				words = append(words, word{node, off})
			}
		}
	}
	with := func(survives func(i int) bool) {
		var images []content
		for _, d := range c.durable {
			images = append(images, maps.Clone(d))
		}
		for i, w := range words {
			if survives(i) {
				images[w.node][w.off] = c.live[w.node][w.off]
			}
		}
		f(images)
	}
	for n := 0; n <= len(words); n++ {
		if n > 4 && n < len(words)-4 && n%64 != 0 {
			continue // within an image, whose words are alike
		}
		with(func(i int) bool { return i < n })
		with(func(i int) bool { return i >= n })
	}
	for seed := range uint64(2) {
		coin := pmem.Half(seed)
		with(func(int) bool { return coin() })
	}
}

// change is one durable change of an object, and what the object may be before and behind it.
type change struct {
	name string
	// do changes the object and returns it.
	do func(l *slabtest.Port, ref proto.Ref) (proto.Ref, error)
	// old and new are its payloads; nil: it is not there.
	old, new []byte
}

var changes = func() []change {
	old, new := bytes.Repeat([]byte("old."), 475), bytes.Repeat([]byte("NEW!"), 475)
	return []change{
		{"Update", func(l *slabtest.Port, ref proto.Ref) (proto.Ref, error) {
			_, err := l.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return new, nil })
			return ref, err
		}, old, new},
		{"Birth", func(l *slabtest.Port, _ proto.Ref) (proto.Ref, error) {
			return l.Alloc.Alloc(new, alloc.Want{Replicas: len(l.World.Nodes), Durable: true})
		}, nil, new},
		{"Free", func(l *slabtest.Port, ref proto.Ref) (proto.Ref, error) {
			_, _, _, err := l.Lane.Free(ref, false)
			return ref, err
		}, old, nil},
	}
}()

// TestEveryPrefixOfADurableChange: all nodes lose power before each write-back and each fence of one durable change, and behind its answer. Whatever the loss
// leaves, and whichever replica comes back alone: what was answered is there, and what was not is as before or done, whole.
func TestEveryPrefixOfADurableChange(t *testing.T) {
	if fs, err := host.FileSystemOf(t.TempDir()); err != nil || fs.Volatile != nil {
		t.Skipf("folders of tests do not survive a loss of power: %v %v", err, fs.Volatile)
	}
	dialers := map[string]func() rdma.Dialer{
		"tcp":    func() rdma.Dialer { return tcp.Dialer{} },
		"shm":    func() rdma.Dialer { return shm.NewDialer() },
		"inproc": func() rdma.Dialer { return shm.NewInproc() },
	}
	if testing.Short() {
		t.Skip("-short: takes long, and is not about concurrency")
	}
	for provider, dialer := range dialers {
		for replicas := 1; replicas <= 2; replicas++ {
			for _, c := range changes {
				t.Run(fmt.Sprintf("%s,R=%d,%s", provider, replicas, c.name), func(t *testing.T) {
					c.cutEverywhere(t, slabtest.NewOnFiles(t, replicas, dialer()))
				})
			}
		}
	}
}

func (c change) cutEverywhere(t *testing.T, w *slabtest.World) {
	l := w.Lane(1)
	l.Durable()
	first := c.old
	if first == nil {
		first = []byte("another one")
	}
	ref, err := l.Alloc.Alloc(first, alloc.Want{Replicas: len(w.Nodes), Durable: true}) // fills the magazine
	require.NoError(t, err)
	var base [][]byte
	for _, n := range w.Nodes {
		for off := 0; off < len(n.Memory.Bytes()); off += 4096 { // a ledger's fence takes as long as the most lines between two of them
			require.NoError(t, n.Memory.Persist(uint64(off), 4096))
		}
		base = append(base, bytes.Clone(n.Memory.Bytes()))
	}
	var mu sync.Mutex
	var cuts []cut
	note := func() {
		mu.Lock()
		defer mu.Unlock()
		cuts = append(cuts, cutOf(w, base))
	}
	for _, n := range w.Nodes {
		n.Ledger.Before = note
	}
	ref, err = c.do(l, ref)
	require.NoError(t, err)
	for _, n := range w.Nodes {
		n.Ledger.Before = nil
	}
	note()
	checker := w.Lane(2)
	checker.Durable()
	touched := map[int]bool{0: true} // MiB of the memories; a reconcile touches no others
	for _, at := range cuts {
		for _, d := range at.live {
			for off := range d {
				touched[off>>20] = true
			}
		}
	}
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	touched[int(w.Geometry.BlockOff(block)>>20)] = true
	tried := map[string]bool{}
	for i, at := range cuts {
		answered := i == len(cuts)-1
		at.images(func(images []content) {
			for survivor := range len(images) + 1 { // the last: all of them
				if survivor < len(images) && (!answered || len(images) == 1) {
					continue // what was not answered may be on any of them
				}
				from := func(k int) int { return k }
				if survivor < len(images) {
					from = func(int) int { return survivor } // the others are made again from it
				}
				key := fmt.Sprint(answered, survivor, images)
				if tried[key] {
					continue
				}
				tried[key] = true
				for k, n := range w.Nodes {
					for mib := range touched {
						copy(n.Memory.Bytes()[mib<<20:], base[from(k)][mib<<20:(mib+1)<<20])
					}
					for off, word := range images[from(k)] {
						copy(n.Memory.Bytes()[off:], word[:])
					}
				}
				c.check(t, checker, ref, answered, fmt.Sprintf("before step %d of %d, survivor %d", i+1, len(cuts), survivor))
			}
		})
	}
	t.Logf("%d moments, %d different losses of power", len(cuts), len(tried))
}

// check opens the region again and reads the object.
func (c change) check(t *testing.T, l *slabtest.Port, ref proto.Ref, answered bool, when string) {
	l.NextEpoch()
	reg, err := l.Region(1)
	require.NoError(t, err)
	st, err := l.Lane.Reconcile(reg)
	require.NoError(t, err, when)
	require.Zero(t, st.Bad, when)
	got, _, err := l.Lane.Read(ref, nil)
	if err != nil {
		if !errors.Is(err, slab.ErrBadRef) { // its block was not formatted yet
			require.ErrorIs(t, err, slab.ErrFreed, when)
		}
		require.True(t, c.new == nil || c.old == nil && !answered, "%s: the object is gone", when)
		return
	}
	require.True(t, bytes.Equal(got, c.new) && c.new != nil || !answered && c.old != nil && bytes.Equal(got, c.old), "%s: the object has %q", when, got)
}

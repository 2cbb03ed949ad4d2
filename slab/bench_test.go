package slab_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// BenchmarkPrograms runs the programs themselves over shared memory, without the
// session around them.
func BenchmarkPrograms(b *testing.B) {
	for _, size := range []int{128, 4096} {
		for _, kind := range []proto.Kind{proto.Pair, proto.Staged} {
			benchmarkPrograms(b, kind, size)
		}
	}
}

func benchmarkPrograms(b *testing.B, kind proto.Kind, size int) {
	p := slabtest.NewSHM(b, 1).Lane(1)
	payload := make([]byte, size)
	want := alloc.Want{Kind: kind, Replicas: 1}
	ref, err := p.Alloc.Alloc(payload, want)
	require.NoError(b, err)
	b.Run(fmt.Sprintf("Read/%v/%d", kind, size), func(b *testing.B) {
		b.ReportAllocs()
		dst := make([]byte, 0, size)
		for b.Loop() {
			if _, _, err := p.Lane.Read(ref, dst); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run(fmt.Sprintf("Update/%v/%d", kind, size), func(b *testing.B) {
		b.ReportAllocs()
		for n := byte(0); b.Loop(); n++ {
			payload[size/2] = n
			if _, err := p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return payload, nil }); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run(fmt.Sprintf("AllocFree/%v/%d", kind, size), func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r, err := p.Alloc.Alloc(payload, want)
			if err != nil {
				b.Fatal(err)
			}
			if _, _, err := p.Alloc.Free(r); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkDurableUpdate compares an Update of a durable region, one replica, whose lines are flushed by each way of this processor, with a
// volatile one: of one object, whose lines are in the cache, and of many.
func BenchmarkDurableUpdate(b *testing.B) {
	for _, f := range append([]pmem.Flusher{{}}, pmem.Flushers()...) {
		if f.Way() == pmem.Msync {
			continue // memory has none
		}
		for _, objects := range []int{1, 10000} {
			l := slabtest.NewFlushedBy(b, 1, f).Lane(1)
			if f.Persistent() {
				l.Durable()
			}
			payload := make([]byte, 128)
			refs := make([]proto.Ref, objects)
			for i := range refs {
				var err error
				refs[i], err = l.Alloc.Alloc(payload, alloc.Want{Replicas: 1, Durable: f.Persistent()})
				require.NoError(b, err)
			}
			b.Run(fmt.Sprintf("%v/objects=%d", f.Way(), objects), func(b *testing.B) {
				for i := 0; b.Loop(); i = (i + 7919) % objects {
					payload[64]++
					if _, err := l.Lane.Update(refs[i], func([]byte, *slab.Info) ([]byte, error) { return payload, nil }); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkSets holds so many objects, writes them all and gives them back; beside it are as many Updates, which hold one after the other.
func BenchmarkSets(b *testing.B) {
	for name, w := range map[string]*slabtest.World{"shm": slabtest.NewSHM(b, 1), "tcp": slabtest.New(b, 1)} {
		for _, n := range []int{1, 2, 8, 64} {
			p := w.Lane(1)
			payload := make([]byte, 128)
			refs, at, payloads, errs := make([]proto.Ref, n), make([]int, n), make([][]byte, n), make([]error, n)
			for i := range refs {
				var err error
				refs[i], err = p.Alloc.Alloc(payload, alloc.Want{Replicas: 1})
				require.NoError(b, err)
				at[i], payloads[i] = i, payload
			}
			b.Run(fmt.Sprintf("%s/Set/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if err := p.Lane.Hold(refs); err != nil {
						b.Fatal(err)
					}
					p.Lane.WriteHeld(at, payloads, errs)
					if err := errors.Join(errors.Join(errs...), p.Lane.Drop()); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/Updates/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					for _, ref := range refs {
						if _, err := p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return payload, nil }); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}

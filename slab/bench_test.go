package slab_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
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

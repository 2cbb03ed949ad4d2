package slab_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// BenchmarkPrograms runs the programs themselves over shared memory, without the
// session around them.
func BenchmarkPrograms(b *testing.B) {
	for _, size := range []int{100, 4000} {
		p := slabtest.NewSHM(b, 1).Lane(1)
		payload := make([]byte, size)
		want := alloc.Want{Replicas: 1}
		ref, err := p.Alloc.Alloc(payload, want)
		require.NoError(b, err)
		b.Run(fmt.Sprintf("Read/%d", size), func(b *testing.B) {
			b.ReportAllocs()
			dst := make([]byte, 0, size)
			for b.Loop() {
				if _, _, err := p.Lane.Read(ref, dst); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("Update/%d", size), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return payload, nil }); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("AllocFree/%d", size), func(b *testing.B) {
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
}

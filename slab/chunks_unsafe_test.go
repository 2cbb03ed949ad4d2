package slab_test

import (
	"bytes"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestChunksLeaveTheCallersBytesAlone: no READ goes to the bytes before own, not even
// for a moment, wherever the chunks are to stand.
func TestChunksLeaveTheCallersBytesAlone(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	reg, err := p.Region(1)
	require.NoError(t, err)
	reg.Local = true // chunks are read in place
	const size = 4000
	var refs []proto.Ref
	var want []byte
	for i := range 3 {
		b := bytes.Repeat([]byte{byte('a' + i)}, size)
		ref, err := p.Alloc.Alloc(b, alloc.Want{Kind: proto.Single, Replicas: 1})
		require.NoError(t, err)
		refs, want = append(refs, ref), append(want, b...)
	}
	for _, prefix := range []int{0, 1, proto.SingleLead - 1, proto.SingleLead, 1000} {
		for own := range prefix + 1 {
			if own > proto.SingleLead && own < prefix-proto.SingleLead {
				continue
			}
			dst := append(bytes.Repeat([]byte{'p'}, prefix), make([]byte, len(want))...)
			start, inPlace := uintptr(unsafe.Pointer(unsafe.SliceData(dst))), 0
			p.BeforeDo = func(_ int, r *rdma.Round) {
				for i := range r.Len() {
					for _, v := range r.At(i).Verbs {
						at := uintptr(unsafe.Pointer(unsafe.SliceData(v.Buf)))
						if at+uintptr(len(v.Buf)) <= start || at >= start+uintptr(len(dst)) {
							continue
						}
						inPlace++
						require.GreaterOrEqual(t, int(at-start), own)
					}
				}
			}
			require.NoError(t, p.Lane.ReadChunks(refs, dst, own, prefix, size))
			p.BeforeDo = nil
			require.Equal(t, bytes.Repeat([]byte{'p'}, prefix), dst[:prefix])
			require.True(t, bytes.Equal(want, dst[prefix:]))
			wantInPlace := 2
			if prefix-proto.SingleLead >= own {
				wantInPlace = 3
			}
			require.Equal(t, wantInPlace, inPlace, "prefix %d, own %d", prefix, own)
		}
	}
}

package alloc_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestClaimsOfThisEpochOutliveThoseOfTheLast: an Alloc that meets a claim of an
// epoch that is over drops the claims of that epoch, and none that has been made
// since: nobody would ever release those.
func TestClaimsOfThisEpochOutliveThoseOfTheLast(t *testing.T) {
	w := slabtest.New(t, 2)
	p := w.Lane(1)
	_, err := p.Alloc.Alloc([]byte("leaves claims behind"), want(2))
	require.NoError(t, err)
	large, err := p.Alloc.Alloc(make([]byte, 300_000), want(2))
	require.NoError(t, err)
	p.NextEpoch()
	_, _, err = p.Lane.Read(large, nil) // learns the block's header
	require.NoError(t, err)
	_, _, err = p.Alloc.Free(large)
	require.NoError(t, err)
	reservation := func() proto.R {
		reg := mustRegion(t, p)
		b, ok := reg.Geometry.BlockOf(uint64(large.Addr.Off()))
		require.True(t, ok)
		h := reg.Headers.Load(b)
		buf, err := p.Buffer(8)
		require.NoError(t, err)
		r := &rdma.Round{}
		r.Chain(reg.P()).Read(proto.Slab{Off: uint64(large.Addr.Off()), Class: h.Class(), Kind: h.Kind()}.ROff(), buf)
		p.Do(r)
		require.NoError(t, r.Err())
		return proto.R(proto.Word(buf, 0))
	}
	require.EqualValues(t, 1, reservation().Session(), "kept for the next Alloc of its size")
	_, err = p.Alloc.Alloc([]byte("meets the old claims"), want(2))
	require.NoError(t, err)
	require.NoError(t, p.Alloc.Close())
	require.Zero(t, reservation(), "given back")
}

package slab_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// noClaims lends nothing, because of err.
type noClaims struct{ err error }

func (noClaims) Shadow(*slab.Region, proto.Class, int) (slab.Claim, bool) { return slab.Claim{}, false }
func (noClaims) Full(*slab.Region, proto.Class) bool                      { return false }
func (s noClaims) ClaimShadows(*slab.Region, proto.Class) error           { return s.err }

// What keeps a lane from claiming a shadow is the update's error: a region without room is one of the reasons.
func TestErrorOfClaimsIsPassedOn(t *testing.T) {
	p := slabtest.New(t, 1).Lane(1)
	ref, err := p.Alloc.Alloc(make([]byte, 128), stagedWant(128))
	require.NoError(t, err)
	p.Lane.LendShadows(noClaims{slab.ErrLease})
	err = update(p.Lane, ref, bytes.Repeat([]byte{1}, 128))
	require.ErrorIs(t, err, slab.ErrLease)
	require.NotErrorIs(t, err, slab.ErrNoShadow)
}

// asked notes which claims of each class are lent.
type asked struct {
	*alloc.Allocator
	claims map[proto.Class][]int
}

func (s asked) Shadow(reg *slab.Region, class proto.Class, i int) (slab.Claim, bool) {
	s.claims[class] = append(s.claims[class], i)
	return s.Allocator.Shadow(reg, class, i)
}

// The objects of a batch have the first claims of their classes.
func TestBatchesTakeTheFirstClaims(t *testing.T) {
	p := slabtest.New(t, 1).Lane(1)
	var refs []proto.Ref
	var payloads [][]byte
	for i, size := range []int{128, 224, 128, 224} {
		ref, err := p.Alloc.Alloc(make([]byte, size), stagedWant(size))
		require.NoError(t, err)
		refs, payloads = append(refs, ref), append(payloads, bytes.Repeat([]byte{byte(i + 1)}, size))
	}
	s := asked{p.Alloc, map[proto.Class][]int{}}
	p.Lane.LendShadows(s)
	errs := make([]error, len(refs))
	p.Lane.WriteMany(refs, payloads, errs)
	for i := range refs {
		require.NoError(t, errs[i])
		got, _, err := p.Lane.Read(refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, payloads[i], got)
	}
	require.Len(t, s.claims, 2)
	for class, claims := range s.claims {
		require.Equal(t, []int{0, 1}, claims, "%v", class)
	}
}

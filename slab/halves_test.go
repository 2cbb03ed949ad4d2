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

// A reader that knows the parity of a version READs half a slab; one that guesses
// wrong needs one more round, for a whole batch; one that keeps guessing wrong
// stops guessing. It always gets the value.
func TestHalfASlabIsReadWhereTheVersionIsKnown(t *testing.T) {
	w := slabtest.New(t, 1)
	writer, reader := w.Lane(1), w.Lane(2)
	const n = 64
	big := make([]byte, 1900) // a slab of 4160 B
	refs := make([]proto.Ref, n)
	for i := range refs {
		var err error
		refs[i], err = writer.Alloc.Alloc(big, alloc.Want{Replicas: 1})
		require.NoError(t, err)
	}
	class, ok := proto.ClassFor(len(big), proto.Pair)
	require.True(t, ok)
	whole, half := class.Bytes(), class.Bytes()/2+8

	read := func() (rounds, bytes int) {
		before, sent := reader.Rounds(), reader.Lane.Tally().Bytes
		for i, want := range refs {
			got, _, err := reader.Lane.Read(want, nil)
			require.NoError(t, err)
			require.Equal(t, big, got, i)
		}
		return reader.Rounds() - before, int(reader.Lane.Tally().Bytes - sent)
	}
	many := func() (rounds, bytes int) {
		before, sent := reader.Rounds(), reader.Lane.Tally().Bytes
		seen := 0
		require.NoError(t, reader.Lane.ReadMany(refs, func(_ int, p []byte, _ slab.Info, err error) {
			require.NoError(t, err)
			require.Equal(t, big, p)
			seen++
		}))
		require.Equal(t, n, seen)
		return reader.Rounds() - before, int(reader.Lane.Tally().Bytes - sent)
	}
	change := func() {
		big = fmt.Appendf(big[:1800], "changed %d", len(big))
		for _, ref := range refs {
			_, err := writer.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return big, nil })
			require.NoError(t, err)
		}
	}

	_, _ = read() // learns headers and parities
	rounds, bytes := read()
	require.Equal(t, [2]int{n, n * half}, [2]int{rounds, bytes})
	rounds, bytes = many()
	require.Equal(t, [2]int{1, n * half}, [2]int{rounds, bytes})

	change()
	rounds, bytes = many()
	require.Equal(t, [2]int{2, n * (half + whole)}, [2]int{rounds, bytes})
	rounds, bytes = many() // learned, but careful now: whole slabs
	require.Equal(t, [2]int{1, n * whole}, [2]int{rounds, bytes})
	_, _ = many()
	rounds, bytes = many() // confident again
	require.Equal(t, [2]int{1, n * half}, [2]int{rounds, bytes})

	// Objects that change before every read are READ whole, in one round.
	change()
	_, _ = many()
	for range 3 {
		change()
		rounds, bytes = many()
		require.Equal(t, [2]int{1, n * whole}, [2]int{rounds, bytes})
	}
}

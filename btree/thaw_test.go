package btree

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestThawKnowsTheFreeze: a client that has read a frozen leaf is slow to thaw it. Meanwhile others thaw the leaf and write to it, and one that had read the left
// leaf before that changed freezes it once more, by the same node at the same stamp.
func TestThawKnowsTheFreeze(t *testing.T) {
	s := newStage(t, thin(30))
	first := func(p *Program) *page {
		pg, err := p.find(probe{}, 0)
		require.NoError(t, err)
		return pg
	}
	read := func(p *Program, ref Ref) *page {
		pg, err := p.read(ref)
		require.NoError(t, err)
		return pg
	}
	freezer, late, slow, writer := s.client(false), s.client(false), s.client(false), s.client(false)
	l := first(freezer)
	right := l.right
	early := first(late)
	_, err := freezer.freeze(l, read(freezer, right))
	require.NoError(t, err)
	s.put(writer, 0, "the left leaf changes")
	frozen := read(slow, right)
	require.True(t, frozen.frozen())
	low := string(frozen.appendKey(nil, 0))
	_, err = writer.Put([]byte(low), []byte("new"), Cond{}) // thaws it
	require.NoError(t, err)
	s.want[low] = "new"
	now := read(late, right)
	require.False(t, now.frozen())
	_, err = late.freeze(early, now)
	require.NoError(t, err)
	require.NoError(t, slow.thaw(frozen))
	s.see(s.client(false))
	require.NoError(t, writer.settle(right))
	s.see(s.client(false))
	require.Greater(t, read(writer, right).stamp, now.stamp)
}

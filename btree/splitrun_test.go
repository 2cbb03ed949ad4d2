package btree

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// newKeys are writes of n new keys behind base.
func newKeys(base []byte, n, valueBytes int) []Write {
	ws := make([]Write, n)
	for i := range ws {
		ws[i] = Write{Key: fmt.Appendf(nil, "%s/%03d", base, i), Value: make([]byte, valueBytes)}
	}
	return ws
}

// fullLeaf has a group find no room for the first of the writes in its leaf.
func fullLeaf(t testing.TB, p *Program, writes []Write) Ref {
	leaf, ok := p.Leaf(&writes[0])
	require.True(t, ok)
	at := 0
	p.WriteGroup(leaf, func() *Write {
		if at == 1 {
			return nil
		}
		at++
		return &writes[0]
	})
	require.True(t, writes[0].Alone && writes[0].full)
	return leaf
}

// TestSplitRunOfALeafThatHasRoomAgain: between the group that found the leaf full and the split, another client deletes
// the entries behind the new keys, so that nothing has to be split.
func TestSplitRunOfALeafThatHasRoomAgain(t *testing.T) {
	m, st, p := newTree(t, Config{})
	other := NewProgram(p.Shared, m.store(t))
	for i := range 400 {
		_, err := p.Put(key4(i), make([]byte, 40), Cond{})
		require.NoError(t, err)
	}
	// The last leaf is filled until it has no room for one more.
	last := 400
	for ; ; last++ {
		leaf, ok := p.Leaf(&Write{Key: key4(last), Value: make([]byte, 40)})
		require.True(t, ok)
		raw, err := st.Read(leaf, nil)
		require.NoError(t, err)
		v, err := parse(raw)
		require.NoError(t, err)
		if p.limits.Room-v.filled() < 60 {
			break
		}
		_, err = p.Put(key4(last), make([]byte, 40), Cond{})
		require.NoError(t, err)
	}
	writes := newKeys(key4(last-5), 3, 40)
	leaf := fullLeaf(t, p, writes)
	for i := last - 4; i < last; i++ {
		require.NoError(t, other.Delete(key4(i), Cond{}))
	}
	splits := p.stats.splits.Load()
	require.Equal(t, len(writes), p.SplitRun(leaf, writes))
	require.Equal(t, splits, p.stats.splits.Load(), "nothing was split")
	for i := range writes {
		require.NoError(t, writes[i].Err)
		_, version, err := other.Get(writes[i].Key, nil)
		require.NoError(t, err)
		require.Equal(t, writes[i].Version, version)
	}
	require.Equal(t, last-4+len(writes), checkWhole(t, m, st, p.Shared, false).Keys)
}

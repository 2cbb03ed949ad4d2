package btree

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLeavesOfOthersAreExamined: a leaf that this process has written is not examined by its next
// writer; after another program has put something else there it is, and a damaged one is refused.
func TestLeavesOfOthersAreExamined(t *testing.T) {
	m := newMemory()
	s := m.store(t)
	sh, err := Make(s, Config{})
	require.NoError(t, err)
	p := NewProgram(sh, s)
	for i := range 40 {
		_, err := p.Put(fmt.Appendf(nil, "key%02d", i), []byte("value"), Cond{})
		require.NoError(t, err)
	}
	leaf := sh.Root()
	write := func(value string) *Write {
		w := &Write{Key: []byte("key00"), Value: []byte(value)}
		given := false
		p.WriteGroup(leaf, func() *Write {
			if given {
				return nil
			}
			given = true
			return w
		})
		return w
	}
	now := func() []byte {
		b, err := s.Read(leaf, nil)
		require.NoError(t, err)
		return b
	}
	require.False(t, write("first").Alone)
	require.True(t, sh.whole.has(leaf, now()), "not examined again")
	other, err := Attach(m.store(t), leaf, Config{})
	require.NoError(t, err)
	require.False(t, other.whole.has(leaf, now()), "what another process has written")

	good := now()
	bad := append([]byte(nil), good...)
	v, err := parse(bad)
	require.NoError(t, err)
	last, ok := v.suffix(v.count - 1)
	require.True(t, ok)
	last[0] = 0 // out of order, and no search for key00 comes there
	put := func(b []byte) {
		require.NoError(t, m.store(t).Update(leaf, func([]byte) ([]byte, error) { return b, nil }))
	}
	put(bad)
	require.True(t, write("second").Alone, "not written into a damaged leaf")
	require.Equal(t, bad, now())
	_, err = p.Put([]byte("key00"), []byte("second"), Cond{})
	require.ErrorIs(t, err, ErrCorrupt)
	put(good)
	w := write("third")
	require.False(t, w.Alone)
	require.NoError(t, w.Err)
}

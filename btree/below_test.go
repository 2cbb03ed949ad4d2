package btree

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// A cached node leads to its cached children without a search, as long as they are in
// the cache: one that has been dropped or replaced is neither found nor kept.
func TestNodesOutOfTheCacheAreNotFoundBelowTheirParents(t *testing.T) {
	m := newMemory()
	st := m.store(t)
	sh, err := Make(st, Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	p := NewProgram(sh, st)
	key := func(i int) []byte { return fmt.Appendf(nil, "a key of some length %06d", i) }
	for i := range 6000 {
		_, err := p.Put(key(i), make([]byte, 40), Cond{})
		require.NoError(t, err)
	}
	get := func(i int) {
		v, _, err := p.Get(key(i), nil)
		require.NoError(t, err)
		require.Len(t, v, 40)
	}
	root := p.cache.load(p.root)
	require.NotNil(t, root)
	require.Greater(t, int(root.height), 1, "the tree is too low for this test")
	k := key(3000)
	for range 3 {
		get(3000)
	}
	root = p.cache.load(p.root)
	i, _ := root.route(k[root.shared:], true)
	child := root.below[i].Load()
	require.NotNil(t, child, "looked for, and not linked")
	require.Same(t, p.cache.load(root.kid(i)), child)

	p.cache.drop(child.ref)
	require.Nil(t, root.below[i].Load(), "dropped, and still led to")
	_, ok := p.quick(k, 0)
	require.False(t, ok)
	get(3000)
	fresh := p.cache.load(child.ref)
	require.NotNil(t, fresh)
	require.NotSame(t, child, fresh)
	_, ok = p.quick(k, 0)
	require.True(t, ok)
	require.Same(t, fresh, root.below[i].Load())

	p.cache.store(fresh) // read again
	require.Nil(t, root.below[i].Load(), "replaced, and still led to")
	_, ok = p.quick(k, 0)
	require.True(t, ok)
	require.Same(t, p.cache.load(child.ref), root.below[i].Load())

	// Whoever links a node that is leaving the cache at the same moment takes it back.
	gone := p.cache.load(child.ref)
	gone.gone.Store(true)
	root.below[i].Store(nil)
	p.cache.link(root, i)
	require.Nil(t, root.below[i].Load())
}

package pager

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSequence: windows grow with a scan, are read ahead of it, and begin again with every jump.
func TestSequence(t *testing.T) {
	const most = 64
	var q sequence
	type window struct{ n, ahead uint64 }
	missed := func(page uint64) window {
		n, ahead := q.missed(page, most)
		return window{n, ahead}
	}
	require.Equal(t, window{1, 0}, missed(100))
	require.Equal(t, window{1, 0}, missed(50), "a jump")
	require.Equal(t, window{4, 0}, missed(51))
	require.Equal(t, window{8, 0}, missed(55))
	require.Equal(t, window{16, 16}, missed(63), "79 to 94 are read ahead")
	for _, page := range []uint64{70, 80, 94} {
		_, n := q.marked(page, most)
		require.Zero(t, n, "page %d is not the mark", page)
	}
	next, n := q.marked(79, most)
	require.Equal(t, []uint64{95, 32}, []uint64{next, n})
	next, n = q.marked(95, most)
	require.Equal(t, []uint64{127, 64}, []uint64{next, n})
	_, n = q.marked(95, most)
	require.Zero(t, n, "once for each mark")
	next, n = q.marked(127, most)
	require.Equal(t, []uint64{191, 64}, []uint64{next, n}, "at most most")
	require.Equal(t, window{64, 64}, missed(191), "the page that was read ahead was removed: the scan goes on")
	require.Equal(t, window{1, 0}, missed(7), "a jump")
	_, n = q.marked(255, most)
	require.Zero(t, n, "the scan has ended")
	q = sequence{}
	require.Equal(t, window{1, 0}, missed(0), "no fault was before the first one")
}

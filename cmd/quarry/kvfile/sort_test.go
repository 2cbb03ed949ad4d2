package kvfile

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// sorted reads the entries of a sorter, and proves that they rise.
func sorted(t require.TestingT, s *Sorter) (keys []string, at map[string]Entry) {
	in, err := s.Entries()
	require.NoError(t, err)
	at = map[string]Entry{}
	for {
		e, err := in.Next()
		if err == io.EOF {
			_, err = in.Next()
			require.Equal(t, io.EOF, err)
			require.True(t, slices.IsSorted(keys))
			return keys, at
		}
		require.NoError(t, err)
		k := string(e.Key)
		if _, twice := at[k]; twice {
			require.Fail(t, "twice", "%q", k)
		}
		keys, at[k] = append(keys, k), Entry{Value: slices.Clone(e.Value), Line: e.Line}
	}
}

// TestSorterIsAMapInOrder: whatever the memory, with keys that come again, the last one stays.
func TestSorterIsAMapInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &Sorter{memory: rapid.IntRange(1, 5000).Draw(t, "memory")}
		defer s.Close()
		want := map[string]Entry{}
		key := rapid.OneOf(rapid.SliceOfN(rapid.Byte(), 0, 12), rapid.Custom(func(t *rapid.T) []byte {
			return fmt.Appendf(nil, "a common prefix %d", rapid.IntRange(0, 50).Draw(t, "number"))
		}))
		for line := range rapid.IntRange(0, 300).Draw(t, "n") {
			e := Entry{key.Draw(t, "key"), rapid.SliceOfN(rapid.Byte(), 0, 30).Draw(t, "value"), line}
			require.NoError(t, s.Add(e.Key, e.Value, line))
			want[string(e.Key)] = e
		}
		for range 2 { // it can be read again
			keys, got := sorted(t, s)
			require.Equal(t, slices.Sorted(maps.Keys(want)), append([]string(nil), keys...))
			for k, e := range want {
				require.Equal(t, e.Line, got[k].Line)
				require.Equal(t, string(e.Value), string(got[k].Value))
			}
		}
	})
}

// TestSorterMergesRunsOfRuns: more runs than are merged at a time.
func TestSorterMergesRunsOfRuns(t *testing.T) {
	s := &Sorter{memory: 1}
	defer s.Close()
	const n = 2*fanIn*fanIn + 5
	for i := range n {
		require.NoError(t, s.Add(fmt.Appendf(nil, "%05d", i*7%(n/2)), fmt.Appendf(nil, "%d", i), i))
	}
	keys, got := sorted(t, s)
	require.Len(t, s.levels, 3)
	require.Less(t, s.Spilled(), 3*fanIn)
	require.Equal(t, n, s.Added())
	last := map[string]int{}
	for i := range n {
		last[fmt.Sprintf("%05d", i*7%(n/2))] = i
	}
	require.Len(t, keys, len(last))
	for k, i := range last {
		require.Equal(t, i, got[k].Line, k)
		require.Equal(t, fmt.Sprint(i), string(got[k].Value))
	}
}

// TestSorterKeepsToItsMemory: what it holds is bounded whatever it is given, and its files have no names.
func TestSorterKeepsToItsMemory(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	s := NewSorter(MinSortBytes)
	value := make([]byte, 100)
	for i := range 200_000 {
		require.NoError(t, s.Add(fmt.Appendf(nil, "%08d", i*99_991%200_000), value, i))
		held := indexBytes * len(s.index)
		for _, c := range s.chunks {
			held += cap(c)
		}
		require.LessOrEqual(t, held, MinSortBytes+MinSortBytes/4)
	}
	require.Greater(t, s.Spilled(), 10)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	keys, _ := sorted(t, s)
	require.Len(t, keys, 200_000)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
}

// TestSorterSaysWhereItsFilesGo: a folder that does not take them is named.
func TestSorterSaysWhereItsFilesGo(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()+"/missing")
	s := &Sorter{memory: 1}
	require.NoError(t, s.Add([]byte("a"), nil, 1))
	err := s.Add([]byte("b"), nil, 2)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "missing")
	require.ErrorContains(t, err, "TMPDIR")
	// A file that ends early is an error, not the end.
	t.Setenv("TMPDIR", t.TempDir())
	s = &Sorter{memory: 1}
	defer s.Close()
	for i := range 3 {
		require.NoError(t, s.Add([]byte(strings.Repeat("k", i+1)), []byte("value"), i))
	}
	r := s.levels[0][1]
	require.NoError(t, syscall.Ftruncate(int(r.file.Fd()), r.bytes-1))
	in, err := s.Entries()
	for err == nil {
		_, err = in.Next()
	}
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

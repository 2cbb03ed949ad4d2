package redis

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
)

// TestClearIsInBatches: what hangs on an id is removed also where it is more than one batch.
func TestClearIsInBatches(t *testing.T) {
	r := newRig(t)
	sc := newSchedule(t, 1)
	a := sc.add(r.trees[0])
	for _, n := range []int{dropBatch - 1, dropBatch, dropBatch + 1, 2*dropBatch + 3} {
		hset, zadd := []string{"HSET", "h"}, []string{"ZADD", "z"}
		for i := range n {
			hset = append(hset, fmt.Sprint("field", i), "v")
			zadd = append(zadd, fmt.Sprint(i%7), fmt.Sprint("member", i))
		}
		want := fmt.Sprintf(":%d\r\n", n)
		require.Equal(t, want, a.raw(hset...))
		require.Equal(t, want, a.raw(zadd...))
		require.Equal(t, want, a.raw("HLEN", "h"))
		require.Equal(t, ":2\r\n", a.raw("DEL", "h", "z"))
		left, err := a.s.tree.Count(a.s.ctx, btree.Range{})
		require.NoError(t, err)
		require.Equal(t, r.filled, left, "%d fields", n)
	}
}

// TestRenameOfLongStrings: two strings that do not fit the record of one move are renamed by
// a copy. Where the source changes meanwhile the copy is taken back, and RENAME begins again.
func TestRenameOfLongStrings(t *testing.T) {
	if testing.Short() {
		t.Skip("writes some hundred MiB; not with -short")
	}
	r := newRig(t)
	src, dst := strings.Repeat("s", maxValueBytes/2+1), strings.Repeat("d", maxValueBytes/2+1)
	for _, change := range []string{"", "SET a short", "SET b short", "DEL b"} {
		sc := newSchedule(t, 1)
		a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
		require.Equal(t, "+OK\r\n", b.raw("SET", "a", src))
		require.Equal(t, "+OK\r\n", b.raw("SET", "b", dst))
		var answer string
		a.start(func() { answer = a.raw("RENAME", "a", "b") })
		a.run(4) // the copy has been put, the source is there
		if change != "" {
			b.raw(strings.Fields(change)...)
		}
		a.run(endless)
		a.s.tree.step = nil
		require.Equal(t, "+OK\r\n", answer, change)
		require.Equal(t, "$-1\r\n", b.raw("GET", "a"), change)
		got, want := bulkOf(b.raw("GET", "b")), src
		switch change {
		case "SET a short":
			want = "short" // the source is what is renamed last
		case "SET b short":
			want = "short" // behind the copy
		case "DEL b":
			want = ""
		}
		require.True(t, got == want, "%s: %d bytes, %.20s", change, len(got), got)
		require.Empty(t, sc.end(r))
	}
}

package redis

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
)

// TestIDsInRows: the hashes that a connection makes have ids in a row, none of them 0, and a row
// that meets an owner of another one is left.
func TestIDsInRows(t *testing.T) {
	r := newRig(t)
	a := newSchedule(t, 1).add(r.trees[0])
	begin := []uint64{^uint64(0) - 1, 1000, 2000}
	a.s.random = func() uint64 {
		id := begin[0]
		begin = begin[1:]
		return id
	}
	o := owner{kind: kindHash, made: a.c.now, key: []byte("other")}
	_, err := r.trees[0].PutIf(t.Context(), appendID(nil, ownerFamily, 2), o.append(nil), btree.IfAbsent())
	require.NoError(t, err)
	var ids []uint64
	for i := range 5 {
		key := fmt.Sprint("h", i)
		require.Equal(t, ":1\r\n", a.raw("HSET", key, "f", "v"))
		rec, err := a.c.load([]byte(key))
		require.NoError(t, err)
		ids = append(ids, rec.id)
	}
	require.Equal(t, []uint64{^uint64(0) - 1, ^uint64(0), 1, 1000, 1001}, ids)
}

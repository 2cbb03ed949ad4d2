package sim

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller/state"
)

func TestHazard14_EtcdModelGuards(t *testing.T) {
	e := newEtcd()
	term, ok := e.campaign(0, 0, 100)
	require.True(t, ok)
	_, ok = e.campaign(1, 50, 100)
	require.False(t, ok, "somebody leads")

	put := func(key string, prev uint64) state.Op { return state.Op{Key: key, Value: []byte(key), Prev: prev} }
	rev, err := e.txn(term, []state.Op{put("a", 0), put("b", 0)}, 10)
	require.NoError(t, err)
	_, err = e.txn(term, []state.Op{put("a", rev), put("b", 0)}, 10)
	require.ErrorIs(t, err, errGuard)
	require.Equal(t, rev, e.records["a"].Revision, "all or nothing")

	require.True(t, e.extend(term, 90, 100))
	_, err = e.txn(term, []state.Op{{Key: "a", Prev: rev}}, 180)
	require.NoError(t, err)
	require.Len(t, e.all(), 1)

	_, err = e.txn(term, []state.Op{put("c", 0)}, 190)
	require.ErrorIs(t, err, errNotLeader, "the lease is over")
	next, ok := e.campaign(1, 190, 100)
	require.True(t, ok)
	require.Greater(t, next, term)
	require.False(t, e.extend(term, 191, 100))
	e.resign(term, 192)
	require.Equal(t, next, e.term, "only the holder resigns")
	e.resign(next, 192)
	require.Zero(t, e.term)
	_, err = e.txn(0, nil, 192)
	require.ErrorIs(t, err, errNotLeader)

	c := e.clone()
	delete(c.records, "b")
	require.Len(t, e.all(), 1)
}

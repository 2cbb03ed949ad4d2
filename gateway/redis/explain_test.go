package redis

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestThreeAnswers: done, not done, unknown.
func TestThreeAnswers(t *testing.T) {
	c := &conn{s: &Server{shared: &shared{cfg: Config{}.withDefaults()}}}
	require.Contains(t, c.explain(fmt.Errorf("update: %w", client.ErrUnknown)), "UNKNOWN the outcome is not known: it may have been done, at most once")
	require.Equal(t, "OOM no space left in the cluster; not done", c.explain(client.ErrNoSpace))
	require.Equal(t, "ERR node is asleep; not done", c.explain(errors.New("node is asleep")))
	require.Equal(t, "TRYAGAIN others kept changing the key; not done", c.explain(errContended))
	require.Equal(t, string(errWrongType), c.explain(errWrongType))
	require.Equal(t, string(errTooLong), c.explain(client.ErrTooLarge))
	c.did.part = true
	require.Equal(t, "ERR node is asleep; done in part", c.explain(errors.New("node is asleep")))
	require.Equal(t, "TRYAGAIN others kept changing the key; done in part", c.explain(errContended))
	require.Equal(t, string(errWrongType)+"; done in part", c.explain(errWrongType))
	c.did.unsettled = true
	require.Contains(t, c.explain(errContended), "UNKNOWN")
	require.Contains(t, c.explain(errWrongType), "UNKNOWN")
	// A fault that comes with an unknown outcome does not turn it into "not done".
	require.Contains(t, c.explain(fmt.Errorf("%w: %w", errContended, client.ErrUnknown)), "UNKNOWN")
	// A command of unknown outcome is never tried again as if another had been faster.
	require.False(t, lost(fmt.Errorf("%w: %w", client.ErrConflict, client.ErrUnknown)))
	require.True(t, lost(fmt.Errorf("x: %w", client.ErrConflict)))
	require.False(t, lost(nil))
}

// TestPlacesThatAreWantedAgainStay: who gives up a place in the order does not take
// it from somebody who has put it there since. See invariant 2.
func TestPlacesThatAreWantedAgainStay(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	tree, err := kv.Create(ctx, cluster.Connect(client.Config{}), "keys", btree.Config{})
	require.NoError(t, err)
	c := &conn{s: New(Config{Tree: tree})}
	at := appendPlace(nil, 1, 2.5, []byte("member"))
	mine, err := tree.PutIf(ctx, at, nil, btree.Cond{})
	require.NoError(t, err)
	_, err = tree.PutIf(ctx, at, nil, btree.Cond{}) // somebody else
	require.NoError(t, err)
	require.NoError(t, c.unplace([]placement{{at, mine}}))
	theirs, err := c.s.versionOf(at)
	require.NoError(t, err)
	require.NotZero(t, theirs)
	require.NoError(t, c.unplace([]placement{{at, theirs}}))
	gone, err := c.s.versionOf(at)
	require.NoError(t, err)
	require.Zero(t, gone)
}

func TestErrorsAreOneLine(t *testing.T) {
	c := &conn{}
	c.fail("ERR a\r\nb\n")
	require.Equal(t, "-ERR a  b\r\n", string(c.out))
}

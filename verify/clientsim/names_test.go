package clientsim

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// TestHazard212_SilentControllers: the controllers tell nothing of names any more, neither by pushes nor by heartbeats, as those of an earlier version, and the lease
// goes on. Ten seconds later neither an entry nor the tree that was opened by it is used: the name may stand for another one, as it does here.
func TestHazard212_SilentControllers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := Start(1, Options{Regions: 1})
		defer c.close()
		require.NoError(t, err)
		ctx := c.ctx
		_, cl, err := c.Client(ctx, "client", client.Config{})
		require.NoError(t, err)
		_, other, err := c.Client(ctx, "other", client.Config{})
		require.NoError(t, err)
		_, err = kv.Create(ctx, other, replacedTree, btree.Config{})
		require.NoError(t, err)
		named, err := kv.OpenNamed(ctx, cl, replacedTree, btree.Config{})
		require.NoError(t, err)
		follow, err := cl.Names().Follow(ctx, replacedTree)
		require.NoError(t, err)
		former, err := named.Tree(ctx)
		require.NoError(t, err)
		require.NoError(t, c.pause(ctx, nameBound))
		require.NoError(t, former.Put(ctx, []byte("k"), []byte("v")), "nothing has changed")

		session := cl.SessionID()
		c.older.Store(true)
		_, err = kv.Stage(ctx, other, replacedTree, "job")
		require.NoError(t, err)
		require.NoError(t, kv.Commit(ctx, other, replacedTree, "job"))
		require.NoError(t, former.Put(ctx, []byte("k"), []byte("v")), "the change of a name does not wait for its followers")
		require.NoError(t, c.pause(ctx, nameBound))
		require.Equal(t, session, cl.SessionID(), "the lease goes on")
		_, err = follow.Entry()
		require.ErrorIs(t, err, client.ErrUnreachable)
		require.ErrorIs(t, former.Put(ctx, []byte("lost"), []byte("v")), client.ErrUnreachable)
		_, err = former.Get(ctx, []byte("k"), nil)
		require.ErrorIs(t, err, client.ErrUnreachable)

		c.older.Store(false)
		for began := time.Now(); ; {
			next, err := named.Tree(ctx)
			if err == nil && next.Root() != former.Root() {
				require.NoError(t, next.Put(ctx, []byte("k"), []byte("v")))
				break
			}
			require.Less(t, time.Since(began), time.Minute, "%v", err)
			require.NoError(t, c.pause(ctx, 100*time.Millisecond))
		}
		require.ErrorIs(t, former.Put(ctx, []byte("lost"), []byte("v")), kv.ErrReplaced)
		named.Close()
		require.NoError(t, cl.Close())
		require.NoError(t, other.Close())
		require.Empty(t, c.problems)
	})
}

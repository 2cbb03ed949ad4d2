package kv_test

import (
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// Trees of one name in two tenants are two trees: neither shows in the other, in a scan or by a key, and a tree
// opened by the other's root reads nothing.
func TestTreesOfOneNameInTwoTenants(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	for _, name := range []string{"a", "b"} {
		_, err := cluster.Control().CreateTenant(ctx, connect.NewRequest(&quarrypb.CreateTenantRequest{Name: name}))
		require.NoError(t, err)
	}
	trees := map[string]*kv.Tree{}
	for _, tenant := range []string{"a", "b", "default"} {
		c := cluster.Connect(client.Config{Tenant: tenant})
		_, err := kv.Open(ctx, c, "users", btree.Config{})
		require.ErrorIs(t, err, client.ErrNoName, tenant)
		tree, err := kv.Create(ctx, c, "users", btree.Config{})
		require.NoError(t, err)
		require.NoError(t, tree.Put(ctx, []byte("same"), []byte("of "+tenant)))
		require.NoError(t, tree.Put(ctx, []byte("only "+tenant), []byte("x")))
		trees[tenant] = tree
	}
	require.NoError(t, trees["b"].Delete(ctx, []byte("same")))
	for _, tenant := range []string{"a", "b", "default"} {
		c := cluster.Connect(client.Config{Tenant: tenant})
		again, err := kv.Open(ctx, c, "users", btree.Config{})
		require.NoError(t, err)
		v, err := again.Get(ctx, []byte("same"), nil)
		if tenant == "b" {
			require.ErrorIs(t, err, btree.ErrNoKey)
		} else {
			require.NoError(t, err)
			require.Equal(t, "of "+tenant, string(v))
		}
		for _, of := range []string{"a", "b", "default"} {
			if _, err = again.Get(ctx, []byte("only "+of), nil); of == tenant {
				require.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, btree.ErrNoKey, "%s in %s", of, tenant)
			_, err = c.Names().Create(ctx, "stolen from "+of, kv.NameKind, trees[of].Root())
			require.NoError(t, err)
			_, err = kv.Open(ctx, c, "stolen from "+of, btree.Config{})
			require.ErrorIs(t, err, client.ErrTenant, "%s in %s", of, tenant)
		}
	}
}

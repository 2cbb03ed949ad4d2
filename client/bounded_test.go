package client_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A caller's grants may change under its session: a table from which regions of the session's tenant are left
// out changes nothing, though it is newer.
func TestTablesOfOtherTenantsAreRefused(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP})
	ref, err := c.Alloc(t.Context(), []byte("value"), client.AllocOptions{})
	require.NoError(t, err)
	next := client.Table(c)
	had := next.Revision
	next.Revision += 1 << 20
	next.Whole, next.Regions = true, nil
	next.Bounded, next.Tenants = true, []uint32{7}
	require.ErrorIs(t, client.Install(c, next), table.ErrBounded)
	require.Less(t, client.Table(c).Revision, had+1<<20)
	got, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "value", string(got))
}

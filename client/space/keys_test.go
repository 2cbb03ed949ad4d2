package space_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// oneKey is the only key of every tenant.
type oneKey struct{}

func (oneKey) PayloadKeys(context.Context, string) ([]client.PayloadKey, error) {
	return []client.PayloadKey{{1}}, nil
}

// TestClientsWithKeys: a space is not encrypted, so a client with keys writes no byte of it, and reads it only if it reads what is clear.
func TestClientsWithKeys(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{})
	s, err := space.Create(ctx, c.Connect(client.Config{}), "s", mib, space.Options{})
	require.NoError(t, err)
	require.NoError(t, s.Store64(ctx, s.Base(), 7))
	for _, allow := range []bool{false, true} {
		cl := c.Connect(client.Config{Keys: oneKey{}, AllowClear: allow})
		_, err := space.Create(ctx, cl, "another", mib, space.Options{})
		require.ErrorIs(t, err, client.ErrNotEncrypted)
		k, err := space.Open(ctx, cl, "s")
		require.NoError(t, err)
		_, err = k.Write(ctx, []byte("secret"), k.Base())
		require.ErrorIs(t, err, client.ErrNotEncrypted)
		require.ErrorIs(t, k.Store64(ctx, k.Base(), 8), client.ErrNotEncrypted)
		_, err = k.Add64(ctx, k.Base(), 8)
		require.ErrorIs(t, err, client.ErrNotEncrypted)
		_, _, err = k.CAS64(ctx, k.Base(), 7, 8)
		require.ErrorIs(t, err, client.ErrNotEncrypted)
		v, err := k.Load64(ctx, k.Base())
		if allow {
			require.NoError(t, err)
			require.EqualValues(t, 7, v)
		} else {
			require.ErrorIs(t, err, client.ErrNotEncrypted)
		}
	}
}

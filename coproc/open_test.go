package coproc_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func TestMemoryForThoseWhoOnlyWantMemory(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	m, err := coproc.Open(t.Context(), cluster.Controller.URL())
	require.NoError(t, err)
	ref, err := m.Alloc([]byte("hello"))
	require.NoError(t, err)
	require.NoError(t, m.Write(ref, []byte("world")))
	b, err := m.Read(ref, []byte("> "))
	require.NoError(t, err)
	require.Equal(t, "> world", string(b))
	require.NoError(t, m.Free(ref))
	_, err = m.Read(ref, nil)
	require.ErrorIs(t, err, client.ErrFreed)
	for _, way := range m.Ways() {
		require.Equal(t, client.TransportSHM, way, "the best way on one host")
	}
	require.Len(t, m.Ways(), 1)
	require.NoError(t, m.Close())

	_, err = coproc.Open(t.Context())
	require.Error(t, err)
}

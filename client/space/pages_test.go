package space_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestPiecesAndHashes: scattered pieces are one round, and hashes are those of what Read returns, over every transport.
func TestPiecesAndHashes(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		cl := c.Connect(client.Config{Transport: transport})
		s, err := space.Create(ctx, cl, transport, 2*mib, space.Options{RegionBytes: mib, Replicas: 2})
		require.NoError(t, err)
		over := s.Base() + mib - 3
		require.NoError(t, s.WritePieces(ctx, []space.Piece{{s.Base() + 5, []byte("first")}, {over, []byte("over the border")}, {s.Base() + 4096, nil}}))
		all := make([]byte, 2*mib)
		_, err = s.Read(ctx, all, s.Base())
		require.NoError(t, err)
		require.Equal(t, "first", string(all[5:10]))
		require.Equal(t, "over the border", string(all[mib-3:][:15]))

		hashes := make([]uint64, 256)
		for at := 0; at < len(all); at += 4096 * len(hashes) {
			require.NoError(t, s.Hashes(ctx, s.Base()+uint64(at), 4096, hashes))
			for i, h := range hashes {
				require.Equal(t, xxh3.Hash(all[at+4096*i:][:4096]), h, "part %d", i)
			}
		}
		id := s.Identity()
		require.Equal(t, space.Identity{Cluster: cl.Cluster(), Name: transport, Base: s.Base(), Region: id.Region}, id)

		for name, err := range map[string]error{
			"outside":          s.WritePieces(ctx, []space.Piece{{s.Base(), []byte("not written")}, {s.Base() + s.Bytes() - 1, []byte("xx")}}),
			"too many":         s.WritePieces(ctx, []space.Piece{{s.Base(), bytes.Repeat([]byte{1}, mib)}, {s.Base() + mib, []byte{1}}}),
			"hash over border": s.Hashes(ctx, over, 8, hashes[:1]),
			"hash outside":     s.Hashes(ctx, s.Base()+s.Bytes()-4096, 4096, hashes[:2]),
			"too many hashes":  s.Hashes(ctx, s.Base(), 4096, make([]uint64, 257)),
		} {
			require.ErrorIs(t, err, client.ErrArgument, name)
		}
		b := make([]byte, 11)
		_, err = s.Read(ctx, b, s.Base())
		require.NoError(t, err)
		require.Equal(t, "\x00\x00\x00\x00\x00first\x00", string(b), "bad input changes nothing")
	}
}

package proto

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRawRegions(t *testing.T) {
	h := RegionHeader{Domain: DomainAdapter, Kind: RegionRaw, RegionBytes: MaxRawData + RawDataOff, Region: 1}
	b := h.Encode()
	require.Equal(t, "02000000"+"02000100", hex(b[8:16]), "docs/PROTOCOL.md")
	got, err := DecodeRegionHeader(b)
	require.NoError(t, err)
	require.Equal(t, h, got)
	h.Kind = RegionKinds
	_, err = DecodeRegionHeader(h.Encode())
	require.ErrorIs(t, err, ErrNotRegion)
	require.ErrorContains(t, err, "kind 3")

	g, err := GeometryOf(RegionRaw, MaxRawData+RawDataOff)
	require.NoError(t, err)
	require.EqualValues(t, 2048, g.Blocks)
	require.EqualValues(t, RawDataOff, g.BlockOff(0))
	for _, n := range []uint64{0, BlockBytes, 2*BlockBytes + 1, MaxRawRegionBytes + BlockBytes} {
		_, err := GeometryOf(RegionRaw, n)
		require.Error(t, err, "%d", n)
	}
	require.LessOrEqual(t, RawWordOff(MaxRawRegionBytes-8)+8, uint64(RawDataOff))
}

func TestRawReservations(t *testing.T) {
	for _, off := range []uint64{RawDataOff, RawDataOff + 8, RawDataOff + MaxRawData - 8} {
		r := MakeRawR(MaxSession, 1<<20-1, 1<<40-1, off)
		require.EqualValues(t, MaxSession, r.Session())
		require.Equal(t, off, r.Off())
		require.EqualValues(t, RawDataOff+80, r.Of(RawDataOff+80).Off())
		require.EqualValues(t, MaxSession, r.Of(RawDataOff+80).Session())
	}
	require.EqualValues(t, 3, MakeRawR(3, 0, 0, RawDataOff).Session())
}

func hex(b []byte) (s string) {
	for _, x := range b {
		s += string("0123456789abcdef"[x>>4]) + string("0123456789abcdef"[x&15])
	}
	return s
}

package pool

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzPartHead: bytes are refused, or are a header that its own encoding gives again.
func FuzzPartHead(f *testing.F) {
	h := partHead{Magic: partMagic, Sequence: 4, Bytes: 1 << 20, State: partOpen, Token: token{1}}
	f.Add(h.encode(), []byte{})
	h.Sequence++
	f.Add([]byte{}, h.encode())
	f.Fuzz(func(t *testing.T, a, b []byte) {
		page := make([]byte, HeaderBytes)
		copy(page[:slotBytes], a)
		copy(page[slotBytes:], b)
		h, err := decodePartHead(page)
		if err != nil {
			require.Equal(t, partHead{}, h)
			return
		}
		require.True(t, h.State >= partMaking && h.State <= partTorn)
		require.True(t, bytes.HasPrefix(page[h.slot():], h.encode()))
	})
}

// TestTornHeader: whatever of a change has arrived, the state is the former one or the new one.
func TestTornHeader(t *testing.T) {
	page := make([]byte, HeaderBytes)
	_, err := decodePartHead(page)
	require.ErrorIs(t, err, errNoHead)
	h := partHead{Magic: partMagic, Bytes: 1 << 20, State: partOpen, Token: token{1}}
	for range 5 {
		next := h
		next.Sequence++
		next.Token[3] ^= byte(7 * next.Sequence)
		b := next.encode()
		for n := range len(b) + 1 {
			torn := bytes.Clone(page)
			copy(torn[next.slot():], b[:n])
			got, err := decodePartHead(torn)
			if h.Sequence == 0 && n < len(b) {
				require.Error(t, err, "there was none before")
				continue
			}
			require.NoError(t, err)
			if got != next || n < len(b) && !bytes.Equal(torn[next.slot():][:len(b)], b) {
				require.Equal(t, h, got, "%d bytes", n)
			}
		}
		copy(page[next.slot():], b)
		h = next
	}
	for i := range 8 { // a bit of each copy
		bad := bytes.Clone(page)
		bad[3+i] ^= 1
		bad[slotBytes+3+i] ^= 1
		_, err := decodePartHead(bad)
		require.ErrorIs(t, err, ErrNotPart)
	}
}

package pulse

import (
	"bytes"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPacket(t *testing.T) {
	key, err := clusterKeys.controller(7)
	require.NoError(t, err)
	h := header{incarnation: 7, slot: 3, seq: 99}
	long := make([]uint64, maxIncarnations+5)
	for i := range long {
		long[i] = uint64(i) + 1<<63
	}
	for _, p := range []body{
		{kind: Storage, node: 5, to: 1, ack: 2, echo: 3, health: Unfit},
		{kind: Controller, term: 1 << 60, leaves: true, silent: []uint64{1}, asks: []uint64{2, 3}, hears: []uint64{4}},
		{kind: Controller, silent: long, asks: long, hears: long},
	} {
		b := seal(nil, key, h, &p, nil)
		require.LessOrEqual(t, len(b), maxBytes)
		got, err := parseHeader(b)
		require.NoError(t, err)
		require.Equal(t, h, got)
		var q body
		require.NoError(t, open(b, key, &q, nil))
		for _, l := range []*[]uint64{&p.silent, &p.asks, &p.hears} {
			*l = slices.Clone((*l)[:min(len(*l), maxIncarnations)])
		}
		require.Equal(t, appendBody(nil, &p), appendBody(nil, &q))
		require.Equal(t, p.silent, append([]uint64(nil), q.silent...))
	}
	small := seal(nil, key, h, &body{kind: Storage}, nil)
	require.Len(t, small, headerBytes+fixedBytes+tagBytes)
	for _, bad := range [][]byte{nil, small[:len(small)-1], append([]byte("GET / HTTP/1.1\r\n"), small[16:]...), make([]byte, maxBytes), make([]byte, maxBytes+1)} {
		_, err := parseHeader(bad)
		require.ErrorIs(t, err, errMalformed)
	}
}

// The window takes each sequence number once, and none that is too old.
func TestWindow(t *testing.T) {
	p := &peer{}
	for _, c := range []struct {
		seq uint64
		ok  bool
	}{{1, true}, {1, false}, {3, true}, {2, true}, {2, false}, {10, true}, {3, false}, {2, false}, {4, true}, {9, true}, {1000, true}, {993, true}, {992, false}, {1000, false}, {1 << 60, true}} {
		require.Equal(t, c.ok, p.fresh(c.seq), "%d", c.seq)
	}
}

// Whatever is read and taken is written again as it was.
func FuzzBody(f *testing.F) {
	f.Add(appendBody(nil, &body{kind: Storage, node: 4}))
	f.Add(appendBody(nil, &body{kind: Controller, term: 9, silent: []uint64{1, 2}, asks: []uint64{3}, hears: []uint64{4}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p body
		if parseBody(b, &p) == nil {
			require.True(t, bytes.Equal(b, appendBody(nil, &p)))
			_ = p.health.String()
		}
	})
}

// No datagram under another key is taken, whatever is in it.
func FuzzDatagram(f *testing.F) {
	key, _ := clusterKeys.controller(7)
	f.Add(seal(nil, key, header{7, 1, 5}, &body{kind: Storage, to: 1}, nil)[:60])
	f.Add([]byte("quarry"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := newMachine(Controller, 1, 0, clusterKeys)
		require.NoError(t, err)
		m.tick(1, false)
		m.receive(addrAt(1), b)
		require.Empty(t, m.peers)
		require.Equal(t, uint64(1), m.dropped[0]+m.dropped[1]+m.dropped[2])
	})
}

package rdmatest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

func testVerbs(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	require.Equal(t, p.Name, to.Conn.Provider())
	require.Equal(t, p.Name, p.Dialer.Provider())
	require.Equal(t, uint64(RegionBytes), to.Window.Bytes)
	if peer, ok := to.Conn.(rdma.Peer); ok {
		node, incarnation := peer.Peer()
		require.NotZero(t, node)
		require.NotZero(t, incarnation)
	}
	require.Equal(t, make([]byte, 300), read(t, to, 1000, 300), "fresh memory is zero")

	c := one(to, func(c *rdma.Chain) { c.CAS(64, 0, 5); c.CAS(64, 0, 6); c.CAS(64, 5, 7); c.Fenced() })
	require.NoError(t, c.Err)
	require.Equal(t, []uint64{0, 5, 5}, []uint64{c.Verbs[0].Old, c.Verbs[1].Old, c.Verbs[2].Old}, "a failed CAS changes nothing and does not stop the chain")
	require.Equal(t, uint64(7), word(t, to, 64))

	c = one(to, func(c *rdma.Chain) { c.FetchAdd(64, 3); c.FetchAdd(64, ^uint64(0)) })
	require.NoError(t, c.Err)
	require.Equal(t, uint64(7), c.Verbs[0].Old)
	require.Equal(t, uint64(10), c.Verbs[1].Old)
	require.Equal(t, uint64(9), word(t, to, 64))
	require.Equal(t, uint64(9), binary.LittleEndian.Uint64(read(t, to, 64, 8)), "words are little endian")

	require.NoError(t, one(to, func(c *rdma.Chain) { c.Write(128, []byte("quarry")); c.Flush(rdma.Visible, 128, 6) }).Err)
	require.Equal(t, "quarry", string(read(t, to, 128, 6)))

	c = one(to, func(c *rdma.Chain) { c.Flush(rdma.Persistent, 128, 6) })
	if p.Persistent {
		require.NoError(t, c.Err)
	} else {
		require.ErrorIs(t, c.Err, rdma.ErrNotPersistent)
	}

	empty := one(to, func(*rdma.Chain) {})
	require.NoError(t, empty.Err, "an empty chain completes")
}

// testOrder: what a chain has written, its later verbs see; what it reads first is
// not touched by what it writes later.
func testOrder(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	before, after := make([]byte, 512), make([]byte, 512)
	for i := range 50 {
		old, fresh := pattern(512, byte(i)), pattern(512, byte(i+1))
		write(t, to, 4096, old)
		c := one(to, func(c *rdma.Chain) {
			c.Read(4096, before)
			c.Write(4096, fresh)
			c.Fenced()
			c.Read(4096, after)
			c.CAS(8192, uint64(i), uint64(i)+1)
			c.Fenced()
			c.FetchAdd(8192, 0)
			c.Fenced()
		})
		require.NoError(t, c.Err)
		require.Equal(t, 5, c.Done)
		require.True(t, bytes.Equal(old, before))
		require.True(t, bytes.Equal(fresh, after))
		require.Equal(t, uint64(i), c.Verbs[3].Old)
		require.Equal(t, uint64(i)+1, c.Verbs[4].Old)
	}
}

func testSizes(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	for _, n := range []int{1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 1000, 4096, 16383, 16384, 65535, 65536, 65537, 1<<20 - 1, 1 << 20} {
		for _, off := range []uint64{0, 1, 3, 7, 8, 4093, 65531} {
			want := pattern(n, byte(n)+byte(off))
			around := read(t, to, off+uint64(n), 1)
			if off > 0 {
				around = append(read(t, to, off-1, 1), around...)
			}
			write(t, to, off, want)
			require.True(t, bytes.Equal(want, read(t, to, off, n)), "%d bytes at %d", n, off)
			// The neighbours within the same words are as they were.
			now := read(t, to, off+uint64(n), 1)
			if off > 0 {
				now = append(read(t, to, off-1, 1), now...)
			}
			require.Equal(t, around, now, "%d bytes at %d", n, off)
		}
	}
}

// testWithinWord: every offset and length within two words, against a model.
func testWithinWord(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	model := pattern(64, 99)
	write(t, to, 0, model)
	for off := range 17 {
		for n := 1; n <= 24; n++ {
			data := pattern(n, byte(off*31+n))
			write(t, to, uint64(off), data)
			copy(model[off:], data)
			require.Equal(t, model[off:off+n], read(t, to, uint64(off), n))
			require.Equal(t, model, read(t, to, 0, 64), "%d bytes at %d", n, off)
		}
	}
}

// testManyChains: a round may have several chains on one connection, for several
// windows; they are executed in order.
func testManyChains(t *testing.T, p Provider) {
	b := setup(t, p)
	require.NoError(t, b.OpenRegion(t.Context(), 2, 7))
	first := b.lane(1, 0)
	w, err := first.Conn.Open(t.Context(), 2, 7)
	require.NoError(t, err)
	second := &rdma.Target{Conn: first.Conn, Window: w}
	other := b.lane(1, 1)

	var r rdma.Round
	big, back := pattern(rdma.MaxVerbBytes, 3), make([]byte, rdma.MaxVerbBytes)
	for range 3 {
		r.Reset()
		r.Chain(first).Write(4096, big)
		r.Chain(second).Write(4096, big)
		r.Chain(other).FetchAdd(0, 1)
		r.Chain(first).Read(4096, back)
		r.Chain(second).FetchAdd(0, 1)
		r.Chain(second).FetchAdd(1, 1) // refused, on its own
		r.Chain(first).FetchAdd(8, 1)
		rdma.Do(&r)
		for i := range r.Len() {
			if i == 5 {
				require.ErrorIs(t, r.At(i).Err, rdma.ErrAlign)
				continue
			}
			require.NoError(t, r.At(i).Err, fmt.Sprint(i))
		}
		require.True(t, bytes.Equal(big, back))
	}
	require.Equal(t, uint64(3), word(t, first, 0))
	require.Equal(t, uint64(3), word(t, first, 8))
	require.Equal(t, uint64(3), word(t, second, 0))
}

// testLargestChain: as many verbs, and as many bytes, as a chain may have.
func testLargestChain(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	c := one(to, func(c *rdma.Chain) {
		for range rdma.MaxChainVerbs {
			c.FetchAdd(16, 1)
		}
	})
	require.NoError(t, c.Err)
	require.Equal(t, uint64(rdma.MaxChainVerbs-1), c.Verbs[rdma.MaxChainVerbs-1].Old)

	const n = rdma.MaxChainBytes / rdma.MaxVerbBytes
	var data, back [n][]byte
	for i := range n {
		data[i], back[i] = pattern(rdma.MaxVerbBytes, byte(i)), make([]byte, rdma.MaxVerbBytes)
	}
	require.NoError(t, one(to, func(c *rdma.Chain) {
		for i := range n {
			c.Write(uint64(i)*rdma.MaxVerbBytes, data[i])
		}
	}).Err)
	require.NoError(t, one(to, func(c *rdma.Chain) {
		for i := range n {
			c.Read(uint64(i)*rdma.MaxVerbBytes, back[i])
		}
	}).Err)
	require.True(t, bytes.Equal(data[0], back[0]) && bytes.Equal(data[n-1], back[n-1]))

	// Both directions at once, with more small verbs behind.
	c = one(to, func(c *rdma.Chain) {
		c.Write(3, data[1])
		c.Read(3, back[1])
		c.Write(5, data[2])
		c.Fenced()
		c.Read(5, back[2][:rdma.MaxVerbBytes-1000])
		for range 100 {
			c.FetchAdd(0, 1)
		}
	})
	require.NoError(t, c.Err)
	require.True(t, bytes.Equal(data[1], back[1]))

	c = one(to, func(c *rdma.Chain) {
		for i := range rdma.MaxChainBytes/4096 - 3*256 {
			c.Read(uint64(i)*4096, back[0][i*4096:][:4096])
		}
	})
	require.NoError(t, c.Err)
}

func testRefusal(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	for _, size := range []int{16, 300 << 10} { // short and long chains take different paths on tcp
		write(t, to, 0, make([]byte, size))
		buf := make([]byte, size)
		c := one(to, func(c *rdma.Chain) {
			c.Write(0, pattern(size, 1))
			c.FetchAdd(1<<20, 1)
			c.Read(0, buf)
			c.CAS(12, 0, 1)
			c.Write(0, pattern(size, 2))
			c.FetchAdd(1<<20, 1)
		})
		require.ErrorIs(t, c.Err, rdma.ErrAlign)
		require.ErrorIs(t, c.Err, rdma.ErrRefused)
		require.NotErrorIs(t, c.Err, rdma.ErrBroken)
		require.Equal(t, 3, c.Done)
		require.Equal(t, pattern(size, 1), buf, "verbs before the refused one have answered")
		require.Equal(t, pattern(size, 1), read(t, to, 0, size), "those behind it have not run")
	}
	require.Equal(t, uint64(2), word(t, to, 1<<20))
}

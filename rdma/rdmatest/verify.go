package rdmatest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

// testVerify is the group of VERIFY. A provider that has none has to say so, and to refuse it.
func testVerify(t *testing.T, p Provider) {
	b := setup(t, p)
	if to := b.lane(1, 0); !to.Window.Verifies {
		c := one(to, func(c *rdma.Chain) { c.FetchAdd(0, 1); c.Verify(0, 8, 0) })
		require.ErrorIs(t, c.Err, rdma.ErrUnsupported)
		require.Zero(t, c.Done)
		require.Zero(t, word(t, to, 0), "no verb of the chain has run")
		return
	}
	for _, test := range []struct {
		name string
		run  func(*testing.T, Provider)
	}{
		{"Answers", testVerifyAnswers},
		{"OrderInChain", testVerifyOrder},
		{"TestSecurity02_Bounds", testVerifyBounds},
		{"TestSecurity03_Keys", testVerifyKeys},
		{"TestSecurity04_Lengths", testVerifyLengths},
		{"TestSecurity08_Fence", testVerifyFenced},
		{"BesideWrites", testVerifyBesideWrites},
		{"NoAllocations", testVerifyAllocations},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, p) })
	}
}

// verify asks for the hash of a range.
func verify(t testing.TB, to *rdma.Target, off, bytes, seed uint64) uint64 {
	c := one(to, func(c *rdma.Chain) { c.Verify(off, bytes, seed) })
	require.NoError(t, c.Err)
	require.Equal(t, 1, c.Done)
	return c.Verbs[0].Old
}

// testVerifyAnswers: the answer is the hash of what a READ returns, for a session that may only read too.
func testVerifyAnswers(t *testing.T, p Provider) {
	b := setup(t, p)
	to, reader := b.lane(1, 0), b.target(b.Ticket(2, rdma.ReadOnly), 0)
	require.Equal(t, rdma.Hash(make([]byte, 5000), 0), verify(t, to, 123, 5000, 0), "fresh memory is zero")
	data := pattern(rdma.MaxVerbBytes, 3)
	write(t, to, 8, data)
	for _, n := range []uint64{1, 7, 8, 9, 16, 17, 64, 128, 129, 240, 241, 1024, 4095, 4096, 4097, 65536, rdma.MaxVerbBytes - 9, rdma.MaxVerbBytes} {
		for _, at := range []uint64{0, 1, 8, 9} {
			if at+n > uint64(len(data)) {
				continue
			}
			for _, seed := range []uint64{0, 1, ^uint64(0)} {
				want := rdma.Hash(data[at:at+n], seed)
				require.Equal(t, want, verify(t, to, 8+at, n, seed), "%d bytes at %d", n, at)
				require.Equal(t, want, verify(t, reader, 8+at, n, seed), "%d bytes at %d", n, at)
			}
		}
	}
	require.True(t, bytes.Equal(data, read(t, to, 8, len(data))), "nothing has changed")
	// Several in a chain, and several chains in a round.
	w, err := to.Conn.Open(t.Context(), 1, 1)
	require.NoError(t, err)
	again := &rdma.Target{Conn: to.Conn, Window: w}
	var r rdma.Round
	for _, at := range []*rdma.Target{to, reader, again} {
		c := r.Chain(at)
		for i := range uint64(rdma.MaxChainVerbs) {
			c.Verify(8+i, 100, i)
		}
	}
	rdma.Do(&r)
	for k := range r.Len() {
		require.NoError(t, r.At(k).Err)
		for i := range uint64(rdma.MaxChainVerbs) {
			require.Equal(t, rdma.Hash(data[i:i+100], i), r.At(k).Verbs[i].Old)
		}
	}
}

// testVerifyOrder: a VERIFY sees what verbs before it have written, and nothing of those behind it that have a fence.
func testVerifyOrder(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	buf := make([]byte, 512)
	for i := range 50 {
		old, fresh := pattern(512, byte(i)), pattern(512, byte(i+1))
		write(t, to, 4096, old)
		c := one(to, func(c *rdma.Chain) {
			c.CAS(8192, uint64(i), uint64(i)+1)
			c.Verify(8192, 8, 7)
			c.Verify(4096, 512, 7)
			c.Write(4096, fresh)
			c.Fenced()
			c.Verify(4096, 512, 7)
			c.Read(4096, buf)
		})
		require.NoError(t, c.Err)
		require.Equal(t, 6, c.Done)
		require.Equal(t, rdma.Hash(binary.LittleEndian.AppendUint64(nil, uint64(i)+1), 7), c.Verbs[1].Old)
		require.Equal(t, rdma.Hash(old, 7), c.Verbs[2].Old)
		require.Equal(t, rdma.Hash(fresh, 7), c.Verbs[4].Old)
		require.True(t, bytes.Equal(fresh, buf))
	}
}

// testVerifyBounds: HAZARDS, security 2. Nothing outside of the window is looked at.
func testVerifyBounds(t *testing.T, p Provider) {
	b := start(t, p, Cluster{Offences: 1 << 40})
	to := b.lane(1, 0)
	last := uint64(RegionBytes)
	for _, r := range [][2]uint64{
		{0, 0}, {last, 1}, {last - 1, 2}, {last - 8, 9}, {last + 1, 8}, {1 << 32, 8}, {1<<32 - 4, 8}, {1 << 63, 8}, {1<<63 - 1, 8},
		{^uint64(0), 1}, {^uint64(0) - 7, 8}, {^uint64(0) - 63, 64}, {last - rdma.MaxVerbBytes + 1, rdma.MaxVerbBytes},
	} {
		c := one(to, func(c *rdma.Chain) { c.FetchAdd(0, 1); c.Verify(r[0], r[1], 0); c.FetchAdd(0, 1) })
		require.ErrorIs(t, c.Err, rdma.ErrBounds, "%d bytes at %#x", r[1], r[0])
		require.Equal(t, 1, c.Done)
		require.Zero(t, c.Verbs[1].Old, "a refused VERIFY answers nothing")
	}
	require.Equal(t, uint64(13), word(t, to, 0), "what is behind a refused VERIFY does not run")
	verify(t, to, last-1, 1, 0)
	verify(t, to, last-rdma.MaxVerbBytes, rdma.MaxVerbBytes, 0)
}

// testVerifyLengths: HAZARDS, security 4. Limits refuse a chain as a whole.
func testVerifyLengths(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	for name, verb := range map[string]func(c *rdma.Chain){
		"1 MiB + 1": func(c *rdma.Chain) { c.Verify(0, rdma.MaxVerbBytes+1, 0) },
		"4 GiB + 8": func(c *rdma.Chain) { c.Verify(0, 1<<32+8, 0) },
		"all":       func(c *rdma.Chain) { c.Verify(0, ^uint64(0), 0) },
		"4 MiB + 1": func(c *rdma.Chain) {
			for range 4 {
				c.Verify(0, rdma.MaxVerbBytes, 0)
			}
			c.Verify(0, 1, 0)
		},
		"4 MiB + 1 with a READ": func(c *rdma.Chain) {
			for range 4 {
				c.Verify(0, rdma.MaxVerbBytes, 0)
			}
			c.Read(0, make([]byte, 1))
		},
	} {
		c := one(to, func(c *rdma.Chain) { c.FetchAdd(0, 1); verb(c) })
		require.ErrorIs(t, c.Err, rdma.ErrLimit, name)
		require.Zero(t, c.Done, name)
	}
	require.Zero(t, word(t, to, 0))
	require.NoError(t, one(to, func(c *rdma.Chain) {
		for range 4 {
			c.Verify(0, rdma.MaxVerbBytes, 0)
		}
	}).Err)
}

// testVerifyKeys: HAZARDS, security 3: a hash is refused where the bytes are.
func testVerifyKeys(t *testing.T, p Provider) {
	b := start(t, p, Cluster{Offences: 1 << 40})
	mine, theirs := b.lane(1, 0), b.lane(2, 0)
	for _, key := range []uint64{0, theirs.Window.Key, mine.Window.Key + 1, mine.Window.Key ^ 1<<63} {
		forged := *mine
		forged.Window.Key = key
		c := one(&forged, func(c *rdma.Chain) { c.Verify(0, 64, 0) })
		require.ErrorIs(t, c.Err, rdma.ErrKey)
		require.Zero(t, c.Verbs[0].Old)
	}
	verify(t, mine, 0, 64, 0)
	require.NoError(t, b.CloseRegion(t.Context(), 1, 1))
	require.ErrorIs(t, one(mine, func(c *rdma.Chain) { c.Verify(0, 64, 0) }).Err, rdma.ErrKey, "the epoch is over")
}

// testVerifyFenced: a fence ends a session in the middle of VERIFYs.
func testVerifyFenced(t *testing.T, p Provider) {
	b := setup(t, p)
	to, other := b.lane(1, 0), b.lane(2, 0)
	var begun atomic.Int64
	ended := make(chan error, 1)
	go func() {
		for {
			c := one(to, func(c *rdma.Chain) { c.Verify(0, rdma.MaxVerbBytes, 0); c.Verify(8, rdma.MaxVerbBytes, 0) })
			if c.Err != nil {
				ended <- c.Err
				return
			}
			begun.Add(1)
		}
	}()
	eventually(t, "VERIFYs", func() bool { return begun.Load() > 3 })
	require.NoError(t, b.Fence(t.Context(), 1))
	err := <-ended
	require.True(t, errors.Is(err, rdma.ErrRevoked) || errors.Is(err, rdma.ErrBroken), "%v", err)
	require.ErrorIs(t, to.Conn.Reset(t.Context()), rdma.ErrRevoked)
	require.Equal(t, rdma.Hash(make([]byte, 64), 5), verify(t, other, 0, 64, 5))
}

// testVerifyBesideWrites: while one word changes between two values, each answer is the hash of one of them.
func testVerifyBesideWrites(t *testing.T, p Provider) {
	b := setup(t, p)
	to, writer := b.lane(1, 0), b.lane(2, 0)
	const n, at = 250, 192 // both the last whole stripe of the hash and its last bytes contain this word
	states := [2][]byte{pattern(n, 1), pattern(n, 1)}
	for i := range 8 {
		states[1][at+i] ^= 0xff
	}
	write(t, to, 4096, states[0])
	hashes := [2]uint64{rdma.Hash(states[0], 9), rdma.Hash(states[1], 9)}
	done, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(failed)
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			if c := one(writer, func(c *rdma.Chain) { c.Write(4096+at, states[i&1][at:at+8]) }); c.Err != nil {
				failed <- c.Err
				return
			}
		}
	}()
	var seen [2]int
	for i := 0; i < 3000 && min(seen[0], seen[1]) < 300; i++ {
		h := verify(t, to, 4096, n, 9)
		at := slices.Index(hashes[:], h)
		if at < 0 {
			t.Errorf("%#x is the hash of neither value", h)
			break
		}
		seen[at]++
	}
	close(done)
	require.NoError(t, <-failed)
}

// testVerifyAllocations: a VERIFY allocates nothing.
func testVerifyAllocations(t *testing.T, p Provider) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	b := setup(t, p)
	to := b.lane(1, 0)
	var r rdma.Round
	call := func() {
		r.Reset()
		c := r.Chain(to)
		c.Verify(0, 128<<10, 5)
		c.Verify(8, 100, 5)
		rdma.Do(&r)
		if c.Err != nil {
			t.Error(c.Err)
		}
	}
	call()
	require.Less(t, testing.AllocsPerRun(200, call), p.Garbage+1)
}

package rdmatest

import (
	"crypto/rand"
	"encoding/binary"
	"testing"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/stretchr/testify/require"
)

// testBounds: HAZARDS, security 2. No byte changes.
func testBounds(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	last := uint64(RegionBytes)
	write(t, to, last-64, pattern(64, 5))
	write(t, to, 0, pattern(64, 6))
	for _, off := range []uint64{last, last - 1, last - 7, last + 1, last + 8, 1 << 32, 1<<32 - 4, 1 << 63, 1<<63 - 1, ^uint64(0), ^uint64(0) - 7, ^uint64(0) - 63} {
		buf := pattern(9, 0)
		for name, verb := range map[string]func(c *rdma.Chain){
			"READ":      func(c *rdma.Chain) { c.Read(off, buf) },
			"WRITE":     func(c *rdma.Chain) { c.Write(off, buf) },
			"CAS":       func(c *rdma.Chain) { c.CAS(off, 0, 1) },
			"FETCH_ADD": func(c *rdma.Chain) { c.FetchAdd(off, 1) },
			"FLUSH":     func(c *rdma.Chain) { c.Flush(rdma.Visible, off, 9) },
		} {
			c := one(to, verb)
			require.ErrorIs(t, c.Err, rdma.ErrBounds, "%s at %#x", name, off)
			require.Zero(t, c.Done)
		}
		require.Equal(t, pattern(9, 0), buf, "a refused READ brings nothing")
	}
	for _, n := range []uint64{last + 1, 1 << 31, 1 << 32, 1 << 63, ^uint64(0), ^uint64(0) - 7} {
		c := one(to, func(c *rdma.Chain) { c.Flush(rdma.Visible, 8, n) })
		require.ErrorIs(t, c.Err, rdma.ErrBounds, "FLUSH of %#x bytes", n)
	}
	require.Equal(t, pattern(64, 5), read(t, to, last-64, 64))
	require.Equal(t, pattern(64, 6), read(t, to, 0, 64))
	// The last places that are inside.
	require.NoError(t, one(to, func(c *rdma.Chain) { c.FetchAdd(last-8, 0); c.Read(last-1, make([]byte, 1)) }).Err)
}

// testGuessedKeys: HAZARDS, security 3.
func testGuessedKeys(t *testing.T, p Provider) {
	b := start(t, p, Cluster{Offences: 1 << 40})
	require.NoError(t, b.OpenRegion(t.Context(), 2, 1))
	mine, theirs := b.lane(1, 0), b.lane(2, 0)
	w2, err := theirs.Conn.Open(t.Context(), 2, 1)
	require.NoError(t, err)
	require.NotEqual(t, mine.Window.Key, theirs.Window.Key, "sessions have keys of their own")
	require.NotEqual(t, w2.Key, theirs.Window.Key, "regions have keys of their own")
	write(t, mine, 0, pattern(64, 1))

	try := func(w rdma.Window) {
		forged := &rdma.Target{Conn: mine.Conn, Window: w}
		c := one(forged, func(c *rdma.Chain) { c.Write(0, make([]byte, 64)); c.FetchAdd(0, 1) })
		require.ErrorIs(t, c.Err, rdma.ErrKey)
		require.Zero(t, c.Done)
	}
	for _, slot := range []int32{-1, 1, 2, 5000, 1 << 30, -1 << 31} { // not open on this connection
		w := w2
		w.Slot = slot
		try(w)
	}
	with := func(key uint64) rdma.Window { w := mine.Window; w.Key = key; return w }
	for _, key := range []uint64{0, 1, ^uint64(0), theirs.Window.Key, w2.Key, mine.Window.Key + 1, mine.Window.Key ^ 1<<63} {
		try(with(key))
	}
	guesses := 1_000_000 // what the hazard names, where a guess takes no round trip
	switch {
	case p.Name != "shm" && p.Name != "inproc":
		guesses = 20_000
	case raceEnabled:
		t.Log("fewer guesses under the race detector")
		guesses = 20_000
	}
	var r rdma.Round
	var random [8]byte
	rand.Read(random[:])
	key := binary.LittleEndian.Uint64(random[:])
	hits := 0
	for range guesses {
		key = key*6364136223846793005 + 1442695040888963407
		forged := rdma.Target{Conn: mine.Conn, Window: with(key)}
		r.Reset()
		r.Chain(&forged).FetchAdd(0, 1)
		rdma.Do(&r)
		if r.At(0).Done != 0 {
			hits++
		}
	}
	require.Zero(t, hits)
	require.Equal(t, pattern(64, 1), read(t, mine, 0, 64))
}

// testLengths: HAZARDS, security 4. Limits refuse a chain as a whole.
func testLengths(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	huge := make([]byte, RegionBytes+8)
	for name, verb := range map[string]func(c *rdma.Chain){
		"WRITE of 1 MiB + 1": func(c *rdma.Chain) { c.Write(0, huge[:rdma.MaxVerbBytes+1]) },
		"READ of 1 MiB + 1":  func(c *rdma.Chain) { c.Read(0, huge[:rdma.MaxVerbBytes+1]) },
		"WRITE of a region":  func(c *rdma.Chain) { c.Write(0, huge) },
		"257 verbs": func(c *rdma.Chain) {
			for range rdma.MaxChainVerbs + 1 {
				c.FetchAdd(0, 1)
			}
		},
		"5 MiB": func(c *rdma.Chain) {
			for range 5 {
				c.Read(0, huge[:1<<20])
			}
		},
		"op 0":       func(c *rdma.Chain) { c.FetchAdd(0, 1); c.Verbs[0].Op = 0 },
		"op 7":       func(c *rdma.Chain) { c.FetchAdd(0, 1); c.Verbs[0].Op = 7 },
		"op 255":     func(c *rdma.Chain) { c.FetchAdd(0, 1); c.Verbs[0].Op = 255 },
		"flush kind": func(c *rdma.Chain) { c.Flush(7, 0, 8) },
	} {
		c := one(to, func(c *rdma.Chain) { c.FetchAdd(0, 1); verb(c) })
		require.ErrorIs(t, c.Err, rdma.ErrLimit, name)
		require.Zero(t, c.Done, name)
	}
	for name, verb := range map[string]func(c *rdma.Chain){
		"READ of 0":  func(c *rdma.Chain) { c.Read(0, nil) },
		"WRITE of 0": func(c *rdma.Chain) { c.Write(0, nil) },
		"FLUSH of 0": func(c *rdma.Chain) { c.Flush(rdma.Visible, 0, 0) },
	} {
		require.ErrorIs(t, one(to, verb).Err, rdma.ErrBounds, name)
	}
	require.Zero(t, word(t, to, 0))
}

// testTickets: HAZARDS, security 7: a ticket says for what it is good.
func testTickets(t *testing.T, p Provider) {
	b := setup(t, p)
	for name, spoil := range map[string]func(*rdma.Credentials){
		"signature":    func(t *rdma.Credentials) { t.Signature[31] ^= 1 },
		"no signature": func(t *rdma.Credentials) { t.Signature = keyring.Signature{} },
		"serial":       func(t *rdma.Credentials) { t.Serial++ },
		"session":      func(t *rdma.Credentials) { t.Session++ },
		"tenant":       func(t *rdma.Credentials) { t.Tenant++ },
		"rights":       func(t *rdma.Credentials) { t.Rights = rdma.ReadWrite },
		"region":       func(t *rdma.Credentials) { t.Region++ },
		"epoch":        func(t *rdma.Credentials) { t.Epoch++ },
		"cluster":      func(t *rdma.Credentials) { t.Cluster[0]++ },
		"cluster, signed": func(t *rdma.Credentials) {
			t.Cluster[0]++
			t.Sign(b.Key)
		},
		"signed by another": func(t *rdma.Credentials) { t.Sign(keyring.NewSigner([32]byte{1})) },
		"signed by another in the name of the key": func(t *rdma.Credentials) {
			t.Sign(keyring.NewSigner([32]byte{1}))
			t.KeyID = b.Key.ID()
		},
		"signed by its holder": func(t *rdma.Credentials) { t.Sign(keyring.NewSigner([32]byte(t.Key.Seed()))) },
		"the node's own":       func(t *rdma.Credentials) { t.Serial = host.LoopSerial; t.Sign(b.Key) },
		"stolen":               func(t *rdma.Credentials) { t.Key = nil },
		"stolen, with a key":   func(t *rdma.Credentials) { t.Key = rdma.NewCredentials().Key },
		"stolen, holder replaced": func(t *rdma.Credentials) {
			other := rdma.NewCredentials()
			t.Holder, t.Key = other.Holder, other.Key
		},
	} {
		ticket := b.Ticket(1, rdma.ReadOnly)
		spoil(ticket)
		_, err := b.dialer.Dial(t.Context(), b.Addr(), ticket, 0)
		require.ErrorIs(t, err, rdma.ErrTicket, name)
	}
	_, err := b.dialer.Dial(t.Context(), b.Addr(), b.Ticket(1, rdma.ReadOnly).For(99, ""), 0)
	require.ErrorIs(t, err, rdma.ErrBroken, "meant for another node: no proof is made for this one")
	require.NoError(t, b.Fence(t.Context(), 1), "fencing a session that was never here")
	_, err = b.dialer.Dial(t.Context(), b.Addr(), b.Ticket(1, rdma.ReadOnly), 0)
	require.ErrorIs(t, err, rdma.ErrRevoked, "a ticket shown again after the fence")
}

// testBoundTicket: a ticket of one region and epoch, such as those of nodes' programs, opens no other: not by
// another lane, not after a window of its own region, and not when the epoch has come that it lacks.
func testBoundTicket(t *testing.T, p Provider) {
	b := setup(t, p)
	require.NoError(t, b.OpenRegion(t.Context(), 2, 1))
	require.NoError(t, b.Node.OpenRegion(t.Context(), 7, 3, 1))
	bound := func(region uint32, epoch uint64) *rdma.Credentials {
		return rdma.Issue(b.Key, rdma.Ticket{Cluster: b.UUID, Serial: 1 << 63, Rights: rdma.ReadWrite, Region: region, Epoch: epoch})
	}
	program := rdma.Issue(b.Key, rdma.Ticket{Cluster: b.UUID, Session: 5, Serial: 5, Rights: rdma.ReadWrite, Region: 1, Epoch: 1})
	for lane := range uint32(2) {
		own := b.target(program, lane)
		write(t, own, 0, pattern(64, byte(lane)))
		for region, epoch := range map[uint32]uint64{2: 1, 3: 1, 1: 2, 0: 0} {
			_, err := own.Conn.Open(t.Context(), region, epoch)
			require.ErrorIs(t, err, rdma.ErrTicket, "region %d under epoch %d", region, epoch)
		}
		require.Equal(t, pattern(64, byte(lane)), read(t, own, 0, 64), "its own region still")
	}
	for i, c := range []struct {
		as     *rdma.Credentials
		region uint32
		want   error
	}{{bound(1, 1), 1, nil}, {bound(1, 1), 2, rdma.ErrTicket}, {bound(1, 2), 1, rdma.ErrTicket}, {bound(0, 1), 2, rdma.ErrTicket}} {
		conn, err := b.dialer.Dial(t.Context(), b.Addr(), c.as, uint32(i))
		require.NoError(t, err)
		_, err = conn.Open(t.Context(), c.region, 1)
		require.ErrorIs(t, err, c.want, "ticket %d", i)
		require.NoError(t, conn.Close())
	}
	require.NoError(t, b.OpenRegion(t.Context(), 1, 2))
	conn, err := b.dialer.Dial(t.Context(), b.Addr(), program, 2)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	for _, epoch := range []uint64{1, 2} {
		_, err = conn.Open(t.Context(), 1, epoch)
		require.Error(t, err, "epoch %d", epoch)
		require.ErrorIs(t, err, rdma.ErrRefused, "epoch %d", epoch)
	}
}

// testReadOnly: HAZARDS, security 9.
func testReadOnly(t *testing.T, p Provider) {
	b := setup(t, p)
	writer := b.lane(1, 0)
	write(t, writer, 0, pattern(64, 1))
	reader := b.target(b.Ticket(2, rdma.ReadOnly), 0)
	require.Equal(t, pattern(64, 1), read(t, reader, 0, 64))
	for name, verb := range map[string]func(c *rdma.Chain){
		"WRITE":     func(c *rdma.Chain) { c.Write(0, make([]byte, 64)) },
		"WRITE 3":   func(c *rdma.Chain) { c.Write(1, make([]byte, 3)) },
		"CAS":       func(c *rdma.Chain) { c.CAS(0, 0, 1) },
		"FETCH_ADD": func(c *rdma.Chain) { c.FetchAdd(0, 1) },
	} {
		c := one(reader, verb)
		require.ErrorIs(t, c.Err, rdma.ErrReadOnly, name)
		require.Zero(t, c.Done)
	}
	require.NoError(t, one(reader, func(c *rdma.Chain) { c.Flush(rdma.Visible, 0, 64) }).Err)
	require.Equal(t, pattern(64, 1), read(t, writer, 0, 64))
}

// testAlignment: HAZARDS, security 10.
func testAlignment(t *testing.T, p Provider) {
	b := setup(t, p)
	to := b.lane(1, 0)
	write(t, to, 0, pattern(64, 1))
	for off := uint64(1); off < 8; off++ {
		require.ErrorIs(t, one(to, func(c *rdma.Chain) { c.CAS(off, 0, 1) }).Err, rdma.ErrAlign)
		require.ErrorIs(t, one(to, func(c *rdma.Chain) { c.FetchAdd(8+off, 1) }).Err, rdma.ErrAlign)
	}
	if !p.Persistent {
		c := one(to, func(c *rdma.Chain) {
			c.Read(0, make([]byte, 8))
			c.Flush(rdma.Persistent, 0, 8)
			c.Write(0, make([]byte, 8))
		})
		require.ErrorIs(t, c.Err, rdma.ErrNotPersistent)
		require.Equal(t, 1, c.Done)
	}
	require.Equal(t, pattern(64, 1), read(t, to, 0, 64))
}

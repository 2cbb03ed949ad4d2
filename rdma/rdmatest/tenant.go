package rdmatest

import (
	"fmt"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

// testTenants: a region is opened by lanes of its own tenant alone, whatever their rights, and a key that
// was given to another tenant's lane is worth nothing.
func testTenants(t *testing.T, p Provider) {
	b := setup(t, p)
	tenants := []uint32{0, 1, 2}
	region := func(of uint32) uint32 { return 10 + of }
	serial := uint64(100)
	dial := func(in uint32, rights rdma.Rights) rdma.Conn {
		serial++
		as := rdma.Issue(b.Key, rdma.Ticket{Cluster: b.UUID, Session: uint32(serial), Serial: serial, Rights: rights, Tenant: in})
		c, err := b.dialer.Dial(t.Context(), b.Addr(), as, 0)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	owners := map[uint32]*rdma.Target{}
	for _, of := range tenants {
		require.NoError(t, b.Node.OpenRegion(t.Context(), of, region(of), 1))
		c := dial(of, rdma.ReadWrite)
		w, err := c.Open(t.Context(), region(of), 1)
		require.NoError(t, err)
		owners[of] = &rdma.Target{Conn: c, Window: w}
		write(t, owners[of], 0, pattern(64, byte(of)))
	}
	for _, in := range tenants {
		for _, rights := range []rdma.Rights{rdma.ReadOnly, rdma.ReadWrite} {
			c := dial(in, rights)
			own, err := c.Open(t.Context(), region(in), 1)
			require.NoError(t, err)
			for _, of := range tenants {
				what := fmt.Sprintf("tenant %d with rights %d, region of tenant %d", in, rights, of)
				if in == of {
					to := &rdma.Target{Conn: c, Window: own}
					require.Equal(t, pattern(64, byte(of)), read(t, to, 0, 64), what)
					err := one(to, func(c *rdma.Chain) { c.Write(4096, []byte{1}) }).Err
					if rights == rdma.ReadOnly {
						require.ErrorIs(t, err, rdma.ErrReadOnly, what)
					} else {
						require.NoError(t, err, what)
					}
					continue
				}
				_, err := c.Open(t.Context(), region(of), 1)
				require.ErrorIs(t, err, rdma.ErrTicket, what)
				stolen := owners[of].Window
				stolen.Slot = own.Slot
				buf := make([]byte, 64)
				require.ErrorIs(t, one(&rdma.Target{Conn: c, Window: stolen}, func(c *rdma.Chain) { c.Read(0, buf) }).Err, rdma.ErrKey, what)
				require.Equal(t, make([]byte, 64), buf, what)
				err = one(&rdma.Target{Conn: c, Window: stolen}, func(c *rdma.Chain) { c.Write(0, buf) }).Err
				require.Error(t, err, what)
				require.ErrorIs(t, err, rdma.ErrRefused, what)
			}
		}
	}
	for _, of := range tenants {
		require.Equal(t, pattern(64, byte(of)), read(t, owners[of], 0, 64), "tenant %d", of)
	}
	// A later epoch is its tenant's as well.
	require.NoError(t, b.Node.OpenRegion(t.Context(), 2, region(2), 2))
	_, err := dial(0, rdma.ReadWrite).Open(t.Context(), region(2), 2)
	require.ErrorIs(t, err, rdma.ErrTicket)
	_, err = dial(2, rdma.ReadWrite).Open(t.Context(), region(2), 2)
	require.NoError(t, err)
}

// testLanes: a session has as many lanes as its ticket says.
func testLanes(t *testing.T, p Provider) {
	b := setup(t, p)
	as := rdma.Issue(b.Key, rdma.Ticket{Cluster: b.UUID, Session: 1, Serial: 1, Rights: rdma.ReadWrite, Lanes: 2})
	for lane := range uint32(2) {
		b.target(as, lane)
	}
	_, err := b.dialer.Dial(t.Context(), b.Addr(), as, 2)
	require.ErrorIs(t, err, rdma.ErrLimit)
	write(t, b.target(as, 1), 0, []byte{1}) // again
}

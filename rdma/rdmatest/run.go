package rdmatest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/stretchr/testify/require"
)

// RegionBytes is the size of the regions that a Node makes.
const RegionBytes = 4 << 20

// Provider is what is tested.
type Provider struct {
	Name   string
	Dialer rdma.Dialer
	// Start makes a node. It is stopped by the test, or by t.Cleanup.
	Start func(t testing.TB, c Cluster) Node
	// Persistent: the nodes' memory survives a loss of power.
	Persistent bool
	// Garbage is how often a library in the data path allocates in the round of NoAllocations.
	Garbage float64
	// Vague: a verb whose key is over ends the connection, and its outcome is unknown until Reset.
	Vague bool
	// Unsuited tests, by name, ask for what the provider's driver does wrong.
	Unsuited []string
}

// Cluster is what nodes and tickets of a test have in common.
type Cluster struct {
	UUID     [16]byte
	Key      *keyring.Signer
	Offences uint64 // before a session is ended; 0 is the node's default
}

// Node is a storage node under test.
type Node interface {
	Addr() string
	// OpenRegion serves a region of RegionBytes to a tenant, zeroed when first opened.
	OpenRegion(ctx context.Context, tenant, region uint32, epoch uint64) error
	CloseRegion(ctx context.Context, region uint32, epoch uint64) error
	Fence(ctx context.Context, serials ...uint64) error
	// Handle makes a procedure known that clients call by messages.
	// Preconditions: nothing has been dialled.
	Handle(number uint16, p host.Procedure)
	// Bytes is the memory of a region as the node sees it, nil if tests cannot.
	Bytes(region uint32) []byte
	Stop()
}

// Run checks the whole contract.
func Run(t *testing.T, p Provider) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Provider)
	}{
		{"Verbs", testVerbs},
		{"OrderInChain", testOrder},
		{"Sizes", testSizes},
		{"WithinWord", testWithinWord},
		{"ManyChainsOnOneConn", testManyChains},
		{"WholeChainLimit", testLargestChain},
		{"TestSecurity02_Bounds", testBounds},
		{"TestSecurity03_GuessedKeys", testGuessedKeys},
		{"TestSecurity04_Lengths", testLengths},
		{"TestSecurity07_Tickets", testTickets},
		{"TestSecurity07_BoundTicket", testBoundTicket},
		{"Tenants", testTenants},
		{"LanesOfATicket", testLanes},
		{"TestSecurity08_RevokedWhileWriting", testRevoked},
		{"TestSecurity09_ReadOnly", testReadOnly},
		{"TestSecurity10_AlignmentAndFlush", testAlignment},
		{"TestHazard06_ReleaseByCAS", testReleaseByCAS},
		{"TestHazard24_WordsNeverTear", testTearing},
		{"TestHazard32_KeysOfAnotherIncarnation", testAnotherIncarnation},
		{"TestHazard37_ResetEndsOldVerbs", testReset},
		{"RefusalStopsChain", testRefusal},
		{"Rotation", testRotation},
		{"RotationUnderLoad", testRotationUnderLoad},
		{"CloseRegion", testCloseRegion},
		{"DialAgain", testDialAgain},
		{"ConcurrentAtomics", testAtomics},
		{"ClosedPeer", testClosedPeer},
		{"CloseWhileBusy", testCloseWhileBusy},
		{"NoAllocations", testAllocations},
		{"Messages", testMessages},
		{"Verify", testVerify},
	} {
		t.Run(test.name, func(t *testing.T) {
			if slices.Contains(p.Unsuited, test.name) {
				t.Skip("a fault of the driver")
			}
			test.run(t, p)
		})
	}
}

// bench is one node with region 1 open under epoch 1.
type bench struct {
	testing.TB
	dialer rdma.Dialer
	Node
	Cluster
	vague bool // of Provider
}

// contractCluster is a cluster with the key of all tests.
func contractCluster(c Cluster) Cluster {
	c.UUID, c.Key = [16]byte{1, 2, 3}, keyring.NewSigner([32]byte{4, 5, 6})
	return c
}

func start(t testing.TB, p Provider, c Cluster) *bench {
	c = contractCluster(c)
	b := &bench{TB: t, dialer: p.Dialer, Node: p.Start(t, c), Cluster: c, vague: p.Vague}
	require.NoError(t, b.OpenRegion(t.Context(), 1, 1))
	return b
}

// OpenRegion serves a region to tenant 0, which is that of Ticket.
func (b *bench) OpenRegion(ctx context.Context, region uint32, epoch uint64) error {
	return b.Node.OpenRegion(ctx, 0, region, epoch)
}

func setup(t testing.TB, p Provider) *bench { return start(t, p, Cluster{}) }

// Ring verifies the tickets.
func (c *Cluster) Ring() *keyring.Ring { return keyring.NewRing(c.Key.Public()) }

// Ticket is one of a session, signed, with a key of its own.
func (c *Cluster) Ticket(serial uint64, rights rdma.Rights) *rdma.Credentials {
	return rdma.Issue(c.Key, rdma.Ticket{Cluster: c.UUID, Session: uint32(serial), Serial: serial, Rights: rights})
}

// lane dials and opens region 1 under epoch 1.
func (b *bench) lane(serial uint64, number uint32) *rdma.Target {
	return b.target(b.Ticket(serial, rdma.ReadWrite), number)
}

func (b *bench) target(ticket *rdma.Credentials, number uint32) *rdma.Target {
	c, err := b.dialer.Dial(b.Context(), b.Addr(), ticket, number)
	require.NoError(b, err)
	b.Cleanup(func() { c.Close() })
	w, err := c.Open(b.Context(), 1, 1)
	require.NoError(b, err)
	return &rdma.Target{Conn: c, Window: w}
}

// outdated runs a chain under a key that is over. Where the provider cannot tell why it was ended it runs it again behind Reset.
func (b *bench) outdated(to *rdma.Target, f func(c *rdma.Chain)) *rdma.Chain {
	c := one(to, f)
	if b.vague && errors.Is(c.Err, rdma.ErrBroken) {
		require.NoError(b, to.Conn.Reset(b.Context()))
		c = one(to, f)
	}
	return c
}

// one runs a chain built by f and returns it.
func one(to *rdma.Target, f func(c *rdma.Chain)) *rdma.Chain {
	var r rdma.Round
	f(r.Chain(to))
	rdma.Do(&r)
	return r.At(0)
}

func read(t testing.TB, to *rdma.Target, off uint64, n int) []byte {
	buf := make([]byte, n)
	c := one(to, func(c *rdma.Chain) { c.Read(off, buf) })
	require.NoError(t, c.Err)
	require.Equal(t, 1, c.Done)
	return buf
}

func write(t testing.TB, to *rdma.Target, off uint64, b []byte) {
	require.NoError(t, one(to, func(c *rdma.Chain) { c.Write(off, b) }).Err)
}

func word(t testing.TB, to *rdma.Target, off uint64) uint64 {
	c := one(to, func(c *rdma.Chain) { c.FetchAdd(off, 0) })
	require.NoError(t, c.Err)
	return c.Verbs[0].Old
}

// eventually polls, since nothing here may depend on how long something takes.
func eventually(t testing.TB, what string, ok func() bool) {
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), what)
	}
}

// pattern is n bytes that differ from place to place.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7+i>>8) ^ seed
	}
	return b
}

package rdma_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// FuzzTicket: a ticket has one form, and only the one that was signed verifies.
func FuzzTicket(f *testing.F) {
	signer := keyring.NewSigner([keyring.SeedBytes]byte{1})
	keys := keyring.NewRing(signer.Public())
	signed := rdma.Ticket{Cluster: [16]byte{2}, Session: 3, Serial: 4, Rights: rdma.ReadWrite, Holder: keyring.Public{5}}
	signed.Sign(signer)
	good, err := signed.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(good)
	f.Add(good[:rdma.TicketBytes-1])
	other := rdma.Ticket{Rights: rdma.ReadOnly, Region: 1, Epoch: 1 << 63, Session: 1 << 31}
	b, err := other.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		ticket, err := rdma.DecodeTicket(b)
		if err != nil {
			return
		}
		again, err := ticket.AppendBinary(nil)
		require.NoError(t, err)
		require.Equal(t, b, again)
		require.Equal(t, string(b) == string(good), ticket.Verify(keys))
		told, err := rdma.TicketOf(ticket.Proto())
		if ticket.Session > proto.MaxSession {
			require.Error(t, err)
			return
		}
		require.NoError(t, err)
		require.Equal(t, ticket, told)
	})
}

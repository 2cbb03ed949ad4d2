package rdma

import (
	"errors"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
)

func TestTicket(t *testing.T) {
	signer := keyring.NewSigner([32]byte{1})
	key := keyring.NewRing(signer.Public())
	ticket := &Ticket{Cluster: [16]byte{2}, Session: 3, Serial: 4, Rights: ReadWrite, Tenant: 5, Lanes: 9, Region: 6, Epoch: 7, Holder: keyring.Public{8}}
	require.False(t, ticket.Verify(key))
	ticket.Sign(signer)
	require.True(t, ticket.Verify(key))
	require.False(t, ticket.Verify(keyring.NewRing(keyring.NewSigner([32]byte{2}).Public())))
	b, err := ticket.AppendBinary(nil)
	require.NoError(t, err)
	require.Len(t, b, TicketBytes)
	got, err := DecodeTicket(b)
	require.NoError(t, err)
	require.Equal(t, *ticket, got)
	for i := range b {
		b[i] ^= 0x10
		if got, err := DecodeTicket(b); err == nil {
			require.False(t, got.Verify(key), "byte %d is not covered by the signature", i)
		}
		b[i] ^= 0x10
	}
	for n := range b {
		_, err := DecodeTicket(b[:n])
		require.Error(t, err)
	}
	for _, rights := range []byte{0, 3, 255} {
		b[40] = rights
		_, err := DecodeTicket(b)
		require.Error(t, err)
	}
}

func TestRefusals(t *testing.T) {
	for i, err := range Refusals {
		require.ErrorIs(t, err, ErrRefused)
		require.NotErrorIs(t, err, ErrBroken)
		for _, other := range Refusals[:i] {
			require.False(t, errors.Is(err, other))
		}
	}
}

func TestArena(t *testing.T) {
	a, err := NewArena(10_000)
	require.NoError(t, err)
	require.Len(t, a.Bytes(), 12288, "whole pages")
	var _ Buffers = a
	total := 0
	for _, n := range []int{1, 64, 65, 0, 1000} {
		b, err := a.Alloc(n)
		require.NoError(t, err)
		require.Len(t, b, n)
		require.Equal(t, n, cap(b), "a buffer cannot be grown into its neighbour")
		if n > 0 {
			require.Zero(t, reflect.ValueOf(&b[0]).Pointer()%64)
			for i := range b {
				require.Zero(t, b[i])
				b[i] = 0xff
			}
		}
		total += (n + 63) &^ 63
	}
	_, err = a.Alloc(12288 - total + 1)
	require.ErrorContains(t, err, "raise its size")
	_, err = a.Alloc(-1)
	require.Error(t, err)
	_, err = a.Alloc(12288 - total)
	require.NoError(t, err)
	require.NoError(t, a.Close())
	require.NoError(t, a.Close())
	_, err = a.Alloc(1)
	require.Error(t, err)
	_, err = NewArena(0)
	require.Error(t, err)
}

func TestTally(t *testing.T) {
	var r Round
	c := r.Chain(&Target{})
	c.Read(0, make([]byte, 100))
	c.Write(0, make([]byte, 10))
	c.CAS(0, 0, 1)
	c.Flush(Visible, 0, 1000)
	r.Chain(&Target{}).FetchAdd(0, 1)
	var tally Tally
	tally.Count(&r)
	tally.Count(&r)
	require.Equal(t, uint64(2), tally.Rounds)
	require.Equal(t, uint64(220), tally.Bytes)
	require.Equal(t, uint64(10), tally.AllVerbs())
	require.Equal(t, uint64(2), tally.Verbs[CompareSwap])
	r.Reset()
	require.Zero(t, r.Len())
	require.NoError(t, r.Err())
}

package keyring_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
)

func TestRing(t *testing.T) {
	old, present := keyring.NewSigner([32]byte{1}), keyring.NewSigner([32]byte{2})
	require.NotEqual(t, old.ID(), present.ID())
	require.Equal(t, old.Public().ID(), old.ID())
	message := []byte("message")
	s := old.Sign("label", message)
	var none keyring.Ring
	require.False(t, none.Verify(old.ID(), "label", message, s))
	r := keyring.NewRing(present.Public(), old.Public())
	require.True(t, r.Verify(old.ID(), "label", message, s))
	require.False(t, r.Verify(present.ID(), "label", message, s), "another key's id")
	require.False(t, r.Verify(old.ID(), "labe", append([]byte("l"), message...), s), "another label")
	require.False(t, r.Verify(old.ID(), "label", message[1:], s))
	s[3] ^= 1
	require.False(t, r.Verify(old.ID(), "label", message, s))
	s[3] ^= 1
	r.Set(present.Public())
	require.False(t, r.Verify(old.ID(), "label", message, s), "a key that has gone")
}

func TestProof(t *testing.T) {
	s := keyring.NewSigner([32]byte{1})
	p := s.Proof("session", []byte{1})
	require.Len(t, p, 32)
	require.Equal(t, p, keyring.NewSigner([32]byte{1}).Proof("session", []byte{1}), "it can be made again")
	require.NotEqual(t, p, s.Proof("session", []byte{2}))
	require.NotEqual(t, p, s.Proof("sessions", []byte{1}))
	require.NotEqual(t, p, keyring.NewSigner([32]byte{2}).Proof("session", []byte{1}))
}

package payloadkey

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
)

// The vectors of c2sp.org/XAES-256-GCM, which cover both values of the top bit in K1.
func TestVectors(t *testing.T) {
	nonce := []byte("ABCDEFGHIJKLMNOPQRSTUVWX")
	for _, v := range []struct {
		key      byte
		ad, want string
	}{
		{1, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
		{3, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"},
	} {
		c := NewCipher(Key(bytes.Repeat([]byte{v.key}, KeyBytes)))
		box, err := hex.DecodeString(v.want)
		require.NoError(t, err)
		got, err := c.Open(nil, nonce, box, []byte(v.ad))
		require.NoError(t, err)
		require.Equal(t, "XAES-256-GCM", string(got))
		box[3] ^= 1
		_, err = c.Open(nil, nonce, box, []byte(v.ad))
		require.ErrorIs(t, err, ErrNotAuthentic)
	}
}

// TestNoncesDiffer: messages of one process share the salt, those of another process or key do not.
func TestNoncesDiffer(t *testing.T) {
	key := NewKey()
	a, b := NewCipher(key), NewCipher(key)
	seen := map[string]bool{}
	seal := func(c *Cipher) (nonce, box []byte) {
		nonce, box = make([]byte, nonceBytes), make([]byte, 0, 100)
		box = c.Seal(box, nonce, []byte("text"), []byte("place"))
		require.False(t, seen[string(nonce)])
		seen[string(nonce)] = true
		return nonce, box
	}
	n1, box := seal(a)
	n2, _ := seal(a)
	n3, _ := seal(b)
	require.Equal(t, n1[:saltBytes], n2[:saltBytes])
	require.NotEqual(t, n1[:saltBytes], n3[:saltBytes])
	got, err := b.Open(nil, n1, box, []byte("place"))
	require.NoError(t, err)
	require.Equal(t, "text", string(got))
	_, err = b.Open(nil, n1, box, []byte("elsewhere"))
	require.ErrorIs(t, err, ErrNotAuthentic)

	a.sealing.Load().sealed.Store(maxSealed)
	n4, _ := seal(a)
	require.NotEqual(t, n1[:saltBytes], n4[:saltBytes], "a salt serves 2^31 messages")
}

// TestManyWriters: a reader of more salts than it keeps reads all of them.
func TestManyWriters(t *testing.T) {
	r, w := NewCipher(Key{1}), NewCipher(Key{1})
	nonce, box := make([]byte, nonceBytes), make([]byte, 0, 100)
	for range 2 * ways * groups {
		w.sealing.Store(nil)
		box = w.Seal(box, nonce, []byte("text"), nil)
		got, err := r.Open(nil, nonce, box, nil)
		require.NoError(t, err)
		require.Equal(t, "text", string(got))
	}
}

func TestNoAllocations(t *testing.T) {
	c := NewCipher(NewKey())
	nonce, text, ad := make([]byte, nonceBytes), make([]byte, 128), make([]byte, 48)
	box := make([]byte, 0, 144)
	run := func() {
		box = c.Seal(box, nonce, text, ad)
		if _, err := c.Open(text, nonce, box, ad); err != nil {
			t.Fatal(err)
		}
	}
	run()
	require.Zero(t, testing.AllocsPerRun(100, run))
}

func TestRing(t *testing.T) {
	a, b := NewKey(), NewKey()
	r := NewRing("shop", false, nil, a)
	first := r.First()
	require.Equal(t, a.ID(), first.ID())
	require.Nil(t, r.Find(b.ID()))
	r.Set(b, a)
	require.Equal(t, b.ID(), r.First().ID())
	require.Same(t, first, r.Find(a.ID()), "what is known of a key stays")
	require.Contains(t, r.String(), IDText(b.ID()))
}

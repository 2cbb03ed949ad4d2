package verbs

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
)

func TestMessageForms(t *testing.T) {
	require.NoError(t, checkIntro(appendIntro(nil)))
	require.Len(t, appendIntro(nil), introBytes)
	for at, bad := range map[int]byte{0: 0, 4: 1, 5: 1, 6: 1, 7: 1} {
		c := appendIntro(nil)
		c[at] = bad
		require.ErrorIs(t, checkIntro(c), errPeer, "byte %d", at)
	}
	require.ErrorIs(t, checkIntro(appendIntro(nil)[:introBytes-1]), errPeer)

	e := endpoint{port: 1, addr: [16]byte{4, 15: 5}, nonce: [16]byte{6, 15: 7}}
	b := e.append(nil)
	require.Len(t, b, endpointBytes)
	got, err := decodeEndpoint(b)
	require.NoError(t, err)
	require.Equal(t, e, got)
	acts := e
	acts.acts = true
	got, err = decodeEndpoint(acts.append(nil))
	require.NoError(t, err)
	require.Equal(t, acts, got)
	require.ErrorIs(t, checkMagic(acts.append(nil), endpointBytes), errPeer, "a client that knows no such nodes takes it for one")
	for at, bad := range map[int]byte{0: 0, 4: 1, 5: 1, 6: 0} {
		c := bytes.Clone(b)
		c[at] = bad
		_, err := decodeEndpoint(c)
		require.ErrorIs(t, err, errPeer, "byte %d", at)
	}
	for _, bad := range []endpoint{{addr: e.addr, nonce: e.nonce}, {port: 1, nonce: e.nonce}, {port: 1, addr: e.addr}} {
		_, err := decodeEndpoint(bad.append(nil))
		require.ErrorIs(t, err, errPeer)
	}
	_, err = decodeEndpoint(b[:endpointBytes-1])
	require.ErrorIs(t, err, errPeer)

	c := claim{lane: 9, nonce: e.nonce}
	b = c.append(nil)
	require.Len(t, b, claimBytes)
	for _, b := range [][]byte{b, append(bytes.Clone(b), make([]byte, 56-claimBytes)...)} {
		got, err := decodeClaim(b)
		require.NoError(t, err)
		require.Equal(t, c, got)
	}
	for at, bad := range map[int]byte{0: 0, 4: 1, 6: 29, 7: 1} {
		c := bytes.Clone(b)
		c[at] = bad
		_, err := decodeClaim(c)
		require.ErrorIs(t, err, errPeer, "byte %d", at)
	}
	_, err = decodeClaim(b[:claimBytes-1])
	require.ErrorIs(t, err, errPeer)

	r := request{kind: kindOpen, tag: 2, region: 3, slot: -4, epoch: 1<<63 + 5}
	b = r.append(nil)
	require.Len(t, b, requestBytes)
	require.Equal(t, r, decodeRequest(b))
	for i, err := range append([]error{nil, rdma.ErrBroken}, rdma.Refusals...) {
		a := answer{kind: kindFarewell, tag: 1, err: err, flush: rdma.FlushMethod(i % 5), verifies: i%2 == 0, key: 2, bytes: 3, rkey: 1<<32 - 1}
		b := a.append(nil, false)
		require.Len(t, b, answerLen(false))
		require.Equal(t, a, decodeAnswer(b))
		a.base = 1<<47 + 1
		b = a.append(nil, true)
		require.Len(t, b, answerLen(true))
		require.Equal(t, a, decodeAnswer(b))
	}
}

// Whatever comes from a socket is refused or has one form.
func FuzzMessages(f *testing.F) {
	f.Add((&endpoint{port: 1, addr: [16]byte{1}, nonce: [16]byte{1}}).append(nil))
	f.Add((&claim{lane: 1}).append(nil))
	f.Add((&answer{err: rdma.ErrKey}).append(nil, false))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, err := decodeEndpoint(b); err == nil && !bytes.Equal(e.append(nil), b[:endpointBytes]) {
			t.Fatal("an endpoint has two forms")
		}
		if c, err := decodeClaim(b); err == nil && !bytes.Equal(c.append(nil), b[:claimBytes]) {
			t.Fatal("a claim has two forms")
		}
		if len(b) == requestBytes {
			r := decodeRequest(b)
			if !bytes.Equal(r.append(nil), b) {
				t.Fatal("a request has two forms")
			}
		}
		if len(b) == answerLen(false) || len(b) == answerLen(true) {
			decodeAnswer(b)
		}
	})
}

func TestSpinHasADefault(t *testing.T) {
	require.Equal(t, defaultSpin, Config{}.withDefaults().Spin)
	require.EqualValues(t, 7, Config{Spin: 7}.withDefaults().Spin)
}

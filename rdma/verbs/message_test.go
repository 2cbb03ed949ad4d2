package verbs

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
)

func TestMessageForms(t *testing.T) {
	e := endpoint{lid: 1, qpn: 1<<24 - 1, psn: 3, gid: [16]byte{4, 15: 5}, mtu: 5, reads: 16}
	b := e.append(nil)
	require.Len(t, b, endpointBytes)
	got, err := decodeEndpoint(b)
	require.NoError(t, err)
	require.Equal(t, e, got)
	for at, bad := range map[int]byte{0: 0, 4: 2, 11: 1, 15: 1, 32: 0, 33: 0} {
		c := bytes.Clone(b)
		c[at] = bad
		_, err := decodeEndpoint(c)
		require.ErrorIs(t, err, errPeer, "byte %d", at)
	}
	_, err = decodeEndpoint(b[:endpointBytes-1])
	require.ErrorIs(t, err, errPeer)

	for _, kind := range []uint32{kindOpen, kindFlush} {
		r := request{kind: kind, tag: 2, region: 3, slot: -4, epoch: 5, off: 1 << 63, bytes: 7}
		b := r.append(nil)
		require.Len(t, b, requestBytes)
		require.Equal(t, r, decodeRequest(b))
	}
	for _, err := range append([]error{nil, rdma.ErrBroken}, rdma.Refusals...) {
		a := answer{kind: kindFarewell, tag: 1, err: err, persistent: err == nil, key: 2, bytes: 3, rkey: 1<<32 - 1}
		b := a.append(nil)
		require.Len(t, b, answerBytes)
		require.Equal(t, a, decodeAnswer(b))
	}
}

// Whatever comes from a socket is refused or has one form.
func FuzzMessages(f *testing.F) {
	f.Add((&endpoint{mtu: 1, reads: 1}).append(nil))
	f.Add((&answer{err: rdma.ErrKey}).append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, err := decodeEndpoint(b); err == nil && !bytes.Equal(e.append(nil)[:34], b[:34]) {
			t.Fatal("an endpoint has two forms")
		}
		if len(b) == requestBytes {
			r := decodeRequest(b)
			if !bytes.Equal(r.append(nil), b) {
				t.Fatal("a request has two forms")
			}
			decodeAnswer(b)
		}
	})
}

func TestSpinHasADefault(t *testing.T) {
	require.Equal(t, defaultSpin, Config{}.withDefaults().Spin)
	require.EqualValues(t, 7, Config{Spin: 7}.withDefaults().Spin)
}

package host

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptest"
	"testing"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

func TestHelloForms(t *testing.T) {
	h := Hello{Lane: 7, Attempt: 9, Ticket: ticket(3).Ticket, Proof: keyring.Signature{1, 2}}
	require.Len(t, h.Append(nil), HelloBytes)
	got, err := DecodeHello(h.Append(nil))
	require.NoError(t, err)
	require.Equal(t, h, got)
	c := Challenge{Node: 4, Incarnation: 5, Nonce: [32]byte{6}}
	require.Len(t, c.Append(nil), ChallengeBytes)
	gotChallenge, err := DecodeChallenge(c.Append(nil))
	require.NoError(t, err)
	require.Equal(t, c, gotChallenge)
	for i := range h.Append(nil)[:12] {
		b := h.Append(nil)
		b[i] ^= 1
		_, err := DecodeHello(b)
		require.ErrorIs(t, err, ErrHello)
	}
	for i, err := range append([]error{nil, rdma.ErrBroken}, rdma.Refusals...) {
		w := Welcome{Err: err, Node: 4, Incarnation: 5}
		require.Len(t, w.Append(nil), WelcomeBytes)
		got, decodeErr := DecodeWelcome(w.Append(nil))
		require.NoError(t, decodeErr)
		require.Equal(t, w, got)
		a := OpenAnswer{Tag: 1, Err: err, Flush: rdma.FlushMethod(i % 5), Key: 6, Bytes: 7}
		require.Len(t, a.Append(nil), OpenAnswerBytes)
		gotAnswer, decodeErr := DecodeOpenAnswer(a.Append(nil))
		require.NoError(t, decodeErr)
		require.Equal(t, a, gotAnswer)
	}
	require.Equal(t, rdma.ErrBroken, CodeError(Code(errors.New("anything else"))))
	o := OpenRequest{Tag: 1, Region: 2, Slot: -3, Epoch: 4}
	require.Len(t, o.Append(nil), OpenRequestBytes)
	gotRequest, err := DecodeOpenRequest(o.Append(nil))
	require.NoError(t, err)
	require.Equal(t, o, gotRequest)
}

func FuzzHello(f *testing.F) {
	h := Hello{Lane: 7, Ticket: ticket(3).Ticket, Proof: keyring.Signature{1, 2}}
	f.Add(h.Append(nil))
	w := Welcome{}
	f.Add(w.Append(nil))
	c := Challenge{Node: 1}
	f.Add(c.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := DecodeHello(b); err == nil && string(h.Append(nil)) != string(b) {
			t.Fatal("a hello has two forms")
		}
		if c, err := DecodeChallenge(b); err == nil && string(c.Append(nil)) != string(b) {
			t.Fatal("a challenge has two forms")
		}
		DecodeWelcome(b)
		DecodeOpenRequest(b)
		DecodeOpenAnswer(b)
	})
}

// A hello is bound to the TLS channel that it travels on: what a man in the middle passes on
// from one channel to another is refused.
func TestHelloIsBoundToTheChannel(t *testing.T) {
	srv := httptest.NewUnstartedServer(nil)
	srv.StartTLS()
	defer srv.Close()
	channel := func() (client, server Binding) {
		near, far := net.Pipe()
		defer near.Close()
		defer far.Close()
		done := make(chan error, 1)
		go func() {
			var err error
			server, err = BindingOf(tls.Server(far, srv.TLS))
			done <- err
		}()
		client, err := BindingOf(tls.Client(near, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}))
		require.NoError(t, err)
		require.NoError(t, <-done)
		return client, server
	}
	near, far := channel()
	require.Equal(t, near, far)
	require.NotEqual(t, Binding{}, near)
	_, other := channel()
	require.NotEqual(t, far, other)
	plain, err := BindingOf(&net.TCPConn{})
	require.NoError(t, err)
	require.Equal(t, Binding{}, plain)

	v := Verifier{Cluster: testCluster, Keys: testKeys, Node: 1, Incarnation: 2}
	c := v.Challenge()
	h, err := NewHello(ticket(3), 0, &c, near)
	require.NoError(t, err)
	require.NoError(t, v.Check(&h, &c, far))
	require.ErrorIs(t, v.Check(&h, &c, other), rdma.ErrTicket)
	require.ErrorIs(t, v.Check(&h, &c, Binding{}), rdma.ErrTicket)
	for name, change := range map[string]func(c *Challenge){
		"nonce": func(c *Challenge) { c.Nonce[31]++ }, "node": func(c *Challenge) { c.Node++ }, "incarnation": func(c *Challenge) { c.Incarnation++ }, "tls": func(c *Challenge) { c.TLS = OfferedTLS },
	} {
		d := c
		change(&d)
		require.ErrorIs(t, v.Check(&h, &d, far), rdma.ErrTicket, name)
	}
	_, err = NewHello(ticket(3).For(7, ""), 0, &c, near)
	require.ErrorIs(t, err, rdma.ErrBroken)
}

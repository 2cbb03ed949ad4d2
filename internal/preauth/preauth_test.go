package preauth

import (
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/verify/certs"
)

// pair is a connection with TLS; the client's certificate has so many bytes behind it.
func pair(t *testing.T, behind int) (server, client *tls.Conn) {
	ca := certs.New(t, "prod")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l = Listen(l, ca.Source(identity.Controller, "c1").Server())
	t.Cleanup(func() { l.Close() })
	src := ca.Source(identity.Client, "app")
	f := src.Files()
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	require.NoError(t, err)
	if behind > 0 {
		cert.Certificate = append(cert.Certificate, make([]byte, behind))
	}
	conf := src.Client(identity.Controller)
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	out, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	in, err := l.Accept()
	require.NoError(t, err)
	server, client = in.(*tls.Conn), tls.Client(out, conf)
	for _, c := range []*tls.Conn{server, client} {
		require.NoError(t, c.SetDeadline(time.Now().Add(3*time.Minute)))
		t.Cleanup(func() { _ = c.NetConn().Close() })
	}
	return server, client
}

func TestAStrangerSendsLittle(t *testing.T) {
	server, client := pair(t, MaxBytes)
	go func() { _ = client.Handshake() }()
	require.ErrorIs(t, server.Handshake(), ErrTooMuch, "certificates without an end")
	require.True(t, Spent(server))
	Again(server)
	require.False(t, Spent(server))
}

func TestTheBoundIsLifted(t *testing.T) {
	server, client := pair(t, 0)
	go func() { _, _ = client.Write(make([]byte, 6*MaxBytes)) }()
	require.NoError(t, server.Handshake())
	_, err := io.ReadFull(server, make([]byte, MaxBytes/2))
	require.NoError(t, err)
	Again(server)
	_, err = io.ReadFull(server, make([]byte, MaxBytes/2))
	require.NoError(t, err)
	Known(server)
	_, err = io.ReadFull(server, make([]byte, 3*MaxBytes))
	require.NoError(t, err)
	Again(server)
	_, err = io.ReadFull(server, make([]byte, 2*MaxBytes))
	require.NoError(t, err, "who is known stays known")
}

func TestTheBoundCountsWhatFollowsTheHandshake(t *testing.T) {
	server, client := pair(t, 0)
	go func() { _, _ = client.Write(make([]byte, 2*MaxBytes)) }()
	_, err := io.Copy(io.Discard, server)
	require.ErrorIs(t, err, ErrTooMuch)
}

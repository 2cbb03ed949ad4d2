package redis_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/preauth"
	"github.com/quarrystore/quarry/verify/certs"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// encrypted serves a tree at a plain port and at one with TLS.
func encrypted(t *testing.T, cfg redis.Config, secured *tls.Config) (plain, sealed string) {
	_, cfg.Tree = newTree(t, testcluster.Options{})
	var listeners []net.Listener
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners = append(listeners, l)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- redis.New(cfg).Serve(ctx, listeners[0], preauth.Listen(listeners[1], secured)) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return listeners[0].Addr().String(), listeners[1].Addr().String()
}

// over is a raw connection over TLS.
func over(t testing.TB, addr, ca string) *peer {
	pem, err := os.ReadFile(ca)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(pem))
	p := dial(t, addr)
	c := tls.Client(p.Conn, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS12})
	require.NoError(t, c.Handshake())
	p.Conn = c
	p.r.Reset(c)
	return p
}

// redis-cli and pipelines are served over TLS, beside plain ones; a certificate that is replaced is the
// next connection's.
func TestServesOverTLS(t *testing.T) {
	ca := certs.New(t, "prod")
	files := ca.Files(identity.Gateway, "g1", "127.0.0.1", "localhost")
	src, err := identity.Open(identity.Files{Cert: files.Cert, Key: files.Key}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	plain, sealed := encrypted(t, redis.Config{Password: "open sesame"}, src.Public())

	if path, err := exec.LookPath("redis-cli"); err == nil {
		host, port, _ := net.SplitHostPort(sealed)
		cli := func(args ...string) (string, error) {
			out, err := exec.CommandContext(t.Context(), path, append([]string{"-h", host, "-p", port, "--no-auth-warning", "-a", "open sesame"}, args...)...).CombinedOutput()
			return strings.TrimSpace(string(out)), err
		}
		out, err := cli("--tls", "--cacert", ca.CA, "SET", "k", "v")
		require.NoError(t, err, out)
		require.Equal(t, "OK", out)
		out, err = cli("--tls", "--cacert", certs.New(t, "prod").CA, "GET", "k")
		require.Error(t, err)
		require.Contains(t, out, "certificate verify failed")
		out, err = cli("GET", "k") // plain, to the port with TLS
		require.Error(t, err, out)
	} else {
		t.Log("redis-cli is not installed")
	}

	p := over(t, sealed, ca.CA)
	require.Equal(t, "-NOAUTH Authentication required.", p.cmd("GET k"))
	require.Equal(t, "+OK", p.do("AUTH", "open sesame"))
	long := strings.Repeat("0123456789", 100_000)
	var out []byte
	for range 5 {
		out = append(append(out, frame("SET", "long", long)...), frame("GET", "long")...)
	}
	go p.Conn.Write(out)
	for range 5 {
		require.Equal(t, "+OK", p.reply().String())
		require.Equal(t, long, p.reply().text)
	}
	q := dial(t, plain)
	require.Equal(t, "+OK", q.do("AUTH", "open sesame"))
	require.Equal(t, ":1000000", q.cmd("STRLEN long"))

	before := p.Conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber
	ca.Files(identity.Gateway, "g1", "127.0.0.1", "localhost")
	after := over(t, sealed, ca.CA).Conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber
	require.NotEqual(t, before, after)
	require.Equal(t, ":1", p.cmd("EXISTS long"), "the old connection goes on")
}

// With authorities for clients, one without a certificate of theirs is refused before a command.
func TestClientsShowCertificates(t *testing.T) {
	ca, foreign := certs.New(t, "prod"), certs.New(t, "prod")
	files := ca.Files(identity.Gateway, "g1", "127.0.0.1")
	src, err := identity.Open(files, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	_, sealed := encrypted(t, redis.Config{}, src.Public())
	ask := func(show *identity.Files) error {
		c := &tls.Config{InsecureSkipVerify: true}
		if show != nil {
			pair, err := tls.LoadX509KeyPair(show.Cert, show.Key)
			require.NoError(t, err)
			c.Certificates = []tls.Certificate{pair}
		}
		nc, err := tls.Dial("tcp", sealed, c)
		if err != nil {
			return err
		}
		defer nc.Close()
		require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
		if _, err := nc.Write(frame("PING")); err != nil {
			return err
		}
		_, err = nc.Read(make([]byte, 7))
		return err
	}
	mine, theirs := ca.Files(identity.Client, "app"), foreign.Files(identity.Client, "app")
	require.NoError(t, ask(&mine))
	require.Error(t, ask(nil))
	require.Error(t, ask(&theirs))
}

// Connections that do not shake hands count as unauthenticated, also where no password is asked for: they keep
// no client out.
func TestHandshakesKeepNobodyOut(t *testing.T) {
	ca := certs.New(t, "prod")
	files := ca.Files(identity.Gateway, "g1", "127.0.0.1")
	src, err := identity.Open(identity.Files{Cert: files.Cert, Key: files.Key}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	_, sealed := encrypted(t, redis.Config{MaxClients: 2}, src.Public())
	first := over(t, sealed, ca.CA)
	require.Equal(t, "+PONG", first.cmd("PING"))
	for i := range 3000 {
		c, err := net.Dial("tcp", sealed)
		require.NoError(t, err)
		defer c.Close()
		if i%2 == 0 {
			_, _ = c.Write([]byte{0x16, 3, 1, 2, 0, 1}) // the beginning of a ClientHello
		}
	}
	second := over(t, sealed, ca.CA)
	require.Equal(t, "+PONG", second.cmd("PING"))
	require.Equal(t, "+PONG", first.cmd("PING"))
	third := over(t, sealed, ca.CA)
	require.Equal(t, "-ERR max number of clients reached", third.reply().String())
}

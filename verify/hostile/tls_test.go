package hostile

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/verify/certs"
)

// foreign is a certificate of no authority, behind which so many bytes follow in the chain.
func foreign(t *testing.T, behind int) *tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	return &tls.Certificate{Certificate: [][]byte{der, make([]byte, behind)}, PrivateKey: key}
}

// withheld is a connection of which only the first bytes are sent.
type withheld struct {
	net.Conn
	left int
}

func (w *withheld) Write(b []byte) (int, error) {
	n := min(len(b), w.left)
	w.left -= n
	if n > 0 {
		if _, err := w.Conn.Write(b[:n]); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// A stranger is an attack of a peer without a certificate.
type stranger struct {
	do func(net.Conn) // goes on with a connection, and leaves it open
	// connections is many times preauth.MaxHandshakes. 2 000 chains take a process without preauth.MaxBytes beyond
	// most, and 4 000 silent connections one without MaxHandshakes (seen: 155 and 157 MiB). A handshake costs
	// both sides a millisecond of a processor, and a chain two.
	connections int
}

// strangers are the attacks by name.
func strangers(t *testing.T, alpn ...string) map[string]stranger {
	// Three records of a ClientHello that has another one.
	hello := make([]byte, 3*(16<<10))
	copy(hello, []byte{1, 0, 0xff, 0xf0})
	var records []byte
	for b := range slices.Chunk(hello, 16<<10) {
		records = append(append(records, 0x16, 3, 1, 0x40, 0), b...)
	}
	conf := &tls.Config{InsecureSkipVerify: true, NextProtos: alpn, CurvePreferences: []tls.CurveID{tls.X25519}} // the cheapest
	chain, chained := foreign(t, 240<<10), conf.Clone()
	chained.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return chain, nil }
	return map[string]stranger{
		"a hello without an end": {func(c net.Conn) { _, _ = c.Write(records) }, connections},
		// TLS holds up to 256 KiB of certificates until they are whole.
		"a chain without an end": {func(c net.Conn) { _ = tls.Client(&withheld{c, 220 << 10}, chained).Handshake() }, 2_000},
		"silence under TLS":      {func(c net.Conn) { _ = tls.Client(c, conf).Handshake() }, 4_000},
	}
}

// strike makes the attack on connections, some at a time, and leaves them open until the test ends. When
// half of them are made, user begins.
func strike(t *testing.T, address string, connections int, attack func(net.Conn), user func()) {
	t.Helper()
	var mu sync.Mutex
	var all []net.Conn
	t.Cleanup(func() {
		for _, c := range all {
			c.Close()
		}
	})
	half := make(chan struct{})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range connections / 16 {
				c, err := net.Dial("tcp", address)
				if err != nil {
					continue // refused: that is one way to stay within bounds
				}
				_ = c.SetDeadline(time.Now().Add(patience))
				attack(c) // the process may close it meanwhile
				mu.Lock()
				if all = append(all, c); len(all) == connections/2 {
					close(half)
				}
				mu.Unlock()
			}
		})
	}
	select {
	case <-half:
		user()
	case <-time.After(patience):
		t.Error("the attack could not be made: is the limit of open files too low?")
	}
	wg.Wait()
}

// again repeats what a client of HTTP or Redis repeats when its connection is closed before an answer.
func again(t *testing.T, do func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if err = do(); err == nil {
			return
		}
	}
	t.Errorf("a well-behaved client is kept out: %v", err)
}

// get asks over a new connection.
func get(conf *tls.Config, url string) error {
	tr := &http.Transport{TLSClientConfig: conf}
	defer tr.CloseIdleConnections()
	res, err := (&http.Client{Transport: tr, Timeout: patience}).Get(url)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return errors.New(res.Status)
	}
	return nil
}

// set gives the password and writes a key.
func set(conf *tls.Config, address string) error {
	c, err := tls.Dial("tcp", address, conf)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "AUTH \"open sesame\"\r\nSET k v\r\n"); err != nil {
		return err
	}
	answer := make([]byte, len("+OK\r\n+OK\r\n"))
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	if string(answer) != "+OK\r\n+OK\r\n" {
		return fmt.Errorf("answer %q", answer)
	}
	return nil
}

// Handshakes that do not end, at every port with TLS: the memory stays bounded, and users with a certificate go on.
func TestHandshakesWithoutEnd(t *testing.T) {
	ca := certs.New(t, "prod")
	trust := func(role identity.Role, name string) []string {
		f := ca.Files(role, name, "127.0.0.1")
		return []string{"--tls-cert", f.Cert, "--tls-key", f.Key, "--tls-ca", f.CA}
	}
	with := func(flags []string, args ...string) []string { return append(args, flags...) }
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	etcd := l.Addr().String() // free when the controller starts
	require.NoError(t, l.Close())
	controller := start(t, with(trust(identity.Controller, "c1"), "controller", "--name", "c1", "--listen", "127.0.0.1:0", "--data", t.TempDir(),
		"--etcd-peer", "https://"+etcd)...)
	node := start(t, with(trust(identity.Node, "s1"), "storage", "--name", "s1", "-C", controller.url(), "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0",
		"--socket", "none", "--metrics-listen", "127.0.0.1:0", "--metrics-tls", "required")...)
	client := trust(identity.Client, "app")
	alloc := func() {
		controller.run(with(client, "slab", "alloc", "-C", controller.url(), "--transport", "tcp", "--data", "well behaved")...)
	}
	alloc() // the first one makes a region, which the node has in its memory
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("open sesame\n"), 0o600))
	gateway := start(t, with(trust(identity.Gateway, "g1"), "gateway", "redis", "-C", controller.url(), "--listen", "none", "--tls-listen", "127.0.0.1:0",
		"--tree", "attacked", "--create", "--password-file", password)...)

	viewer := ca.Source(identity.Viewer, "v1")
	toNode := viewer.Client(identity.Node)
	toGateway := viewer.Client(identity.Gateway)
	toEtcd := ca.Source(identity.Controller, "c2").Client(identity.Controller)
	for name, port := range map[string]struct {
		of      *process
		address string
		alpn    []string
		user    func()
	}{
		"fabric":     {node, node.ready["tcp"], []string{"quarry-fabric/3"}, alloc},
		"agent":      {node, hostOf(node.ready["agent"]), []string{"h2"}, func() { again(t, func() error { return get(toNode, node.ready["agent"]+"/healthz") }) }},
		"metrics":    {node, strings.TrimSuffix(hostOf(node.ready["metrics"]), "/metrics"), []string{"h2"}, func() { again(t, func() error { return get(toNode, node.ready["metrics"]) }) }},
		"controller": {controller, hostOf(controller.url()), []string{"h2"}, alloc},
		"etcd":       {controller, etcd, []string{"h2"}, func() { again(t, func() error { return get(toEtcd, "https://"+etcd+"/version") }) }},
		"gateway":    {gateway, gateway.ready["tls_address"], nil, func() { again(t, func() error { return set(toGateway, gateway.ready["tls_address"]) }) }},
	} {
		t.Run(name, func(t *testing.T) {
			port.of.t, controller.t = t, t
			require.Less(t, port.of.growth(func() {
				for how, attack := range strangers(t, port.alpn...) {
					t.Run(how, func(t *testing.T) {
						strike(t, port.address, attack.connections, func(c net.Conn) {
							if name == "fabric" { // it speaks first
								_, _ = io.ReadFull(c, make([]byte, host.ChallengeBytes))
							}
							attack.do(c)
						}, port.user)
					})
				}
			}), most)
		})
	}
}

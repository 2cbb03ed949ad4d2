package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/httpserver"
)

const (
	day      = 24 * time.Hour
	patience = 3 * time.Minute
)

// pki is an authority with a folder.
type pki struct {
	*Authority
	dir string
}

func newPKI(t testing.TB, cluster string) pki {
	a, cert, _, err := NewAuthority(cluster, day)
	require.NoError(t, err)
	p := pki{a, t.TempDir()}
	require.NoError(t, os.WriteFile(filepath.Join(p.dir, "ca.crt"), cert, 0o600))
	return p
}

// write issues a certificate under a name of files.
func (p pki) write(t testing.TB, file string, role Role, name string, hosts ...string) Files {
	cert, key, err := p.Issue(role, name, hosts, day)
	require.NoError(t, err)
	f := Files{filepath.Join(p.dir, file+".crt"), filepath.Join(p.dir, file+".key"), filepath.Join(p.dir, "ca.crt")}
	replace(t, f.Key, key)
	replace(t, f.Cert, cert)
	return f
}

func replace(t testing.TB, name string, b []byte) {
	require.NoError(t, os.WriteFile(name+".new", b, 0o600))
	require.NoError(t, os.Rename(name+".new", name))
}

func open(t testing.TB, f Files) *Source {
	s, err := Open(f, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return s
}

// serve answers with the identity of the caller.
func serve(t testing.TB, c *tls.Config, own ID) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	srv := httpserver.New("test", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, err := OfPeer(r.TLS, own)
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		_, _ = io.WriteString(w, id.String())
	}))
	srv.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	srv.TLS = c
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close() })
	return "https://" + l.Addr().String()
}

// get makes one call over a new connection.
func get(c *tls.Config, url string) (string, error) {
	tr := &http.Transport{TLSClientConfig: c}
	defer tr.CloseIdleConnections()
	res, err := (&http.Client{Transport: tr}).Get(url)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if res.StatusCode != http.StatusOK {
		return "", errors.New(string(b))
	}
	return string(b), err
}

func TestBothSidesAreIdentified(t *testing.T) {
	p, foreign := newPKI(t, "prod"), newPKI(t, "prod")
	other := newPKI(t, "staging")
	ctl := open(t, p.write(t, "c1", Controller, "c1"))
	url := serve(t, ctl.Server(), ctl.ID())
	node := open(t, p.write(t, "n1", Node, "n1"))

	got, err := get(node.Client(Controller), url)
	require.NoError(t, err)
	require.Equal(t, "spiffe://prod/node/n1", got)

	_, err = get(node.Client(Node), url)
	require.ErrorContains(t, err, "want a certificate of role [node]")
	_, err = get(open(t, foreign.write(t, "n1", Node, "n1")).Client(Controller), url)
	require.ErrorContains(t, err, "unknown authority", "the same name of another authority")

	// Both authorities are trusted: the clusters tell them apart.
	both := filepath.Join(t.TempDir(), "both.crt")
	a, err := os.ReadFile(filepath.Join(p.dir, "ca.crt"))
	require.NoError(t, err)
	b, err := os.ReadFile(filepath.Join(other.dir, "ca.crt"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(both, append(a, b...), 0o600))
	f := other.write(t, "n1", Node, "n1")
	f.CA = both
	_, err = get(open(t, f).Client(Controller), url)
	require.ErrorContains(t, err, "want one of cluster staging")
	f = p.write(t, "c2", Controller, "c2")
	f.CA = both
	wide := open(t, f)
	url2 := serve(t, wide.Server(), wide.ID())
	f = other.write(t, "lax", Client, "lax")
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	require.NoError(t, err)
	_, err = get(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}, url2)
	require.ErrorContains(t, err, "this is cluster prod")
}

// A client's or a node's certificate does not serve as a controller's.
func TestServersNeedTheirRole(t *testing.T) {
	p := newPKI(t, "prod")
	for _, role := range []Role{Client, Node, Operator, Worker} {
		bad := open(t, p.write(t, "bad", role, "x", "127.0.0.1"))
		url := serve(t, bad.Server(), bad.ID())
		_, err := get(open(t, p.write(t, "me", Client, "me")).Client(Controller), url)
		require.Error(t, err, role)
		_, err = get(open(t, Files{CA: filepath.Join(p.dir, "ca.crt")}).Client(Controller), url)
		require.Error(t, err, "without an identity, by the host's name alone: %s", role)
	}
	good := open(t, p.write(t, "c1", Controller, "c1", "127.0.0.1"))
	url := serve(t, good.Server(), good.ID())
	got, err := get(open(t, Files{CA: filepath.Join(p.dir, "ca.crt")}).Client(Controller), url)
	require.NoError(t, err)
	require.Empty(t, got, "a client without a certificate has no identity")
	elsewhere := open(t, p.write(t, "c2", Controller, "c2", "10.9.9.9"))
	_, err = get(open(t, Files{CA: filepath.Join(p.dir, "ca.crt")}).Client(Controller), serve(t, elsewhere.Server(), elsewhere.ID()))
	require.ErrorContains(t, err, "10.9.9.9")
}

func TestPortsForRoles(t *testing.T) {
	p := newPKI(t, "prod")
	ctl := open(t, p.write(t, "c1", Controller, "c1"))
	url := serve(t, ctl.ServerFor(Controller), ctl.ID())
	got, err := get(open(t, p.write(t, "c2", Controller, "c2")).Client(Controller), url)
	require.NoError(t, err)
	require.Equal(t, "spiffe://prod/controller/c2", got)
	_, err = get(open(t, p.write(t, "n1", Node, "n1")).Client(Controller), url)
	require.Error(t, err)
	_, err = get(&tls.Config{InsecureSkipVerify: true}, url)
	require.Error(t, err)
}

// While certificates and the authority are replaced, calls go on, old connections too.
func TestFilesAreReplacedUnderLoad(t *testing.T) {
	p := newPKI(t, "prod")
	server := open(t, p.write(t, "c1", Controller, "c1"))
	url := serve(t, server.Server(), server.ID())
	client := open(t, p.write(t, "n1", Node, "n1"))
	stop, calls := make(chan struct{}), atomic.Int64{}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if got, err := get(client.Client(Controller), url); err != nil || got != "spiffe://prod/node/n1" {
					t.Errorf("call: %q, %v", got, err)
					return
				}
				calls.Add(1)
			}
		})
	}
	old := &http.Transport{TLSClientConfig: client.Client(Controller)}
	defer old.CloseIdleConnections()
	serialOver := func(tr *http.Transport) string {
		res, err := (&http.Client{Transport: tr}).Get(url)
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		return res.TLS.PeerCertificates[0].SerialNumber.String()
	}
	first := serialOver(old)
	for range 8 {
		p.write(t, "c1", Controller, "c1") // the key and the certificate, one after the other
		p.write(t, "n1", Node, "n1")
		before := calls.Load()
		require.Eventually(t, func() bool { return calls.Load() >= before+8 || t.Failed() }, patience, time.Millisecond)
	}
	require.Equal(t, first, serialOver(old), "an old connection goes on")
	root := func(src *Source) string {
		c, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), src.Client(Controller))
		require.NoError(t, err)
		defer c.Close()
		cs := c.ConnectionState()
		chains, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: src.current().pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		require.NoError(t, err)
		cs.VerifiedChains = chains
		return AuthorityOf(&cs)
	}
	former := root(client)
	require.True(t, server.Trusts(former))
	fresh := &http.Transport{TLSClientConfig: client.Client(Controller)}
	defer fresh.CloseIdleConnections()
	require.NotEqual(t, first, serialOver(fresh), "a new one uses the new certificate")
	close(stop)
	wg.Wait()

	// The authority is replaced: whoever it has not signed is out.
	next, cert, _, err := NewAuthority("prod", day)
	require.NoError(t, err)
	replace(t, filepath.Join(p.dir, "ca.crt"), cert)
	_, err = get(client.Client(Controller), url)
	require.Error(t, err)
	moved := pki{next, p.dir}
	moved.write(t, "c1", Controller, "c1")
	moved.write(t, "n1", Node, "n1")
	got, err := get(client.Client(Controller), url)
	require.NoError(t, err)
	require.Equal(t, "spiffe://prod/node/n1", got)

	require.False(t, server.Trusts(former), "it is not an authority any more")
	require.True(t, server.Trusts(root(client)))

	// What cannot be used is not taken.
	replace(t, filepath.Join(p.dir, "n1.crt"), []byte("half a cert"))
	_, err = get(client.Client(Controller), url)
	require.NoError(t, err)
	moved.write(t, "n1", Node, "n2")
	got, err = get(client.Client(Controller), url)
	require.NoError(t, err)
	require.Equal(t, "spiffe://prod/node/n1", got, "a process does not change its name")
}

func TestReadsIdentities(t *testing.T) {
	uri := func(s ...string) *x509.Certificate {
		c := &x509.Certificate{}
		for _, s := range s {
			u, err := url.Parse(s)
			require.NoError(t, err)
			c.URIs = append(c.URIs, u)
		}
		return c
	}
	id, err := FromCertificate(uri("https://example.org/x", "spiffe://prod.example.org/node/rack1.host-3"))
	require.NoError(t, err)
	require.Equal(t, ID{"prod.example.org", Node, "rack1.host-3"}, id)
	id, err = FromCertificate(uri("https://example.org/x"))
	require.NoError(t, err)
	require.Zero(t, id)
	for _, bad := range [][]string{
		{"spiffe://a/node/x", "spiffe://a/node/y"}, {"spiffe://a/node"}, {"spiffe://a/node/x/y"}, {"spiffe://a/king/x"}, {"spiffe:///node/x"},
		{"spiffe://a/node/"}, {"spiffe://a/node/.."}, {"spiffe://u@a/node/x"}, {"spiffe://a/node/x?y=1"}, {"spiffe://a:1/node/x"}, {"spiffe://a/node/%2e%2e%2f"},
	} {
		_, err := FromCertificate(uri(bad...))
		require.Error(t, err, bad)
	}
}

func TestAuthorityRefuses(t *testing.T) {
	p := newPKI(t, "prod")
	for _, host := range []string{PeerName("prod"), "CONTROLLER.prod.quarry", "*.quarry", "", "a:1", "http://a"} {
		_, _, err := p.Issue(Node, "n", []string{host}, day)
		require.Error(t, err, host)
	}
	_, _, err := p.Issue("king", "n", nil, day)
	require.Error(t, err)
	_, _, err = p.Issue(Node, "a/b", nil, day)
	require.Error(t, err)
	_, _, _, err = NewAuthority("Prod", day)
	require.Error(t, err)
	cert, _, err := p.Issue(Client, "c", nil, 100*day)
	require.NoError(t, err)
	got, err := ParsePEM(cert)
	require.NoError(t, err)
	require.False(t, got[0].NotAfter.After(p.cert.NotAfter), "a certificate ends with its authority")
}

func TestOpenNamesTheFile(t *testing.T) {
	p := newPKI(t, "prod")
	f := p.write(t, "n1", Node, "n1")
	g := p.write(t, "n2", Node, "n2")
	for _, c := range []struct {
		files Files
		want  string
	}{
		{Files{Cert: f.Cert}, "--tls-key"},
		{Files{Cert: f.Cert, Key: g.Key}, "n2.key"},
		{Files{Cert: "/nowhere.crt", Key: f.Key}, "/nowhere.crt"},
		{Files{CA: f.Key}, "n1.key"},
	} {
		_, err := Open(c.files, slog.Default())
		require.ErrorContains(t, err, c.want)
	}
}

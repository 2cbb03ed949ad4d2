package userdir

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Dev is what a quarry dev keeps for its user's other processes while it runs: its token, and the authority
// of its controller's certificate.
type Dev struct {
	// TokenFile has the token; "" if none is kept.
	TokenFile string
	authority *os.File // locked while this process runs
}

func tokenFile(port string) string     { return filepath.Join(Path(), "dev-"+port+".token") }
func authorityFile(port string) string { return filepath.Join(Path(), "dev-"+port+".crt") }

// Keep writes the token, "" for none, and the authority, PEM, of the controller at an address of this host. Only this
// user may read the files. Readers use them only while this process runs and has not called Close, because another
// program may take the port afterwards. One quarry dev of a user may have a port, whatever its address.
func Keep(address, token string, authority []byte) (d *Dev, err error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if err := Make(); err != nil {
		return nil, err
	}
	if _, other := running(address); other != nil {
		return nil, fmt.Errorf("another quarry dev of this user has port %s, at another address of this host: choose another port", port)
	}
	d = &Dev{}
	fresh := authorityFile(port) + ".new"
	defer func() {
		if err != nil {
			os.Remove(fresh)
			d.Close()
		}
	}()
	if d.authority, err = os.OpenFile(fresh, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); err != nil {
		return d, err
	}
	if err := unix.Flock(int(d.authority.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return d, err
	}
	if _, err := d.authority.Write(authority); err != nil {
		return d, err
	}
	if token == "" {
		err = os.Remove(tokenFile(port)) // of one that was killed
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	} else {
		d.TokenFile = tokenFile(port)
		err = replace(d.TokenFile, []byte(token+"\n"))
	}
	if err != nil {
		return d, err
	}
	return d, os.Rename(fresh, authorityFile(port))
}

func replace(file string, b []byte) error {
	if err := os.WriteFile(file+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// Close removes the files.
func (d *Dev) Close() error {
	if d.authority == nil {
		return nil
	}
	var err error
	if d.TokenFile != "" {
		err = os.Remove(d.TokenFile)
	}
	return errors.Join(err, os.Remove(strings.TrimSuffix(d.authority.Name(), ".new")), d.authority.Close())
}

// running returns the port of an address if it is of this host, and the authority of the quarry dev of this user that
// serves it; nil: none runs.
func running(address string) (port string, authority []byte) {
	host, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err != nil || host != "localhost" && (ip == nil || !ip.IsLoopback()) || check(Path()) != nil {
		return "", nil
	}
	f, err := os.Open(authorityFile(port))
	if err != nil {
		return "", nil
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return "", nil // the process that made it has ended, and its lock with it
	}
	if authority, err = io.ReadAll(io.LimitReader(f, 64<<10)); err != nil {
		return "", nil
	}
	return port, authority
}

// Token is the token of a quarry dev of this user that serves an address of this host; "" for
// another address, or if none runs.
func Token(address string) string {
	port, authority := running(address)
	if authority == nil {
		return ""
	}
	b, err := os.ReadFile(tokenFile(port))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Transport makes calls of http URLs with TLS where a quarry dev of this user serves the address: its certificate is
// verified by the authority that it has kept. Other calls go through t as they are. If t has a TLS configuration,
// Transport returns t.
func Transport(t *http.Transport) http.RoundTripper {
	if t.TLSClientConfig != nil {
		return t
	}
	return &transport{plain: t}
}

type transport struct {
	plain *http.Transport

	mu        sync.Mutex
	authority string          // that secured trusts
	secured   *http.Transport // nil: none was needed yet
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "http" {
		return t.plain.RoundTrip(r)
	}
	_, authority := running(r.URL.Host)
	if authority == nil {
		return t.plain.RoundTrip(r)
	}
	over := r.Clone(r.Context())
	over.URL.Scheme = "https"
	return t.trusting(authority).RoundTrip(over)
}

// trusting is the transport for servers of an authority, made anew when another quarry dev has the port.
func (t *transport) trusting(authority []byte) *http.Transport {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.secured != nil && t.authority == string(authority) {
		return t.secured
	}
	if t.secured != nil {
		t.secured.CloseIdleConnections()
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	t.authority, t.secured = string(authority), t.plain.Clone()
	t.secured.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}
	t.secured.ForceAttemptHTTP2 = true
	return t.secured
}

// CloseIdleConnections is http.Transport's.
func (t *transport) CloseIdleConnections() {
	t.plain.CloseIdleConnections()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.secured != nil {
		t.secured.CloseIdleConnections()
	}
}

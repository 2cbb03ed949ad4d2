package identity

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// Files are PEM files. Cert and Key go together: the certificate, with its intermediates behind
// it, that a process shows. CA holds the authorities it trusts; without, the system's, and no
// certificate of a client is asked for.
type Files struct {
	Cert, Key, CA string
}

// maxFileBytes bounds one file.
const maxFileBytes = 1 << 20

// stamp tells one state of a file from another.
type stamp struct {
	modified time.Time
	size     int64
	file     fs.FileInfo // tells a file from another of that name
}

func (s stamp) same(t stamp) bool {
	return s.size == t.size && s.modified.Equal(t.modified) && (s.file == nil) == (t.file == nil) && (s.file == nil || os.SameFile(s.file, t.file))
}

// material is what the files contain.
type material struct {
	cert *tls.Certificate // nil: none
	id   ID               // of cert
	pool *x509.CertPool   // nil: the system's
	// authorities are the names of those in pool.
	authorities map[string]bool
}

// Source is a process's certificate, key and authorities. Safe for concurrent use.
type Source struct {
	files Files
	log   *slog.Logger
	id    ID // never changes

	mu     sync.Mutex
	now    *material
	stamps [3]stamp // of the files when they were read, also in vain
}

// Open reads the files. Errors name the file.
func Open(f Files, log *slog.Logger) (*Source, error) {
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("a certificate and its key go together: give --tls-cert and --tls-key")
	}
	s := &Source{files: f, log: log, stamps: stampsOf(f)}
	m, err := load(f)
	if err != nil {
		return nil, err
	}
	s.now, s.id = m, m.id
	return s, nil
}

// ID is the identity of the process, none if its certificate names none. It does not change: a
// file with another is not taken.
func (s *Source) ID() ID { return s.id }

// Serves says whether there is a certificate to serve with.
func (s *Source) Serves() bool { return s.files.Cert != "" }

// Mutual says whether clients are identified by their certificates.
func (s *Source) Mutual() bool { return s.id != (ID{}) && s.files.CA != "" }

// Files are the names of the files, for programs that read them by themselves.
func (s *Source) Files() Files { return s.files }

// Expires is when the certificate that is in use ends; zero without one.
func (s *Source) Expires() time.Time {
	if m := s.current(); m.cert != nil {
		return m.cert.Leaf.NotAfter
	}
	return time.Time{}
}

func stampsOf(f Files) (out [3]stamp) {
	for i, name := range []string{f.Cert, f.Key, f.CA} {
		if name == "" {
			continue
		}
		if fi, err := os.Stat(name); err == nil {
			out[i] = stamp{fi.ModTime(), fi.Size(), fi}
		}
	}
	return out
}

func readFile(what, name string) ([]byte, error) {
	fi, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if fi.Size() > maxFileBytes {
		return nil, fmt.Errorf("%s %s: %d bytes, above the limit %d", what, name, fi.Size(), maxFileBytes)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return b, nil
}

func load(f Files) (*material, error) {
	m := &material{}
	if f.Cert != "" {
		cert, err := readFile("certificate", f.Cert)
		if err != nil {
			return nil, err
		}
		key, err := readFile("key of the certificate", f.Key)
		if err != nil {
			return nil, err
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
		}
		if m.id, err = FromCertificate(pair.Leaf); err != nil {
			return nil, fmt.Errorf("certificate %s: %w", f.Cert, err)
		}
		m.cert = &pair
	}
	if f.CA != "" {
		b, err := readFile("certificate authority", f.CA)
		if err != nil {
			return nil, err
		}
		m.pool, m.authorities = x509.NewCertPool(), map[string]bool{}
		for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
			if c, err := x509.ParseCertificate(block.Bytes); err == nil && block.Type == "CERTIFICATE" {
				m.pool.AddCert(c)
				m.authorities[authorityName(c)] = true
			}
		}
		if len(m.authorities) == 0 {
			return nil, fmt.Errorf("certificate authority %s: no PEM certificate in it", f.CA)
		}
	}
	return m, nil
}

// current is what the files contain. What cannot be read, or names another identity, is
// logged once and not taken: while a certificate is replaced, its key is of another for a moment.
func (s *Source) current() *material {
	stamps := stampsOf(s.files)
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.EqualFunc(stamps[:], s.stamps[:], stamp.same) {
		return s.now
	}
	s.stamps = stamps
	m, err := load(s.files)
	if err == nil && m.id != s.id {
		err = fmt.Errorf("certificate %s: it is of %q, this process is %q: start it again to change that", s.files.Cert, m.id, s.id)
	}
	if err != nil {
		s.log.Warn("tls: files have changed and are not taken", "error", err)
		return s.now
	}
	if m.cert != nil {
		s.log.Info("tls: files read again", "identity", m.id, "expires", m.cert.Leaf.NotAfter)
	}
	s.now = m
	return m
}

// Trusts says whether an authority, by the name that AuthorityOf gives it, is one of those in the file now. Without a
// file, all are.
func (s *Source) Trusts(authority string) bool {
	m := s.current()
	return m.pool == nil || m.authorities[authority]
}

// Server is the configuration of a port. It asks for a client's certificate where there is an
// authority and the process has an identity, and lets clients without one in: what they may call
// is decided at each call. Sessions are not resumed, so that an authority that is taken away
// counts at the next connection.
func (s *Source) Server() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m := s.current()
		c := &tls.Config{MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, Certificates: []tls.Certificate{*m.cert}, NextProtos: []string{"h2", "http/1.1"}}
		if s.Mutual() {
			c.ClientAuth, c.ClientCAs = tls.VerifyClientCertIfGiven, m.pool
		}
		return c, nil
	}}
}

// Public is the configuration of a port for programs that are not of the cluster: TLS 1.2 or 1.3, and
// where there are authorities, only clients with a certificate of theirs, whatever it names.
func (s *Source) Public() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m := s.current()
		c := &tls.Config{MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true, Certificates: []tls.Certificate{*m.cert}}
		if m.pool != nil {
			c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, m.pool
		}
		return c, nil
	}}
}

// ServerFor is Server for a port that only processes of some roles reach at all.
func (s *Source) ServerFor(roles ...Role) *tls.Config {
	outer := s.Server()
	inner := outer.GetConfigForClient
	outer.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		c, err := inner(h)
		if err != nil {
			return nil, err
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			id, err := OfPeer(&cs, s.id)
			if err != nil {
				return err
			}
			return id.hasRole(roles)
		}
		return c, nil
	}
	return outer
}

func (i ID) hasRole(roles []Role) error {
	if !slices.Contains(roles, i.Role) {
		return fmt.Errorf("identity %q: want a certificate of role %v", i, roles)
	}
	return nil
}

// Client is the configuration for calls of servers with one of the roles.
//
// A process with an identity takes only servers with an identity of its own cluster and of one of
// the roles: this, and not a host's name, says that it is the right server. A process without
// one compares the host's name; there a server's certificate need not name a role, and one that
// does must name one of the roles. Its authorities are those of the time of the call.
func (s *Source) Client(roles ...Role) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS13}
	if s.files.Cert != "" {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return s.current().cert, nil }
	}
	if s.id == (ID{}) {
		c.RootCAs = s.current().pool
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			id, err := FromCertificate(cs.PeerCertificates[0])
			if err != nil || id == (ID{}) {
				return err
			}
			return id.hasRole(roles)
		}
		return c
	}
	// crypto/tls would compare the host's name, and with authorities that are fixed here.
	c.InsecureSkipVerify = true
	c.VerifyConnection = func(cs tls.ConnectionState) error { return s.verifyServer(cs.PeerCertificates, roles) }
	return c
}

// ClientOf is Client for calls of one process of a role; name "" is any of the role.
func (s *Source) ClientOf(role Role, name string) *tls.Config {
	c := s.Client(role)
	if name == "" {
		return c
	}
	verify := c.VerifyConnection
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		if err := verify(cs); err != nil {
			return err
		}
		id, err := FromCertificate(cs.PeerCertificates[0])
		if err == nil && (id.Role != role || id.Name != name) {
			err = fmt.Errorf("tls: the server is %q, want %s", id, ID{s.id.Cluster, role, name})
		}
		return err
	}
	return c
}

// ForeignClient is the configuration for calls of servers that are not of the cluster, such as an
// etcd of the operator's: by the host's name, with the authorities of the time of the call.
func (s *Source) ForeignClient() *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: s.current().pool}
	if s.files.Cert != "" {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return s.current().cert, nil }
	}
	return c
}

func (s *Source) verifyServer(certs []*x509.Certificate, roles []Role) error {
	if len(certs) == 0 {
		return errors.New("tls: the server shows no certificate")
	}
	opts := x509.VerifyOptions{Roots: s.current().pool, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, c := range certs[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := certs[0].Verify(opts); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: certs, Err: err}
	}
	id, err := FromCertificate(certs[0])
	if err != nil {
		return err
	}
	if id.Cluster != s.id.Cluster {
		return fmt.Errorf("tls: the server is %q, want one of cluster %s", id, s.id.Cluster)
	}
	return id.hasRole(roles)
}

package identity

import (
	"crypto/ed25519"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// tokenCluster is the cluster in the identities of FromToken.
const tokenCluster = "same-token"

// tokenRounds of PBKDF2 make each guess at a token cost about a tenth of a second: anyone who can
// connect receives the certificate, and can test guesses against it elsewhere.
const tokenRounds = 600_000

// FromToken is the identity of a controller among processes that have the same token: the token
// gives the key of an authority (PBKDF2, RFC 8018), which signs a certificate for a key that is
// made anew. It writes the three files into dir, where other users read nothing.
func FromToken(token, dir, name string, log *slog.Logger) (*Source, error) {
	seed, err := pbkdf2.Key(sha256.New, token, []byte("quarry controllers"), tokenRounds, ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	key := ed25519.NewKeyFromSeed(seed)
	from := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Quarry controllers with one token"}, URIs: []*url.URL{{Scheme: scheme, Host: tokenCluster}},
		NotBefore: from, NotAfter: from.AddDate(200, 0, 0), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	if t, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	a := &Authority{tokenCluster, t, key}
	cert, certKey, err := a.Issue(Controller, name, nil, time.Until(t.NotAfter))
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f := Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, b := range map[string][]byte{f.Cert: cert, f.Key: certKey, f.CA: ca} {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			return nil, err
		}
	}
	return Open(f, log)
}

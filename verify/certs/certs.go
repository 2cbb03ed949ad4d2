// Package certs issues the certificates of tests.
//
//	ca := certs.New(t, "prod")
//	src := ca.Source(identity.Node, "s1")
package certs

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
)

const valid = 24 * time.Hour

// Authority is one of a cluster, with a folder that ends with the test.
type Authority struct {
	*identity.Authority
	CA  string // its certificate's file
	dir string
	t   testing.TB
}

// New makes an authority.
func New(t testing.TB, cluster string) *Authority {
	a, cert, _, err := identity.NewAuthority(cluster, valid)
	require.NoError(t, err)
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.crt")
	require.NoError(t, os.WriteFile(ca, cert, 0o600))
	return &Authority{a, ca, dir, t}
}

// Files issues a certificate.
func (a *Authority) Files(role identity.Role, name string, hosts ...string) identity.Files {
	base := filepath.Join(a.dir, string(role)+"-"+name)
	f := identity.Files{Cert: base + ".crt", Key: base + ".key", CA: a.CA}
	cert, key, err := a.Issue(role, name, hosts, valid)
	require.NoError(a.t, err)
	require.NoError(a.t, os.WriteFile(f.Key, key, 0o600))
	require.NoError(a.t, os.WriteFile(f.Cert, cert, 0o600))
	return f
}

// Source is a process of the role and name.
func (a *Authority) Source(role identity.Role, name string, hosts ...string) *identity.Source {
	s, err := identity.Open(a.Files(role, name, hosts...), slog.New(slog.DiscardHandler))
	require.NoError(a.t, err)
	return s
}

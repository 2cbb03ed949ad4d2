// Package testpki makes certificates for tests of trust.
//
//	issue := testpki.New(t, "prod")
//	srv.TLSConfig = issue(identity.Controller, "c1").Server()
package testpki

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
)

// New makes the authority of a cluster, and returns what issues its certificates: in files of the
// test's folder, good for 127.0.0.1, for an hour.
func New(t testing.TB, cluster string) func(identity.Role, string) *identity.Source {
	a, ca, _, err := identity.NewAuthority(cluster, time.Hour)
	require.NoError(t, err)
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, b, 0o600))
		return p
	}
	caFile := write("ca.crt", ca)
	return func(role identity.Role, name string) *identity.Source {
		cert, key, err := a.Issue(role, name, []string{"127.0.0.1"}, time.Hour)
		require.NoError(t, err)
		base := string(role) + "-" + name
		src, err := identity.Open(identity.Files{Cert: write(base+".crt", cert), Key: write(base+".key", key), CA: caFile}, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		return src
	}
}

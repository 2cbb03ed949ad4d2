package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCertificates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	run := func(args ...string) result {
		return quarry(t, nil, "", append(append([]string{"cert"}, args...), "--dir", dir)...)
	}
	run("node", "n1").fails(t, exitUsage, "create-ca")
	run("create-ca", "--cluster", "prod").ok(t)
	run("create-ca").fails(t, exitUsage, "--rotate")
	first, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(t, err)

	var made map[string]string
	quarry(t, nil, "", "cert", "controller", "c1", "--host", "127.0.0.1,quarry.example", "--dir", dir, "--json").decode(t, &made)
	require.Equal(t, "spiffe://prod/controller/c1", made["identity"])
	run("controller", "c1").fails(t, exitUsage, "--renew")
	run("controller", "c1", "--renew", "--days", "5").ok(t)
	for _, role := range []string{"node", "client", "worker", "gateway", "operator"} {
		require.Contains(t, run(role, "x").ok(t), "spiffe://prod/"+role+"/x")
	}
	run("node", "a/b").fails(t, exitUsage, "a/b")
	run("node", "n9", "--host", "controller.prod.quarry").fails(t, exitUsage, "controllers")
	run("node", "n9", "--days", "0").fails(t, exitUsage, "--days")
	for _, name := range []string{"ca.key", "controller-c1.key"} {
		fi, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), fi.Mode().Perm(), name)
	}

	var list []certLine
	quarry(t, nil, "", "cert", "list", "--dir", dir, "--json").decode(t, &list)
	require.Len(t, list, 7)
	run("expire").fails(t, exitFailed, "1 certificates")
	require.Contains(t, run("expire").out, "controller-c1.crt")
	require.NotContains(t, run("expire").out, "node-x.crt")
	run("expire", "--within", "2").ok(t)

	run("create-ca", "--rotate").ok(t)
	both, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(t, err)
	require.Contains(t, string(both), string(first), "the former authority stays trusted")
	require.Greater(t, len(both), len(first))
	run("controller", "c1", "--renew").ok(t)
}

package main

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
)

// readEvery is the pause between two looks at a cluster.
const readEvery = 100 * time.Millisecond

// trusted is a cluster of processes with mutual TLS.
func trusted(t *testing.T, cfg local.Config) *local.Cluster {
	cfg.Binary, cfg.TLS, cfg.RegionBytes, cfg.Lease = executable(t), true, "16MiB", "10s" // on a busy machine, sessions last
	c, err := local.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { c.Stop() })
	return c
}

// as runs the command as a holder of a certificate.
func as(t *testing.T, c *local.Cluster, role identity.Role, args ...string) result {
	t.Helper()
	env, err := c.Env(role, "someone")
	require.NoError(t, err)
	return quarry(t, append(env, "QUARRY_CONTROLLER="+strings.Join(c.URLs, ",")), "", args...)
}

// Controllers, their etcd, nodes and commands know each other by certificates. All of them are
// replaced while a client works: no call fails, and what is started later uses the new ones.
func TestMutualTLS(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	c := trusted(t, local.Config{Controllers: 3, Nodes: 2})
	for _, u := range c.URLs {
		require.True(t, strings.HasPrefix(u, "https://"), u)
	}
	as(t, c, identity.Client, "slab", "alloc", "--data", "kept", "--name", "n").ok(t)

	// Without a certificate, of another role, or without TLS nothing is told.
	controllers := "QUARRY_CONTROLLER=" + strings.Join(c.URLs, ",")
	env, err := c.Env(identity.Client, "someone")
	require.NoError(t, err)
	quarry(t, []string{controllers, env[2]}, "", "status").fails(t, exitFailed, "show a certificate")
	quarry(t, []string{controllers}, "", "status").fails(t, exitUnreachable, "certificate")
	quarry(t, append(env, strings.ReplaceAll(controllers, "https:", "http:")), "", "status").fails(t, exitFailed, "400 Bad Request")
	as(t, c, identity.Client, "node", "drain", "n1").fails(t, exitFailed, "spiffe://local/client/someone may not call")
	as(t, c, identity.Node, "slab", "read", "@n").fails(t, exitFailed, "of its programs over regions only")
	as(t, c, identity.Operator, "fsck").ok(t)

	files, err := c.Issue(identity.Client, "app")
	require.NoError(t, err)
	tls, err := client.TLSFromFiles(files.Cert, files.Key, files.CA)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	connect := func() *client.Client {
		cl, err := client.Connect(ctx, client.Config{Controllers: c.URLs, TLS: tls})
		require.NoError(t, err)
		return cl
	}
	old := connect()
	defer old.Close()
	read := func(cl *client.Client) {
		n, err := cl.Names().Lookup(ctx, "n")
		require.NoError(t, err)
		b, err := cl.Read(ctx, n.Ref, nil)
		require.NoError(t, err)
		require.Equal(t, "kept", string(b))
	}
	for range 5 {
		for name, role := range map[string]identity.Role{"c1": identity.Controller, "c2": identity.Controller, "c3": identity.Controller, "n1": identity.Node, "n2": identity.Node, "app": identity.Client} {
			_, err := c.Issue(role, name)
			require.NoError(t, err)
		}
		read(old)
		fresh := connect()
		read(fresh)
		require.NoError(t, fresh.Close())
	}
	for _, name := range []string{"c3", "n2"} { // its peers have old connections, and new certificates
		c.Process(name).Kill()
		require.NoError(t, c.Restart(t.Context(), name))
	}
	require.Eventually(t, func() bool {
		r := as(t, c, identity.Operator, "controller", "list")
		return r.code == 0 && strings.Count(r.out, "https://") >= 6
	}, patience, readEvery)
	as(t, c, identity.Operator, "status").ok(t)
	read(old)
}

// A fabric that requires encryption: clients and nodes work on each other's memory under TLS, others
// are refused, and everything that shows a node says so.
func TestEncryptedFabric(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	c := trusted(t, local.Config{Nodes: 2, NodeArgs: []string{"--fabric-tls", "required"}})
	as(t, c, identity.Client, "--fabric", "tcp", "--fabric-tls", "required", "slab", "alloc", "--replicas", "2", "--data", "kept", "--name", "n").ok(t)
	as(t, c, identity.Client, "--fabric", "tcp", "--fabric-tls", "off", "slab", "read", "@n").fails(t, exitUnreachable, "the node takes encrypted connections only")
	out := as(t, c, identity.Operator, "status").ok(t)
	require.Contains(t, out, "FABRIC TLS")
	require.Regexp(t, `n1 .* required +- +volatile\n`, as(t, c, identity.Operator, "node", "list").ok(t))
	require.Regexp(t, `n1 .* required +shm:`, strings.ReplaceAll(out, "tcp:", "shm:"))
	require.Contains(t, as(t, c, identity.Operator, "--json", "status").ok(t), `"fabric_tls": "required"`)
	require.Contains(t, as(t, c, identity.Operator, "doctor").ok(t), "encryption is required")
	as(t, c, identity.Operator, "--fabric", "tcp", "fsck").ok(t)

	// A node that comes back without memory gets its replicas from the other one.
	c.Process("n1").Kill()
	require.NoError(t, c.Restart(t.Context(), "n1"))
	as(t, c, identity.Operator, "status", "--wait", "--timeout", patience.String()).ok(t)
	require.Contains(t, as(t, c, identity.Client, "--fabric", "tcp", "slab", "read", "@n").ok(t), "kept")
	as(t, c, identity.Operator, "--fabric", "tcp", "fsck").ok(t)

	// Nodes need what they shall show.
	quarry(t, []string{"QUARRY_CONTROLLER=" + c.URL}, "", "storage", "--fabric-tls", "required").fails(t, exitUsage, "--tls-cert")
	as(t, c, identity.Client, "--fabric-tls", "always", "status").fails(t, exitUsage, "want off, on or required")
}

// Workers with certificates run a job for its submitter, in a tenant that they cannot reach by themselves, where nodes take
// encrypted connections alone. One is killed in between, and the next one goes on.
func TestWorkersUnderMutualTLS(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	c := trusted(t, local.Config{Nodes: 2, NodeArgs: []string{"--fabric-tls", "required", "--socket", "none"}})
	mine := func(args ...string) result {
		t.Helper()
		return as(t, c, identity.Client, append(args, "--fabric-tls", "required", "--tenant", "shop")...)
	}
	as(t, c, identity.Operator, "tenant", "create", "shop").ok(t)
	as(t, c, identity.Operator, "tenant", "grant", "shop", "--identity", "client/someone", "--rights", "read,write,create").ok(t)
	mine("kv", "create", "-t", "texts").ok(t)
	mine("kv", "put", "-t", "texts", "a", "-d", "stone on stone").ok(t)
	mine("job", "run", "words", "--input", "tree:texts", "--output", "tree:x").fails(t, exitNotFound, "no worker is there")
	as(t, c, identity.Worker, "kv", "get", "-t", "texts", "a", "--tenant", "shop").fails(t, exitFailed, "has no rights of its own")

	start := func(name string) *local.Process {
		f, err := c.Issue(identity.Worker, name)
		require.NoError(t, err)
		w, err := local.Spawn(t.Context(), executable(t), "worker", "-C", c.URL, "--name", name, "--fabric-tls", "required",
			"--tls-cert", f.Cert, "--tls-key", f.Key, "--tls-ca", f.CA)
		require.NoError(t, err)
		return w
	}
	w := start("w1")
	mine("job", "run", "words", "--input", "tree:texts", "--output", "tree:counts").ok(t)
	require.Equal(t, "2", mine("kv", "get", "-t", "counts", "stone").ok(t))
	w.Signal(syscall.SIGKILL)
	w.Wait()
	mine("job", "run", "words", "--input", "tree:texts", "--output", "tree:counts2", "--no-wait").ok(t)
	w = start("w2")
	t.Cleanup(func() { require.NoError(t, w.Stop()) })
	require.Eventually(t, func() bool { return strings.Contains(mine("job", "status", "2").out, "done") }, patience, readEvery)
	require.Equal(t, "2", mine("kv", "get", "-t", "counts2", "stone").ok(t))

	// Without the grant the next job of the submitter is not run.
	as(t, c, identity.Operator, "tenant", "revoke-grant", "shop", "--identity", "client/someone").ok(t)
	mine("job", "run", "words", "--input", "tree:texts", "--output", "tree:y").fails(t, exitFailed, "client/someone")
}

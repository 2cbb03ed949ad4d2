package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

const (
	waitLong  = time.Minute
	pollEvery = 100 * time.Millisecond
)

func untar(t *testing.T, file string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	z, err := gzip.NewReader(bytes.NewReader(b))
	require.NoError(t, err)
	out := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		data, err := io.ReadAll(r)
		require.NoError(t, err)
		_, name, _ := strings.Cut(h.Name, "/")
		out[name] = string(data)
	}
}

// The archive has what a helper needs, and none of the canaries, wherever they were put.
func TestSupportCollect(t *testing.T) {
	const token, password, logged, inURL = "canary-token-91", "canary-password-17", "canary-logged-55", "canary-url-23"
	dir := t.TempDir()
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "1", "--region-bytes", "16MiB", "--metrics-listen", "127.0.0.1:0", "--token", token)
	require.NoError(t, err)
	defer p.Stop()
	env := []string{"QUARRY_CONTROLLER=" + p.Ready["url"], "QUARRY_TOKEN=" + token}
	quarry(t, env, "", "slab", "alloc", "-d", "canary-payload-3", "--name", "canary-name-4").ok(t)

	conf := filepath.Join(dir, "conf")
	require.NoError(t, os.MkdirAll(conf, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(conf, "storage.yml"), []byte("token: >-\n  "+password+"\nstorage: {capacity: 1GiB}\n"), 0o600))
	log := filepath.Join(dir, "quarry.log")
	require.NoError(t, os.WriteFile(log, []byte("something happened\nbad token="+logged+" of a client\nwith "+token+" in the middle, and "+password+"\n"), 0o600))
	out := filepath.Join(dir, "s.tar.gz")
	var rep supportReport
	quarry(t, env, "", "support", "collect", "--out", out, "--metrics", p.Ready["metrics"], "--log", log, "--conf", conf, "--fsck", "--json").decode(t, &rep)
	require.Equal(t, out, rep.File)
	parts := untar(t, out)
	require.Contains(t, parts["status.json"], `"nodes"`)
	require.Contains(t, parts["doctor.json"], `"check"`)
	require.Contains(t, parts["fsck.json"], `"regions"`)
	require.Contains(t, parts["sessions.json"], `[`)
	require.Contains(t, parts["machine.txt"], "Linux")
	metrics := 0
	for name, text := range parts {
		if strings.HasPrefix(name, "metrics/") {
			metrics++
			require.Contains(t, text, "quarry_cluster_nodes")
		}
		for _, canary := range []string{token, password, logged, "canary-payload", "canary-name"} {
			require.NotContains(t, text, canary, name)
		}
	}
	require.Equal(t, 1, metrics)
	found := false
	for name, text := range parts {
		if strings.HasSuffix(name, "quarry.log") {
			found = true
			require.Contains(t, text, "something happened")
			require.Contains(t, text, "[blotted out]")
		}
	}
	require.True(t, found)
	// Nothing is overwritten.
	quarry(t, env, "", "support", "collect", "--out", out).fails(t, exitUsage, out)
}

// Without a cluster there is still an archive: that is when it is needed most.
func TestSupportCollectOfADeadCluster(t *testing.T) {
	out := filepath.Join(t.TempDir(), "s.tar.gz")
	text := quarry(t, nil, "", "support", "collect", "-C", "http://127.0.0.1:1", "--timeout", "2s", "--out", out, "--conf", t.TempDir(), "--metrics", "http://127.0.0.1:1/metrics").ok(t)
	require.Contains(t, text, "not had: status.json")
	parts := untar(t, out)
	require.Contains(t, parts["not-had.txt"], "status.json")
	require.Contains(t, parts["host/proc/meminfo"], "MemTotal")
}

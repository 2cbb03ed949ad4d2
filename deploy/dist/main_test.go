package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// contents of an archive by name.
func contents(t *testing.T, file string) map[string][]byte {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	z, err := gzip.NewReader(bytes.NewReader(b))
	require.NoError(t, err)
	out := map[string][]byte{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		out[h.Name], err = io.ReadAll(r)
		require.NoError(t, err)
	}
}

func TestRelease(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program; not with -short")
	}
	t.Chdir(filepath.Join("..", ".."))
	platform := runtime.GOOS + "/" + runtime.GOARCH
	r := release{version: "v0.0.1-test", out: filepath.Join(t.TempDir(), "dist"), platforms: []string{platform}}
	require.NoError(t, r.make())
	check(t, r.out, strings.ReplaceAll(platform, "/", "-"))
	// The same commit makes the same files.
	again := release{version: r.version, out: t.TempDir(), when: commitTime()}
	require.NoError(t, again.chart())
	for _, name := range again.files {
		a, err := os.ReadFile(filepath.Join(r.out, name))
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(again.out, name))
		require.NoError(t, err)
		require.True(t, bytes.Equal(a, b), name)
	}
}

func check(t *testing.T, out, platform string) {
	if sum, err := exec.LookPath("sha256sum"); err == nil {
		cmd := exec.CommandContext(t.Context(), sum, "-c", "SHA256SUMS")
		cmd.Dir = out
		text, err := cmd.CombinedOutput()
		require.NoError(t, err, string(text))
		require.Equal(t, 3, strings.Count(string(text), ": OK"))
	}
	top := "quarry-v0.0.1-test-" + platform
	files := contents(t, filepath.Join(out, top+".tar.gz"))
	for _, name := range []string{"bin/quarry", "LICENSE", "README.md", "docs/METRICS.md", "deploy/systemd/quarry-storage.service", "share/man/man1/quarry.1",
		"share/man/man1/quarry-storage.1", "share/bash-completion/completions/quarry", "share/zsh/site-functions/_quarry", "share/fish/vendor_completions.d/quarry.fish"} {
		require.NotEmpty(t, files[top+"/"+name], name)
	}
	for name := range files {
		require.False(t, strings.HasSuffix(name, ".go"), name)
	}
	// What was packed runs, and knows its version.
	exe := filepath.Join(t.TempDir(), "quarry")
	require.NoError(t, os.WriteFile(exe, files[top+"/bin/quarry"], 0o755))
	text, err := exec.CommandContext(t.Context(), exe, "version").CombinedOutput()
	require.NoError(t, err)
	require.Contains(t, string(text), "v0.0.1-test")

	chart := contents(t, filepath.Join(out, "quarry-chart-v0.0.1-test.tgz"))
	require.NotEmpty(t, chart["quarry/Chart.yaml"])
	require.NotEmpty(t, chart["quarry/templates/_helpers.tpl"])

	b, err := os.ReadFile(filepath.Join(out, "quarry-v0.0.1-test-sbom.cdx.json"))
	require.NoError(t, err)
	var bom struct {
		BomFormat  string
		Components []struct{ Name, Version, Purl string }
	}
	require.NoError(t, json.Unmarshal(b, &bom))
	require.Equal(t, "CycloneDX", bom.BomFormat)
	known := map[string]bool{}
	for _, c := range bom.Components {
		known[c.Name] = true
		require.NotEmpty(t, c.Version, c.Name)
	}
	require.True(t, known["std"] && known["github.com/prometheus/client_golang"] && known["go.etcd.io/etcd/server/v3"])
	man(t, files[top+"/share/man/man1/quarry-storage.1"])
}

// man wants a page that the formatter reads without a warning.
func man(t *testing.T, page []byte) {
	require.Contains(t, string(page), `\-\-capacity`)
	formatter, err := exec.LookPath("groff")
	if err != nil {
		return
	}
	cmd := exec.CommandContext(t.Context(), formatter, "-man", "-Tutf8", "-ww", "-z")
	cmd.Stdin = bytes.NewReader(page)
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, string(text))
	require.Empty(t, string(text))
}

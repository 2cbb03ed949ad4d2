package quarrypb_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGeneratedCodeIsCurrent generates the code again and compares. protoc is
// installed where that is possible.
func TestGeneratedCodeIsCurrent(t *testing.T) {
	if _, err := exec.LookPath("protoc"); err != nil {
		if os.Geteuid() != 0 {
			t.Skip("no protoc: install the package protobuf-compiler to check that the generated code is current")
		}
		if out, err := exec.Command("apt-get", "install", "-y", "-qq", "protobuf-compiler").CombinedOutput(); err != nil {
			t.Skipf("no protoc, and apt-get cannot install protobuf-compiler: %v: %s", err, lastLine(out))
		}
	}
	dir := t.TempDir()
	out, err := exec.Command("sh", "generate.sh", dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	n := 0
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		rel, err := filepath.Rel(dir, path)
		require.NoError(t, err)
		want, err := os.ReadFile(path)
		require.NoError(t, err)
		have, err := os.ReadFile(rel)
		require.NoError(t, err)
		// The compiler's own version stands in a comment; it says nothing about the code.
		require.Equal(t, unversioned(want), unversioned(have), "%s is not what quarry.proto makes: run sh proto/quarrypb/generate.sh", rel)
		return nil
	}))
	require.Equal(t, 2, n, "generated files")
}

func unversioned(b []byte) string {
	var keep []string
	for line := range strings.Lines(string(b)) {
		if !strings.HasPrefix(line, "// \tprotoc ") {
			keep = append(keep, line)
		}
	}
	return strings.Join(keep, "")
}

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}

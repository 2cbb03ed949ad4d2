// Package testbinary builds the programs that tests start, once for all test packages of a
// checkout: they lie in bin/tests, and go build links only what has changed.
package testbinary

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

var (
	mu   sync.Mutex
	done = map[string]string{} // the folder by patterns: one build a process
)

// Folder, below the module's, is where go build writes the programs, and LinkFlags are its flags. The stage build of verify/testrun
// writes every program of the module there with the same flags: the tests then link none.
const (
	Folder    = "bin/tests/built"
	LinkFlags = "-ldflags=-s -w"
)

// Build builds the main packages that match the patterns, which are relative to the module's
// folder, and returns the folder of the programs. They are built without cgo, as they are
// shipped. A program is replaced only when its content changes, and Build opens it: go test
// runs a cached package again if a program that it starts is another.
func Build(t testing.TB, patterns ...string) (dir string) {
	t.Helper()
	mu.Lock()
	defer mu.Unlock()
	what := strings.Join(patterns, " ")
	if dir := done[what]; dir != "" {
		return dir
	}
	out, err := exec.Command("go", "env", "GOMOD").Output()
	require.NoError(t, err)
	root := filepath.Dir(strings.TrimSpace(string(out)))
	dir = filepath.Join(root, "bin", "tests")
	built := filepath.Join(root, Folder)
	require.NoError(t, os.MkdirAll(built, 0o755))
	lock, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	require.NoError(t, err)
	defer lock.Close() // ends the lock too
	require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))

	run(t, root, "go", append([]string{"build", LinkFlags, "-o", built + "/"}, patterns...)...)
	list := run(t, root, "go", append([]string{"list", "-f", `{{if eq .Name "main"}}{{.ImportPath}}{{end}}`}, patterns...)...)
	for pkg := range strings.FieldsSeq(list) {
		name := filepath.Base(pkg)
		run(t, built, "sh", "-c", `cmp -s "$1" "../$1" || { cp "$1" "../.new" && mv "../.new" "../$1"; }`, "sh", name)
		f, err := os.Open(filepath.Join(dir, name))
		require.NoError(t, err)
		f.Close()
	}
	done[what] = dir
	return dir
}

// ToolEnv is the environment of a go command that compiles and links. Those programs collect garbage
// less often than Go's setting has it, which saves a fifth of a compiler's processor time and takes a third
// more memory. A GOGC of the user's stays. verify/testrun does the same to the packages of the tests.
func ToolEnv() []string {
	if os.Getenv("GOGC") != "" {
		return os.Environ()
	}
	return append(os.Environ(), "GOGC=400")
}

func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(ToolEnv(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

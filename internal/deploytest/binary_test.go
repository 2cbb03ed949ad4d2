package deploytest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var temp string

func TestMain(m *testing.M) {
	if script := os.Getenv(asShell); script != "" {
		fmt.Fprintln(os.Stderr, shell(script))
		os.Exit(1)
	}
	var err error
	if temp, err = os.MkdirTemp("", "quarry-deploytest-"); err != nil {
		panic(err)
	}
	code := m.Run()
	os.RemoveAll(temp)
	os.Exit(code)
}

var build = sync.OnceValues(func() (string, error) {
	exe := filepath.Join(temp, "quarry")
	cmd := exec.Command("go", "build", "-o", exe, "./cmd/quarry")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), err
	}
	return exe, nil
})

// binary is the command as people install it.
func binary(t *testing.T) string {
	t.Helper()
	exe, err := build()
	require.NoError(t, err, exe)
	return exe
}

// understood wants the command to know all flags of a command line, and to take their
// values. Nothing is run.
func understood(t *testing.T, where string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary(t), append(args, "--help")...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: quarry %s: %s", where, strings.Join(args, " "), out)
	require.Contains(t, string(out), "Usage: quarry "+args[0], where)
}

// The check itself finds what is wrong.
func TestUnderstoodIsStrict(t *testing.T) {
	for _, args := range [][]string{{"storage", "--fly"}, {"storage", "--capacity=3miles"}, {"fly"}} {
		require.Error(t, exec.CommandContext(t.Context(), binary(t), append(args, "--help")...).Run(), "%v", args)
	}
}

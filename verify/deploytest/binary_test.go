package deploytest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/testbinary"
)

func TestMain(m *testing.M) {
	if script := os.Getenv(asShell); script != "" {
		fmt.Fprintln(os.Stderr, shell(script))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// binary is the command as people install it.
func binary(t *testing.T) string {
	t.Helper()
	return filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry")
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

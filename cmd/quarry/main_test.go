package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// The test binary is the command itself when it is told so: tests run real
// processes without building anything.
const asCommand = "QUARRYTEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Setenv(asCommand, "1")
	os.Unsetenv("QUARRY_CONFIG")
	code := m.Run()
	if c, err := sharedCluster(); err == nil {
		c.Stop()
	}
	os.Exit(code)
}

func executable(t testing.TB) string {
	exe, err := os.Executable()
	require.NoError(t, err)
	return exe
}

// sharedCluster is one for all tests that need no other.
var sharedCluster = sync.OnceValues(func() (*local.Cluster, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// A short lease would end sessions of tests on a busy machine; some tests wait for its end.
	return local.Start(context.Background(), local.Config{Binary: exe, Nodes: 2, RegionBytes: "64MiB", Lease: "5s"})
})

func cluster(t testing.TB) *local.Cluster {
	t.Helper()
	c, err := sharedCluster()
	require.NoError(t, err)
	return c
}

// result of one run of the command.
type result struct {
	out, err string
	code     int
}

// quarry runs the command; stdin may be "".
func quarry(t testing.TB, env []string, stdin string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, executable(t), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	_ = cmd.Run()
	return result{out.String(), errOut.String(), cmd.ProcessState.ExitCode()}
}

// on runs the command against the shared cluster.
func on(t testing.TB, args ...string) result {
	t.Helper()
	return quarry(t, []string{"QUARRY_CONTROLLER=" + cluster(t).URL}, "", args...)
}

func (r result) ok(t testing.TB) string {
	t.Helper()
	require.Zero(t, r.code, r.err)
	return r.out
}

// fails wants an exit code and one line on standard error that has all of what.
func (r result) fails(t testing.TB, code int, what ...string) {
	t.Helper()
	require.Equal(t, code, r.code, r.err)
	require.Equal(t, 1, strings.Count(r.err, "\n"), "one line: %s", r.err)
	require.True(t, strings.HasPrefix(r.err, "quarry: "), r.err)
	for _, w := range what {
		require.Contains(t, r.err, w)
	}
}

// decode wants valid JSON.
func (r result) decode(t testing.TB, v any) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(r.ok(t)), v), r.out)
}

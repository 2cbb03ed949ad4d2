package local

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func script(t *testing.T, text string) Command {
	path := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
	return Command{Name: "script", Path: path}
}

func TestRunWaitsForTheReadyLine(t *testing.T) {
	c := script(t, "echo oops >&2\necho \"{\\\"ready\\\": \\\"$WHAT\\\"}\"\nexec sleep 100")
	c.Env = []string{"WHAT=it"}
	c.Log = filepath.Join(t.TempDir(), "log")
	p, err := Run(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"ready": "it"}, p.Ready)
	require.False(t, p.Ended())
	p.Kill()
	require.True(t, p.Ended())
	require.Equal(t, "oops", p.Log())
	b, err := os.ReadFile(c.Log)
	require.NoError(t, err)
	require.Equal(t, "oops\n", string(b))
}

func TestRunSaysWhyNothingWasReady(t *testing.T) {
	for _, text := range []string{
		"echo no such thing >&2; exit 3",
		"exec >&-; sleep 0.1; echo no such thing >&2; exit 3", // the reason comes last
	} {
		_, err := Run(t.Context(), script(t, text))
		require.ErrorContains(t, err, "script ended before it was ready: no such thing")
	}
	_, err := Run(t.Context(), Command{Name: "x", Path: "/nonexistent"})
	require.Error(t, err)
}

// TestRunElsewhere: what goes before a command runs it.
func TestRunElsewhere(t *testing.T) {
	c := script(t, `echo "{\"where\": \"$WHERE\"}"`)
	c.Run = []string{"env", "WHERE=here"}
	p, err := Run(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, "here", p.Ready["where"])
	require.True(t, p.Wait().Success())
}

// TestStopSaysWhatADeafProcessDid: one that ignores SIGTERM writes its goroutines before it is killed.
func TestStopSaysWhatADeafProcessDid(t *testing.T) {
	p, err := Run(t.Context(), script(t, "trap 'echo goroutine 1 >&2; exit 2' QUIT\ntrap '' TERM\necho {}\nwhile :; do sleep 0.01; done"))
	require.NoError(t, err)
	require.ErrorContains(t, p.stop(50*time.Millisecond), "did not end within 50ms and was killed: goroutine 1")
	require.True(t, p.Ended())
}

func TestFreePortsDiffer(t *testing.T) {
	ports, err := freePorts(4)
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, p := range ports {
		at, err := netip.ParseAddrPort(p)
		require.NoError(t, err)
		require.Equal(t, "127.0.0.1", at.Addr().String())
		require.Less(t, int(at.Port()), highPort)
		require.False(t, seen[p])
		seen[p] = true
	}
}

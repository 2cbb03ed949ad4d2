package rxevm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// busyApt puts an apt-get into PATH that fails as the real one does while another process
// holds the lock of the package lists, and does nothing else. calls is a file with a line for
// each call; release releases the lock.
func busyApt(t *testing.T) (calls string, release func()) {
	dir := t.TempDir()
	lock, err := os.Create(filepath.Join(dir, "lock"))
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	calls = filepath.Join(dir, "calls")
	script := fmt.Sprintf(`#!/bin/sh
echo "$*" >>%s
flock -n %s true && exit 0
echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)"
exit 100
`, calls, lock.Name())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "apt-get"), []byte(script), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return calls, func() { lock.Close() }
}

// An installation waits for another installer, in the program and in the repository's script.
// It neither fails nor skips.
func TestInstallingWaitsForOthers(t *testing.T) {
	for name, update := range map[string]func(ctx context.Context) error{
		"program": func(ctx context.Context) error { return apt(ctx, "", "update") },
		"script": func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, filepath.Join("..", "..", ".ci", "apt"), "update").CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			calls, release := busyApt(t)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- update(ctx) }()
			require.Eventually(t, func() bool { b, _ := os.ReadFile(calls); return len(b) > 0 }, patience, time.Millisecond)
			select {
			case err := <-done:
				t.Fatal("did not wait: ", err)
			default:
			}
			release()
			require.NoError(t, <-done)
		})
	}
}

// Any other failure ends at once. As root it is an error; nothing is skipped.
func TestInstallingFailsClearly(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "apt-get"), []byte("#!/bin/sh\necho 'E: Unable to locate package x'\nexit 100\n"), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	require.ErrorContains(t, apt(t.Context(), "", "install", "x"), "Unable to locate package x")
	out, err := exec.Command(filepath.Join("..", "..", ".ci", "apt"), "install", "x").CombinedOutput()
	require.Error(t, err)
	require.Equal(t, "E: Unable to locate package x\n", string(out))
	if os.Geteuid() != 0 {
		return
	}
	old := needs
	defer func() { needs = old }()
	needs = []need{{pkg: "x", present: func() bool { return false }}}
	err = installPackages(t.Context(), true, t.Output())
	require.ErrorContains(t, err, "cannot install x")
	require.ErrorContains(t, err, "Unable to locate package x")
	var missing *MissingError
	require.NotErrorAs(t, err, &missing, "that would be a skip")
	require.ErrorAs(t, installPackages(t.Context(), false, t.Output()), &missing)
}

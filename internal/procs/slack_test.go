package procs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const (
	slackChild = "QUARRY_TEST_SLACK"
	slackBegun = "QUARRY_TEST_SLACK_BEGUN" // grows each time that main begins
)

func TestMain(m *testing.M) {
	switch how := os.Getenv(slackChild); how {
	case "":
		os.Exit(m.Run())
	case "gone":
		_ = os.Remove(os.Args[0])
		fallthrough
	default:
		os.Setenv(slackBegun, os.Getenv(slackBegun)+"i")
		err := Slack()
		threads := make(chan int)
		for range 4 { // a thread each, of which some are new
			go func() {
				runtime.LockOSThread()
				n, _ := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
				threads <- n
			}()
		}
		fmt.Println(os.Getpid(), os.Args[1:], how, os.Getenv(slackBegun), err, <-threads, <-threads, <-threads, <-threads)
	}
}

// The program that is executed again is the same process with the same arguments and environment, and
// all its threads have the slack. Where it cannot be executed it goes on.
func TestSlack(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	run := func(exe, how string) (string, *exec.Cmd) {
		cmd := exec.CommandContext(t.Context(), exe, "controller", "--token", "a b")
		cmd.Env = append(os.Environ(), slackChild+"="+how)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		require.NoError(t, err)
		return string(out), cmd
	}
	out, cmd := run(exe, "x")
	require.Equal(t, fmt.Sprintln(cmd.Process.Pid, "[controller --token a b]", "x", "ii", nil, slack.Nanoseconds(), slack.Nanoseconds(), slack.Nanoseconds(), slack.Nanoseconds()), out)

	program, err := os.ReadFile(exe)
	require.NoError(t, err)
	other := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(other, program, 0o700))
	out, _ = run(other, "gone")
	require.Contains(t, out, "no such file")
}

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Prints what has changed since the last time, and what changes meanwhile; a follower that is killed gives way to the next one.
func TestKVFollow(t *testing.T) {
	const tree, state = "kv/follow", "kv/follow.state"
	follow := func(args ...string) result {
		return kvOn(t, tree, "", append([]string{"follow", "--state", state}, args...)...)
	}
	follow("--once").fails(t, exitNotFound, tree)
	kvOn(t, tree, "", "create").ok(t)
	for _, key := range []string{"a1", "a2", "b1"} {
		kvOn(t, tree, "", "put", key, "-d", "value of "+key).ok(t)
	}
	require.Equal(t, "put\ta1\tvalue of a1\nput\ta2\tvalue of a2\nsynced\n", follow("--prefix", "a", "--once").ok(t))
	require.Equal(t, "put\tb1\n", follow("-n", "1", "--keys-only").ok(t))
	kvOn(t, tree, "", "del", "a1").ok(t)
	kvOn(t, tree, "", "put", "a2", "-d", "new").ok(t)
	require.Equal(t, "delete\ta1\n", follow("-n", "1").ok(t), "the other change is not acknowledged")
	require.Equal(t, "put\ta2\tnew\nsynced\n", follow("--from", "a", "--to", "b", "--once").ok(t))
	require.Equal(t, "synced\n", follow("--once").ok(t))
	require.Regexp(t, `^{"event":"synced","position":\d+}\n$`, follow("--once", "--json").ok(t))

	// A follower that runs, is in the way of another one, and is killed.
	cmd := exec.CommandContext(t.Context(), executable(t), "kv", "follow", tree, "--json", "--state", state)
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	kvOn(t, tree, "", "put", "live", "-d", "1").ok(t)
	require.True(t, lines.Scan())
	require.Regexp(t, `^{"event":"put","position":\d+,"key":"live","value":"1","version":\d+}$`, lines.Text())
	follow("--once", "--timeout", "1s").fails(t, exitConflict, "another feed has the state")
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.Error(t, cmd.Wait())
	require.Equal(t, 130, cmd.ProcessState.ExitCode())
	require.Equal(t, "synced\n", follow("--once").ok(t), "an interrupted follower gives the state up")

	// Acknowledgements of another program: none, then some, then all. It reads what it acknowledges.
	kvOn(t, tree, "", "put", "x", "-d", "1").ok(t)
	kvOn(t, tree, "", "put", "y", "-d", "1").ok(t)
	rounds := 0
	acks := exec.CommandContext(t.Context(), executable(t), "kv", "follow", tree, "--json", "--acks", "--once", "--state", state)
	for _, want := range [][]string{{"x", "y"}, {"x", "y"}, {"y"}, {}} {
		cmd := exec.CommandContext(t.Context(), acks.Path, acks.Args[1:]...)
		cmd.Env, cmd.Stderr = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL), os.Stderr
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		keys, lines := []string{}, json.NewDecoder(out)
		for {
			var e kvFollowed
			require.NoError(t, lines.Decode(&e))
			if e.Event == "synced" {
				break
			}
			keys = append(keys, *e.Key)
			if rounds == 1 && *e.Key == "x" || rounds == 2 {
				_, err := fmt.Fprintln(in, e.Position)
				require.NoError(t, err)
			}
		}
		require.Equal(t, want, keys)
		if rounds < 2 { // else it ends by itself
			require.NoError(t, in.Close())
		}
		require.NoError(t, cmd.Wait())
		rounds++
	}
	bad := kvOn(t, tree, "nonsense\n", "follow", "--state", state, "--json", "--acks")
	require.Equal(t, exitUsage, bad.code)
	require.Contains(t, bad.err, "line 1")

	// The state of a follower that runs is dropped: its positions are over.
	cmd = exec.CommandContext(t.Context(), executable(t), "kv", "follow", tree, "--state", state+".gone")
	var stderr strings.Builder
	cmd.Env, cmd.Stderr = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL), &stderr
	out, err = cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	for lines = bufio.NewScanner(out); lines.Scan() && lines.Text() != "synced"; {
	}
	kvOn(t, state+".gone", "", "drop").ok(t)
	kvOn(t, tree, "", "put", "x", "-d", "2").ok(t)
	for lines.Scan() {
	}
	require.Error(t, cmd.Wait())
	require.Contains(t, stderr.String(), "the state of the feed was dropped")
	require.Equal(t, exitNotFound, cmd.ProcessState.ExitCode())
	kvOn(t, tree, "", "follow", "--state", state, "--once").ok(t)

	kvOn(t, "kv/follow.other", "", "create").ok(t)
	kvOn(t, "kv/follow.other", "", "follow", "--state", state, "--once").fails(t, exitUsage, "kv/follow")
	follow("--from", "b", "--to", "a").fails(t, exitUsage, "no key is in it")

	kvOn(t, tree, "", "drop").ok(t)
	follow("--once").fails(t, exitNotFound, tree)
	kvOn(t, tree, "", "create").ok(t)
	require.Equal(t, "delete\ta2\ndelete\tb1\ndelete\tlive\ndelete\tx\ndelete\ty\nsynced\n", follow("--once").ok(t), "of a tree that was made anew")

	kvOn(t, tree, "", "follow").fails(t, exitUsage, "--state")
	follow("--acks").fails(t, exitUsage, "--json")
	follow("-n=-1").fails(t, exitUsage, "--count")
	follow("--prefix", "a", "--to", "b").fails(t, exitUsage, "--prefix")
	kvOn(t, tree, "", "follow", "--state", tree).fails(t, exitUsage, "--state")
	kvOn(t, "kv/other", "", "create").ok(t)
	kvOn(t, "kv/other", "", "put", "k", "-d", "v").ok(t)
	kvOn(t, tree, "", "follow", "--state", "kv/other").fails(t, exitUsage, "not the state of a feed")
}

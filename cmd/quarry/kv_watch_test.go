package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Prints what is there, then what changes, as text and as JSON; a log has each event once more, and a watch with it goes on
// where the last one has ended, also behind one that was killed in the middle of a line.
func TestKVWatch(t *testing.T) {
	const tree = "kv/watch"
	kvOn(t, tree, "", "watch").fails(t, exitNotFound, tree)
	kvOn(t, tree, "", "create").ok(t)
	for _, key := range []string{"a1", "a2", "b1"} {
		kvOn(t, tree, "", "put", key, "-d", "value of "+key).ok(t)
	}
	require.Equal(t, "put\ta1\tvalue of a1\nput\ta2\tvalue of a2\nsynced\n", kvOn(t, tree, "", "watch", "--prefix", "a", "--synced").ok(t))
	require.Equal(t, "put\t6231\nsynced\n", quarry(t, []string{"QUARRY_CONTROLLER=" + cluster(t).URL}, "", "kv", "watch", tree, "--prefix", "62", "--hex", "--keys-only", "--synced").ok(t))
	require.Equal(t, "synced\n", kvOn(t, tree, "", "watch", "--now", "--synced").ok(t))

	log := filepath.Join(t.TempDir(), "events.jsonl")
	kvOn(t, tree, "", "watch", "--prefix", "a", "--log", log, "--synced").ok(t)
	kvOn(t, tree, "", "del", "a1").ok(t)
	kvOn(t, tree, "", "put", "a3", "-d", "new").ok(t)
	f, err := os.OpenFile(log, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	_, err = f.WriteString(`{"event":"put","key":"a9"`)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, "delete\ta1\nput\ta3\tnew\nsynced\n", kvOn(t, tree, "", "watch", "--prefix", "a", "--log", log, "--synced").ok(t))
	require.Equal(t, "synced\n", kvOn(t, tree, "", "watch", "--prefix", "a", "--log", log, "--synced").ok(t))
	require.Equal(t, 3, strings.Count(read(t, log), `"event":"synced"`))
	kvOn(t, tree, "", "drop").ok(t)
	kvOn(t, tree, "", "create").ok(t)
	require.Equal(t, "delete\ta2\ndelete\ta3\nsynced\n", kvOn(t, tree, "", "watch", "--prefix", "a", "--log", log, "--synced").ok(t), "of a tree that was made anew")

	kvOn(t, tree, "", "watch", "--log", log, "--now").fails(t, exitUsage, "--log", "--now")
	kvOn(t, tree, "", "watch", "-n=-1").fails(t, exitUsage, "--count")
	require.NoError(t, os.WriteFile(log, []byte("{}\nnonsense\n"), 0o600))
	kvOn(t, tree, "", "watch", "--log", log).fails(t, exitFailed, log, "line 2")

	// A watch that runs prints a change that another process makes.
	cmd := exec.CommandContext(t.Context(), executable(t), "kv", "watch", tree, "--json", "-n", "1")
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	require.Regexp(t, `^{"event":"tree","root":"[^"]+"}$`, lines.Text())
	require.True(t, lines.Scan())
	require.Equal(t, `{"event":"synced"}`, lines.Text())
	kvOn(t, tree, "", "put", "live", "-d", "1").ok(t)
	require.True(t, lines.Scan())
	require.Regexp(t, `^{"event":"put","key":"live","value":"1","version":\d+}$`, lines.Text())
	require.NoError(t, cmd.Wait())
}

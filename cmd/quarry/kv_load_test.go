package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// loadLines are n entries in no order, each key twice. The second value is the one to stay.
func loadLines(n int) string {
	var b strings.Builder
	for round := range 2 {
		for i := range n {
			fmt.Fprintf(&b, `{"key":"k%06d","value":"%0100d"}`+"\n", i*7919%n, 1000*round+i*7919%n%1000)
		}
	}
	return b.String()
}

// TestKVLoadSorts: what is loaded is the same with and without sorting, with and without files for it, in
// an empty tree and over what is there; sorted, it takes fewer nodes.
func TestKVLoadSorts(t *testing.T) {
	const n = 12_000
	file, temp := filepath.Join(t.TempDir(), "in.jsonl"), t.TempDir()
	require.NoError(t, os.WriteFile(file, []byte(loadLines(n)), 0o600))
	cluster(t) // in another folder
	t.Setenv("TMPDIR", temp)
	leaves := map[string]int{}
	for _, c := range [][]string{{"--no-sort"}, {}, {"--sort-memory", "1MiB"}, {"--fill", "100"}} {
		name := "kv/sorts" + strings.Join(c, "")
		kvOn(t, name, "", "create").ok(t)
		for range 2 {
			require.Contains(t, kvOn(t, name, "", append([]string{"load", file}, c...)...).ok(t), " entries from")
			require.Equal(t, fmt.Sprintln(n), kvOn(t, name, "", "count").ok(t))
			require.Equal(t, fmt.Sprintf("%0100d", 1077), kvOn(t, name, "", "get", "k000077").ok(t), "the last value of a key stays")
			var s kvStatsView
			kvOn(t, name, "", "stats", "--json").decode(t, &s)
			if leaves[name] == 0 {
				leaves[name] = s.Survey.Leaves
			}
			// The second load changes values and versions. A version may take a byte more, which a full leaf has not.
			require.InEpsilon(t, leaves[name], s.Survey.Leaves, 0.02, "%v", c)
		}
		kvOn(t, name, "", "drop").ok(t)
	}
	left, err := filepath.Glob(filepath.Join(temp, "quarry-sort-*"))
	require.NoError(t, err)
	require.Empty(t, left)
	require.Equal(t, leaves["kv/sorts"], leaves["kv/sorts--sort-memory1MiB"])
	require.Less(t, leaves["kv/sorts--fill100"], leaves["kv/sorts"])
	require.Less(t, 10*leaves["kv/sorts"], 9*leaves["kv/sorts--no-sort"])
}

// TestStoppedLoad: a load that is stopped in the middle leaves the tree as it was, and no files; loading
// again loads all.
func TestStoppedLoad(t *testing.T) {
	const n = 30_000
	lines := loadLines(n)
	for _, c := range []struct {
		name string
		args []string
		sig  syscall.Signal
	}{
		{"interrupted while it sorts", []string{"--sort-memory", "1MiB"}, syscall.SIGINT},
		{"killed while it sorts", []string{"--sort-memory", "1MiB"}, syscall.SIGKILL},
		{"killed while it builds", []string{"--sorted"}, syscall.SIGKILL},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree, temp := "stopped/"+strings.ReplaceAll(c.name, " ", "-"), t.TempDir()
			kvOn(t, tree, "", "create").ok(t)
			cmd := exec.Command(executable(t), append([]string{"kv", "load", "-t", tree, "-"}, c.args...)...)
			cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL, "TMPDIR="+temp)
			in, err := cmd.StdinPipe()
			require.NoError(t, err)
			var text strings.Builder
			cmd.Stderr = &text
			require.NoError(t, cmd.Start())
			// All but what fits a pipe is read when this returns. The input does not end.
			if c.args[0] == "--sorted" {
				for i := range n {
					_, err = fmt.Fprintf(in, `{"key":"k%06d","value":"%0100d"}`+"\n", i, i)
					require.NoError(t, err)
				}
			} else {
				_, err = io.WriteString(in, lines)
				require.NoError(t, err)
			}
			require.NoError(t, cmd.Process.Signal(c.sig))
			require.Error(t, cmd.Wait())
			if c.sig == syscall.SIGINT {
				require.Equal(t, exitInterrupted, cmd.ProcessState.ExitCode())
				require.Contains(t, text.String(), "interrupted: nothing is loaded")
			}
			left, err := filepath.Glob(filepath.Join(temp, "quarry-sort-*"))
			require.NoError(t, err)
			require.Empty(t, left)
			require.Equal(t, "0\n", kvOn(t, tree, "", "count").ok(t))
			kvOn(t, tree, lines, "load").ok(t)
			require.Equal(t, fmt.Sprintln(n), kvOn(t, tree, "", "count").ok(t))
			kvOn(t, tree, "", "drop").ok(t)
		})
	}
	on(t, "kv", "collect").ok(t)
	on(t, "fsck").ok(t)
}

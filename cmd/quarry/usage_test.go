package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto"
)

func TestUsageErrors(t *testing.T) {
	for _, c := range []struct {
		args []string
		what string
	}{
		{[]string{"fly"}, "fly"},
		{[]string{"slab"}, "expected one of"},
		{[]string{"slab", "read"}, "target"},
		{[]string{"status", "--colour"}, "--colour"},
		{[]string{"status", "--timeout", "soon"}, "soon"},
		{[]string{"status", "--timeout=-1s"}, "more than 0"},
		{[]string{"slab", "alloc", "--transport", "pigeon"}, "pigeon"},
		{[]string{"slab", "alloc", "--data", "x", "some-file"}, "want one of them"},
		{[]string{"slab", "alloc", "no-such-file"}, "no-such-file"},
		{[]string{"region", "create", "--size", "3 miles"}, "miles"},
		{[]string{"dev", "--nodes", "0"}, "--nodes 0"},
		{[]string{"dev", "--nodes", "1", "--replicas", "2"}, "only 1 nodes"},
		{[]string{"status", "-C", "localhost"}, "want a URL"},
		{[]string{"controller", "--etcd", "http://127.0.0.1:1", "--data", "x"}, "--data"},
		{[]string{"controller", "--cert", "no-such.pem", "--key", "k"}, "no-such.pem"},
		{[]string{"status", "--ca", "no-such.pem"}, "no-such.pem"},
		{[]string{"demo", "no-such-dir"}, "no-such-dir"},
		{[]string{"completion", "tcsh"}, "tcsh"},
		{[]string{"session", "revoke", "me"}, "me"},
		{[]string{"sim", "--faults", "fire"}, "fire"},
		{[]string{"sim", "--clients", "7"}, "--clients 7"},
		{[]string{"sim", "--replay", "!"}, "--replay"},
		{[]string{"sim", "--script", "nothing"}, "nothing"},
	} {
		quarry(t, nil, "", c.args...).fails(t, exitUsage, c.what)
	}
}

func TestHelp(t *testing.T) {
	require.Contains(t, quarry(t, nil, "").ok(t), "shared-memory store")
	for _, cmd := range []string{"dev", "controller", "storage", "status", "region", "slab", "name", "session", "fsck", "sim", "bench", "demo", "version", "completion"} {
		require.Contains(t, quarry(t, nil, "", "--help").ok(t), cmd)
		require.Contains(t, quarry(t, nil, "", cmd, "--help").ok(t), "Usage: quarry "+cmd)
	}
}

func TestVersion(t *testing.T) {
	require.Contains(t, quarry(t, nil, "", "version").ok(t), "quarry ")
	var v map[string]any
	quarry(t, nil, "", "version", "--json").decode(t, &v)
	require.EqualValues(t, proto.LayoutVersion, v["layout"])
}

// A flag beats a variable beats the file beats the default.
func TestConfigurationPrecedence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "quarry.yml")
	write := func(s string) { require.NoError(t, os.WriteFile(file, []byte(s), 0o600)) }
	nobody := func(port string) string { return "http://127.0.0.1:" + port }
	write("controller: [" + nobody("1") + "]\n")
	quarry(t, nil, "", "status", "--config", file).fails(t, exitUnreachable, nobody("1"))
	quarry(t, []string{"QUARRY_CONFIG=" + file}, "", "status").fails(t, exitUnreachable, nobody("1"))
	quarry(t, []string{"QUARRY_CONTROLLER=" + nobody("2")}, "", "status", "-c", file).fails(t, exitUnreachable, nobody("2"))
	quarry(t, []string{"QUARRY_CONTROLLER=" + nobody("2")}, "", "status", "-c", file, "-C", nobody("3")).fails(t, exitUnreachable, nobody("3"))
	write("controller: " + cluster(t).URL + "\nregion:\n  create:\n    replicas: 7\n")
	quarry(t, nil, "", "status", "-c", file).ok(t)
	require.NotZero(t, quarry(t, nil, "", "region", "create", "-c", file).code)

	// One file for all: the list of controllers, and the section of their command.
	write("controllers: [" + cluster(t).URL + "]\ncontroller:\n  listen: nonsense\n")
	quarry(t, nil, "", "status", "-c", file).ok(t)
	require.Contains(t, quarry(t, nil, "", "controller", "-c", file).err, "nonsense")
	quarry(t, nil, "", "status", "--controllers", nobody("4"), "-c", file).fails(t, exitUnreachable, nobody("4"))
}

func TestConfigurationIsStrict(t *testing.T) {
	file := filepath.Join(t.TempDir(), "quarry.yml")
	for content, what := range map[string]string{
		"controler: http://x\n":                         `"controler"`,
		"storage:\n  lisen: 1\n":                        `"storage.lisen"`,
		"status: 3\n":                                   `"status"`,
		"controllers: http://x\ncontroller: http://y\n": "two names of one thing",
		"timeout: {a: 1}\n":                             `"timeout"`,
		"a: b: c\n":                                     "mapping values",
		"storage:\n  config: x\n":                       "config",
		"timeout: later\n":                              "later",
		"region:\n  create: {fly: 1}\n":                 `"region.create.fly"`,
	} {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		quarry(t, nil, "", "status", "-c", file).fails(t, exitUsage, what)
	}
	quarry(t, nil, "", "status", "-c", "no-such.yml").fails(t, exitUsage, "no-such.yml")
}

func TestUnreachable(t *testing.T) {
	for _, args := range [][]string{{"status"}, {"slab", "alloc", "--data", "x"}, {"slab", "read", "1:0x00500040/0.17"}, {"name", "list"}, {"fsck"}, {"region", "list"}, {"session", "list"}, {"bench", "--no-yardsticks"}} {
		quarry(t, nil, "", append(args, "-C", "http://127.0.0.1:1,http://127.0.0.1:2", "--timeout", "5s")...).fails(t, exitUnreachable, "127.0.0.1:1")
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		out := quarry(t, nil, "", "completion", shell).ok(t)
		for _, w := range []string{"fsck", "revoke", "write-once"} {
			require.Contains(t, out, w, shell)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not installed")
	}
	complete := func(words ...string) string {
		script := quarry(t, nil, "", "completion", "bash").ok(t) +
			"COMP_WORDS=(" + strings.Join(words, " ") + "); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _quarry; echo ${COMPREPLY[@]}"
		out, err := exec.Command(bash, "-c", script).CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	require.Equal(t, "storage status\n", complete("quarry", "st"))
	require.Equal(t, "alloc\n", complete("quarry", "slab", "al"))
	require.Contains(t, complete("quarry", "slab", "alloc", "--w"), "--write-once")
	require.Contains(t, complete("quarry", "slab", "alloc", "--js"), "--json")
}

// TestCompletionOfValues: values of enums, and of what the cluster has.
func TestCompletionOfValues(t *testing.T) {
	require.Equal(t, "auto\ncsv\njsonl\n", quarry(t, nil, "", "complete-values", "kv load", "--", "--format").ok(t))
	require.Equal(t, "bash\nzsh\nfish\n", quarry(t, nil, "", "complete-values", "completion").ok(t))
	require.Empty(t, quarry(t, nil, "", "complete-values", "no such command").ok(t))
	require.Empty(t, quarry(t, []string{"QUARRY_CONTROLLER=http://127.0.0.1:1"}, "", "complete-values", "node drain").ok(t), "no cluster")

	on(t, "kv", "create", "-t", "complete-tree").ok(t)
	on(t, "slab", "alloc", "--data", "x", "--name", "complete-name").ok(t)
	require.Contains(t, on(t, "complete-values", "kv get", "--", "-t").ok(t), "complete-tree\n")
	require.NotContains(t, on(t, "complete-values", "kv get", "--", "--tree").ok(t), "complete-name")
	require.Contains(t, on(t, "complete-values", "slab read").ok(t), "@complete-name\n")
	require.Contains(t, on(t, "complete-values", "name get").ok(t), "complete-name\n")
	require.Contains(t, on(t, "complete-values", "node drain").ok(t), "n1\n")
	require.Contains(t, on(t, "complete-values", "region move").ok(t), "1\n")

	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not installed")
	}
	script := quarry(t, nil, "", "completion", "bash").ok(t) +
		"COMP_WORDS=(" + executable(t) + " slab read @complete-n); COMP_CWORD=3; _quarry; echo ${COMPREPLY[@]}"
	cmd := exec.Command(bash, "-c", script)
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, "@complete-name\n", string(out))
}

// TestHelpAndVersion in the words that people try first.
func TestHelpAndVersion(t *testing.T) {
	require.Equal(t, quarry(t, nil, "", "kv", "load", "--help").ok(t), quarry(t, nil, "", "help", "kv", "load").ok(t))
	require.Equal(t, quarry(t, nil, "", "--help").ok(t), quarry(t, nil, "", "help").ok(t))
	require.Equal(t, version+"\n", quarry(t, nil, "", "--version").ok(t))
	r := quarry(t, nil, "", "help", "nonsense")
	require.Equal(t, exitUsage, r.code)
	require.Contains(t, r.err, "nonsense")
}

// TestListsOfNothing: what is not there yet is an empty list.
func TestListsOfNothing(t *testing.T) {
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 1, RegionBytes: "16MiB"})
	require.NoError(t, err)
	t.Cleanup(func() { c.Stop() })
	require.Equal(t, "[]\n", quarry(t, []string{"QUARRY_CONTROLLER=" + c.URL}, "", "job", "list", "--json").ok(t))
	require.Equal(t, "[]\n", on(t, "kv", "list", "--json", "no-such-prefix").ok(t))
	on(t, "kv", "create", "-t", "listed").ok(t)
	require.Contains(t, on(t, "kv", "list").ok(t), "listed")
}

// TestInterruptedLoad: a load that is interrupted says what is stored.
func TestInterruptedLoad(t *testing.T) {
	on(t, "kv", "create", "-t", "interrupted").ok(t)
	cmd := exec.Command(executable(t), "kv", "load", "-t", "interrupted", "--no-sort", "--batch", "100", "-")
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	var text strings.Builder
	cmd.Stderr = &text
	require.NoError(t, cmd.Start())
	for i := range 250 {
		fmt.Fprintf(in, "{\"key\":\"k%03d\",\"value\":\"v\"}\n", i)
	}
	require.Eventually(t, func() bool { return on(t, "kv", "count", "-t", "interrupted").out == "200\n" }, patience, 20*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	require.Error(t, cmd.Wait())
	require.Equal(t, exitInterrupted, cmd.ProcessState.ExitCode())
	require.Contains(t, text.String(), "interrupted: 200 entries of standard input are loaded")
}

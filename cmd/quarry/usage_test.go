package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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
	require.EqualValues(t, 1, v["layout"])
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

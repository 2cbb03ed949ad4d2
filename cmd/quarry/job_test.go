package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/search"
	"github.com/quarrystore/quarry/internal/local"
)

// The whole way of a user: texts into a tree, an index over them, questions.
func TestJobs(t *testing.T) {
	on(t, "job", "run", "words", "--input", "tree:nothing", "--output", "tree:x").fails(t, exitNotFound, "no worker is there")
	w, err := local.Spawn(t.Context(), executable(t), "worker", "-C", cluster(t).URL, "--name", "w1")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Stop()) })

	on(t, "kv", "create", "-t", "job-texts").ok(t)
	for name, text := range map[string]string{"a": "the quarry gives stone", "b": "stone on stone", "c": "water"} {
		on(t, "kv", "put", "-t", "job-texts", name, "-d", text).ok(t)
	}
	var j job.Job
	require.Eventually(t, func() bool { // until the worker has said that it is there
		return on(t, "job", "plugins").code == 0 && on(t, "--json", "job", "run", "words", "--input", "tree:job-texts", "--output", "tree:job-counts").code == 0
	}, patience, 50*time.Millisecond)
	require.Equal(t, "3", on(t, "kv", "get", "-t", "job-counts", "stone").ok(t))

	on(t, "--json", "job", "run", "search", "--input", "tree:job-texts", "--output", "tree:job-index", "--map-parts", "2").decode(t, &j)
	require.Equal(t, job.Done, j.State)
	var hits []search.Hit
	on(t, "--json", "search", "job-index", "stone", "water").decode(t, &hits)
	require.Len(t, hits, 3)
	require.Equal(t, "c", hits[0].Name)
	require.Contains(t, on(t, "search", "job-index", "stone").ok(t), "b")

	require.Contains(t, on(t, "job", "list").ok(t), "search")
	require.Contains(t, on(t, "job", "status", "1").ok(t), "words")
	on(t, "job", "logs", "1").ok(t)
	on(t, "job", "cancel", "1").fails(t, exitFailed, "job 1 has ended: it is done")
	on(t, "job", "status", "999").fails(t, exitNotFound, "999")

	// The same plugin as a module.
	file := filepath.Join(t.TempDir(), "words.wasm")
	build := exec.Command("go", "build", "-o", file, "github.com/quarrystore/quarry/coproc/plugins/words/wasm")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", asCommand+"=")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	on(t, "job", "put", "words", file).fails(t, exitUsage, "compiled in")
	require.Contains(t, on(t, "job", "put", "counter", file).ok(t), "counts the words")
	on(t, "job", "run", "counter", "--input", "tree:job-texts", "--output", "tree:job-counts2").ok(t)
	require.Equal(t, on(t, "kv", "dump", "-t", "job-counts", "-").ok(t), on(t, "kv", "dump", "-t", "job-counts2", "-").ok(t))
	on(t, "job", "remove", "counter").ok(t)
	on(t, "job", "run", "counter", "--input", "tree:job-texts", "--output", "tree:x").fails(t, exitNotFound, `"counter"`)
	on(t, "job", "put", "bad", os.Args[0]).fails(t, exitFailed, "bad")

	on(t, "job", "run", "words", "--input", "job-texts", "--output", "tree:x").fails(t, exitUsage, "or objects:PREFIX")
	on(t, "job", "run", "words", "--input", "tree:job-texts", "--output", "x").fails(t, exitUsage, "tree:NAME")
	on(t, "job", "run", "nearest", "--input", "tree:job-texts", "--output", "tree:y", "--arg", "query=a").fails(t, exitFailed, "argument query")
}

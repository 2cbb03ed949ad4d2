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

	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/search"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/testbinary"
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
	on(t, "--json", "job", "run", "search", "--input", "tree:job-texts", "--output", "tree:job-index", "--max-parts", "1", "--priority", "low").decode(t, &j)
	require.Equal(t, job.Done, j.State)
	require.Equal(t, job.Low, j.Spec.Priority)
	require.Regexp(t, `(?m)search .*low\s*$`, on(t, "job", "list").ok(t))
	var listed []struct{ Priority string }
	on(t, "--json", "job", "list").decode(t, &listed)
	require.Equal(t, []struct{ Priority string }{{"normal"}, {"normal"}, {"low"}}, listed)
	on(t, "job", "run", "words", "--input", "tree:job-texts", "--output", "tree:x", "--priority", "urgent").fails(t, exitUsage, "--priority")
	require.Equal(t, 1, j.Spec.MaxRunning)
	var hits []search.Hit
	on(t, "--json", "search", "job-index", "stone", "water").decode(t, &hits)
	require.Len(t, hits, 3)
	require.Equal(t, "c", hits[0].Name)
	require.Contains(t, on(t, "search", "job-index", "stone").ok(t), "b")

	require.Contains(t, on(t, "job", "list").ok(t), "search")
	require.Regexp(t, `(?m)words .*normal\s*$`, on(t, "job", "list").ok(t))
	require.Contains(t, on(t, "job", "status", "1").ok(t), "words")
	on(t, "job", "logs", "1").ok(t)
	on(t, "job", "cancel", "1").fails(t, exitFailed, "job 1 has ended: it is done")
	on(t, "job", "status", "999").fails(t, exitNotFound, "999")
	on(t, "job", "quota", "much").fails(t, exitUsage, `quota "much": want a size, or auto`)
	require.Contains(t, on(t, "job", "quota", "40GiB").ok(t), "40.0 GiB for records between map and reduce")
	on(t, "job", "run", "words", "--input", "tree:job-texts", "--output", "tree:x", "--shuffle", "41GiB").fails(t, exitNoSpace, "the quota of all jobs is 40960 MiB")
	on(t, "job", "quota", "auto").ok(t)
	on(t, "job", "forget").fails(t, exitUsage, "--older")
	on(t, "job", "forget", "--older", "1h").ok(t)
	on(t, "job", "status", "1").ok(t)
	require.Eventually(t, func() bool { return on(t, "job", "rm", "1").code == 0 }, patience, 50*time.Millisecond) // a worker has cleaned up
	on(t, "job", "status", "1").fails(t, exitNotFound, "no such job: 1")

	// The same plugin as a module.
	file := filepath.Join(t.TempDir(), "words.wasm")
	build := exec.Command("go", "build", "-o", file, "github.com/quarrystore/quarry/coproc/plugins/words/wasm")
	build.Env = append(testbinary.ToolEnv(), "GOOS=wasip1", "GOARCH=wasm", asCommand+"=")
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

// A pool of workers whose token is of role worker runs jobs of a tenant that it cannot reach by itself. A worker is killed
// in between, and the next one goes on.
func TestAPoolOfWorkers(t *testing.T) {
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "2", "--replicas", "1", "--region-bytes", "16MiB")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop()) })
	as := func(token string, args ...string) result {
		t.Helper()
		return quarry(t, []string{"QUARRY_CONTROLLER=" + p.Ready["url"], "QUARRY_TOKEN=" + token}, "", args...)
	}
	pool := strings.TrimSpace(as("", "token", "create", "--role", "worker").ok(t))
	shop := strings.TrimSpace(as("", "token", "create", "--role", "client").ok(t))
	identity := "token:" + strings.Split(shop, "_")[1]
	as("", "tenant", "create", "shop").ok(t)
	as("", "tenant", "grant", "shop", "--identity", identity, "--rights", "read,write,create").ok(t)
	as(shop, "kv", "create", "-t", "texts").ok(t)
	as(shop, "kv", "put", "-t", "texts", "a", "-d", "stone on stone").ok(t)
	as(shop, "job", "run", "words", "--input", "tree:texts", "--output", "tree:x").fails(t, exitNotFound, "no worker is there")
	as(pool, "kv", "get", "-t", "texts", "a", "--tenant", "shop").fails(t, exitFailed, "has no rights of its own")
	as(pool, "slab", "alloc", "--data", "x").fails(t, exitFailed, "has no rights of its own")

	start := func(name string) *local.Process {
		w, err := local.Spawn(t.Context(), executable(t), "worker", "-C", p.Ready["url"], "--name", name, "--token", pool)
		require.NoError(t, err)
		return w
	}
	w := start("w1")
	require.Contains(t, as(shop, "job", "plugins").ok(t), "worker w1")
	as(shop, "job", "run", "words", "--input", "tree:texts", "--output", "tree:counts").ok(t)
	require.Equal(t, "2", as(shop, "kv", "get", "-t", "counts", "stone").ok(t))
	w.Signal(syscall.SIGKILL)
	w.Wait()
	as(shop, "job", "run", "words", "--input", "tree:texts", "--output", "tree:counts2", "--no-wait").ok(t)
	w = start("w2")
	t.Cleanup(func() { require.NoError(t, w.Stop()) })
	require.Eventually(t, func() bool { return strings.Contains(as(shop, "job", "status", "2").out, "done") }, patience, 50*time.Millisecond)
	require.Equal(t, "2", as(shop, "kv", "get", "-t", "counts2", "stone").ok(t))
	as(shop, "job", "run", "words", "--input", "tree:texts", "--output", "tree:y", "--lasts", "9999h").fails(t, exitFailed, "it lasts 9999h0m0s")
	as(shop, "job", "cancel", "2", "--revoke").fails(t, exitFailed, "job 2 has ended")
}

// A function is called on an object by workers beside the nodes.
func TestJobCall(t *testing.T) {
	on(t, "slab", "alloc", "-d", "40", "--name", "visits", "--capacity", "100").ok(t)
	on(t, "job", "call", "add", "@visits").fails(t, exitNotFound, "no such function")
	for i := range cluster(t).Nodes {
		node := fmt.Sprintf("n%d", i+1)
		w, err := local.Spawn(t.Context(), executable(t), "worker", "-C", cluster(t).URL, "--name", "call-"+node, "--node", node)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.Stop()) })
	}
	require.Eventually(t, func() bool { return on(t, "job", "call", "add", "@visits", "1").code == 0 }, patience, 50*time.Millisecond)
	require.Equal(t, "43", strings.TrimSpace(on(t, "job", "call", "add", "@visits", "2").ok(t)))
	require.Equal(t, "44", strings.TrimSpace(on(t, "job", "call", "add", "@visits").ok(t)))
	on(t, "job", "call", "add", "@visits", "many").fails(t, exitFailed, `argument "many": want a decimal number`)
	on(t, "job", "call", "nothing", "@visits").fails(t, exitNotFound, "nothing")
	on(t, "job", "call", "words", "@visits").fails(t, exitFailed, "it is no function")
	var said struct{ Answer []byte }
	on(t, "--json", "job", "call", "add", "@visits", "--", "-1").decode(t, &said)
	require.Equal(t, "43", string(said.Answer))
}

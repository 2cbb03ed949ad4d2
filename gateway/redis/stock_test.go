package redis_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// nodeModules has the client of the test below, as make tools installs it.
const nodeModules = "/usr/local/lib/quarry-redis/node_modules"

// A stock client, node-redis 5 with client-side caching, uses the gateway as it is: it takes what it has read from its own cache, and has
// what another gateway changes soon afterwards.
func TestStockClientWithCaching(t *testing.T) {
	if _, err := exec.LookPath("node"); err != nil {
		t.Skip("node is not installed: make tools, as root")
	}
	if _, err := os.Stat(filepath.Join(nodeModules, "redis")); err != nil {
		t.Skipf("%v: make tools, as root", err)
	}
	cluster, tree := newTree(t, testcluster.Options{})
	ours, writer := gateway(t, redis.Config{Tree: tree}), dial(t, gateway(t, redis.Config{Tree: openTree(t, cluster)}))
	ctx, cancel := context.WithTimeout(t.Context(), patience) // ends the client, and each wait for it
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", "testdata/caching.cjs", ours)
	cmd.Env, cmd.Stderr = append(os.Environ(), "NODE_PATH="+nodeModules), os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	answers := bufio.NewScanner(out)
	ask := func(line string) (value string, hits int) {
		_, err := fmt.Fprintln(in, line)
		require.NoError(t, err)
		require.True(t, answers.Scan(), "no answer to %q", line)
		var a struct {
			Value json.RawMessage
			Hits  int
		}
		require.NoError(t, json.Unmarshal(answers.Bytes(), &a))
		return string(a.Value), a.Hits
	}
	value, hits := ask("get a")
	require.Equal(t, "null", value)
	for i := range 20 {
		require.Equal(t, "+OK", writer.do("SET", "a", fmt.Sprint(i)))
		writer.do("HSET", "h", "f", fmt.Sprint(i))
		for _, line := range [][2]string{{"get a", fmt.Sprintf("%q", fmt.Sprint(i))}, {"hgetall h", fmt.Sprintf(`{"f":"%d"}`, i)}} {
			require.Eventually(t, func() bool {
				value, hits = ask(line[0])
				return value == line[1]
			}, patience, 1)
		}
		before := hits
		require.Eventually(t, func() bool { // an invalidation may come twice
			_, hits = ask("get a")
			return hits > before
		}, patience, 1)
	}
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Wait())
}

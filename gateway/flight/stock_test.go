package flight_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// nodeModules has the packages of the test below, as make tools installs them.
const nodeModules = "/usr/local/lib/quarry-flight/node_modules"

// A client of another language, of the npm packages apache-arrow and grpc, puts entries, and reads two trees by ranges; DuckDB joins them.
func TestNodeClientAndDuckDB(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: the client of npm packages and DuckDB, which make one call after the other")
	}
	if _, err := exec.LookPath("node"); err != nil {
		t.Skip("node is not installed: make tools, as root")
	}
	for _, name := range []string{"apache-arrow", "@grpc/grpc-js", "@duckdb/node-api"} {
		if _, err := os.Stat(filepath.Join(nodeModules, name)); err != nil {
			t.Skipf("%v: make tools, as root", err)
		}
	}
	const token = "a token for this test, which is long enough"
	w := newWorld(t, testcluster.Options{Token: token})
	orders, err := kv.Create(t.Context(), w.c, "orders", btree.Config{NodeBytes: 1024})
	require.NoError(t, err)
	totals := map[string]int{}
	for i := range 300 {
		require.NoError(t, orders.Put(t.Context(), fmt.Appendf(nil, "p%d/%d", i%90, i), fmt.Append(nil, i)))
		totals[fmt.Sprint("city ", i%90%3)] += i
	}
	_, err = kv.Create(t.Context(), w.c, "people", btree.Config{})
	require.NoError(t, err)
	_, addr := w.serve(flight.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client := func(token string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, "node", "testdata/client.cjs", addr, token)
		cmd.Env, cmd.Stderr = append(os.Environ(), "NODE_PATH="+nodeModules), os.Stderr
		return cmd.Output()
	}
	for range 2 { // to put again changes nothing
		out, err := client(token)
		require.NoError(t, err)
		var got struct {
			Acks                   []flight.PutResult
			Ranges, People, Orders int
			Totals                 [][]any
		}
		require.NoError(t, json.Unmarshal(out, &got), "%s", out)
		require.Equal(t, []flight.PutResult{{Batch: 1, Puts: 100, Total: 100}}, got.Acks)
		require.Equal(t, 4, got.Ranges)
		require.Equal(t, []int{100, 300}, []int{got.People, got.Orders})
		require.Len(t, got.Totals, 3)
		for _, row := range got.Totals {
			require.EqualValues(t, totals[row[0].(string)], row[1])
		}
	}
	cmd := exec.CommandContext(ctx, "node", "testdata/client.cjs", addr, "another token, which is long enough too")
	cmd.Env = append(os.Environ(), "NODE_PATH="+nodeModules)
	said, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "UNAUTHENTICATED")
}

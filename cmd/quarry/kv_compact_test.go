package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestKVCompact: a tree takes fewer leaves, and has the same keys.
func TestKVCompact(t *testing.T) {
	const tree = "kv/compact"
	kvOn(t, tree, "", "create").ok(t)
	var in strings.Builder
	for i := range 1500 {
		fmt.Fprintf(&in, `{"key":"k%05d","value":"%0100d"}`+"\n", i*7919%10007, i)
	}
	kvOn(t, tree, in.String(), "load", "--no-sort").ok(t)
	before := kvOn(t, tree, "", "scan").ok(t)
	var was, now kvStatsView
	kvOn(t, tree, "", "stats", "--json").decode(t, &was)
	var done, again kvCompactView
	on(t, "kv", "compact", tree, "--json").decode(t, &done)
	kvOn(t, tree, "", "stats", "--json").decode(t, &now)
	require.Equal(t, 92, done.Fill)
	require.Equal(t, tree, done.Tree)
	require.Equal(t, was.Survey.Leaves, done.Leaves)
	require.Positive(t, done.Freed)
	require.Equal(t, was.Survey.Leaves-done.Freed, now.Survey.Leaves)
	require.EqualValues(t, done.Freed*now.Limits.SlabBytes, done.FreedBytes)
	require.Equal(t, before, kvOn(t, tree, "", "scan").ok(t))
	kvOn(t, tree, "", "compact", "--json").decode(t, &again)
	require.Zero(t, again.Freed+again.Shifts)
	require.Contains(t, kvOn(t, tree, "", "compact").ok(t), "leaves; freed: 0")
	kvOn(t, tree, "", "compact", "--fill", "49").fails(t, exitUsage, "--fill 49: want 50 to 100")
	for _, share := range []string{"0", "101"} {
		kvOn(t, tree, "", "compact", "--share", share).fails(t, exitUsage, "--share "+share+": want 1 to 100")
	}
	kvOn(t, tree, "", "compact", "--fill", "100", "--share", "50", "--json").decode(t, &again)
	require.Equal(t, 100, again.Fill)
	require.Equal(t, now.Survey.Leaves, again.Leaves)
	require.Equal(t, before, kvOn(t, tree, "", "scan").ok(t))
	on(t, "kv", "compact", "no/such/tree").fails(t, exitNotFound, "no/such/tree")
	on(t, "fsck").ok(t)
	kvOn(t, tree, "", "drop").ok(t)
}

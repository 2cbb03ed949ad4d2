package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// The files in testdata/layout1 were written by kv dump of the last build of layout 1, from one tree: keys and values of text and of other bytes, an empty value,
// keys that stand in a layer, a value with a slab of its own. This build loads what they hold, and writes the same file.
func TestDumpsOfLayout1AreLoaded(t *testing.T) {
	want, err := os.ReadFile("testdata/layout1/dump.jsonl")
	require.NoError(t, err)
	for _, name := range []string{"dump.jsonl", "dump.csv"} {
		tree := "kv/layout1/" + name
		kvOn(t, tree, "", "create").ok(t)
		require.Contains(t, kvOn(t, tree, "", "load", "testdata/layout1/"+name).ok(t), "48 entries")
		require.Equal(t, string(want), kvOn(t, tree, "", "dump", "-").ok(t), name)
		kvOn(t, tree, "", "drop").ok(t)
	}
}

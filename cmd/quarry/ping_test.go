package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestNodePing: a node answers messages, and a name or a size that is none is refused.
func TestNodePing(t *testing.T) {
	s := newSurfaces(t, testcluster.New(t, testcluster.Options{Nodes: 1}))
	out, err := s.command("node", "ping", "node1", "--size", "1000", "--transport", "tcp")
	require.NoError(t, err)
	require.Contains(t, out, "node node1 has answered 10 messages of 1000 bytes: min ")
	out, err = s.command("node", "ping", "node1", "-n", "3", "--json")
	require.NoError(t, err)
	var v pingView
	require.NoError(t, json.Unmarshal([]byte(out), &v))
	require.Equal(t, 3, v.Messages)
	require.True(t, v.MinUS > 0 && v.MinUS <= v.MedianUS && v.MedianUS <= v.MaxUS, out)
	_, err = s.command("node", "ping", "node9")
	require.ErrorContains(t, err, `no storage node is named "node9"`)
	_, err = s.command("node", "ping", "node1", "--size", "4065")
	require.ErrorContains(t, err, "at most 4064 bytes")
	_, err = s.command("node", "ping", "node1", "-n", "0")
	require.ErrorContains(t, err, "--count 0")
}

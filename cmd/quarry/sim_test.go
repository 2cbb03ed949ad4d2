package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSim(t *testing.T) {
	require.Contains(t, quarry(t, nil, "", "sim", "--seeds", "100").ok(t), "100 schedules")
	var a, b struct {
		Schedules  int
		Steps      uint64
		Operations map[string]map[string]uint64
		Faults     map[string]uint64
	}
	args := []string{"sim", "--seeds", "200", "--durable", "--max-faults", "8", "--json"}
	quarry(t, nil, "", append(args, "--workers", "1")...).decode(t, &a)
	quarry(t, nil, "", append(args, "--workers", "3")...).decode(t, &b)
	require.Equal(t, 200, a.Schedules)
	require.NotZero(t, a.Operations["update"]["done"])
	require.NotZero(t, a.Faults["power"])
	require.Equal(t, a, b, "who runs a schedule makes no difference")
	require.Contains(t, quarry(t, nil, "", "sim", "--seed", "5", "--trace").ok(t), "client 0: session")
	require.Contains(t, quarry(t, nil, "", "sim", "--duration", "100ms", "--faults", "kill,pause").ok(t), "schedules")
}

// TestSimFailure: a broken promise has its own exit code, and a command that plays it again.
func TestSimFailure(t *testing.T) {
	args := []string{"sim", "--script", "crash:update:13:power:0:40:0", "--faults", "node,control", "--max-faults", "5", "--clients", "3",
		"--slabs", "1", "--replicas", "2", "--durable", "--scheduler", "walk", "--seed", "400", "--seeds", "400", "--no-shrink"}
	quarry(t, nil, "", args...).ok(t)
	r := quarry(t, nil, "", append(args, "--strict-reads")...)
	r.fails(t, exitDamaged, "findings")
	require.Contains(t, r.out, "again: quarry sim --seed ")
}

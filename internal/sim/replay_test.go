package sim

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// kept is a shrunk failure, as testdata/sim keeps it.
type kept struct {
	Found    string // what was broken then
	Mutation string // name of the deliberate bug that breaks it again
	Script   string
	Seed     uint64
	Faults   Fault `json:",omitempty"`
	Clients  int
	Ops      int `json:",omitempty"`
	Slabs    int
	Replicas int
	Choices  string
}

func readKept(t *testing.T) map[string]*kept {
	paths, err := filepath.Glob("testdata/sim/*.json")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	all := map[string]*kept{}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		require.NoError(t, err)
		k := &kept{}
		require.NoError(t, json.Unmarshal(b, k), p)
		all[filepath.Base(p)] = k
	}
	return all
}

func (k *kept) play(t *testing.T) *Report {
	o := Options{Seed: k.Seed, Schedules: 1, Faults: k.Faults, Clients: k.Clients, Ops: k.Ops, Slabs: k.Slabs, Replicas: k.Replicas, AnyScheduler: true}
	var err error
	if k.Script != "" {
		o.Script, err = ParseScript(k.Script)
		require.NoError(t, err)
	}
	o.Choices, err = DecodeChoices(k.Choices)
	require.NoError(t, err)
	r := NewRunner()
	defer r.Close()
	rep := r.Run(o, nil)
	return rep
}

// TestReplays: what the simulator has found once, it does not find again.
func TestReplays(t *testing.T) {
	for name, k := range readKept(t) {
		if rep := k.play(t); rep.Failure != nil {
			t.Errorf("%s: %v", name, rep.Failure)
		}
	}
}

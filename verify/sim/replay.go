package sim

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Replay is a shrunk failure, as testdata keeps it.
type Replay struct {
	Found    string // what was broken then
	Mutation string // name of the mutant that breaks it again
	Script   string
	Seed     uint64
	Faults   Fault `json:",omitempty"`
	Clients  int
	Ops      int `json:",omitempty"`
	Slabs    int
	Replicas int
	Choices  string
}

// ReplayOf is what testdata keeps of a failure that a mutant caused.
func ReplayOf(f *Failure, mutation string) *Replay {
	o := f.Options
	r := &Replay{Found: f.What, Mutation: mutation, Seed: o.Seed, Faults: o.Faults, Clients: o.Clients, Ops: o.Ops, Slabs: o.Slabs,
		Replicas: o.Replicas, Choices: EncodeChoices(o.Choices)}
	if o.Script != nil {
		r.Script = o.Script.String()
	}
	return r
}

// ReadReplays reads the replays of a directory, by the names of their files.
func ReadReplays(dir string) (map[string]*Replay, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	all := map[string]*Replay{}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			return nil, err
		}
		r := &Replay{}
		if err := json.Unmarshal(b, r); err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		all[filepath.Base(p)] = r
	}
	return all, nil
}

// Play plays the schedule again.
func (r *Replay) Play() (*Report, error) {
	o := Options{Seed: r.Seed, Schedules: 1, Faults: r.Faults, Clients: r.Clients, Ops: r.Ops, Slabs: r.Slabs, Replicas: r.Replicas, AnyScheduler: true}
	var err error
	if r.Script != "" {
		if o.Script, err = ParseScript(r.Script); err != nil {
			return nil, err
		}
	}
	if o.Choices, err = DecodeChoices(r.Choices); err != nil {
		return nil, err
	}
	return Run(o, nil), nil
}

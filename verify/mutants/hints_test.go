package mutants

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// hintFile has a hint for each run of a mutant that took more than a few schedules.
const hintFile = "testdata/first.json"

// A hint is the schedule that found a mutant last. It is played first; where it finds
// nothing, because the code or the simulator has changed, the whole search follows.
type hint struct {
	At   string `json:",omitempty"`
	Runs int    `json:",omitempty"` // schedules that the search took
}

// fewRuns take no longer than to start the process.
const fewRuns = 20

func (h hint) json() string {
	if h.At == "" {
		return ""
	}
	b, _ := json.Marshal(h)
	return string(b)
}

// id names the job's run in the file of hints.
func (j *job) id() string { return fmt.Sprintf("%s/%d", j.name, j.which) }

func readHints(t *testing.T) map[string]hint {
	t.Helper()
	b, err := os.ReadFile(hintFile)
	require.NoError(t, err)
	var known map[string]hint
	require.NoError(t, json.Unmarshal(b, &known))
	return known
}

// writeHints replaces the hints of the jobs; those of others stay if they are still in the list.
func writeHints(t *testing.T, known map[string]hint, jobs []job) {
	t.Helper()
	kept := map[string]hint{}
	for i := range all {
		for k := range all[i].runs {
			j := job{mutant: &all[i], which: k}
			if h := known[j.id()]; h.At != "" {
				kept[j.id()] = h
			}
		}
	}
	for i := range jobs {
		j := &jobs[i]
		delete(kept, j.id())
		if j.At != "" && j.Runs > 1 && (j.Runs > fewRuns || j.took > time.Second) {
			kept[j.id()] = hint{j.At, j.Runs}
		}
	}
	b, err := json.MarshalIndent(kept, "", "\t")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(hintFile, append(b, '\n'), 0o644))
}

// A hint that leads nowhere is followed by the whole search.
func TestStaleHints(t *testing.T) {
	at := hint{At: "3", Runs: 3}
	require.Equal(t, found{Runs: 5}, schedules(quiet, 5).find(t, &mutant{}, at))
	require.Equal(t, found{Runs: 2}, clients(1, 2).find(t, &mutant{}, at))
	require.Equal(t, hint{}, readHints(t)["no such mutant/0"])
}

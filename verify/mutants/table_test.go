package mutants

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/sim"
)

const (
	hazards    = root + "/docs/HAZARDS.md"
	replayDir  = root + "/verify/sim/testdata/sim"
	tableBegin = "<!-- mutants: written by go test ./verify/mutants -run TestMutants -args -all -table -->\n"
	tableEnd   = "<!-- end of mutants -->\n"
)

// table gives the text of docs/HAZARDS.md around the table of mutants.
func table(t *testing.T) (before, after string) {
	t.Helper()
	b, err := os.ReadFile(hazards)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(b), tableBegin)
	_, after, end := strings.Cut(rest, tableEnd)
	require.True(t, ok && end, "%s has no lines %q and %q around the table of mutants", hazards, tableBegin, tableEnd)
	return before, after
}

// rows are the lines of the table, by the mutant's name; one with several runs has several.
func rows(t *testing.T) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(hazards)
	require.NoError(t, err)
	before, after := table(t)
	rows := map[string][]string{}
	for row := range strings.Lines(strings.TrimSuffix(strings.TrimPrefix(string(b), before+tableBegin), tableEnd+after)) {
		if name, _, ok := strings.Cut(strings.TrimPrefix(row, "| "), " | "); ok && name != "mutant" {
			rows[name] = append(rows[name], row)
		}
	}
	return rows
}

// writeTable writes the rows of the mutants that were played; those of others stay.
func writeTable(t *testing.T, jobs []job) {
	t.Helper()
	played := map[string][]string{}
	for _, j := range jobs {
		in := map[string]bool{}
		var where []string
		for _, e := range j.edits {
			if !in[e.in] {
				in[e.in] = true
				where = append(where, "`"+e.in+"`")
			}
		}
		played[j.name] = append(played[j.name], fmt.Sprintf("| %s | %s: %s | %d | %s |\n", j.name, j.what, strings.Join(where, ", "), j.Runs, j.What))
	}
	old := rows(t)
	var b strings.Builder
	b.WriteString("| mutant | leaves out, in | found after | by |\n|---|---|---|---|\n")
	for i := range all {
		r := played[all[i].name]
		if r == nil {
			r = old[all[i].name]
		}
		b.WriteString(strings.Join(r, ""))
	}
	before, after := table(t)
	require.NoError(t, os.WriteFile(hazards, []byte(before+tableBegin+b.String()+tableEnd+after), 0o644)) //nolint:gosec // a document
}

// TestHazardsNamesEveryMutant: the table of docs/HAZARDS.md has a row for each mutant and no
// other rows, and its other sections name mutants that exist.
func TestHazardsNamesEveryMutant(t *testing.T) {
	var want, got []string
	known := map[string]bool{}
	for i := range all {
		known[all[i].name] = true
		for range all[i].runs {
			want = append(want, all[i].name)
		}
	}
	for name, r := range rows(t) {
		for range r {
			got = append(got, name)
		}
	}
	require.ElementsMatch(t, want, got, "write the table: go test ./verify/mutants -run TestMutants -args -all -table; with -only NAME the rows of these mutants alone")
	before, after := table(t)
	for _, m := range named.FindAllStringSubmatch(before+after, -1) {
		for _, q := range quoted.FindAllStringSubmatch(m[0], -1) {
			require.True(t, known[q[1]], "%s names the mutant %q, which does not exist", hazards, q[1])
		}
	}
}

var (
	named  = regexp.MustCompile(`\b(mutation|mutant)s? "[^"]+"(,? (and )?"[^"]+")*`)
	quoted = regexp.MustCompile(`"([^"]+)"`)
)

// keep writes a replay; see the flag -keep.
func keep(t *testing.T, f *sim.Failure, mutation string) {
	t.Helper()
	b, err := json.MarshalIndent(sim.ReplayOf(f, mutation), "", "  ")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(replayDir, *keepFlag+".json"), append(b, '\n'), 0o644))
}

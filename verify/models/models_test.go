package models

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// memoryMiB bounds one search. A search that reaches the bound fails: it proves nothing.
const memoryMiB = 2000

// depth bounds the stack of a depth-first search, in steps.
const depth = 100_000

func TestModels_DesignHolds(t *testing.T) {
	// With -O2 the compiler takes twice as long, and the search no less.
	runAll(t, designs, []string{"-O1"})
}

func TestHazard03_05_08_10_20_31_40_ModelsFindDeliberateBugs(t *testing.T) {
	// Not optimised, because the compiler would take longer than the search. Breadth first,
	// because that finds a shortest counterexample.
	runAll(t, bugs, []string{"-O0", "-DBFS"})
}

// A model in which nothing happens is free of errors too.
func TestModels_WitnessesAreReached(t *testing.T) {
	runAll(t, witnesses, []string{"-O0"})
}

func runAll(t *testing.T, searches []search, flags []string) {
	needSpin(t)
	for _, s := range searches {
		t.Run(s.model+"/"+s.name, func(t *testing.T) {
			switch {
			case s.size == large && os.Getenv("MODELS") != "all":
				t.Skip("a large bound: runs with MODELS=all")
			case s.size != quick && testing.Short():
				t.Skip("not with -short")
			}
			run(t, s, flags)
		})
	}
}

func run(t *testing.T, s search, flags []string) {
	source, err := filepath.Abs(filepath.Join("..", "..", "docs", "models", s.model+".pml"))
	require.NoError(t, err)
	dir := t.TempDir()

	out := command(t, dir, "spin", append(append([]string{"-a"}, strings.Fields(s.defs)...), source)...)
	require.NotContains(t, out, "rror", "spin -a %s", s.defs)
	flags = append(slices.Clone(flags), "-w", "-DSAFETY", "-DMEMLIM="+strconv.Itoa(memoryMiB), "-o", "pan", "pan.c")
	if s.size == large {
		flags = append(flags, "-DCOLLAPSE") // compresses states: a third of the memory for half as much time again
	}
	command(t, dir, "gcc", flags...)

	pan := exec.CommandContext(t.Context(), "./pan",
		append([]string{"-m" + strconv.Itoa(depth)}, strings.Fields(s.pan)...)...)
	if s.finds != "" && s.size != large {
		pan.Args = append(pan.Args, "-w21") // the usual hash table takes longer to clear than the search takes
	}
	pan.Dir = dir
	// The exit code is 0 whatever the search has found, and another if the search was cut short.
	report, err := pan.CombinedOutput()
	require.NoError(t, err, "%s", report)
	r := parse(t, string(report))
	t.Logf("%s %s: %d states, depth %d, %d MiB, %.1f s of CPU; %s", s.model, s.defs, r.states, r.depth,
		r.memoryMiB, pan.ProcessState.UserTime().Seconds(), r.verdict)

	if s.finds == "" {
		require.Zero(t, r.errors, "%s", report)
		require.True(t, r.complete, "the search did not end:\n%s", report)
		return
	}
	require.NotZero(t, r.errors, "the bug was not found:\n%s", report)
	require.Contains(t, r.verdict, s.finds, "found, but by another rule than expected")
}

// result is parsed from the output of a search.
type result struct {
	errors    int
	states    int
	depth     int // of the counterexample, else the deepest step
	memoryMiB int
	complete  bool
	verdict   string
}

var (
	errorsLine  = regexp.MustCompile(`depth reached (\d+), errors: (\d+)`)
	statesLine  = regexp.MustCompile(`([0-9.e+]+) states, stored`)
	memoryLine  = regexp.MustCompile(`([0-9.]+)\s+total actual memory usage`)
	verdictLine = regexp.MustCompile(`pan:\d+: (.*?) \(at depth (\d+)\)`)
)

func parse(t *testing.T, report string) result {
	r := result{verdict: "no error"}
	number := func(s string) int {
		f, err := strconv.ParseFloat(s, 64)
		require.NoError(t, err)
		return int(f)
	}
	m := errorsLine.FindStringSubmatch(report)
	require.NotNil(t, m, "no result in:\n%s", report)
	r.depth, r.errors = number(m[1]), number(m[2])
	m = statesLine.FindStringSubmatch(report)
	require.NotNil(t, m, "no state count in:\n%s", report)
	r.states = number(m[1])
	if m = memoryLine.FindStringSubmatch(report); m != nil {
		r.memoryMiB = number(m[1])
	}
	if m = verdictLine.FindStringSubmatch(report); m != nil {
		r.verdict, r.depth = m[1], number(m[2])
	}
	r.complete = !strings.Contains(report, "Search not completed") &&
		!strings.Contains(report, "max search depth too small") &&
		!strings.Contains(report, "reached -DMEMLIM bound")
	return r
}

func command(t *testing.T, dir, name string, args ...string) string {
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %s\n%s", name, strings.Join(args, " "), out)
	return string(bytes.TrimSpace(out))
}

// needSpin skips the test if a tool is missing. .ci/tools installs both where it can.
func needSpin(t *testing.T) {
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("the models need %s: apt-get install %s", tool, tool)
		}
	}
}

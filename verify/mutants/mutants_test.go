package mutants

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/mutants/selected"
	"github.com/quarrystore/quarry/verify/testbinary"
)

var (
	allFlag   = flag.Bool("all", false, "run the slow mutants too")
	onlyFlag  = flag.String("only", "", "run mutants whose name matches this regular expression")
	runFlag   = flag.Int("run-of", 0, "which of its runs, in a process that runs a mutant")
	keepFlag  = flag.String("keep", "", "with -only: shrink the failure and keep it as verify/sim/testdata/sim/NAME.json")
	tableFlag = flag.Bool("table", false, "search without hints, write the table in docs/HAZARDS.md and the hints; use with -all")
	firstFlag = flag.String("first", "", "hint, in a process that runs a mutant")
)

// TestMutantsApply: every edit changes code that is there.
func TestMutantsApply(t *testing.T) {
	overlayOf(t, t.TempDir())
}

// overlayOf writes the overlay with every mutant.
func overlayOf(t *testing.T, dir string) (config string) {
	t.Helper()
	o := newOverlay()
	names := map[string]bool{}
	for i := range all {
		m := &all[i]
		if m.name == "" || m.what == "" || names[m.name] || len(m.edits) == 0 || len(m.runs) == 0 {
			t.Errorf("mutant %d, %q: an entry has a name of its own, says what it does, and has edits and runs", i+1, m.name)
		}
		names[m.name] = true
		if err := o.add(i+1, m); err != nil {
			t.Errorf("mutant %q (it %s) does not apply any more: %v\nThe comment of package mutants says what to do.", m.name, m.what, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	config, err := o.write(dir)
	require.NoError(t, err)
	return config
}

// TestMutants: every mutant is found. In a process with a mutant it is that mutant's run.
func TestMutants(t *testing.T) {
	if n := selected.Number(); n > 0 {
		m := &all[n-1]
		var first hint
		if *firstFlag != "" {
			require.NoError(t, json.Unmarshal([]byte(*firstFlag), &first))
		}
		b, err := json.Marshal(m.runs[*runFlag].find(t, m, first))
		require.NoError(t, err)
		fmt.Printf("%s%s\n", foundPrefix, b)
		return
	}
	if testing.Short() {
		t.Skip("-short: builds and runs every mutant in a process of its own, which takes a minute or more")
	}
	dir := t.TempDir()
	g := &gate{dir: dir, config: overlayOf(t, dir), built: map[string]string{}}
	pkgs := []string{here}
	only := regexp.MustCompile(*onlyFlag)
	known := readHints(t)
	var todo []job
	for i := range all {
		m := &all[i]
		if m.slow && !*allFlag && *onlyFlag == "" || !only.MatchString(m.name) {
			continue
		}
		for k := range m.runs {
			j := job{mutant: m, number: i + 1, which: k}
			if j.first = known[j.id()]; *tableFlag || *keepFlag != "" {
				j.first = hint{}
			}
			todo = append(todo, j)
			if pkg := m.runs[k].pkg; pkg != "" && !slices.Contains(pkgs, pkg) {
				pkgs = append(pkgs, pkg)
			}
		}
	}
	require.NotEmpty(t, todo, "no name of a mutant matches %q", *onlyFlag)
	g.build(t, pkgs)
	var next atomic.Int32
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for i := next.Add(1) - 1; int(i) < len(todo); i = next.Add(1) - 1 {
				g.play(t, &todo[i])
				todo[i].report(t)
			}
		})
	}
	workers.Wait()
	if *tableFlag && !t.Failed() {
		writeTable(t, todo)
		writeHints(t, known, todo)
	}
}

const (
	here        = "verify/mutants"
	foundPrefix = "found: "
	patience    = time.Hour // for one mutant, where go test has no -timeout
)

// gate is the build with all mutants.
type gate struct {
	dir, config string
	built       map[string]string // test binary of each package
}

// build builds the tests of packages with every mutant in them. -vet=off: a mutant need not satisfy vet, and go test -c
// would analyze again every package that a mutant changes, and all that import it. One go command reads the module once; it
// names the binaries by the last element of the path, so packages that share it need one more command.
func (g *gate) build(t *testing.T, pkgs []string) {
	t.Helper()
	for n := 0; len(pkgs) > 0; n++ {
		dir := filepath.Join(g.dir, fmt.Sprint("tests", n))
		args := []string{"test", "-c", "-vet=off", "-ldflags=-w", "-overlay", g.config, "-o", dir + "/"}
		var later []string
		named := map[string]bool{}
		for _, pkg := range pkgs {
			if named[path.Base(pkg)] {
				later = append(later, pkg)
				continue
			}
			named[path.Base(pkg)] = true
			args = append(args, "./"+pkg)
			g.built[pkg] = filepath.Join(dir, path.Base(pkg)+".test")
		}
		cmd := exec.Command("go", args...)
		cmd.Dir, cmd.Env = root, testbinary.ToolEnv()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("with all mutants in it, a test does not compile (a line that begins with \"mutant\" names the one that is wrong): %v\n%s", err, out)
		}
		pkgs = later
	}
}

// job is one run of one mutant, and what came of it.
type job struct {
	*mutant
	number, which int
	first         hint

	found
	ran    bool // the mutant's code was called
	err    error
	output []byte
	took   time.Duration
}

// play runs a mutant in a process of its own, of a test with schedules first the hinted one.
func (g *gate) play(t *testing.T, j *job) {
	end, ok := t.Deadline()
	if end = end.Add(-10 * time.Second); !ok {
		end = time.Now().Add(patience)
	}
	ctx, cancel := context.WithDeadline(context.Background(), end)
	defer cancel()
	began := time.Now()
	defer func() { j.took = time.Since(began).Round(10 * time.Millisecond) }()
	r := &j.runs[j.which]
	if r.test == "" {
		g.execute(ctx, j, g.built[here], ".", "-test.run=^TestMutants$", fmt.Sprint("-run-of=", j.which), "-keep="+*keepFlag, "-first="+j.first.json())
		if ctx.Err() == nil {
			j.parse()
		}
		return
	}
	args := append([]string{"-test.run=" + r.test, "-test.failfast"}, r.args...)
	binary, dir := g.built[r.pkg], filepath.Join(root, r.pkg)
	if j.first.At != "" && hasSchedules(r.args) {
		g.execute(ctx, j, binary, dir, append(slices.Clone(args), "-schedules=1", "-schedule-seed="+j.first.At)...)
		if j.failedTest(); j.What != "" {
			j.Runs = j.first.Runs
			return
		}
	}
	g.execute(ctx, j, binary, dir, args...)
	j.failedTest()
}

// hasSchedules reports whether the test plays schedules and has flags that say which.
func hasSchedules(args []string) bool {
	return slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "-schedules=") })
}

// execute runs a mutant's process. Its temporary files are removed with it: a test that a mutant
// brings down removes none.
func (g *gate) execute(ctx context.Context, j *job, binary, dir string, args ...string) {
	temp, err := os.MkdirTemp("", "mutant") // a short path: unix sockets are made in it
	if err != nil {
		j.err = err
		return
	}
	defer os.RemoveAll(temp)
	cmd := exec.CommandContext(ctx, binary, append(args, "-test.timeout=0")...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+temp, fmt.Sprintf("%s=%d", selected.Variable, j.number))
	if binary == g.built[here] {
		cmd.Env = append(cmd.Env, "GOGC=400") // schedules leave little garbage in little memory
	}
	j.output, j.err = cmd.CombinedOutput()
	j.ran = bytes.Contains(j.output, []byte(selected.Ran))
	if ctx.Err() != nil {
		j.err = errors.New("not over in the time that go test has")
	}
}

// failedTest takes what an ordinary test has printed: it has found the mutant if it failed.
func (j *job) failedTest() {
	var exit *exec.ExitError
	if !errors.As(j.err, &exit) || exit.ExitCode() <= 0 {
		return
	}
	j.Runs, j.What, j.err = 1, failed(j.output), nil
	if n := afterSchedules.FindSubmatch(j.output); n != nil {
		j.At = string(n[1])
		j.Runs, _ = strconv.Atoi(string(n[2]))
	}
}

// parse takes what a run of this package has printed. A process that crashed in the
// mutant's code has found it too: without the mutant a crash fails the same schedules.
func (j *job) parse() {
	for line := range strings.Lines(string(j.output)) {
		if b, ok := strings.CutPrefix(line, foundPrefix); ok && j.err == nil {
			j.err = json.Unmarshal([]byte(b), &j.found)
			return
		}
	}
	if what := crash(j.output); what != "" && j.ran {
		j.Runs, j.What, j.err = 1, what, nil
		return
	}
	j.err = errors.Join(errors.New("the run did not end as it should"), j.err)
}

// afterSchedules is what a test with random schedules prints when one has failed.
var afterSchedules = regexp.MustCompile(`(?:seed (\d+): .*)?failed after (\d+) schedules`)

// failed is the name of the test that failed.
func failed(output []byte) string {
	for line := range strings.Lines(string(output)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--- FAIL: "); ok {
			name, _, _ = strings.Cut(name, " ")
			return name
		}
	}
	return cmp.Or(crash(output), "?")
}

// crash is the first line of the message with which a process of Go has crashed.
func crash(output []byte) string {
	for line := range strings.Lines(string(output)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			return line
		}
	}
	return ""
}

func (j *job) report(t *testing.T) {
	switch {
	case j.err != nil:
		t.Errorf("%s: %v\n%s", j.name, j.err, tail(j.output))
	case !j.ran:
		t.Errorf("%s: its code was never called: the run is not about it", j.name)
	case j.What == "":
		t.Errorf("%s: NOT found in %d runs, %v: it %s, and nothing notices", j.name, j.Runs, j.took, j.what)
	default:
		t.Logf("%-60s %6d  %s (%v) %.100q", j.name, j.Runs, j.What, j.took, j.Detail)
	}
}

func tail(b []byte) []byte { return b[max(0, len(b)-4000):] }

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/verify/testbinary"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// A stand is a report at a clock that the test moves.
type stand struct {
	*report
	out  strings.Builder
	time time.Time
}

func newStand(stages ...*stage) *stand {
	s := &stand{time: time.Unix(1000, 0)}
	s.report = newReport(&s.out, stages)
	s.report.now = func() time.Time { return s.time }
	s.report.began = s.time
	return s
}

// said returns what was printed since the last call.
func (s *stand) said() string {
	defer s.out.Reset()
	return s.out.String()
}

// events gives go test's events of one package to the report: "action", "action Test" or
// "output Test text"; the test "-" is none.
func (s *stand) events(of *stage, pkg string, lines ...string) {
	for _, line := range lines {
		action, rest, _ := strings.Cut(line, " ")
		test, text, _ := strings.Cut(rest, " ")
		if test == "-" {
			test = ""
		}
		e := fmt.Sprintf(`{"Action":%q,"Package":%q,"Test":%q,"Elapsed":0.5`, action, module+pkg, test)
		if action == "output" {
			e += fmt.Sprintf(`,"Output":%q`, text+"\n")
		}
		s.event(of, e+"}")
	}
}

func TestPassingPackagePrintsItsLine(t *testing.T) {
	tests := &stage{name: "tests", goTest: true, packages: 2}
	race := &stage{name: "race", goTest: true, packages: 1, mark: "(race)"}
	s := newStand(tests, race)
	s.started(tests)
	s.started(race)
	s.said()
	for _, st := range []*stage{tests, race} {
		s.events(st, "slab", "start", "run TestA", "output TestA === RUN   TestA", "output TestA     a_test.go:1: hello", "output TestA --- PASS: TestA (0.50s)", "pass TestA",
			"output - PASS", "output - ok  \t"+module+"slab\t0.5s", "pass")
	}
	require.Equal(t, "ok  \t"+module+"slab\t0.5s\nok  \t"+module+"slab\t0.5s\t(race)\n", s.said())
	s.ended(tests, nil)
	s.ended(race, nil)
	require.True(t, s.end())
	require.Contains(t, s.said(), "DONE 2 tests, 0 skipped, 0 failures in 0s")
}

// The processor time that cpu.sh prints stands behind a package's line, and the end names the most
// expensive packages. A cached result has the line of an earlier run.
func TestPackagesHaveTheirCost(t *testing.T) {
	tests := &stage{name: "tests", goTest: true, packages: 3}
	s := newStand(tests)
	s.started(tests)
	s.said()
	for _, pkg := range []string{"slab\t0.5s", "alloc\t9s", "btree\t(cached)"} {
		name, _, _ := strings.Cut(pkg, "\t")
		used := map[string]string{"slab": "1m1.50s 0m0.25s", "alloc": "0m0.40s 0m0.20s", "btree": "5m0.00s 0m0.00s"}[name]
		s.events(tests, name, "start", "output - PASS", "output - 0m0.00s 0m0.00s", "output - "+used, "output - ok  \t"+module+pkg, "pass")
	}
	require.Equal(t, "ok  \t"+module+"slab\t0.5s\t61.8 s of processor time\nok  \t"+module+"alloc\t9s\t0.6 s of processor time\nok  \t"+module+"btree\t(cached)\n", s.said())
	s.ended(tests, nil)
	require.True(t, s.end())
	require.Contains(t, s.said(), "processor time of tests, without building them: 62 s; most: slab 62 s, alloc 1 s\n")
}

// cpu.sh prints what a program and its children have used, and keeps its exit code.
func TestScriptMeasures(t *testing.T) {
	work := `i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done`
	out, err := exec.Command("sh", "cpu.sh", "sh", "-c", "echo there; sh -c '"+work+"'; exit 7").CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 7, exit.ExitCode())
	p := &pkgRun{}
	for line := range strings.Lines(string(out)) {
		p.output(strings.TrimSuffix(line, "\n"))
	}
	require.Equal(t, []string{"there"}, p.lines)
	require.Positive(t, p.cpu)
}

// go test ends a test that hangs by SIGQUIT to cpu.sh: the test binary prints its goroutines. It has its input, and its exit code counts.
func TestScriptPassesSignalsOn(t *testing.T) {
	if os.Getenv("TESTRUN_HANGS") != "" {
		b := make([]byte, 5)
		_, err := io.ReadFull(os.Stdin, b)
		require.NoError(t, err)
		fmt.Printf("has %s\n", b)
		select {}
	}
	for sent, want := range map[os.Signal]struct {
		code int
		text string
	}{unix.SIGQUIT: {2, "TestScriptPassesSignalsOn"}, unix.SIGTERM: {128 + 15, ""}, unix.SIGINT: {128 + 15, ""}} {
		if signal.Ignored(sent) {
			t.Logf("%v is ignored here, as for programs in the background: a shell cannot change that", sent)
			continue
		}
		cmd := exec.Command("sh", "cpu.sh", os.Args[0], "-test.run", "^TestScriptPassesSignalsOn$")
		cmd.Env = append(os.Environ(), "TESTRUN_HANGS=1")
		cmd.Stdin = strings.NewReader("input")
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		var traces strings.Builder
		cmd.Stderr = &traces
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(out)
		require.True(t, lines.Scan())
		require.Equal(t, "has input", lines.Text())
		require.NoError(t, cmd.Process.Signal(sent))
		last := ""
		for lines.Scan() {
			last = lines.Text()
		}
		var exit *exec.ExitError
		require.ErrorAs(t, cmd.Wait(), &exit)
		require.Equal(t, want.code, exit.ExitCode(), "%v", sent)
		require.Contains(t, traces.String(), want.text)
		require.Regexp(t, `^\d+m[\d.]+s \d+m[\d.]+s$`, last, "the times are printed")
	}
}

func TestFailureIsPrintedAndRepeated(t *testing.T) {
	race := &stage{name: "race", goTest: true, packages: 1, mark: "(race)"}
	s := newStand(race)
	s.started(race)
	s.said()
	s.events(race, "slab", "run TestA", "run TestA/one", "output TestA/one === RUN   TestA/one", "output TestA/one     a_test.go:1: wrong",
		"output TestA/one     --- FAIL: TestA/one (0.50s)", "fail TestA/one", "output TestA --- FAIL: TestA (0.50s)", "fail TestA",
		"run TestB", "output TestB     a_test.go:9: fine", "output TestB --- PASS: TestB (0.50s)", "pass TestB",
		"output - FAIL", "output - FAIL\t"+module+"slab\t0.5s", "fail")
	require.Equal(t, "--- FAIL: TestA (0.50s)\n    --- FAIL: TestA/one (0.50s)\n    a_test.go:1: wrong\nFAIL\nFAIL\t"+module+"slab\t0.5s\t(race)\n", s.said())
	s.ended(race, errors.New("exit status 1"))
	s.said()
	require.False(t, s.end())
	said := s.said()
	require.Contains(t, said, "--- FAIL: TestA/one (0.50s) slab\t(race)\n    a_test.go:1: wrong\n")
	require.Contains(t, said, "DONE 3 tests, 0 skipped, 1 failures")
	require.NotContains(t, said, "FAIL: TestA (", "the parent says nothing of its own")
}

// What was running when the process ended is named with what it had printed.
func TestPanicNamesTheTestThatRan(t *testing.T) {
	tests := &stage{name: "tests", goTest: true, packages: 1}
	s := newStand(tests)
	s.started(tests)
	s.events(tests, "slab", "run TestA", "output TestA panic: boom", "output - FAIL\t"+module+"slab\t0.5s", "fail")
	s.ended(tests, errors.New("exit status 1"))
	require.Contains(t, s.said(), "--- FAIL: TestA (not ended)\npanic: boom\nFAIL\nFAIL\t")
	require.False(t, s.end())
	require.Contains(t, s.said(), "--- FAIL: TestA (not ended) slab\npanic: boom\n")
}

func TestStageThatFailsWithoutATest(t *testing.T) {
	tests := &stage{name: "tests", goTest: true, packages: 1}
	vet := &stage{name: "vet"}
	s := newStand(tests, vet)
	s.started(tests)
	s.event(tests, `{"ImportPath":"x","Action":"build-output","Output":"x.go:1: undefined: y\n"}`)
	s.event(tests, "go: no such thing")
	s.ended(tests, errors.New("exit status 1"))
	require.Contains(t, s.said(), "x.go:1: undefined: y\ngo: no such thing\n")
	require.False(t, s.end())
	require.Contains(t, s.said(), "FAIL: stage tests: exit status 1\n")
}

// A run in which a stage was never reached has not succeeded.
func TestStageThatWasNotRun(t *testing.T) {
	build, tests := &stage{name: "build"}, &stage{name: "tests", goTest: true}
	s := newStand(build, tests)
	s.started(build)
	s.ended(build, nil)
	require.False(t, s.end())
	require.Contains(t, s.said(), "tests      not run\n")
}

func TestSkipsAreListedWithTheirReasons(t *testing.T) {
	tests := &stage{name: "tests", goTest: true, packages: 1}
	s := newStand(tests)
	s.started(tests)
	s.events(tests, "slab", "run TestA", "output TestA     a_test.go:7: no device: load rdma_rxe", "output TestA --- SKIP: TestA (0.00s)", "skip TestA",
		"run TestB", "output TestB     b_test.go:7: not with -short", "output TestB --- SKIP: TestB (0.00s)", "skip TestB", "pass")
	s.ended(tests, nil)
	s.said()
	require.True(t, s.end())
	said := s.said()
	require.Contains(t, said, "--- SKIP: TestA slab: no device: load rdma_rxe\n")
	require.Contains(t, said, "--- SKIP: TestB slab: not with -short\n")
}

func TestSkipsInsideOtherStagesAreListed(t *testing.T) {
	vm := &stage{name: "soft-roce"}
	s := newStand(vm)
	s.started(vm)
	for _, line := range []string{"--- SKIP: TestA/native (the fabric): libibverbs has no FLUSH: it needs rdma-core 45", "--- SKIP: TestB", "test-rdma: the fabric: ok, 3 s"} {
		s.line(vm, line)
	}
	s.ended(vm, nil)
	s.said()
	require.True(t, s.end())
	said := s.said()
	require.Contains(t, said, "--- SKIP: TestA/native (the fabric) soft-roce: libibverbs has no FLUSH: it needs rdma-core 45\n")
	require.Contains(t, said, "--- SKIP: TestB soft-roce: no reason given\n")
	require.Contains(t, said, ", 2 skipped, ")
}

func TestProgressNamesWhatRunsAndWhatIsLeft(t *testing.T) {
	tests := &stage{name: "tests", goTest: true, packages: 3}
	vm, race := &stage{name: "soft-roce"}, &stage{name: "race"}
	s := newStand(tests, vm, race)
	s.progress()
	require.Empty(t, s.said(), "nothing runs")
	s.started(tests)
	s.events(tests, "slab", "start", "pass")
	s.events(tests, "alloc", "start", "run TestA", "run TestA/one")
	s.time = s.time.Add(70 * time.Second)
	s.events(tests, "client", "run TestB", "pause TestB", "run TestC")
	s.started(vm)
	s.line(vm, "test-rdma: the fabric: ok, 30 s")
	s.said()
	s.time = s.time.Add(20 * time.Second)
	s.progress()
	require.Equal(t, "[1:30] 3 of 3 stages left; tests: 1 of 3 packages done, running alloc (TestA/one 90 s), client (TestC 20 s); soft-roce: 20 s, last line: test-rdma: the fabric: ok, 30 s\n", s.said())
	s.ended(vm, nil)
	require.Equal(t, "[1:30] soft-roce: ok in 20 s, 2 of 3 stages left\n", s.said())
}

// Stages run as processes: the first group stops at what fails, a lane does not.
func TestRun(t *testing.T) {
	sh := func(name, script string) *stage { return &stage{name: name, command: []string{"sh", "-c", script}} }
	file := filepath.Join(t.TempDir(), "ran")
	p := plan{first: []*stage{sh("a", "echo one; echo two >&2")}, lanes: [][]*stage{{sh("b", "exit 3"), sh("c", "echo c >>"+file)}, {{name: "d", skip: "no compiler"}}}}
	s := newStand(p.stages()...)
	p.run(t.Context(), s.report)
	require.False(t, s.end())
	said := s.said()
	for _, line := range []string{"one\n", "two\n", "a          ok in 0 s, 0 s of processor time\n", "b          FAILED in 0 s, 0 s of processor time\n", "c          ok in 0 s, 0 s of processor time\n", "d          skipped\n", "FAIL: stage b: exit status 3\n"} {
		require.Contains(t, said, line)
	}
	require.FileExists(t, file)

	p = plan{first: []*stage{sh("a", "exit 1"), sh("b", "true")}}
	s = newStand(p.stages()...)
	p.run(t.Context(), s.report)
	require.False(t, s.end())
	require.Contains(t, s.said(), "b          not run\n")
}

// Ending the run ends what its stages have started.
func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	st := &stage{name: "a", command: []string{"sh", "-c", "sleep 600 & echo there; wait"}}
	s := newStand(st)
	done := make(chan bool)
	go func() { done <- st.run(ctx, s.report) }()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return strings.Contains(s.out.String(), "there")
	}, patience, time.Millisecond)
	cancel()
	require.False(t, <-done)
	require.False(t, s.end())
}

func TestPlan(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	p, err := newPlan("")
	require.NoError(t, err)
	var names []string
	for _, s := range p.stages() {
		names = append(names, s.name)
	}
	require.Equal(t, []string{"build", "gofmt", "vet", "tests", "soft-roce", "fuzz", "race", "plain"}, names)
	all, err := packages("go")
	require.NoError(t, err)
	for _, name := range slices.Concat(slowest, notRaced) {
		require.Contains(t, all, "./"+name, "a package that no longer exists: rename it here too")
	}
	for _, name := range raced {
		require.DirExists(t, name)
	}
	tests, race, plain := p.stages()[3].command, p.stages()[6], p.stages()[7]
	for _, pkg := range all {
		if race.skip != "" {
			require.Contains(t, tests, pkg)
			continue
		}
		require.NotEqual(t, slices.Contains(tests, pkg), slices.Contains(race.command, pkg), "%s runs in one of both stages", pkg)
	}
	require.Less(t, slices.Index(tests, "./verify/sim"), slices.Index(tests, "./coproc/worker"))
	require.Equal(t, race, plain.rest)
	for pkg, want := range map[string]bool{"./slab": true, "./gateway/redis": true, "./verify/clientsim": true, "./verify/sim": false, "./verify/models": false, "./cmd/quarry": false} {
		require.Equal(t, want, slices.Contains(race.command, pkg) || race.skip != "" && want, pkg)
	}

	p, err = newPlan("tests")
	require.NoError(t, err)
	for _, pkg := range all {
		require.Contains(t, p.stages()[0].command, pkg, "without the stage race, tests runs everything")
	}
	_, err = newPlan("plain")
	require.ErrorContains(t, err, "race,plain")
	p, err = newPlan("vet,race")
	require.NoError(t, err)
	require.Len(t, p.stages(), 2)
	_, err = newPlan("vet,fly")
	require.ErrorContains(t, err, `no stage "fly"`)
	t.Setenv("GO", "/no/such/go")
	_, err = newPlan("")
	require.Error(t, err)
}

// The compiler and the linker collect garbage less often; tests, and processes that they start, do
// not. A GOGC of the user's holds for both.
func TestToolsAloneCollectLess(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	for _, users := range []string{"", "70"} {
		t.Setenv("GOGC", users)
		p, err := newPlan("")
		require.NoError(t, err)
		for _, s := range p.stages() {
			if s.goTest || s.name == "build" || s.name == "vet" {
				require.Equal(t, users == "", slices.Contains(s.env, "GOGC=400"), s.name)
			}
			if !s.goTest {
				continue
			}
			runner := s.command[slices.Index(s.command, "-exec")+1]
			cmd := exec.Command("sh", "-c", runner+` sh -c 'echo "GOGC=[$GOGC]"'`)
			cmd.Env = append(os.Environ(), s.env...)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "GOGC=["+users+"]\n", s.name)
		}
	}
}

// The stage build leaves the programs where the tests that start some look for them, linked with the same flags and in the same
// environment but for what lessCollection adds.
func TestProgramsAreLinkedOnce(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	p, err := newPlan("")
	require.NoError(t, err)
	s := p.stages()[0]
	require.Equal(t, "build", s.name)
	require.Contains(t, s.env, "CGO_ENABLED=0")
	require.Contains(t, s.String(), fmt.Sprintf("build '%s' -o %s/ ./...", testbinary.LinkFlags, testbinary.Folder))
}

// What the race detector or -short has kept from a test runs again, and nothing else.
func TestPlainRunsWhatRaceLeavesOut(t *testing.T) {
	race := &stage{name: "race", goTest: true, packages: 3, mark: "(race)"}
	plain := &stage{name: "plain", goTest: true, rest: race, command: []string{"go", "test"}}
	s := newStand(race, plain)
	s.started(race)
	s.events(race, "slab", "run TestA", "output TestA === RUN   TestA", "output TestA     a_test.go:1: fine", "pass TestA", "pass")
	s.events(race, "alloc", "run TestB", "run TestB/one", "output TestB/one     a_test.go:7: the race detector allocates", "skip TestB/one", "pass TestB",
		"run TestC", "output TestC     a_test.go:7: -short: fewer rounds", "pass TestC", "run TestD", "pass TestD", "pass")
	s.events(race, "rdma/tcp", "run TestE", "output TestE     b_test.go:7: takes a minute; not with -short", "skip TestE", "pass")
	s.ended(race, nil)
	plain.takeRest(s.report)
	require.Equal(t, "go test -run ^TestB$/^one$|^TestC$|^TestE$ ./rdma/tcp ./alloc", plain.String())
	require.Equal(t, 2, plain.packages)

	s.started(plain)
	s.events(plain, "alloc", "run TestB", "run TestB/one", "pass TestB/one", "pass TestB", "run TestC", "pass TestC", "pass")
	s.events(plain, "rdma/tcp", "pass")
	s.ended(plain, nil)
	require.False(t, s.checkRest(plain), "TestE has not run")
	s.events(plain, "rdma/tcp", "run TestE", "pass TestE", "pass")
	require.True(t, s.checkRest(plain))
	require.False(t, s.end())
	said := s.said()
	require.Contains(t, said, "--- SKIP: TestB/one alloc\t(race): the race detector allocates; the stage plain runs it\n")
	require.Contains(t, said, "--- SKIP: TestE rdma/tcp\t(race): takes a minute; not with -short; the stage plain runs it\n")
	require.Contains(t, said, "FAIL: stage plain has not run what race has left out\n"+module+"rdma/tcp TestE\n")

	race, plain = &stage{name: "race", goTest: true}, &stage{name: "plain", rest: race}
	plain.rest = race
	s = newStand(race, plain)
	s.started(race)
	s.ended(race, nil)
	require.True(t, plain.run(t.Context(), s.report))
	require.Contains(t, s.said(), "plain: skipped: race has left no test out")
}

// A pattern selects subtests alone, except where their test runs again itself.
func TestPatternOfSubtests(t *testing.T) {
	left := map[string]map[string]bool{
		"a": {"TestA/x_y/z#01": true, "TestB": true, "TestB/one": true, "TestC/(a|b)": true},
		"b": {"TestB/one": true},
	}
	require.Equal(t, `^TestA$/^x_y$/^z#01$|^TestB$|^TestB$/^one$|^TestC$/^\(a\|b\)$`, pattern(left))
}

// A test that does less with -short or under the race detector says so where it does: that
// is how the stage plain knows.
func TestWhatDoesLessSaysSo(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	out, err := exec.Command("git", "ls-files", "*.go").Output()
	require.NoError(t, err)
	looks := 0
	for name := range strings.FieldsSeq(string(out)) {
		if !isRaced(filepath.Dir(name)) {
			continue
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, name, nil, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted, and not committed
		}
		require.NoError(t, err)
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || filepath.Base(filepath.Dir(name)) == "testrun" {
				continue
			}
			asks, says := 0, 0
			ast.Inspect(fn, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && x.Name == "testing" && n.Sel.Name == "Short" {
						asks++
					}
				case *ast.Ident:
					if n.Name == "raceEnabled" {
						asks++
					}
				case *ast.BasicLit:
					if doesLess(n.Value) {
						says++
					}
				}
				return true
			})
			require.GreaterOrEqual(t, says, asks, "%s: %s looks at testing.Short or raceEnabled: where it does less, t.Log(\"-short: what it leaves out\")", set.Position(fn.Pos()), fn.Name.Name)
			looks += asks
		}
	}
	require.NotZero(t, looks)
}

func TestLines(t *testing.T) {
	var got []string
	w := &lineWriter{take: func(line string) { got = append(got, line) }}
	for _, part := range []string{"a", "b\nc", "\r\n", "\nd"} {
		n, err := w.Write([]byte(part))
		require.NoError(t, err)
		require.Equal(t, len(part), n)
	}
	w.flush()
	w.flush()
	require.Equal(t, []string{"ab", "c", "", "d"}, got)
}

// What is kept of one test is bounded.
func TestOutputIsBounded(t *testing.T) {
	var lines []string
	buried := 0
	for i := range 3 * maxLines {
		lines, buried = keep(lines, buried, fmt.Sprint(i))
	}
	require.LessOrEqual(t, len(lines), maxLines)
	require.Equal(t, 3*maxLines, len(lines)+buried)
	require.Equal(t, fmt.Sprint(3*maxLines-1), lines[len(lines)-1])
}

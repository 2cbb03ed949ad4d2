package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// A report prints a run and keeps what its end repeats.
type report struct {
	mu     sync.Mutex // guards all below; lines are printed under it
	out    io.Writer
	now    func() time.Time
	began  time.Time
	events string // folder that keeps go test's events, or empty
	stages []*stage
	state  map[*stage]*stageState

	tests    int
	costs    []cost
	skips    []skip
	failures []failure
}

// A stageState is what is known of a stage that has begun.
type stageState struct {
	began, ended time.Time
	err          error         // why the stage failed
	cpu          time.Duration // that its processes have used; 0: not known
	skipped      bool
	doing        string // the last line of a stage that is not go test
	done         int    // packages that have ended
	failures     int
	running      map[string]*pkgRun         // packages that run now
	left         map[string]map[string]bool // tests and subtests that were not run in full, by package
	begun        map[string]bool            // tests and subtests that have begun, as package and test
}

// A cost is the processor time of one package's tests, without what building them takes.
type cost struct {
	pkg string
	cpu time.Duration
}

// A skip is one test that was not run.
type skip struct {
	test, why string
	later     string // the stage that runs it, or empty
}

// A failure is one test, package or stage that failed.
type failure struct {
	title string
	lines []string
}

// skipPrefix begins the line of a skipped test, here and in stages that are not go test.
const skipPrefix = "--- SKIP: "

// costLines is how many of the most expensive packages the end names.
const costLines = 12

// failureLines bounds what the end repeats of one failure.
const failureLines = 40

func newReport(out io.Writer, stages []*stage) *report {
	r := &report{out: out, now: time.Now, stages: stages, state: map[*stage]*stageState{}}
	r.began = r.now()
	return r
}

func (r *report) printf(format string, args ...any) {
	fmt.Fprintf(r.out, format+"\n", args...)
}

// note prints a line about the run itself, with the time since its beginning.
func (r *report) note(format string, args ...any) {
	at := r.now().Sub(r.began).Round(time.Second)
	r.printf("[%d:%02d] %s", at/time.Minute, at%time.Minute/time.Second, fmt.Sprintf(format, args...))
}

func (r *report) started(s *stage) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state[s] = &stageState{began: r.now(), running: map[string]*pkgRun{}, left: map[string]map[string]bool{}, begun: map[string]bool{}}
	r.note("stage %d of %d, %s: %s", slices.Index(r.stages, s)+1, len(r.stages), s.name, s.short())
}

// short is the command line without the list of packages.
func (s *stage) short() string {
	words := s.command
	if i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "./") }); s.goTest && i > 0 && len(words)-i > 4 {
		words = append(slices.Clone(words[:i]), fmt.Sprintf("(%d packages)", len(words)-i))
	}
	return strings.Join(words, " ")
}

func (r *report) skipped(s *stage) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.state[s] = &stageState{began: now, ended: now, skipped: true}
	r.note("%s: skipped: %s", s.name, s.skip)
}

// laterStage names the stage that runs a test which this stage has skipped, or nothing.
func (r *report) laterStage(s *stage, pkg, test string) string {
	if left := r.state[s].left[pkg]; !left[test] && !within(left, test) {
		return ""
	}
	for _, other := range r.stages {
		if other.rest == s {
			return other.name
		}
	}
	return ""
}

// checkRest fails the stage if it has not begun a test that it was to run for another stage: a
// subtest, for example, whose name differs there.
func (r *report) checkRest(s *stage) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	missing := r.state[s].missing(r.state[s.rest].left)
	if len(missing) > 0 {
		r.failed(s, failure{title: fmt.Sprintf("FAIL: stage %s has not run what %s has left out", s.name, s.rest.name), lines: missing})
	}
	return len(missing) == 0
}

// leftOut are the tests of a stage that were not run, or not in full, by package.
func (r *report) leftOut(s *stage) map[string]map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if st := r.state[s]; st != nil {
		return st.left
	}
	return nil
}

// used notes the processor time of a stage's processes.
func (r *report) used(s *stage, p *os.ProcessState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p != nil {
		r.state[s].cpu = p.UserTime() + p.SystemTime()
	}
}

func (r *report) ended(s *stage, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := r.state[s]
	st.ended, st.err = r.now(), err
	for _, p := range st.running { // go test was ended before the package
		r.printFailure(s, p)
	}
	clear(st.running)
	if err != nil && st.failures == 0 {
		r.failed(s, failure{title: fmt.Sprintf("FAIL: stage %s: %v", s.name, err)})
	}
	r.note("%s: %s, %s", s.name, st.verdict(), r.left())
}

// failed keeps a failure for the end.
func (r *report) failed(s *stage, f failure) {
	r.state[s].failures++
	r.failures = append(r.failures, f)
}

func (st *stageState) verdict() string {
	word := "ok"
	if st.skipped {
		return "skipped"
	}
	if st.err != nil {
		word = "FAILED"
	}
	cpu := ""
	if st.cpu > 0 { // on a busy machine this says more than the time that has passed
		cpu = fmt.Sprintf(", %.0f s of processor time", st.cpu.Seconds())
	}
	return fmt.Sprintf("%s in %.0f s%s", word, st.ended.Sub(st.began).Seconds(), cpu)
}

// left says how many stages have not ended.
func (r *report) left() string {
	n := len(r.stages)
	for _, st := range r.state {
		if !st.ended.IsZero() {
			n--
		}
	}
	return fmt.Sprintf("%d of %d stages left", n, len(r.stages))
}

// line prints a line of a stage that is not go test, or what go test writes beside its events.
// A skipped test among them, "--- SKIP: TEST: REASON", is repeated at the end.
func (r *report) line(s *stage, line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state[s].doing = line
	if rest, found := strings.CutPrefix(line, skipPrefix); found {
		test, why, _ := strings.Cut(rest, ": ")
		r.skips = append(r.skips, skip{test: test + " " + s.name, why: cmp.Or(why, "no reason given")})
	}
	r.printf("%s", line)
}

// progress prints one line: the stages that run, how many of their packages are left, and
// the test of each that has run longest.
func (r *report) progress() {
	r.mu.Lock()
	defer r.mu.Unlock()
	var parts []string
	for _, s := range r.stages {
		st := r.state[s]
		if st == nil || !st.ended.IsZero() {
			continue
		}
		parts = append(parts, r.stageProgress(s, st))
	}
	if len(parts) == 0 {
		return
	}
	failed := ""
	if n := len(r.failures); n > 0 {
		failed = fmt.Sprintf(", %d failed", n)
	}
	r.note("%s%s; %s", r.left(), failed, strings.Join(parts, "; "))
}

func (r *report) stageProgress(s *stage, st *stageState) string {
	if !s.goTest {
		text := fmt.Sprintf("%s: %.0f s", s.name, r.now().Sub(st.began).Seconds())
		if st.doing != "" {
			text += ", last line: " + st.doing
		}
		return text
	}
	text := fmt.Sprintf("%s: %d of %d packages done", s.name, st.done, s.packages)
	pkgs := make([]string, 0, len(st.running))
	for name := range st.running {
		pkgs = append(pkgs, name)
	}
	slices.SortFunc(pkgs, func(a, b string) int {
		return cmp.Compare(st.running[a].began.UnixNano(), st.running[b].began.UnixNano())
	})
	for i, name := range pkgs {
		text += map[bool]string{true: ", running ", false: ", "}[i == 0] + strings.TrimPrefix(name, module)
		if test, since := st.running[name].longest(); test != "" {
			text += fmt.Sprintf(" (%s %.0f s)", test, r.now().Sub(since).Seconds())
		}
	}
	return text
}

// end prints the summary and reports whether all went well.
func (r *report) end() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.skips {
		if s.later != "" {
			s.why += "; the stage " + s.later + " runs it"
		}
		r.printf("%s%s: %s", skipPrefix, s.test, s.why)
	}
	good := true
	for _, s := range r.stages {
		verdict := "not run"
		if st := r.state[s]; st != nil {
			verdict = st.verdict()
		}
		if r.state[s] == nil || r.state[s].err != nil {
			good = false
		}
		r.printf("%-10s %s", s.name, verdict)
	}
	r.printCosts()
	for _, f := range r.failures {
		r.printf("%s", f.title)
		for i, line := range f.lines {
			if i == failureLines {
				r.printf("    … %d lines more above", len(f.lines)-i)
				break
			}
			r.printf("%s", line)
		}
	}
	r.printf("DONE %d tests, %d skipped, %d failures in %.0fs", r.tests, len(r.skips), len(r.failures), r.now().Sub(r.began).Seconds())
	return good && len(r.failures) == 0
}

// printCosts prints the packages whose tests have used most processor time.
func (r *report) printCosts() {
	slices.SortStableFunc(r.costs, func(a, b cost) int { return cmp.Compare(b.cpu, a.cpu) })
	var texts []string
	sum := time.Duration(0)
	for i, c := range r.costs {
		if sum += c.cpu; i < costLines && c.cpu > 0 {
			texts = append(texts, fmt.Sprintf("%s %.0f s", strings.ReplaceAll(c.pkg, "\t", " "), c.cpu.Seconds()))
		}
	}
	if len(texts) > 0 {
		r.printf("processor time of tests, without building them: %.0f s; most: %s", sum.Seconds(), strings.Join(texts, ", "))
	}
}

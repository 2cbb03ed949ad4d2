package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A pkgRun is one package while go test runs it.
type pkgRun struct {
	name   string
	began  time.Time
	tests  map[string]*testRun
	order  []*testRun    // of tests, as they began
	lines  []string      // what belongs to no test: panics, messages of TestMain
	last   string        // go test's ok or FAIL line
	cpu    time.Duration // that its processes have used; 0: not known, or the result was cached
	buried int           // lines dropped because of maxLines
}

// A testRun is one test.
type testRun struct {
	name    string
	began   time.Time
	running bool
	ended   bool
	failed  bool
	took    float64 // seconds
	lines   []string
	buried  int
}

// maxLines bounds what is kept of one test's output.
const maxLines = 20_000

// An event is one of go test -json (go doc test2json).
type event struct {
	Time        time.Time
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	Elapsed     float64
	FailedBuild string
}

// event takes a line of go test -json.
func (r *report) event(s *stage, line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e event
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
		r.printf("%s", line)
		return
	}
	st := r.state[s]
	if e.Action == "build-output" {
		r.printf("%s", strings.TrimSuffix(e.Output, "\n"))
		return
	}
	if e.Package == "" {
		return
	}
	p := st.running[e.Package]
	if p == nil {
		p = &pkgRun{name: e.Package, began: r.now(), tests: map[string]*testRun{}}
		st.running[e.Package] = p
	}
	if e.Test != "" {
		r.testEvent(s, p, e)
		return
	}
	switch e.Action {
	case "output":
		p.output(strings.TrimSuffix(e.Output, "\n"))
	case "pass", "fail", "skip":
		delete(st.running, e.Package)
		st.done++
		if strings.Contains(p.last, "(cached)") {
			p.cpu = 0 // that of an earlier run
		}
		r.costs = append(r.costs, cost{mark(strings.TrimPrefix(p.name, module), s), p.cpu})
		if e.Action == "fail" {
			r.printFailure(s, p)
			return
		}
		if p.last != "" {
			r.printf("%s%s", mark(p.last, s), p.used())
		}
	}
}

// used is what stands behind the package's line.
func (p *pkgRun) used() string {
	if p.cpu == 0 {
		return ""
	}
	return fmt.Sprintf("\t%.1f s of processor time", p.cpu.Seconds())
}

func mark(line string, s *stage) string {
	if s.mark == "" {
		return line
	}
	return line + "\t" + s.mark
}

// times is a line of cpu.sh: user and system time.
var times = regexp.MustCompile(`^\d+m\d+\.\d+s \d+m\d+\.\d+s$`)

func (p *pkgRun) output(line string) {
	for _, word := range []string{"ok  \t", "FAIL\t", "?   \t"} {
		if strings.HasPrefix(line, word) {
			p.last = line
			return
		}
	}
	if line == "PASS" || line == "FAIL" || line == "" {
		return
	}
	if times.MatchString(line) {
		for word := range strings.FieldsSeq(line) {
			d, _ := time.ParseDuration(word) // an odd number of seconds is not worth a failure
			p.cpu += d
		}
		return
	}
	p.lines, p.buried = keep(p.lines, p.buried, line)
}

// keep appends a line; beyond maxLines the oldest half goes.
func keep(lines []string, buried int, line string) ([]string, int) {
	if len(lines) == maxLines {
		lines = append(lines[:0], lines[maxLines/2:]...)
		buried += maxLines / 2
	}
	return append(lines, line), buried
}

func (r *report) testEvent(s *stage, p *pkgRun, e event) {
	t := p.tests[e.Test]
	if t == nil {
		t = &testRun{name: e.Test, began: r.now()}
		p.tests[e.Test] = t
		p.order = append(p.order, t)
	}
	switch e.Action {
	case "run", "cont":
		r.state[s].begun[p.name+" "+e.Test] = true
		t.running, t.began = true, r.now()
	case "pause":
		t.running = false
	case "output":
		line := strings.TrimSuffix(e.Output, "\n")
		r.state[s].notice(p.name, t.name, line)
		if !strings.HasPrefix(line, "=== ") {
			t.lines, t.buried = keep(t.lines, t.buried, line)
		}
	case "pass", "fail", "skip":
		r.tests++
		t.running, t.ended, t.failed, t.took = false, true, e.Action == "fail", e.Elapsed
		if e.Action == "skip" {
			r.skips = append(r.skips, skip{test: mark(e.Test+" "+strings.TrimPrefix(p.name, module), s), why: t.reason(), later: r.laterStage(s, p.name, e.Test)})
		}
		if !t.failed {
			t.lines = nil
		}
	}
}

// doesLess reports whether a line says that a test does less, or nothing, with -short or
// under the race detector.
func doesLess(line string) bool {
	return strings.Contains(line, "-short") || strings.Contains(line, "the race detector")
}

// notice keeps the name of a test or subtest that does less. TestWhatDoesLessSaysSo makes sure
// that each says it.
func (st *stageState) notice(pkg, test, line string) {
	if !doesLess(line) {
		return
	}
	if st.left[pkg] == nil {
		st.left[pkg] = map[string]bool{}
	}
	st.left[pkg][test] = true
}

// pattern is the -run flag that selects the tests and subtests of all packages.
func pattern(left map[string]map[string]bool) string {
	wanted := map[string]bool{}
	for _, tests := range left {
		for name := range tests {
			if !within(tests, name) {
				levels := strings.Split(name, "/")
				for i, l := range levels {
					levels[i] = "^" + regexp.QuoteMeta(l) + "$"
				}
				wanted[strings.Join(levels, "/")] = true
			}
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(wanted)), "|")
}

// within reports whether a test above the named one is among the tests: it runs all its subtests.
func within(tests map[string]bool, name string) bool {
	for i := strings.LastIndexByte(name, '/'); i > 0; i = strings.LastIndexByte(name, '/') {
		name = name[:i]
		if tests[name] {
			return true
		}
	}
	return false
}

// missing are the tests of left that the stage has not begun, as package and test.
func (st *stageState) missing(left map[string]map[string]bool) (names []string) {
	for pkg, tests := range left {
		for name := range tests {
			if full := pkg + " " + name; !st.begun[full] && !within(tests, name) {
				names = append(names, full)
			}
		}
	}
	slices.Sort(names)
	return names
}

// reason is what a skipped test said last.
func (t *testRun) reason() string {
	for _, line := range slices.Backward(t.lines) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "--- ") {
			continue
		}
		if _, text, found := strings.Cut(line, ": "); found && strings.Contains(line[:len(line)-len(text)], ".go:") {
			line = text
		}
		return line
	}
	return "no reason given"
}

// longest is the test that has run longest, without the parents of those that run.
func (p *pkgRun) longest() (name string, since time.Time) {
	for _, t := range p.order {
		if !t.running {
			continue
		}
		if name == "" || t.began.Before(since) || strings.HasPrefix(t.name, name+"/") {
			name, since = t.name, t.began
		}
	}
	return name, since
}

// printFailure prints a package that failed as go test does, and keeps each failed test for
// the end. A test without an end was running when the package's process ended.
func (r *report) printFailure(s *stage, p *pkgRun) {
	where := mark(strings.TrimPrefix(p.name, module), s)
	before := len(r.failures)
	for _, t := range p.order {
		if t.ended && !t.failed {
			continue
		}
		head := slices.IndexFunc(t.lines, func(l string) bool { return strings.HasPrefix(strings.TrimSpace(l), "--- FAIL") })
		if head < 0 {
			r.printf("--- FAIL: %s (not ended)", t.name)
		} else {
			r.printf("%s", t.lines[head])
			t.lines = slices.Delete(t.lines, head, head+1)
		}
		r.printLines(t.lines, t.buried)
		parent := slices.ContainsFunc(p.order, func(o *testRun) bool {
			return strings.HasPrefix(o.name, t.name+"/") && (o.failed || !o.ended)
		})
		if parent && len(t.lines) == 0 {
			continue
		}
		end := fmt.Sprintf("%.2fs", t.took)
		if !t.ended {
			end = "not ended"
		}
		r.failed(s, failure{title: fmt.Sprintf("--- FAIL: %s (%s) %s", t.name, end, where), lines: t.lines})
	}
	r.printLines(p.lines, p.buried)
	if len(r.failures) == before {
		r.failed(s, failure{title: "--- FAIL: " + where, lines: p.lines})
	}
	last := p.last
	if last == "" {
		last = "FAIL\t" + p.name
	}
	r.printf("FAIL\n%s%s", mark(last, s), p.used())
}

func (r *report) printLines(lines []string, buried int) {
	if buried > 0 {
		r.printf("    … %d lines dropped", buried)
	}
	for _, line := range lines {
		r.printf("%s", line)
	}
}

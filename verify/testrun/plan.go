package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

const module = "github.com/quarrystore/quarry/"

// A plan is what one run does: the stages of first in order, then the lanes beside each
// other, each with its stages in order.
type plan struct {
	first []*stage
	lanes [][]*stage
}

// A stage is one command.
type stage struct {
	name    string
	command []string
	env     []string // added to the environment
	goTest  bool     // the command is go test -json
	// mark stands behind the lines of the stage's packages, where another stage runs the
	// same packages.
	mark     string
	packages int    // packages that a go test stage runs; 0 is unknown
	skip     string // why the stage is not run; empty runs it
	// rest is a stage whose tests were not run, or not in full; this one runs them. The
	// command is complete but for these.
	rest *stage
}

func (s *stage) String() string {
	if s.skip != "" {
		return "skipped: " + s.skip
	}
	return strings.Join(append(slices.Clone(s.env), s.command...), " ")
}

// The packages that take longest, which are started first: one that begins last makes all others
// wait for it. Those that mostly wait stand between those that use processors.
var slowest = []string{
	"cmd/quarry", "verify/mutants", "coproc/job", "verify/sim", "verify/deploytest", "verify/models", "verify/hostile",
	"verify/clientsim", "verify/chaos", "verify/rxevm", "verify/rxevm/killed", "verify/rxevm/shared", "verify/testcluster", "gateway/redis", "controller", "client", "internal/etcdembed", "rdma/shm", "storagenode",
	"rdma/tcp", "btree", "fsck", "rdma/host", "btree/kv", "rdma/sim", "controller/state", "cmd/quarry/kvfile",
	"alloc", "examples", "deploy/dist",
}

// raced are the folders whose tests run under the race detector: the data path and the
// control plane.
var raced = []string{"alloc", "btree", "client", "controller", "fsck", "gateway", "internal", "proto", "rdma", "slab", "storagenode", "verify"}

// notRaced are packages below raced in whose tests nothing runs beside anything: they start
// compilers and other programs, read the sources, step a pure machine, or resume one
// coroutine after the other.
var notRaced = []string{"verify/models", "verify/models/layout2", "verify/lint", "verify/deploytest", "verify/hostile", "proto/quarrypb",
	"controller/state", "storagenode/state", "rdma/msg", "verify/sim", "verify/mutants", "verify/rxevm/killed", "verify/rxevm/shared"}

// build compiles every package, and links every program as verify/testbinary does: the tests that start programs find them
// linked. go build -o leaves out what is no program; several packages without a program are compiled and linked into nothing.
const build = `"$1" build $("$1" list -f '{{if ne .Name "main"}}{{.ImportPath}}{{end}}' ./...) && mkdir -p bin/tests/built && "$1" build '-ldflags=-s -w' -o bin/tests/built/ ./...`

func newPlan(only string) (plan, error) {
	tool := os.Getenv("GO")
	if tool == "" {
		tool = "go"
	}
	all, err := packages(tool)
	if err != nil {
		return plan{}, err
	}
	// One set of compiled packages serves the program and the tests: without cgo, as the program is
	// shipped, and with -trimpath, as the archives are built. The tags choose the files of net and
	// os/user that CGO_ENABLED=0 chooses. With them the verbs provider, which needs cgo, finds all
	// packages compiled except its own. The race detector compiles for itself; the programs that its
	// tests start are built with the same flags.
	flags := "GOFLAGS=" + strings.TrimSpace(os.Getenv("GOFLAGS")+" -trimpath -tags=netgo,osusergo")
	static := []string{"CGO_ENABLED=0", flags}
	tools, runner := lessCollection(os.Getenv("GOGC"))
	goTool := slices.Concat(static, tools)
	// -vet=off: the stage vet has run every analyzer. -ldflags=-w: to write the tables for debuggers takes
	// the linker a second of processor time for each test binary.
	here, err := os.Getwd()
	if err != nil {
		return plan{}, err
	}
	test := func(flags ...string) []string {
		return append([]string{tool, "test", "-json", "-vet=off", "-ldflags=-w", "-timeout", "35m", "-exec", runner + "sh '" + here + "/verify/testrun/cpu.sh'"}, flags...)
	}
	atOnce := strconv.Itoa(runtime.NumCPU())
	tests := &stage{name: "tests", goTest: true, env: goTool}
	race := &stage{name: "race", goTest: true, env: slices.Concat([]string{"CGO_ENABLED=1", flags}, tools), mark: "(race)", skip: noRace(tool)}
	// Plain is the last stage, and most of its packages wait: for leases, for processes, or for the one processor they use.
	plain := &stage{name: "plain", goTest: true, env: goTool, mark: "(plain)", rest: race, skip: race.skip, command: test("-p", strconv.Itoa(2*runtime.NumCPU()))}
	underRace := slices.DeleteFunc(slices.Clone(all), func(p string) bool { return !isRaced(p) })
	race.packages = len(underRace)
	race.command = append(test("-race", "-short", "-p", atOnce), slowestFirst(underRace)...)
	p := plan{
		first: []*stage{
			{name: "build", env: goTool, command: []string{"sh", "-c", build, "sh", tool}},
			{name: "gofmt", command: []string{"sh", "-c",
				`files=$(gofmt -l $(git ls-files -co --exclude-standard '*.go')) && [ -z "$files" ] || { echo "not gofmt clean, run gofmt -w on:"; echo "$files"; exit 1; }`}},
			{name: "vet", env: goTool, command: []string{tool, "vet", "./..."}},
		},
		lanes: [][]*stage{
			{tests},
			{
				{name: "soft-roce", env: []string{flags}, command: []string{"sh", "verify/rxevm/test-rdma.sh", "suited"}},
				{name: "fuzz", env: append([]string{"FUZZTIME=1000x", "FUZZWORKERS=1"}, static...), command: []string{"sh", "verify/fuzz/run.sh"}},
			},
			{race, plain},
		},
	}
	if err := p.keep(only); err != nil {
		return plan{}, err
	}
	// A test that passes under the race detector is not run again without it. What the race
	// detector or -short keeps from a test, the stage plain does.
	if slices.Contains(p.stages(), race) && slices.Contains(p.stages(), plain) && race.skip == "" {
		all = slices.DeleteFunc(all, isRaced)
	}
	tests.packages, tests.command = len(all), append(test("-p", atOnce), slowestFirst(all)...)
	if slices.Contains(p.stages(), plain) && !slices.Contains(p.stages(), race) {
		return plan{}, errors.New("plain runs what race leaves out: -only race,plain")
	}
	return p, nil
}

// lessCollection is what has the compiler and the linker collect garbage less often, since they end
// before they fill the memory, and what starts a test without that: tests keep Go's own setting.
// A GOGC of the user's holds for all of them.
func lessCollection(users string) (tools []string, runner string) {
	if users != "" {
		return nil, ""
	}
	return []string{"GOGC=400"}, "env -u GOGC "
}

// keep leaves the named stages; no names leave all.
func (p *plan) keep(only string) error {
	if only == "" {
		return nil
	}
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(only, ",") {
		wanted[name] = false
	}
	drop := func(s *stage) bool {
		_, found := wanted[s.name]
		if found {
			wanted[s.name] = true
		}
		return !found
	}
	p.first = slices.DeleteFunc(p.first, drop)
	for i := range p.lanes {
		p.lanes[i] = slices.DeleteFunc(p.lanes[i], drop)
	}
	for name, found := range wanted {
		if !found {
			return fmt.Errorf("no stage %q: testrun -list prints the stages", name)
		}
	}
	return nil
}

func (p plan) stages() []*stage {
	return slices.Concat(append([][]*stage{p.first}, p.lanes...)...)
}

// packages are the module's packages that have tests, as paths below the module.
func packages(tool string) ([]string, error) {
	out, err := exec.Command(tool, "list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("%s list: %w: are we in the module's folder?", tool, err)
	}
	var all []string
	for p := range strings.FieldsSeq(string(out)) {
		all = append(all, "./"+strings.TrimPrefix(p, module))
	}
	return all, nil
}

func slowestFirst(pkgs []string) []string {
	rank := func(p string) int {
		if i := slices.Index(slowest, strings.TrimPrefix(p, "./")); i >= 0 {
			return i
		}
		return len(slowest)
	}
	pkgs = slices.Clone(pkgs)
	slices.SortStableFunc(pkgs, func(a, b string) int { return rank(a) - rank(b) })
	return pkgs
}

func isRaced(pkg string) bool {
	rel := strings.TrimPrefix(pkg, "./")
	top, _, _ := strings.Cut(rel, "/")
	return slices.Contains(raced, top) && !slices.Contains(notRaced, rel)
}

// noRace says why the race detector cannot run, or nothing.
func noRace(tool string) string {
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "gcc"
	}
	const remedy = "the race detector needs cgo and a C compiler (apt-get install gcc libc6-dev)"
	if _, err := exec.LookPath(cc); err != nil {
		return remedy
	}
	if out, err := exec.Command(tool, "env", "CGO_ENABLED").Output(); err == nil && strings.TrimSpace(string(out)) == "0" {
		return remedy
	}
	return ""
}

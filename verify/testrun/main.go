// Testrun runs what `make test` runs: the builds and linters first, then the test lanes
// beside each other, because most tests wait for leases and processes and leave the
// processors idle.
//
//	go run ./verify/testrun               every stage
//	go run ./verify/testrun -list         the stages and their commands
//	go run ./verify/testrun -only vet,race
//
// It prints the lines of go test, a line of progress every 15 seconds, and at the end the
// tests that were skipped, the time of each stage and each failure once more. A failed
// stage of the first group ends the run; a failed lane lets the other lanes finish.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	list := flag.Bool("list", false, "print the stages and their commands, run nothing")
	only := flag.String("only", "", "run these `stages` alone, separated by commas")
	every := flag.Duration("progress", 15*time.Second, "time between two lines of progress; 0 prints none")
	events := flag.String("events", "", "keep the events of go test in this `folder`, a file for each stage")
	flag.Parse()
	if flag.NArg() > 0 {
		fail("unexpected argument %q", flag.Arg(0))
	}
	p, err := newPlan(*only)
	if err != nil {
		fail("%v", err)
	}
	if *list {
		for _, s := range p.stages() {
			fmt.Printf("%-10s %s\n", s.name, s)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := newReport(os.Stdout, p.stages())
	if r.events = *events; *events != "" {
		if err := os.MkdirAll(*events, 0o755); err != nil {
			fail("%v", err)
		}
	}
	if *every > 0 {
		ticker := time.NewTicker(*every)
		defer ticker.Stop()
		go func() {
			for range ticker.C {
				r.progress()
			}
		}()
	}
	p.run(ctx, r)
	if !r.end() {
		os.Exit(1)
	}
}

func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "testrun: "+format+"\n", args...)
	os.Exit(2)
}

// run runs the first group in order, then the lanes beside each other.
func (p plan) run(ctx context.Context, r *report) {
	for _, s := range p.first {
		if !s.run(ctx, r) {
			return
		}
	}
	var lanes sync.WaitGroup
	for _, lane := range p.lanes {
		lanes.Go(func() {
			for _, s := range lane {
				s.run(ctx, r)
			}
		})
	}
	lanes.Wait()
}

// run runs the stage's command and reports whether it succeeded.
func (s *stage) run(ctx context.Context, r *report) bool {
	if s.rest != nil && s.skip == "" {
		s.takeRest(r)
	}
	if s.skip != "" {
		r.skipped(s)
		return true
	}
	if ctx.Err() != nil {
		return false
	}
	cmd := exec.CommandContext(ctx, s.command[0], s.command[1:]...)
	cmd.Env = append(os.Environ(), s.env...)
	// The processes that a stage starts end with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	plain := &lineWriter{take: func(line string) { r.line(s, line) }}
	cmd.Stdout, cmd.Stderr = plain, plain
	var events *lineWriter
	if s.goTest {
		events = &lineWriter{take: func(line string) { r.event(s, line) }}
		cmd.Stdout = events
		if r.events != "" {
			f, err := os.Create(filepath.Join(r.events, s.name+".json"))
			if err != nil {
				r.started(s)
				r.ended(s, err)
				return false
			}
			defer f.Close()
			cmd.Stdout = io.MultiWriter(events, f)
		}
	}
	r.started(s)
	err := cmd.Run()
	if events != nil {
		events.flush()
	}
	plain.flush()
	r.used(s, cmd.ProcessState)
	r.ended(s, err)
	if err == nil && s.rest != nil {
		return r.checkRest(s)
	}
	return err == nil
}

// takeRest completes the command with the tests that the other stage has left out. One -run
// serves all packages: a package that has another's test too runs it once more.
func (s *stage) takeRest(r *report) {
	left := r.leftOut(s.rest)
	if len(left) == 0 {
		s.skip = s.rest.name + " has left no test out"
		return
	}
	pkgs := make([]string, 0, len(left))
	for pkg := range left {
		pkgs = append(pkgs, "./"+strings.TrimPrefix(pkg, module))
	}
	slices.Sort(pkgs)
	s.packages = len(pkgs)
	s.command = append(slices.Clone(s.command), "-run", pattern(left))
	s.command = append(s.command, slowestFirst(pkgs)...)
}

// lineWriter passes on whole lines without their end. exec uses one goroutine for a
// writer; two of them share one lineWriter only where it is the same value.
type lineWriter struct {
	rest []byte
	take func(line string)
}

func (w *lineWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		i := slices.Index(w.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		w.take(strings.TrimSuffix(string(w.rest[:i]), "\r"))
		w.rest = w.rest[i+1:]
	}
}

func (w *lineWriter) flush() {
	if len(w.rest) > 0 {
		w.take(string(w.rest))
		w.rest = nil
	}
}

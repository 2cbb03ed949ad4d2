// Rxevm runs a command beside a Soft-RoCE device in a virtual machine:
//
//	go run ./verify/rxevm/cmd/rxevm [flags] -- command [args...]
//
// Its exit code is the command's, or
//
//	77   this machine cannot do it; standard error says in one line why
//	124  --timeout passed
//	125  the harness or the guest failed
//	130  ended by a signal
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/verify/rxevm"
)

const (
	exitMissing = 77
	exitTimeout = 124
	exitFailed  = 125
	exitSignal  = 130
)

// parsed is the command line.
type parsed struct {
	setup   rxevm.Setup
	job     rxevm.Job
	timeout time.Duration
	prepare bool
	verbose bool
}

// timeoutError is a job that was ended because --timeout passed.
type timeoutError time.Duration

func (e timeoutError) Error() string {
	return fmt.Sprintf("not done after --timeout %v; the machine was ended", time.Duration(e))
}

// extraEnv collects repeated --env flags.
type extraEnv []string

func (e *extraEnv) String() string { return strings.Join(*e, " ") }

func (e *extraEnv) Set(kv string) error {
	if name, _, ok := strings.Cut(kv, "="); !ok || name == "" {
		return errors.New("want NAME=value")
	}
	*e = append(*e, kv)
	return nil
}

func parse(args []string) (parsed, error) {
	var p parsed
	var env extraEnv
	var noInstall bool
	fs := flag.NewFlagSet("rxevm", flag.ContinueOnError)
	// Errors are one line; only --help prints the flags.
	fs.Usage = func() {}
	fs.SetOutput(io.Discard)
	fs.BoolVar(&p.job.Two, "two", false, "two machines joined by a wire; the command runs in both (RXE_ROLE)")
	fs.BoolVar(&p.job.NativeOK, "native-ok", false, "run on the host when it has an active RDMA device")
	fs.StringVar(&p.job.OutDir, "out", "", "`directory` shared writable at its own path")
	fs.StringVar(&p.job.Dir, "dir", "", "working `directory` (default the current one)")
	fs.StringVar(&p.job.Accel, "accel", "", "kvm or tcg (default kvm where it works)")
	fs.IntVar(&p.job.MemoryMiB, "memory-mib", 2048, "memory of each machine")
	fs.IntVar(&p.job.CPUs, "cpus", 2, "processors of each machine")
	fs.IntVar(&p.job.PmemMiB, "pmem-mib", 0, "size of each of two NVDIMMs, one a DAX file system and one a device (PMEM_FSDAX, PMEM_DEVDAX)")
	fs.IntVar(&p.job.SharedMiB, "shared-mib", 0, "with --two, size of an NVDIMM that both machines have (PMEM_SHARED)")
	fs.Var(&env, "env", "`NAME=value` added to the environment; may be repeated")
	fs.DurationVar(&p.timeout, "timeout", 5*time.Minute, "limit for boot and command together")
	fs.StringVar(&p.setup.Kernel, "kernel", "", "kernel `version` (default the newest cached, else the newest available)")
	fs.BoolVar(&noInstall, "no-install", false, "never run apt-get install; QUARRY_NO_INSTALL=1 says the same")
	fs.BoolVar(&p.prepare, "prepare", false, "install and download what is needed, run nothing")
	fs.BoolVar(&p.verbose, "v", false, "say on standard error where it ran and how long booting took")
	err := fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Print("usage: rxevm [flags] -- command [args...]\n")
		fs.SetOutput(os.Stdout)
		fs.PrintDefaults()
	}
	if err != nil {
		return p, err
	}
	p.setup.Install = !noInstall && os.Getenv("QUARRY_NO_INSTALL") == ""
	p.job.Env = append(os.Environ(), env...)
	p.job.Command = fs.Args()
	switch {
	case p.timeout <= 0:
		return p, fmt.Errorf("timeout %v: must be positive", p.timeout)
	case p.prepare && len(p.job.Command) != 0:
		return p, errors.New("--prepare runs no command")
	case !p.prepare && len(p.job.Command) == 0:
		return p, errors.New("no command given: rxevm [flags] -- command [args...]")
	}
	return p, nil
}

func main() {
	p, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		var code int
		if code, err = run(p); err == nil {
			os.Exit(code)
		}
	}
	if errors.Is(err, context.Canceled) {
		os.Exit(exitSignal)
	}
	fmt.Fprintf(os.Stderr, "rxevm: %v\n", err)
	var missing *rxevm.MissingError
	switch {
	case errors.As(err, &missing):
		os.Exit(exitMissing)
	case errors.As(err, new(timeoutError)):
		os.Exit(exitTimeout)
	}
	os.Exit(exitFailed)
}

func run(p parsed) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	p.setup.Log = os.Stderr
	p.job.Stdout, p.job.Stderr = os.Stdout, os.Stderr

	var image *rxevm.Image
	if p.prepare || !p.job.NativeOK || p.job.Two || !rxevm.HostHasDevice() {
		var err error
		// Not under the timeout: downloading is bounded by apt itself.
		if image, err = rxevm.Prepare(ctx, p.setup); err != nil {
			return 0, err
		}
	}
	if p.prepare {
		fmt.Printf("kernel %s\n", image.Kernel)
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	result, err := image.Run(ctx, p.job)
	if errors.Is(err, context.DeadlineExceeded) {
		return 0, timeoutError(p.timeout)
	}
	if p.verbose && err == nil {
		fmt.Fprintf(os.Stderr, "rxevm: ran on %s, booted in %.1f s, exit code %d\n", result.Where, result.Boot.Seconds(), result.Code)
	}
	return result.Code, err
}

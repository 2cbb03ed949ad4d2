// Command quarry runs and uses a Quarry cluster: its services (dev, controller,
// storage), its objects and names, and what checks and measures it.
//
// # Where a command is
//
// The flags and arguments of a command are the fields of a struct that is named after it: quarry kv
// get is kvGetCmd, and its method Run executes it. kong parses the struct tags, which also have the
// help texts. cli (cli.go) is the root of all commands and has the global flags.
//
//	cli.go config.go errors.go main.go     parsing, configuration file, exit codes
//	control.go fabric.go confine.go        calls of controllers, RDMA flags, processes of workers
//	serve.go controller.go gateway.go      services; exposed.go refuses open ports
//	node.go region.go status.go            the cluster; controller_members.go, tenant.go, token.go, cert.go
//	slab.go slab_list.go name.go kv*.go    objects, names, trees
//	spaces.go pager.go                     spaces, and their pages in programs
//	job.go worker.go search.go             jobs
//	fsck.go doctor.go support.go           checks and diagnostics
//	bench.go demo.go litmus.go sim.go      measurements, demonstration, tests of devices and protocol
//	complete.go completion.go man.go       shells and manual pages
//
// Exit codes: see errors.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/quarrystore/quarry/coproc/worker"
	"github.com/quarrystore/quarry/internal/procs"
)

// version is set when the binary is built; see the Makefile.
var version = "dev"

// main ends with the exit code of run.
func main() {
	// Before anything is parsed: what is read from a pipe, such as a token, is read once. Without
	// slack a controller works too, with more wakes.
	if len(os.Args) > 1 && os.Args[1] == "controller" {
		_ = procs.Slack()
	}
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program without the exit of the process, so that tests can call it.
func run(args []string, in io.Reader, out, errOut io.Writer) int {
	ctx, stop := interruptible(errOut)
	defer stop()
	err := dispatch(ctx, args, in, out, errOut)
	if err == nil {
		return exitOK
	}
	code := exitCode(err)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		if code = exitInterrupted; !errors.As(err, new(interrupted)) {
			return code
		}
	}
	if wantsJSON(args) {
		_ = json.NewEncoder(errOut).Encode(map[string]any{"error": oneLine(err), "exit": code})
	} else {
		fmt.Fprintln(errOut, "quarry: "+oneLine(err))
	}
	return code
}

// interruptible is a context that the first SIGINT or SIGTERM ends; the second
// ends the process at once.
func interruptible(errOut io.Writer) (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		select {
		case <-ch:
			cancel()
		case <-done:
			return
		}
		select {
		case <-ch:
			fmt.Fprintln(errOut, "quarry: interrupted twice, stopping at once")
			os.Exit(exitInterrupted)
		case <-done:
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		close(done)
		cancel()
	}
}

// stopParsing is the panic by which kong ends a command such as --help; dispatch recovers it.
type stopParsing struct{}

// dispatch parses the arguments and runs the command they name.
func dispatch(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) (err error) {
	defer func() {
		if p := recover(); p != nil {
			if _, ok := p.(stopParsing); !ok {
				panic(p)
			}
		}
	}()
	var c cli
	parser, err := newParser(&c, out, errOut)
	if err != nil {
		return err
	}
	conf, err := loadConfig(configPath(args), parser.Model)
	if err != nil {
		return usageError{err}
	}
	if err := kong.Resolvers(conf).Apply(parser); err != nil {
		return err
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	kctx, err := parser.Parse(args)
	if err != nil {
		return usageError{fmt.Errorf("%w (%s)", err, helpHint(kctx, err))}
	}
	app := &app{cli: &c, in: in, out: out, errOut: errOut, parser: parser}
	if err := app.prepare(); err != nil {
		return err
	}
	kctx.BindTo(ctx, (*context.Context)(nil))
	return kctx.Run(app)
}

// newParser builds the parser of the command line from the struct tags.
func newParser(c *cli, out, errOut io.Writer) (*kong.Kong, error) {
	return kong.New(c,
		kong.Name("quarry"),
		kong.Description("A distributed, lock-free shared-memory store on one-sided verbs."),
		kong.Writers(out, errOut),
		kong.Exit(func(int) { panic(stopParsing{}) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}),
		kong.Vars{"version": version, "isolate_help": worker.IsolateHelp, "drain": worker.DefaultDrain.String(), "drain_help": worker.DrainHelp},
		bindEnv("QUARRY"),
	)
}

// helpHint names the --help of the last command that the arguments name.
func helpHint(_ *kong.Context, err error) string {
	var pe *kong.ParseError
	if errors.As(err, &pe) && pe.Context != nil {
		if sel := pe.Context.Selected(); sel != nil {
			return "quarry " + sel.Path() + " --help"
		}
	}
	return "quarry --help"
}

// wantsJSON says whether --json is among the arguments. It is used where parsing may have failed.
func wantsJSON(args []string) bool {
	for _, a := range args {
		if a == "--" {
			return false
		}
		if a == "--json" || a == "-j" {
			return true
		}
	}
	v := strings.ToLower(os.Getenv("QUARRY_JSON"))
	return v == "true" || v == "1"
}

// oneLine makes one line of an error, also of several joined ones.
func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

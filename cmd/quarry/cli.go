package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kong"
	"golang.org/x/term"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// cli is the command line. Every flag can also be set by a QUARRY_* variable and
// in the configuration file under the same name; a flag beats a variable beats
// the file beats the default.
type cli struct {
	Controller []string      `short:"C" aliases:"controllers" default:"http://127.0.0.1:7420" placeholder:"URL" help:"Controllers, comma separated."`
	Config     string        `short:"c" placeholder:"FILE" help:"YAML configuration file; default /etc/quarry/quarry.yml if it is there."`
	JSON       bool          `short:"j" name:"json" help:"Print JSON."`
	Token      string        `placeholder:"TOKEN" help:"Token that the cluster asks for."`
	Tenant     string        `placeholder:"NAME" complete:"tenant" help:"Tenant that the command works in; if none is named, the one that the caller has grants in, else default."`
	KeyFile    string        `name:"key-file" placeholder:"FILE" help:"Keys that payloads are encrypted with before they leave this process; quarry key payload create makes it. A storage node hands it to its workers."`
	AllowClear bool          `name:"allow-clear" help:"With --key-file: read objects that are not encrypted, too."`
	TLSCert    string        `name:"tls-cert" aliases:"cert" placeholder:"FILE" help:"Certificate of this process, PEM, for all its ports and calls; quarry cert issues it."`
	TLSKey     string        `name:"tls-key" aliases:"key" placeholder:"FILE" help:"Key of the certificate, PEM."`
	TLSCA      string        `name:"tls-ca" aliases:"ca" placeholder:"FILE" help:"Certificate authorities of the other processes, PEM."`
	Insecure   bool          `name:"insecure" help:"Services: serve other hosts without certificates, token or password."`
	Transport  string        `name:"fabric" aliases:"transport" default:"auto" enum:"auto,verbs,shm,tcp" help:"Transport: auto, verbs, shm or tcp."`
	FabricTLS  string        `name:"fabric-tls" placeholder:"off|on|required" help:"Encrypt the tcp fabric: off, on (where both sides have certificates) or required; default on with --tls-cert, --tls-key and --tls-ca, else off."`
	Rail       []string      `placeholder:"NAME[=ADDRESS]" help:"Networks that this process is on, comma separated, with the local address that connections come from: storage nodes with several tcp addresses are reached by one on these. A storage node's own are named in its --listen."`
	Rails      string        `default:"warn" placeholder:"warn|strict" help:"Storage nodes that are on no --rail: reach them by another network, counted and logged (warn), or do not (strict)."`
	RDMA       bool          `name:"require-rdma" help:"Fail where no RDMA adapter can be used."`
	RDMADevice rdmaFlags     `embed:"" prefix:"rdma-" group:"RDMA"`
	Timeout    time.Duration `placeholder:"10s" help:"Longest wait for one operation, 10s unless given. With --wait the longest wait for all of it, without bound unless given."`
	LogLevel   string        `default:"warn" enum:"debug,info,warn,error" help:"Lowest level of log lines: debug, info, warn or error."`

	Version kong.VersionFlag `name:"version" help:"Print the version and exit."`

	Dev           devCmd        `cmd:"" help:"Run a whole cluster in this process."`
	ControllerCmd controllerCmd `cmd:"" name:"controller" help:"Run a controller; list, add, remove and replace controllers."`
	Storage       storageCmd    `cmd:"" help:"Run a storage node."`
	Share         shareCmd      `cmd:"" help:"Let the clients of this host use a device that a storage node on another host shares."`
	Status        statusCmd     `cmd:"" help:"Show controllers, nodes and regions."`
	Node          nodeCmd       `cmd:"" help:"List, add, drain, remove and forget storage nodes."`
	Region        regionCmd     `cmd:"" help:"Create, list, move, rebalance and remove regions."`
	Slab          slabCmd       `cmd:"" help:"Allocate, read, write and free objects."`
	Name          nameCmd       `cmd:"" help:"Give objects names."`
	Space         spaceCmd      `cmd:"" help:"Use ranges of virtual addresses in the memory of storage nodes."`
	Pool          poolCmd       `cmd:"" help:"Keep copies of files, or of programs' memory, in the cluster."`
	PoolAgent     poolAgentCmd  `cmd:"" name:"pool-agent" help:"Keep pools for a program on another host, which runs this command by ssh."`
	KV            kvCmd         `cmd:"" name:"kv" help:"Keep keys and values in trees."`
	TokenCmd      tokenCmd      `cmd:"" name:"token" help:"Make, list and revoke tokens of one role."`
	TenantCmd     tenantCmd     `cmd:"" name:"tenant" help:"Keep the memory of some programs apart from that of others, within quotas."`
	Audit         auditCmd      `cmd:"" help:"List the latest calls that changed the cluster."`
	Cert          certCmd       `cmd:"" help:"Issue certificates, and list those that end soon."`
	Gateway       gatewayCmd    `cmd:"" help:"Serve a tree to clients of other stores."`
	Pager         pagerCmd      `cmd:"" help:"Serve the page faults of programs that map spaces into their memory. Example: quarry pager --memory 1GiB"`
	PagerGuard    pagerGuardCmd `cmd:"" name:"pager-guard" hidden:"" help:"Ends the mappings of a pager that has ended; the pager starts it."`
	Session       sessionCmd    `cmd:"" help:"List and revoke sessions."`
	Key           keyCmd        `cmd:"" help:"List and rotate the signing keys of the controllers; keep files of payload keys."`
	Fsck          fsckCmd       `cmd:"" help:"Check the whole structure of live regions."`
	Sim           simCmd        `cmd:"" help:"Run the store's code on a simulated, hostile fabric and check every promise."`
	Litmus        litmusCmd     `cmd:"" help:"Test an RDMA device for what the protocols rely on."`
	Job           jobCmd        `cmd:"" help:"Run programs where the memory is."`
	Search        searchCmd     `cmd:"" help:"Ask an index that a job has built."`
	Worker        workerCmd     `cmd:"" help:"Run parts of jobs."`
	Bench         benchCmd      `cmd:"" help:"Measure a cluster beside this machine's memory, TCP and Redis."`
	Demo          demoCmd       `cmd:"" help:"Keep a real directory in a cluster of separate processes and compare every byte."`
	Doctor        doctorCmd     `cmd:"" help:"Find faults of this host and of the cluster, and name the remedies."`
	Support       supportCmd    `cmd:"" help:"Collect a diagnostics archive without secrets."`
	Metrics       metricsCmd    `cmd:"" help:"List exported metrics."`
	VersionCmd    versionCmd    `cmd:"" name:"version" help:"Show the version."`
	Help          helpCmd       `cmd:"" help:"Show what a command does and takes: quarry help kv load."`
	Man           manCmd        `cmd:"" hidden:"" help:"Write manual pages."`
	Completion    completionCmd `cmd:"" help:"Print a completion script for a shell."`
	Complete      completeCmd   `cmd:"" name:"complete-values" hidden:"" help:"Print the values that may follow; for completion scripts."`
}

// app is the environment of a command. dispatch makes it, and prepare fills what the flags decide.
type app struct {
	cli    *cli             // the parsed flags
	in     io.Reader        // standard input
	out    io.Writer        // results: text, or JSON with --json
	errOut io.Writer        // errors, log lines and progress
	parser *kong.Kong       // for help and completion
	log    *slog.Logger     // to errOut, from --log-level on
	trust  *identity.Source // certificate, key and authorities; nil: none is given
	tls    *tls.Config      // for calls of controllers; nil: plain HTTP
	fabric *tcp.TLS         // encryption of the tcp fabric; nil: plain
	// patient: no --timeout is given, so that --wait waits without bound.
	patient bool
}

const defaultTimeout = 10 * time.Second

// errWaited: the condition that --wait waits for does not hold after --timeout.
var errWaited = errors.New("the wait is over")

// waiting is the context of a command with --wait.
func (a *app) waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.patient {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.cli.Timeout)
}

// pause waits between two looks at a condition. An error ends the command: that of ctx if the user
// has interrupted it, errWaited with what is missing if waiting has ended.
func (a *app) pause(ctx, waiting context.Context, missing string) error {
	select {
	case <-time.After(200 * time.Millisecond):
		return nil
	case <-waiting.Done():
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%w after %v: %s", errWaited, a.cli.Timeout, missing)
}

// prepare checks the global flags, opens the log and the certificate, and sets the default timeout.
func (a *app) prepare() error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.cli.LogLevel)); err != nil {
		return usageError{err}
	}
	var h slog.Handler = slog.NewTextHandler(a.errOut, &slog.HandlerOptions{Level: level})
	if a.cli.JSON {
		h = slog.NewJSONHandler(a.errOut, &slog.HandlerOptions{Level: level})
	}
	a.log = slog.New(h)
	slog.SetDefault(a.log)
	if f := (identity.Files{Cert: a.cli.TLSCert, Key: a.cli.TLSKey, CA: a.cli.TLSCA}); f != (identity.Files{}) {
		src, err := identity.Open(f, a.log)
		if err != nil {
			return usageError{err}
		}
		a.trust, a.tls = src, src.Client(identity.Controller)
	}
	var err error
	if a.fabric, err = tcp.NewTLS(a.cli.FabricTLS, a.trust); err != nil {
		return usagef("--fabric-tls: %w", err)
	}
	if _, err := rail.ParseOwn(a.cli.Rail); err != nil {
		return usagef("--rail: %w", err)
	}
	if _, err := rail.ParsePolicy(a.cli.Rails); err != nil {
		return usagef("--rails: %w", err)
	}
	switch {
	case a.cli.Timeout < 0:
		return usagef("--timeout %v: want more than 0", a.cli.Timeout)
	case a.cli.Timeout == 0:
		a.cli.Timeout, a.patient = defaultTimeout, true
	}
	return nil
}

// connect opens a client within --timeout. change may alter its configuration. The caller closes it.
func (a *app) connect(ctx context.Context, change func(*client.Config)) (*client.Client, error) {
	cfg := a.clientConfig()
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	return client.Connect(ctx, cfg)
}

// with runs f with a client and a deadline of --timeout, and closes the client.
func (a *app) with(ctx context.Context, change func(*client.Config), f func(context.Context, *client.Client) error) error {
	c, err := a.connect(ctx, change)
	if err != nil {
		return err
	}
	tctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	return errors.Join(f(tctx, c), c.Close())
}

// withLong is with for work whose length depends on how much there is: --timeout bounds each call of it.
func (a *app) withLong(ctx context.Context, change func(*client.Config), f func(context.Context, *client.Client) error) error {
	c, err := a.connect(ctx, change)
	if err != nil {
		return err
	}
	return errors.Join(f(ctx, c), c.Close())
}

// print writes v as JSON with --json, else what text prints.
func (a *app) print(v any, text func(io.Writer)) error {
	if a.cli.JSON {
		e := json.NewEncoder(a.out)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	text(w)
	return w.Flush()
}

// isTerminal says whether w is a terminal, on which progress may be shown.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// bytesText is n with a binary unit.
func bytesText(n uint64) string {
	for i, unit := range []string{"B", "KiB", "MiB", "GiB", "TiB"} {
		if v := float64(n) / float64(uint64(1)<<(10*i)); v < 1024 || unit == "TiB" {
			if i == 0 {
				return fmt.Sprintf("%d B", n)
			}
			return fmt.Sprintf("%.1f %s", v, unit)
		}
	}
	return ""
}

// sizeFlag is a number of bytes with an optional unit: 64, 4KiB, 2GiB.
type sizeFlag uint64

// UnmarshalText reads a size. All units are binary: K is KiB.
func (s *sizeFlag) UnmarshalText(b []byte) error {
	var n float64
	var unit string
	if k, err := fmt.Sscanf(string(b), "%g%s", &n, &unit); k == 0 || n < 0 {
		return fmt.Errorf("size %q: want a number with an optional unit, such as 4KiB (%v)", b, err)
	}
	m := map[string]float64{"": 1, "B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}[unit]
	if m == 0 {
		return fmt.Errorf("size %q: unit %q: want B, KiB, MiB or GiB", b, unit)
	}
	*s = sizeFlag(n * m)
	return nil
}

func (s sizeFlag) String() string { return bytesText(uint64(s)) }

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
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
)

// cli is the command line. Every flag can also be set by a QUARRY_* variable and
// in the configuration file under the same name; a flag beats a variable beats
// the file beats the default.
type cli struct {
	Controller []string      `short:"C" aliases:"controllers" default:"http://127.0.0.1:7420" placeholder:"URL" help:"Controllers, comma separated."`
	Config     string        `short:"c" placeholder:"FILE" help:"YAML configuration file; default /etc/quarry/quarry.yml if it is there."`
	JSON       bool          `short:"j" name:"json" help:"Print JSON."`
	Token      string        `placeholder:"TOKEN" help:"Token that the cluster asks for."`
	CA         string        `name:"ca" placeholder:"FILE" help:"Certificate authority of https controllers, PEM."`
	Transport  string        `name:"fabric" aliases:"transport" default:"auto" enum:"auto,verbs,shm,tcp" help:"Way to the memory: auto, verbs, shm or tcp."`
	RDMA       bool          `name:"require-rdma" help:"Refuse what does not go through an RDMA adapter."`
	RDMADevice string        `name:"rdma-device" placeholder:"DEVICE" help:"RDMA device as NAME[/PORT][@ADDRESS]; default the best there is."`
	Timeout    time.Duration `default:"10s" help:"Longest wait for one operation."`
	LogLevel   string        `default:"warn" enum:"debug,info,warn,error" help:"Least serious log lines: debug, info, warn or error."`

	Dev           devCmd        `cmd:"" help:"Run a whole cluster in this process."`
	ControllerCmd controllerCmd `cmd:"" name:"controller" help:"Run a controller."`
	Storage       storageCmd    `cmd:"" help:"Run a storage node."`
	Status        statusCmd     `cmd:"" help:"Show controllers, nodes and regions."`
	Node          nodeCmd       `cmd:"" help:"List, add, drain and remove storage nodes."`
	Region        regionCmd     `cmd:"" help:"Create, list, move and rebalance regions."`
	Slab          slabCmd       `cmd:"" help:"Allocate, read, write and free objects."`
	Name          nameCmd       `cmd:"" help:"Give objects names."`
	KV            kvCmd         `cmd:"" name:"kv" help:"Keep keys and values in trees."`
	Gateway       gatewayCmd    `cmd:"" help:"Serve a tree to clients of other stores."`
	Session       sessionCmd    `cmd:"" help:"List and revoke sessions."`
	Fsck          fsckCmd       `cmd:"" help:"Check the whole structure of live regions."`
	Sim           simCmd        `cmd:"" help:"Run the store's code on a simulated, hostile fabric and check every promise."`
	Litmus        litmusCmd     `cmd:"" help:"Ask an RDMA device what the protocols rely on."`
	Job           jobCmd        `cmd:"" help:"Run programs where the memory is."`
	Search        searchCmd     `cmd:"" help:"Ask an index that a job has built."`
	Worker        workerCmd     `cmd:"" help:"Run parts of jobs."`
	Bench         benchCmd      `cmd:"" help:"Measure a cluster beside this machine's memory, TCP and Redis."`
	Demo          demoCmd       `cmd:"" help:"Keep a real directory in a cluster of separate processes and compare every byte."`
	Doctor        doctorCmd     `cmd:"" help:"Look for what makes this host or the cluster fail or slow, and say what to do."`
	Support       supportCmd    `cmd:"" help:"Gather what a person needs who is to help."`
	Metrics       metricsCmd    `cmd:"" help:"Tell what processes can be watched by."`
	Version       versionCmd    `cmd:"" help:"Show the version."`
	Man           manCmd        `cmd:"" hidden:"" help:"Write manual pages."`
	Completion    completionCmd `cmd:"" help:"Print a completion script for a shell."`
}

// app is what commands run with.
type app struct {
	cli    *cli
	in     io.Reader
	out    io.Writer
	errOut io.Writer
	parser *kong.Kong
	log    *slog.Logger
	tls    *tls.Config
}

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
	if a.cli.CA != "" {
		pem, err := os.ReadFile(a.cli.CA)
		if err != nil {
			return usagef("certificate authority: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return usagef("certificate authority %s: no PEM certificate in it", a.cli.CA)
		}
		a.tls = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
	}
	if a.cli.Timeout <= 0 {
		return usagef("--timeout %v: want more than 0", a.cli.Timeout)
	}
	return nil
}

// connect opens a client; the caller closes it.
func (a *app) connect(ctx context.Context, change func(*client.Config)) (*client.Client, error) {
	cfg := client.Config{Controllers: a.cli.Controller, Transport: a.cli.Transport, RequireRDMA: a.cli.RDMA, RDMADevice: a.cli.RDMADevice, Token: a.cli.Token, TLS: a.tls, Logger: a.log}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	return client.Connect(ctx, cfg)
}

// with runs f with a client and a deadline.
func (a *app) with(ctx context.Context, change func(*client.Config), f func(context.Context, *client.Client) error) error {
	c, err := a.connect(ctx, change)
	if err != nil {
		return err
	}
	tctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	return errors.Join(f(tctx, c), c.Close())
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

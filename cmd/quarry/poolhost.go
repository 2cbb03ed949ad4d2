package main

import (
	"context"
	"os/signal"
	"syscall"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

// poolHostFlags name the cluster that a command works in.
type poolHostFlags struct {
	Host string `placeholder:"USER@HOST" help:"Work in the cluster that this host reaches: run quarry pool-agent there by ssh. Default: the cluster of --controller."`
}

// openPool is a pool that this process has open.
type openPool interface {
	Sync(ctx context.Context, progress func(done uint64)) (pool.Report, error)
	Restore(ctx context.Context, progress func(done uint64)) (pool.Report, error)
	Close(ctx context.Context) error
}

// pools are those of a cluster.
type pools interface {
	create(ctx context.Context, name string, local []byte, o pool.Options) (openPool, error)
	open(ctx context.Context, name string, local []byte) (openPool, error)
	Stat(ctx context.Context, name string) (pool.Info, error)
	Check(ctx context.Context, name string, local []byte, progress func(done uint64)) (pool.Report, error)
	Remove(ctx context.Context, name string) error
}

// clusterPools are those of a client's cluster.
type clusterPools struct{ c *client.Client }

func (p clusterPools) create(ctx context.Context, name string, local []byte, o pool.Options) (openPool, error) {
	return pool.Create(ctx, p.c, name, local, o)
}
func (p clusterPools) open(ctx context.Context, name string, local []byte) (openPool, error) {
	return pool.Open(ctx, p.c, name, local, nil)
}
func (p clusterPools) Stat(ctx context.Context, name string) (pool.Info, error) {
	return pool.Stat(ctx, p.c, name)
}
func (p clusterPools) Check(ctx context.Context, name string, local []byte, progress func(done uint64)) (pool.Report, error) {
	return pool.Check(ctx, p.c, name, local, progress)
}
func (p clusterPools) Remove(ctx context.Context, name string) error {
	return pool.Remove(ctx, p.c, name)
}

// hostPools are those of the cluster that a host reaches.
type hostPools struct{ pool.Host }

func (p hostPools) create(ctx context.Context, name string, local []byte, o pool.Options) (openPool, error) {
	return p.Host.Create(ctx, name, local, o)
}
func (p hostPools) open(ctx context.Context, name string, local []byte) (openPool, error) {
	return p.Host.Open(ctx, name, local, nil)
}

// withPools runs f with the pools that the flags name, for work whose length depends on how much there is.
func (p poolHostFlags) withPools(ctx context.Context, a *app, change func(*client.Config), f func(ctx context.Context, in pools) error) error {
	if p.Host != "" {
		return f(ctx, hostPools{pool.Host{Name: p.Host, SSH: a.cli.Pool.SSH, Agent: a.cli.Pool.Agent}})
	}
	return a.withLong(ctx, change, func(ctx context.Context, c *client.Client) error { return f(ctx, clusterPools{c}) })
}

// withPoolsSoon is withPools with a deadline of --timeout.
func (p poolHostFlags) withPoolsSoon(ctx context.Context, a *app, change func(*client.Config), f func(ctx context.Context, in pools) error) error {
	return p.withPools(ctx, a, change, func(ctx context.Context, in pools) error {
		ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
		defer cancel()
		return f(ctx, in)
	})
}

type poolAgentCmd struct{}

// Help is shown below the flags.
func (*poolAgentCmd) Help() string {
	return `quarry pool --host USER@HOST, and lines REPLICA USER@HOST POOL of poolset files, run this command on the host by ssh. It works in the
cluster of --controller, as that is configured on the host, with the rights of the user there, and ends with the connection.`
}

// Run serves the program on the other side of standard input and output.
func (*poolAgentCmd) Run(ctx context.Context, a *app) error {
	if isTerminal(a.out) {
		return usagef("standard output is a terminal: quarry pool --host runs this command by ssh")
	}
	signal.Ignore(syscall.SIGPIPE) // a write fails instead, and the pool is closed in order
	return a.withLong(ctx, nil, func(ctx context.Context, c *client.Client) error { return pool.Serve(ctx, c, a.in, a.out) })
}

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/gateway/redis"
)

type gatewayCmd struct {
	Redis gatewayRedisCmd `cmd:"" help:"Serve a tree to Redis clients. Example: quarry gateway redis --tree users --create"`
}

type gatewayRedisCmd struct {
	metricsFlags
	Listen       string   `default:"127.0.0.1:6379" placeholder:"HOST:PORT" help:"Port for Redis clients, or unix:PATH; port 0 takes a free one."`
	Tree         string   `required:"" placeholder:"NAME" help:"Tree to serve. Any number of gateways may serve one tree."`
	Create       bool     `help:"Make the tree if there is none."`
	Replicas     int      `short:"r" placeholder:"N" help:"Replicas of the tree's regions, with --create; default is the cluster's."`
	Durable      bool     `help:"With --create: acknowledged changes survive a power failure of all nodes. Uses only regions of nodes with persistent memory or disks."`
	PasswordFile string   `placeholder:"FILE" help:"File whose first line is the password that clients must give."`
	MaxClients   int      `default:"10000" help:"Connections at once."`
	SweepKeys    int      `default:"2000" help:"Keys looked at for expiry each second; 0 leaves that to other gateways."`
	Cache        sizeFlag `default:"32MiB" help:"Inner nodes of the tree kept in this process."`
}

func (g *gatewayRedisCmd) Run(ctx context.Context, a *app) error {
	if g.MaxClients < 1 {
		return usagef("--max-clients %d: want 1 or more", g.MaxClients)
	}
	if g.SweepKeys < 0 {
		return usagef("--sweep-keys %d: want 0 or more", g.SweepKeys)
	}
	password, err := g.password()
	if err != nil {
		return err
	}
	if _, err := a.guard(password != "", "--password-file", g.Listen); err != nil {
		return err
	}
	if g.Replicas < 0 {
		return usagef("--replicas %d: want 1 or more", g.Replicas)
	}
	port, err := g.metricsFlags.open(ctx, "gateway")
	if err != nil {
		return err
	}
	defer port.close()
	c, err := a.connect(ctx, func(c *client.Config) { c.Replicas, c.Durability = g.Replicas, durability(g.Durable) })
	if err != nil {
		return err
	}
	return errors.Join(g.serve(ctx, a, c, password, port), c.Close())
}

// password is the first line of the password file.
func (g *gatewayRedisCmd) password() (string, error) {
	if g.PasswordFile == "" {
		return "", nil
	}
	b, err := os.ReadFile(g.PasswordFile)
	if err != nil {
		return "", usagef("--password-file: %w", err)
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	line = bytes.TrimSuffix(line, []byte("\r"))
	if len(line) == 0 {
		return "", usagef("--password-file %s: its first line is empty: want a password there", g.PasswordFile)
	}
	return string(line), nil
}

func (g *gatewayRedisCmd) serve(ctx context.Context, a *app, c *client.Client, password string, port *metricsPort) error {
	tree, err := g.open(ctx, a, c)
	if err != nil {
		return err
	}
	l, err := g.listen(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	sweep := g.SweepKeys
	if sweep == 0 {
		sweep = -1
	}
	s := redis.New(redis.Config{Tree: tree, Password: password, MaxClients: g.MaxClients, SweepKeys: sweep, Version: version, Logger: a.log, Far: func() bool { return far(c) }})
	port.watch(prom.NewCollector(c), collect.NewGateway(s, tree))
	err = a.ready(port.tell(map[string]string{"ready": "gateway", "address": l.Addr().String(), "tree": tree.Name()}), func(w io.Writer) {
		port.text(w)
		fmt.Fprintf(w, "Redis clients are served %s at %s.\n", tree, l.Addr())
		if host, port, err := net.SplitHostPort(l.Addr().String()); err == nil {
			fmt.Fprintf(w, "Try: redis-cli -h %s -p %s ping\n", host, port)
		} else {
			fmt.Fprintf(w, "Try: redis-cli -s %s ping\n", l.Addr())
		}
	})
	if err != nil {
		return err
	}
	return s.Serve(ctx, l)
}

func (g *gatewayRedisCmd) open(ctx context.Context, a *app, c *client.Client) (*kv.Tree, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	cfg := btree.Config{CacheBytes: int(g.Cache)}
	tree, err := kv.Open(ctx, c, g.Tree, cfg)
	if !errors.Is(err, client.ErrNoName) {
		return tree, err
	}
	if !g.Create {
		return nil, fmt.Errorf("%w; --create makes the tree", err)
	}
	tree, err = kv.Create(ctx, c, g.Tree, cfg)
	if errors.Is(err, client.ErrNameExists) { // another gateway was faster
		return kv.Open(ctx, c, g.Tree, cfg)
	}
	return tree, err
}

func (g *gatewayRedisCmd) listen(ctx context.Context) (net.Listener, error) {
	var lc net.ListenConfig
	if path, ok := strings.CutPrefix(g.Listen, "unix:"); ok {
		l, err := lc.Listen(ctx, "unix", path)
		if errors.Is(err, syscall.EADDRINUSE) && abandoned(path) && os.Remove(path) == nil {
			l, err = lc.Listen(ctx, "unix", path)
		}
		return l, inUse(err)
	}
	l, err := lc.Listen(ctx, "tcp", g.Listen)
	return l, inUse(err)
}

// abandoned says whether a socket is what a killed process has left.
func abandoned(path string) bool {
	c, err := net.Dial("unix", path)
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// far says whether some memory is not on this machine.
func far(c *client.Client) bool {
	for _, provider := range c.Stats().Providers {
		if provider != "shm" {
			return true
		}
	}
	return false
}

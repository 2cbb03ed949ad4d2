package main

import (
	"bytes"
	"context"
	"crypto/tls"
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
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/preauth"
)

type gatewayCmd struct {
	Redis  gatewayRedisCmd  `cmd:"" help:"Serve a tree to Redis clients. Example: quarry gateway redis --tree users --create"`
	Flight gatewayFlightCmd `cmd:"" help:"Serve trees to clients of Apache Arrow Flight. Example: quarry gateway flight --spread"`
}

type gatewayRedisCmd struct {
	metricsFlags
	Listen       string   `default:"127.0.0.1:6379" placeholder:"HOST:PORT" help:"Port for Redis clients, unix:PATH, or none; port 0 takes a free one."`
	TLSListen    string   `name:"tls-listen" placeholder:"HOST:PORT" help:"Port for Redis clients over TLS, beside --listen; with --listen none in its place."`
	ListenCert   string   `placeholder:"FILE" help:"Certificate of --tls-listen, PEM; default that of --tls-cert."`
	ListenKey    string   `placeholder:"FILE" help:"Key of --listen-cert, PEM."`
	ClientCA     string   `name:"client-ca" placeholder:"FILE" help:"Serve at --tls-listen only clients with a certificate of these authorities, PEM."`
	Tree         string   `required:"" placeholder:"NAME" help:"Tree to serve. Any number of gateways may serve one tree."`
	Create       bool     `help:"Make the tree if there is none."`
	Replicas     int      `short:"r" placeholder:"N" help:"Replicas of the tree's regions, with --create; default is the cluster's."`
	Durable      bool     `help:"With --create: acknowledged changes survive a power failure of all nodes. Uses only regions of nodes with persistent memory or disks."`
	Slab         string   `enum:"pair,staged" default:"pair" help:"With --create: slabs of the tree's nodes, pair or staged, as quarry kv create makes them."`
	PasswordFile string   `placeholder:"FILE" help:"File whose first line is the password that clients must give."`
	ACLFile      string   `name:"acl-file" placeholder:"FILE" help:"Users in the form of Redis's aclfile; ACL LOAD reads it again, ACL SAVE writes it. A line for the user default takes the place of --password-file."`
	Grants       bool     `help:"Users other than default work in the tenants of their grants (quarry tenant grant --identity redis:NAME), and those without grants in none."`
	MaxClients   int      `default:"10000" help:"Connections at once."`
	SweepKeys    int      `default:"2000" help:"Keys looked at for expiry each second; 0 leaves that to other gateways."`
	Cache        sizeFlag `default:"32MiB" help:"Inner nodes of the tree kept in this process."`
}

// Run checks the flags, connects, and serves until the context ends.
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
	secured, err := g.secured(a)
	if err != nil {
		return err
	}
	if g.ACLFile == "" {
		if err := g.guard(a, password != ""); err != nil {
			return err
		}
	}
	if g.Replicas < 0 {
		return usagef("--replicas %d: want 1 or more", g.Replicas)
	}
	port, err := g.metricsFlags.open(ctx, a, "gateway")
	if err != nil {
		return err
	}
	defer port.close()
	c, err := a.connect(ctx, func(c *client.Config) {
		c.Replicas, c.Durability, c.Slab = g.Replicas, durability(g.Durable), slabKind(g.Slab)
	})
	if err != nil {
		return err
	}
	return errors.Join(g.serve(ctx, a, c, password, secured, port), c.Close())
}

// guard refuses ports that other hosts reach where clients need to show nothing.
func (g *gatewayRedisCmd) guard(a *app, protected bool) error {
	_, err := a.guard(protected, "--password-file, or --acl-file with a password for default", g.Listen)
	if err == nil {
		_, err = a.guard(protected || g.ClientCA != "", "--password-file, --acl-file or --client-ca", g.TLSListen)
	}
	return err
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

// serve opens the tree and the ports and prints that the gateway is ready. The guard of open ports runs again once
// the file of users is read, because only that file says whether a password is needed.
func (g *gatewayRedisCmd) serve(ctx context.Context, a *app, c *client.Client, password string, secured *tls.Config, port *metricsPort) error {
	named, tree, err := g.open(ctx, a, c)
	if err != nil {
		return err
	}
	defer named.Close()
	sweep := g.SweepKeys
	if sweep == 0 {
		sweep = -1
	}
	s := redis.New(redis.Config{Tree: tree, Reopen: named.Tree, Password: password, MaxClients: g.MaxClients, SweepKeys: sweep, Version: version, Logger: a.log, Far: func() bool { return far(c) }})
	if g.ACLFile != "" {
		if err := s.UseACL(g.ACLFile); err != nil {
			return usagef("--acl-file: %w", err)
		}
		if err := g.guard(a, !s.Open()); err != nil {
			return err
		}
	}
	if g.Grants {
		if err := s.UseGrants(ctx, gatewayUsers{g, a, c}); err != nil {
			return err
		}
	}
	listeners, err := g.listeners(ctx, secured)
	if err != nil {
		return err
	}
	for _, l := range listeners {
		defer l.Close()
	}
	port.watch(prom.NewCollector(c), collect.NewGateway(s))
	if err := a.ready(port.tell(g.facts(listeners, tree)), func(w io.Writer) {
		port.text(w)
		g.welcome(w, listeners, tree)
	}); err != nil {
		return err
	}
	return s.Serve(ctx, listeners...)
}

// facts are what the line of JSON says.
func (g *gatewayRedisCmd) facts(listeners []net.Listener, tree *kv.Tree) map[string]string {
	m := map[string]string{"ready": "gateway", "address": listeners[0].Addr().String(), "tree": tree.Name()}
	if g.TLSListen != "" {
		m["tls_address"] = listeners[len(listeners)-1].Addr().String()
		if g.Listen == noListen {
			delete(m, "address")
		}
	}
	return m
}

func (g *gatewayRedisCmd) welcome(w io.Writer, listeners []net.Listener, tree *kv.Tree) {
	for i, l := range listeners {
		encrypted, flag := "", ""
		if g.TLSListen != "" && i == len(listeners)-1 {
			encrypted, flag = " over TLS", " --tls"
		}
		fmt.Fprintf(w, "Redis clients are served %s at %s%s.\n", tree, l.Addr(), encrypted)
		if host, port, err := net.SplitHostPort(l.Addr().String()); err == nil {
			fmt.Fprintf(w, "Try: redis-cli -h %s -p %s%s ping\n", host, port, flag)
		} else {
			fmt.Fprintf(w, "Try: redis-cli -s %s ping\n", l.Addr())
		}
	}
}

// noListen is --listen of a gateway that serves TLS alone.
const noListen = "none"

// secured is the configuration of --tls-listen, nil without.
func (g *gatewayRedisCmd) secured(a *app) (*tls.Config, error) {
	if g.TLSListen == "" {
		switch {
		case g.ListenCert != "" || g.ListenKey != "" || g.ClientCA != "":
			return nil, usagef("--listen-cert, --listen-key and --client-ca are of --tls-listen: give it too")
		case g.Listen == noListen:
			return nil, usagef("--listen none: give --tls-listen, or no client is served")
		}
		return nil, nil
	}
	f := identity.Files{Cert: g.ListenCert, Key: g.ListenKey, CA: g.ClientCA}
	switch {
	case (f.Cert == "") != (f.Key == ""):
		return nil, usagef("--listen-cert and --listen-key go together")
	case f.Cert == "":
		f.Cert, f.Key = a.cli.TLSCert, a.cli.TLSKey
	}
	if f.Cert == "" {
		return nil, usagef("--tls-listen: no certificate: give --listen-cert and --listen-key, or --tls-cert and --tls-key")
	}
	src, err := identity.Open(f, a.log)
	if err != nil {
		return nil, usagef("--tls-listen: %w", err)
	}
	return src.Public(), nil
}

// listeners are those of --listen and --tls-listen, in this order.
func (g *gatewayRedisCmd) listeners(ctx context.Context, secured *tls.Config) (out []net.Listener, err error) {
	if g.Listen != noListen {
		l, err := listen(ctx, g.Listen)
		if err != nil {
			return nil, err
		}
		out = append(out, l)
	}
	if secured != nil {
		l, err := listen(ctx, g.TLSListen)
		if err != nil {
			for _, l := range out {
				l.Close()
			}
			return nil, err
		}
		out = append(out, preauth.Listen(l, secured))
	}
	return out, nil
}

// open opens the tree that the name stands for, and makes it with --create. Two gateways may be started at once: the one that finds the
// name taken opens the other's tree.
func (g *gatewayRedisCmd) open(ctx context.Context, a *app, c *client.Client) (*kv.Named, *kv.Tree, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cli.Timeout)
	defer cancel()
	cfg := btree.Config{CacheBytes: int(g.Cache), ReadOnly: c.ReadOnly()}
	named, err := kv.OpenNamed(ctx, c, g.Tree, cfg)
	if errors.Is(err, client.ErrNoName) {
		if !g.Create {
			return nil, nil, fmt.Errorf("%w; --create makes the tree", err)
		}
		if _, err = kv.Create(ctx, c, g.Tree, cfg); err == nil || errors.Is(err, client.ErrNameExists) { // or another gateway was faster
			named, err = kv.OpenNamed(ctx, c, g.Tree, cfg)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	tree, err := named.Tree(ctx)
	if err != nil {
		named.Close()
	}
	return named, tree, err
}

// listen opens a TCP or unix port. A unix socket that no process listens on is replaced.
func listen(ctx context.Context, address string) (net.Listener, error) {
	var lc net.ListenConfig
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		l, err := lc.Listen(ctx, "unix", path)
		if errors.Is(err, syscall.EADDRINUSE) && abandoned(path) && os.Remove(path) == nil {
			l, err = lc.Listen(ctx, "unix", path)
		}
		return l, inUse(err)
	}
	l, err := lc.Listen(ctx, "tcp", address)
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

// gatewayUsers reads the grants of users from the controllers, and opens trees of their tenants: of the same name
// as the gateway's own.
type gatewayUsers struct {
	g *gatewayRedisCmd
	a *app
	c *client.Client
}

func (u gatewayUsers) Grants(ctx context.Context) (map[string][]redis.Grant, error) {
	list, err := u.c.UserGrants(ctx)
	out := map[string][]redis.Grant{}
	for _, x := range list {
		if name, ok := strings.CutPrefix(x.Identity, "redis:"); ok {
			out[name] = append(out[name], redis.Grant{Tenant: x.Tenant, Prefix: x.Prefix, Read: x.Read, Write: x.Write})
		}
	}
	return out, err
}

func (u gatewayUsers) Open(ctx context.Context, user, tenant string, readOnly bool) (*kv.Tree, func() error, error) {
	c, err := u.c.ConnectUser(ctx, "redis:"+user, tenant, readOnly)
	if err != nil {
		return nil, nil, err
	}
	named, tree, err := u.g.open(ctx, u.a, c)
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return tree, func() error { named.Close(); return c.Close() }, nil
}

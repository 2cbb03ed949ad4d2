package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/internal/identity"
)

type gatewayFlightCmd struct {
	metricsFlags
	Listen       string            `default:"127.0.0.1:8815" placeholder:"HOST:PORT" help:"Port for Flight clients; port 0 takes a free one. With a certificate it is served over TLS alone."`
	ListenCert   string            `placeholder:"FILE" help:"Certificate of --listen, PEM; default that of --tls-cert."`
	ListenKey    string            `placeholder:"FILE" help:"Key of --listen-cert, PEM."`
	ClientCA     string            `name:"client-ca" placeholder:"FILE" help:"Serve only clients with a certificate of these authorities, PEM. They show a token all the same."`
	Spread       bool              `help:"Name, for each range of a tree, the server at the host of the storage node that holds most of it, on the port of this one. Run one server beside each storage node."`
	Peer         map[string]string `placeholder:"NODE=URI" help:"The server beside a storage node, such as n1=grpc+tcp://10.0.0.1:8815; goes before --spread. May be given for each node."`
	BatchBytes   sizeFlag          `default:"256KiB" help:"Most bytes of keys and values in a batch; a larger entry has a batch of its own."`
	BatchRows    int               `default:"65536" help:"Most rows in a batch."`
	Memory       sizeFlag          `default:"256MiB" help:"Memory for batches that clients have not read yet, of all streams together, at least 130MiB. Streams wait for it."`
	Streams      int               `default:"64" help:"Streams that are read at once; more are refused."`
	PutStreams   int               `default:"8" help:"Streams that are put at once; more are refused. Each may hold a message or two."`
	MessageBytes sizeFlag          `default:"16MiB" help:"Largest message of a client, and so the largest batch that can be put. 65MiB take every value."`
	MaxClients   int               `default:"256" help:"Connections at once."`
	MaxSessions  int               `default:"64" help:"Sessions that are open for callers at once: one for each token and tenant."`
	SlowReader   time.Duration     `default:"5m" help:"How long a client may leave a batch unread before its connection is closed, and how long a put may wait for its next batch."`
	StopTimeout  time.Duration     `name:"stop-timeout" default:"20s" help:"On SIGTERM, refuse new calls and let running streams go on for up to this long. A second signal ends the server at once."`
	TicketTTL    time.Duration     `name:"ticket-ttl" default:"1h" help:"How long a ticket is good."`
	Cache        sizeFlag          `default:"32MiB" help:"Inner nodes kept in this process, for each tree that a caller reads."`
}

// Run checks the flags, connects, and serves until the context ends.
func (g *gatewayFlightCmd) Run(ctx context.Context, a *app) error {
	protected := a.cli.Token != "" || a.trust != nil && a.trust.Mutual()
	if _, err := a.guard(protected, "--token, or --tls-cert, --tls-key and --tls-ca, of a cluster that asks its callers for a token", g.Listen); err != nil {
		return err
	}
	if err := errors.Join(g.checkLimits(), g.checkPeers()); err != nil {
		return err
	}
	secured, err := g.secured(a)
	if err != nil {
		return err
	}
	port, err := g.metricsFlags.open(ctx, a, "gateway")
	if err != nil {
		return err
	}
	defer port.close()
	l, err := listen(ctx, g.Listen)
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := a.connect(ctx, nil)
	if err != nil {
		return err
	}
	return errors.Join(g.serve(ctx, a, c, l, secured, port, !protected), c.Close())
}

// checkLimits refuses limits with which nothing, or not every value, can be read.
func (g *gatewayFlightCmd) checkLimits() error {
	for _, l := range []struct {
		flag         string
		value, least int
	}{
		{"--batch-bytes", int(g.BatchBytes), 1}, {"--batch-rows", g.BatchRows, 1}, {"--streams", g.Streams, 1}, {"--put-streams", g.PutStreams, 1},
		{"--message-bytes", int(g.MessageBytes), 1}, {"--max-clients", g.MaxClients, 1}, {"--max-sessions", g.MaxSessions, 1}, {"--memory", int(g.Memory), flight.MinMemory},
	} {
		if l.value < l.least {
			return usagef("%s %d: want at least %d", l.flag, l.value, l.least)
		}
	}
	if g.TicketTTL <= 0 {
		return usagef("--ticket-ttl %v: want more than 0", g.TicketTTL)
	}
	if g.SlowReader <= 0 {
		return usagef("--slow-reader %v: want more than 0", g.SlowReader)
	}
	if g.StopTimeout <= 0 {
		return usagef("--stop-timeout %v: want more than 0", g.StopTimeout)
	}
	return nil
}

// checkPeers refuses URIs that no Flight client understands.
func (g *gatewayFlightCmd) checkPeers() error {
	for node, uri := range g.Peer {
		u, err := url.Parse(uri)
		if err != nil || u.Host == "" || !slices.Contains([]string{"grpc", "grpc+tcp", "grpc+tls"}, u.Scheme) {
			return usagef("--peer %s=%s: want a URI such as grpc+tcp://10.0.0.1:8815, or grpc+tls://...", node, uri)
		}
	}
	return nil
}

// secured is the TLS configuration of the port, nil without a certificate.
func (g *gatewayFlightCmd) secured(a *app) (*tls.Config, error) {
	f := identity.Files{Cert: g.ListenCert, Key: g.ListenKey, CA: g.ClientCA}
	switch {
	case (f.Cert == "") != (f.Key == ""):
		return nil, usagef("--listen-cert and --listen-key go together")
	case f.Cert == "":
		f.Cert, f.Key = a.cli.TLSCert, a.cli.TLSKey
	}
	if f.Cert == "" {
		if f.CA != "" {
			return nil, usagef("--client-ca: no certificate: give --listen-cert and --listen-key, or --tls-cert and --tls-key")
		}
		return nil, nil
	}
	src, err := identity.Open(f, a.log)
	if err != nil {
		return nil, usagef("--listen-cert: %w", err)
	}
	return src.Public(), nil
}

// serve serves the port. open: the cluster asks callers for nothing, or quarry dev has left its token for this user.
func (g *gatewayFlightCmd) serve(ctx context.Context, a *app, c *client.Client, l net.Listener, secured *tls.Config, port *metricsPort, open bool) error {
	uri := "grpc+tcp://"
	if secured != nil {
		uri = "grpc+tls://"
	}
	s, err := flight.New(flight.Config{
		Connect: func(ctx context.Context, token, tenant string, readOnly bool) (*client.Client, error) {
			if token != "" {
				return c.ConnectAs(ctx, token, tenant, readOnly)
			}
			cfg := a.clientConfig()
			if cfg.ReadOnly = readOnly; tenant != "" {
				cfg.Tenant = tenant
			}
			return client.Connect(ctx, cfg)
		},
		Open: open, Locations: g.locations(uri, l.Addr()), Logger: a.log,
		BatchBytes: int(g.BatchBytes), BatchRows: g.BatchRows, MemoryBytes: int64(g.Memory), ReadStreams: g.Streams, PutStreams: g.PutStreams,
		MessageBytes: int(g.MessageBytes), Connections: g.MaxClients, Callers: g.MaxSessions, SlowReader: g.SlowReader, StopTimeout: g.StopTimeout, TicketTTL: g.TicketTTL, CacheBytes: int(g.Cache),
	})
	if err != nil {
		return usageError{err}
	}
	port.watch(prom.NewCollector(c), collect.NewFlight(s, int64(g.Memory)))
	uri += l.Addr().String()
	if err := a.ready(port.tell(map[string]string{"ready": "gateway", "address": l.Addr().String(), "uri": uri}), func(w io.Writer) {
		port.text(w)
		fmt.Fprintf(w, "Flight clients are served trees at %s.\n", uri)
	}); err != nil {
		return err
	}
	return s.Serve(ctx, secured, l)
}

// locations says where the server beside a storage node is: as --peer has it, else with --spread at the node's host.
func (g *gatewayFlightCmd) locations(scheme string, own net.Addr) func(node, host string) []string {
	_, port, _ := net.SplitHostPort(own.String())
	return func(node, host string) []string {
		if uri, ok := g.Peer[node]; ok {
			return []string{uri}
		}
		if g.Spread && host != "" {
			return []string{scheme + net.JoinHostPort(host, port)}
		}
		return nil
	}
}

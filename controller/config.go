package controller

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/proto"
)

// Config of a controller. Etcd is needed.
type Config struct {
	// Etcd is where the state lives. The caller closes it.
	Etcd *clientv3.Client
	// Prefix of all keys; default "/quarry/".
	Prefix string
	// Listen is the address of the RPC port; default 127.0.0.1:7420. Port 0 takes a free one.
	Listen string
	// Advertise is the URL that others reach it by; default from Listen.
	Advertise string
	// GossipListen is where the cluster's gossip is heard, host:port of UDP and TCP;
	// default a free port of the host in Listen. NoGossip takes no part in it.
	GossipListen string
	// Alone says that no other controller stands by: nobody deposes this one, which
	// then leads for as long as its lease lasts, also on a host that is starved for moments.
	Alone bool
	// Name among the controllers; default the host's name and the port.
	Name string
	// Lease of sessions; default 3 s, at least 300 ms.
	Lease time.Duration
	// RegionBytes of a region whose size nobody names; default 2 GiB.
	RegionBytes uint64
	// ReplaceAfter is how long a storage node that is gone may come back before its
	// replicas are rebuilt on others; default 1 min.
	ReplaceAfter time.Duration
	// RebuildBytesPerSecond bounds the copying to one joining replica; default 0: no bound.
	RebuildBytesPerSecond uint64
	// Token that clients and nodes must show; "" asks for none.
	Token string
	// TLS of the RPC port; nil serves plain HTTP.
	TLS *tls.Config
	// AgentTLS is for calls to agents with https URLs.
	AgentTLS *tls.Config
	// Pages serves what is not an RPC on the same port; nil: nothing.
	Pages http.Handler
	// Logger; nil means slog.Default.
	Logger *slog.Logger
}

// hold is how long a look at the election key lets this controller answer.
func (c *Config) hold() time.Duration {
	if c.Alone {
		return leaderTTL * time.Second
	}
	return leadHold
}

const minLease = 300 * time.Millisecond

func (c Config) withDefaults() Config {
	if c.Prefix == "" {
		c.Prefix = "/quarry/"
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:7420"
	}
	if c.Lease == 0 {
		c.Lease = 3 * time.Second
	}
	if c.ReplaceAfter == 0 {
		c.ReplaceAfter = time.Minute
	}
	if c.RegionBytes == 0 {
		c.RegionBytes = proto.DefaultRegionBytes
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Name == "" {
		c.Name, _ = os.Hostname()
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.Etcd == nil:
		return fmt.Errorf("controller: no etcd client given")
	case c.Prefix[len(c.Prefix)-1] != '/':
		return fmt.Errorf("controller: key prefix %q: want one that ends in /", c.Prefix)
	case c.Lease < minLease || c.Lease > time.Hour:
		return fmt.Errorf("controller: lease %v: want %v to 1h", c.Lease, minLease)
	}
	if _, err := proto.NewGeometry(c.RegionBytes); err != nil {
		return fmt.Errorf("controller: %w", err)
	}
	if c.Advertise != "" {
		if u, err := url.Parse(c.Advertise); err != nil || u.Host == "" {
			return fmt.Errorf("controller: advertised URL %q: want one such as http://10.0.0.1:7420", c.Advertise)
		}
	}
	return nil
}

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

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/wire"
	"github.com/quarrystore/quarry/proto"
)

// Config of a controller. Etcd is needed.
type Config struct {
	// Etcd is where the state lives. The caller closes it.
	Etcd *clientv3.Client
	// Embedded says that etcd runs inside the controllers, which then compact, defragment
	// and repair it. An etcd of the operator's is only measured.
	Embedded bool
	// Member of etcd inside this process, whose elections the pulse begins; nil: there is none,
	// or it elects by itself.
	Member Member
	// Names bounds the placement library.
	Names NameLimits
	// Prefix of all keys; default "/quarry/".
	Prefix string
	// Listen is the address of the RPC port; default 127.0.0.1:7420. Port 0 takes a free one.
	Listen string
	// Advertise is the URL that others reach it by; default from Listen.
	Advertise string
	// GossipListen is where the cluster's pulse is heard, host:port of UDP;
	// default a free port of the host in Listen. NoGossip takes no part in it.
	GossipListen string
	// Alone says that no other controller stands by. So none deposes this one, which
	// then leads for as long as its lease lasts, also on a host that is starved for moments.
	Alone bool
	// LeaderTTL is how long a leader that has vanished keeps others from leading if none of them
	// deposes it: whole seconds, default 2 s. Every controller of a cluster has the same.
	LeaderTTL time.Duration
	// Name among the controllers; default the host's name and the port.
	Name string
	// Lease of sessions; default 3 s, at least 300 ms.
	Lease time.Duration
	// RegionBytes is the largest size that regions grow to where no request names a size; default
	// 2 GiB. The first of a kind has 64 MiB.
	RegionBytes uint64
	// ReplaceAfter is how long a storage node that is gone may come back before its
	// replicas are rebuilt on others; default 1 min.
	ReplaceAfter time.Duration
	// ProbeTimeout is how long a suspected storage node has for the answer to one probe; three
	// in a row without an answer lose it. Default 500 ms. A host that may be starved for longer
	// needs more, or its nodes are lost without having failed.
	ProbeTimeout time.Duration
	// RebuildBytesPerSecond bounds the copying to one joining replica; default 0: no bound.
	RebuildBytesPerSecond uint64
	// Token that has every role; "": there is none. With neither Token nor ID any caller has every role.
	Token string
	// ID is the identity in the certificate of TLS; clients' certificates of its cluster say which
	// role a caller has. None: certificates say nothing.
	ID identity.ID
	// Insecure is shown in Status: other hosts reach the port, and any caller has every role.
	Insecure bool
	// Trusts says whether an authority (identity.AuthorityOf) is one of those that clients' certificates may have
	// now. nil: all are.
	Trusts func(authority string) bool
	// TLS of the RPC port; nil serves plain HTTP. With MixedTLS the port serves both, and its URL is that of plain HTTP.
	TLS      *tls.Config
	MixedTLS bool
	// AgentTLS is for calls to agents with https URLs, PeerTLS for those to other controllers.
	AgentTLS, PeerTLS *tls.Config
	// Pages serves what is not an RPC on the same port; nil: nothing.
	Pages http.Handler
	// Logger; nil means slog.Default.
	Logger *slog.Logger
	// Wire is the network of a simulation; nil means the host's. Advertise is set and
	// GossipListen is NoGossip then.
	Wire *wire.Wire
}

// hold is how long a look at the election key lets this controller answer.
func (c *Config) hold() time.Duration {
	if c.Alone {
		return c.LeaderTTL
	}
	return leadHold
}

// host is the name in Advertise; "" if there is none.
func (c *Config) host() string {
	u, err := url.Parse(c.Advertise)
	if err != nil {
		return ""
	}
	return u.Hostname()
}

const minLease = 300 * time.Millisecond

// withDefaults replaces zero values by the defaults.
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
	if c.LeaderTTL == 0 {
		c.LeaderTTL = defaultLeaderTTL
	}
	if c.ReplaceAfter == 0 {
		c.ReplaceAfter = time.Minute
	}
	if c.ProbeTimeout == 0 {
		c.ProbeTimeout = state.DefaultProbeTimeout
	}
	if c.Names.Most == 0 {
		c.Names.Most = DefaultMostNames
	}
	if c.Names.BytesPerSecond == 0 {
		c.Names.BytesPerSecond = DefaultNameBytesPerSecond
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

// validate refuses values beyond their limits.
func (c Config) validate() error {
	switch {
	case c.Etcd == nil:
		return fmt.Errorf("controller: no etcd client given")
	case c.Prefix[len(c.Prefix)-1] != '/':
		return fmt.Errorf("controller: key prefix %q: want one that ends in /", c.Prefix)
	case c.Lease < minLease || c.Lease > time.Hour:
		return fmt.Errorf("controller: lease %v: want %v to 1h", c.Lease, minLease)
	case c.LeaderTTL%time.Second != 0 || c.LeaderTTL < time.Second || c.LeaderTTL > time.Minute:
		return fmt.Errorf("controller: leader TTL %v: want whole seconds from 1s to 1m", c.LeaderTTL)
	case c.ProbeTimeout < 10*time.Millisecond || c.ProbeTimeout > time.Minute:
		return fmt.Errorf("controller: probe timeout %v: want 10ms to 1m", c.ProbeTimeout)
	case c.Names.Most > DefaultMostNames:
		return fmt.Errorf("controller: at most %d names: want 1 to %d", c.Names.Most, DefaultMostNames)
	case c.Names.BytesPerSecond > 1<<30:
		return fmt.Errorf("controller: %d bytes of names a second: want at most 1 GiB", c.Names.BytesPerSecond)
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

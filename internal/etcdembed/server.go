package etcdembed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// Config of an embedded server. The zero value is one member on sockets in a
// temporary folder that Close removes.
type Config struct {
	// Dir holds the data. Empty: a temporary folder, gone after Close.
	Dir string
	// Name of this member. Empty means "quarry".
	Name string
	// PeerURL is where the other members reach this one; by a name, it listens on all
	// addresses. Empty: a unix socket, which is right for a cluster of one.
	PeerURL string
	// ClientURL is where etcd clients reach this member. Empty: a unix socket.
	ClientURL string
	// InitialCluster names all members, "a=http://host:port,b=...". Empty: this one alone.
	InitialCluster string
	// StartTimeout bounds the wait for the server to be ready. 0 means 30 s.
	StartTimeout time.Duration
	// NoSync skips fsync: fast, and data does not survive a power loss. For tests.
	NoSync bool
	// Log receives warnings and errors. nil means slog.Default().
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = "quarry"
	}
	if c.StartTimeout == 0 {
		c.StartTimeout = 30 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return c
}

// Server is a running member.
type Server struct {
	etcd    *embed.Etcd
	client  string
	sockets string // folder of the unix sockets
	temp    string // folder to remove, if the data is temporary
	closed  bool
}

// Start starts a member and waits until it can serve.
func Start(c Config) (*Server, error) {
	c = c.withDefaults()
	s := &Server{}
	if err := s.start(c); err != nil {
		s.Close()
		return nil, fmt.Errorf("embedded etcd %s: %w", c.Name, err)
	}
	return s, nil
}

func (s *Server) start(c Config) (err error) {
	if c.Dir == "" {
		if s.temp, err = os.MkdirTemp("", "quarry-etcd-"); err != nil {
			return err
		}
		c.Dir = s.temp
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	// The path of a unix socket is at most 107 bytes, and etcd dials the socket by
	// the host part of the URL: a short folder of our own, never the data folder.
	if s.sockets, err = os.MkdirTemp("", "qe-"); err != nil {
		return err
	}
	peer, err := listenURL(c.PeerURL, filepath.Join(s.sockets, "peer"))
	if err != nil {
		return err
	}
	client, err := listenURL(c.ClientURL, filepath.Join(s.sockets, "client"))
	if err != nil {
		return err
	}
	e := embed.NewConfig()
	e.Name = c.Name
	e.Dir = c.Dir
	e.ListenPeerUrls, e.AdvertisePeerUrls = []url.URL{*bindable(peer)}, []url.URL{*peer}
	e.ListenClientUrls, e.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	e.InitialCluster = c.InitialCluster
	if e.InitialCluster == "" {
		e.InitialCluster = c.Name + "=" + peer.String()
		// Nobody to wait for: a cluster of one need not sit out an election of 1 s.
		e.TickMs, e.ElectionMs = 20, 200
	} else {
		// Controllers change nothing while their etcds have no leader. Members are near
		// each other: ten heartbeats lost are enough.
		e.TickMs, e.ElectionMs = 40, 400
	}
	e.UnsafeNoFsync = c.NoSync
	// A controller writes little and reads no history.
	e.AutoCompactionMode, e.AutoCompactionRetention = embed.CompactorModeRevision, "1000"
	e.LogLevel = "warn"
	e.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(slogCore{c.Log}))
	if s.etcd, err = embed.StartEtcd(e); err != nil {
		return err
	}
	s.client = client.String()
	select {
	case <-s.etcd.Server.ReadyNotify():
		return nil
	case err := <-s.etcd.Err():
		return err
	case <-time.After(c.StartTimeout):
		return errors.New("not ready in " + c.StartTimeout.String() + ": are enough members of the initial cluster running?")
	}
}

func listenURL(given, socket string) (*url.URL, error) {
	if given == "" {
		return &url.URL{Scheme: "unix", Path: socket}, nil
	}
	u, err := url.Parse(given)
	if err != nil || u.Host == "" {
		return nil, fmt.Errorf("URL %q: want http://host:port", given)
	}
	return u, nil
}

// bindable is where to listen for a URL: etcd binds addresses, not names.
func bindable(u *url.URL) *url.URL {
	name, port, err := net.SplitHostPort(u.Host)
	if u.Scheme == "unix" || err != nil || net.ParseIP(name) != nil {
		return u
	}
	return &url.URL{Scheme: u.Scheme, Host: net.JoinHostPort("0.0.0.0", port)}
}

// Endpoint is the address for etcd clients.
func (s *Server) Endpoint() string { return s.client }

// Err reports the error that ended the server.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// Client returns a new client of the server; the caller closes it.
func (s *Server) Client() (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints:   []string{s.client},
		DialTimeout: 5 * time.Second,
		Logger:      zap.NewNop(),
		Context:     context.Background(),
	})
}

// Close stops the server and removes what was temporary. Close clients first: the
// server waits some seconds for those that are still connected.
func (s *Server) Close() {
	if s.etcd != nil && !s.closed {
		s.closed = true
		s.etcd.Close()
	}
	for _, dir := range []string{s.sockets, s.temp} {
		if dir != "" {
			os.RemoveAll(dir)
		}
	}
}

package etcdembed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/quarrystore/quarry/internal/identity"
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
	// InitialCluster names all members, "a=http://host:port,b=...", for the first start.
	// Empty: this one alone.
	InitialCluster string
	// TLS serves and calls peer URLs with https: members take each other's calls only with a
	// controller's certificate. nil, or without an identity: Token does.
	TLS *identity.Source
	// Token is a secret of all members. Without TLS, members whose peer URLs are https identify
	// each other by it: see identity.FromToken. Empty: such members need TLS.
	Token string
	// Watched says that Campaign is called when the process of the leader is gone: the
	// members need not find that out by themselves soon.
	Watched bool
	// StartTimeout bounds the wait for the server to be ready. 0 means 30 s. The wait for
	// the other members of a first start is bounded by Start's context alone.
	StartTimeout time.Duration
	// Waiting is called now and then while Start waits for other members: with the silent
	// ones of a first start, or with none if a quorum is missing. nil: not called.
	Waiting func(silent []string)
	// QuotaBytes is the size at which etcd refuses writes until space is freed. 0 means
	// DefaultQuotaBytes.
	QuotaBytes int64
	// NoSync skips fsync: fast, and data does not survive a power loss. For tests.
	NoSync bool
	// Log receives warnings and errors. nil means slog.Default().
	Log *slog.Logger

	lastWaiting *time.Time
	// snapshotEvery is the number of entries between two snapshots; the log keeps half as many behind one.
	// 0: etcd's defaults. For tests of members that are far behind.
	snapshotEvery uint64
}

// waitingFor calls Waiting if it is time to. began is when the wait began.
func (c Config) waitingFor(began time.Time, silent []string) {
	now := time.Now()
	if now.Sub(began) < waitingAfter || now.Sub(*c.lastWaiting) < waitingEvery {
		return
	}
	*c.lastWaiting = now
	c.Waiting(silent)
}

// DefaultQuotaBytes is the largest size that etcd recommends. Controllers keep far below
// it: they refuse names long before.
const DefaultQuotaBytes = 8 << 30

// batchEvery is the time between two commits of the store's file. The log makes changes durable
// before; each commit is a wake, also one of nothing. Space that is freed is used again after the
// commit: what changes in the meantime has to be little beside the quota.
func batchEvery(quota int64) time.Duration {
	if quota < 1<<30 {
		return 100 * time.Millisecond // etcd's default
	}
	return 500 * time.Millisecond
}

// How often Waiting is called, and after which time first.
const (
	waitingAfter = 2 * time.Second
	waitingEvery = 10 * time.Second
)

func (c Config) withDefaults() Config {
	if c.QuotaBytes == 0 {
		c.QuotaBytes = DefaultQuotaBytes
	}
	if c.Waiting == nil {
		c.Waiting = func([]string) {}
	}
	c.lastWaiting = new(time.Time)
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
	gate    *gate
	peers   *peerPort // nil: there are none
	client  string
	sockets string // folder of the unix sockets
	temp    string // folder to remove, if the data is temporary
	closed  atomic.Bool
	failed  chan error
}

// Start starts a member and waits until it can serve: at its first start with others,
// until all of them are there.
func Start(ctx context.Context, c Config) (*Server, error) {
	c = c.withDefaults()
	s := &Server{failed: make(chan error, 1)}
	if err := s.start(ctx, c); err != nil {
		s.Close()
		return nil, fmt.Errorf("embedded etcd %s: %w", c.Name, err)
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, c Config) (err error) {
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
	// the host part of the URL: a short folder of our own, never the data folder. Other
	// users do not reach it.
	if s.sockets, err = os.MkdirTemp("", "qe-"); err != nil {
		return err
	}
	peer, err := listenURL(c.PeerURL, filepath.Join(s.sockets, "peer"))
	if err != nil {
		return err
	}
	if c.TLS, err = peerIdentity(c, peer); err != nil {
		return err
	}
	client, err := listenURL(c.ClientURL, filepath.Join(s.sockets, "client"))
	if err != nil {
		return err
	}
	if peer.Scheme != "unix" { // no other member reaches a cluster of one
		if s.peers, err = listenPeers(c, peer, s.fails); err != nil {
			return err
		}
	}
	e, err := s.config(ctx, c, peer, client)
	if err != nil {
		return err
	}
	if s.etcd, err = embed.StartEtcd(e); err != nil {
		return err
	}
	s.gate = newGate(s.etcd.Server)
	if s.peers != nil {
		s.peers.serves(s.etcd)
	}
	s.client = client.String()
	if err := s.ready(ctx, c); err != nil {
		return err
	}
	go s.watch(c.Name)
	if peer.Scheme == "unix" {
		return nil // a path of this start; no other member uses it
	}
	return s.advertise(ctx, peer)
}

// config is etcd's configuration of a member that listens at two URLs.
func (s *Server) config(ctx context.Context, c Config, peer, client *url.URL) (*embed.Config, error) {
	e := embed.NewConfig()
	e.Name = c.Name
	e.Dir = c.Dir
	if c.snapshotEvery != 0 {
		e.SnapshotCount, e.SnapshotCatchUpEntries = c.snapshotEvery, c.snapshotEvery/2
	}
	e.ListenPeerUrls, e.AdvertisePeerUrls = nil, []url.URL{*peer}
	e.ListenClientUrls, e.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	e.InitialCluster = c.Name + "=" + peer.String()
	if c.InitialCluster == "" && c.PeerURL == "" {
		// A cluster of one elects itself: a short timeout, because the default is 1 s.
		e.TickMs, e.ElectionMs = 20, 200
	} else if c.Watched {
		// A heartbeat wakes every member. The pulse finds a dead leader sooner than the election
		// timeout, so that may be long. etcd's shortest lease is one and a half election
		// timeouts in whole seconds: 2 s, the lease of a controller's leadership.
		e.TickMs, e.ElectionMs = 250, 1250
	} else {
		// Controllers change nothing while their etcds have no leader. Members are near
		// each other: five lost heartbeats are enough.
		e.TickMs, e.ElectionMs = 80, 400
	}
	if c.InitialCluster != "" {
		how, err := howToStart(ctx, c, s.peers)
		if err != nil {
			return nil, err
		}
		e.InitialCluster = how.cluster
		if how.existing {
			e.ClusterState = embed.ClusterStateFlagExisting
		}
	}
	e.UnsafeNoFsync = c.NoSync
	e.BackendBatchInterval = batchEvery(c.QuotaBytes)
	e.QuotaBackendBytes = c.QuotaBytes
	// A controller reads no history. The leading one also compacts by size: see
	// controller's keeper.
	e.AutoCompactionMode, e.AutoCompactionRetention = embed.CompactorModeRevision, "1000"
	e.LogLevel = "warn"
	e.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(slogCore{c.Log}))
	if peer.Scheme == "https" {
		e.PeerTLSInfo, e.TlsMinVersion = peerTLS(c.TLS), "TLS1.3"
	}
	return e, nil
}

// ready waits until the member can serve.
func (s *Server) ready(ctx context.Context, c Config) error {
	began := time.Now()
	timeout, tick := time.NewTimer(c.StartTimeout), time.NewTicker(pollEvery)
	defer timeout.Stop()
	defer tick.Stop()
	for {
		select {
		case <-s.etcd.Server.ReadyNotify():
			return nil
		case err := <-s.etcd.Err():
			return err
		case <-s.etcd.Server.StopNotify():
			return errEnded(c.Name)
		case <-tick.C:
			c.waitingFor(began, nil)
			// The first election need not wait for a timer. If this member is not able to
			// win, the others' timers run as ever.
			if voters := s.Voters(); s.Lead() == 0 && len(voters) > 0 && s.ID() == slices.Min(voters) {
				_ = s.Campaign(ctx)
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-timeout.C:
			return errors.New("not ready in " + c.StartTimeout.String() + ": are enough members of the cluster running?")
		}
	}
}

// errEnded: etcd stops by itself when its member is removed, and says why only in its log.
func errEnded(name string) error {
	return fmt.Errorf("embedded etcd %s has ended: was this controller removed from the cluster? Then its data folder is of no use any more", name)
}

// watch reports the end of a server that was not closed.
func (s *Server) watch(name string) {
	select {
	case err, ok := <-s.etcd.Err():
		if !ok || err == nil {
			return // closed
		}
		s.fails(err)
	case <-s.etcd.Server.StopNotify():
		if !s.closed.Load() {
			s.fails(errEnded(name))
		}
	}
}

// fails has Err yield an error, unless one waits there.
func (s *Server) fails(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// advertise changes the peer URL of a cluster of one that was started with another: so
// that others can join it.
func (s *Server) advertise(ctx context.Context, peer *url.URL) error {
	members := s.etcd.Server.Cluster().Members()
	if len(members) != 1 || slices.Equal(members[0].PeerURLs, []string{peer.String()}) {
		return nil
	}
	m := *members[0]
	m.PeerURLs = []string{peer.String()}
	_, err := s.etcd.Server.UpdateMember(ctx, m)
	return err
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

// Endpoint is the address for etcd clients.
func (s *Server) Endpoint() string { return s.client }

// Err yields an error when the server has ended, or its port has failed, and was not closed.
func (s *Server) Err() <-chan error { return s.failed }

// Close stops the server and removes what was temporary. Close clients first: the
// server waits some seconds for those that are still connected, and calls of Client's fail.
func (s *Server) Close() {
	if s.etcd != nil && !s.closed.Swap(true) {
		s.etcd.Close()
	}
	if s.peers != nil {
		s.peers.server.Close() // after etcd, which gives its leadership to another member
	}
	for _, dir := range []string{s.sockets, s.temp} {
		if dir != "" {
			os.RemoveAll(dir)
		}
	}
}

package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Version is this build's, told by Status.
var Version = "dev"

// Controller is a running controller.
type Controller struct {
	cfg     Config             // with defaults; never changes
	url     string             // where others reach it
	server  *httpserver.Server // of its RPCs and pages
	unserve func()             // with Config.Wire
	ctx     context.Context    // ends when Close begins
	cancel  context.CancelFunc // of ctx
	wg      sync.WaitGroup     // of its goroutines

	// term is the present leadership, nil on a standby.
	term atomic.Pointer[term]
	// leader is the present leader as far as it is known; empty if it is not.
	leader  atomic.Pointer[candidacy]
	changed atomic.Pointer[chan struct{}] // closed when term changes
	failed  chan error                    // why it cannot go on; read by Err
	counted counted                       // for metrics
	pulse   watch                         // its part in the cluster's pulse
	heard   sync.Map                      // serial of a session -> *beats that its last heartbeat came over
	probes  *http.Client                  // of the leader
	upkeep  upkeep                        // of etcd's size
	// nameRates bounds the name changes of each client host.
	nameRates nameRates
	tokens    tokens
	tenants   tenants
	jobs      jobs
	jobQueue  jobQueue
	owners    sync.Map     // number of a node to the name it has registered under here
	stuck     atomic.Bool  // its machine stood still and has not gone on
	rests     atomic.Int64 // ns; before that time this controller deposes no leader: see restAfter
}

// Start serves a controller. It returns once the port is open; leading comes later.
func Start(ctx context.Context, cfg Config) (*Controller, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Controller{cfg: cfg, url: cfg.Advertise, failed: make(chan error, 1),
		upkeep: upkeep{wake: make(chan struct{}, 1)}, nameRates: nameRates{hosts: map[string]*rate.Limiter{}}}
	var l net.Listener
	var at net.Addr
	if cfg.Wire == nil {
		var lc net.ListenConfig
		var err error
		if l, err = lc.Listen(ctx, "tcp", cfg.Listen); err != nil {
			return nil, fmt.Errorf("controller: listen on %s: %w", cfg.Listen, err)
		}
		at = l.Addr()
		if c.url == "" {
			scheme := "http"
			if cfg.TLS != nil && !cfg.MixedTLS {
				scheme = "https"
			}
			c.url = scheme + "://" + at.String()
		}
	}
	c.leader.Store(&candidacy{})
	ch := make(chan struct{})
	c.changed.Store(&ch)
	if err := c.listenPulse(ctx, at); err != nil {
		if l != nil {
			l.Close()
		}
		return nil, fmt.Errorf("controller: %w", err)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.probes = &http.Client{Transport: &http.Transport{TLSClientConfig: cfg.PeerTLS, IdleConnTimeout: time.Minute}}

	mux := http.NewServeMux()
	path, calls := quarrypbconnect.NewControllerHandler(&service{c: c}, append(options(), connect.WithInterceptors(&c.counted.requests, auditor{c}))...)
	mux.Handle(path, rights.Identify(c.caller, httpserver.Gate{Allow: c.allow, MaxBytes: maxBytes}.Before(calls)))
	mux.HandleFunc("GET /healthz", c.health)
	if cfg.Pages != nil {
		mux.Handle("/", c.page(cfg.Pages))
	}
	c.server = httpserver.New("controller", mux)
	c.server.TLS, c.server.Mixed = cfg.TLS, cfg.MixedTLS
	c.server.Hosts = []string{cfg.host()}
	c.server.BaseContext = func(net.Listener) context.Context { return c.ctx }
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	c.server.Protocols = &p
	c.watchConnections(&c.server.Server)
	if cfg.Wire != nil {
		c.unserve = cfg.Wire.Serve(c.url, mux)
	} else {
		c.wg.Go(func() {
			if err := c.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				c.failed <- fmt.Errorf("controller on %s: %w", c.url, err)
			}
		})
	}
	c.wg.Go(c.campaign)
	c.wg.Go(c.watchStore)
	c.wg.Go(c.watchDelegations)
	if c.pulse.port != nil {
		c.wg.Go(c.joinPulse)
		c.wg.Go(c.watchLeader)
		if cfg.Member != nil {
			c.wg.Go(c.electEtcd)
		}
	}
	return c, nil
}

// URL is where the controller is reached.
func (c *Controller) URL() string { return c.url }

// Leads says whether this controller leads now.
func (c *Controller) Leads() bool { return c.term.Load() != nil }

// Err yields errors after which the controller is of no use until it is started again:
// the port has failed, or the machine of its leadership stands still.
func (c *Controller) Err() <-chan error { return c.failed }

// WaitLeader returns once some controller is known to lead.
func (c *Controller) WaitLeader(ctx context.Context) error {
	for {
		ch := *c.changed.Load()
		if c.term.Load() != nil || c.leader.Load().URL != "" {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return fmt.Errorf("no controller leads: %w (is etcd reachable?)", ctx.Err())
		}
	}
}

// health answers 200 while this controller leads or knows the leader, and works.
func (c *Controller) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(incarnationHeader, strconv.FormatUint(c.pulse.incarnation, 10))
	w.Header().Set(quarrypb.VersionHeader, Version)
	if c.stuck.Load() {
		http.Error(w, errHung.Error(), http.StatusServiceUnavailable)
		return
	}
	if c.term.Load() == nil && c.leader.Load().URL == "" {
		http.Error(w, "no leader known", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// signal wakes goroutines that wait for a change of the leadership.
func (c *Controller) signal() {
	ch := make(chan struct{})
	close(*c.changed.Swap(&ch))
}

// Close stops serving, gives the leadership up and returns when all is quiet.
func (c *Controller) Close() error {
	c.cancel()
	if c.unserve != nil {
		c.unserve()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	err := c.server.Shutdown(ctx)
	if err != nil {
		err = c.server.Close()
	}
	if c.stuck.Load() {
		return errors.Join(err, errHung) // what stands still is not waited for
	}
	c.wg.Wait()
	c.probes.CloseIdleConnections()
	return err
}

package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Version is this build's, told by Status.
var Version = "dev"

// Controller is a running controller.
type Controller struct {
	cfg    Config
	url    string
	server *http.Server
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// term is the leadership in hand, nil on a standby.
	term atomic.Pointer[term]
	// leader is whoever leads, as far as known; an empty one is not.
	leader  atomic.Pointer[candidacy]
	changed atomic.Pointer[chan struct{}] // closed when term changes
	failed  chan error
	counted counted
	gossip  gossip
	probes  *http.Client // of the leader
	rests   atomic.Int64 // until then it deposes nobody: see restAfter
}

// Start serves a controller. It returns once the port is open; leading comes later.
func Start(ctx context.Context, cfg Config) (*Controller, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("controller: listen on %s: %w", cfg.Listen, err)
	}
	c := &Controller{cfg: cfg, url: cfg.Advertise, failed: make(chan error, 1)}
	if c.url == "" {
		scheme := "http"
		if cfg.TLS != nil {
			scheme = "https"
		}
		c.url = scheme + "://" + l.Addr().String()
	}
	c.leader.Store(&candidacy{})
	ch := make(chan struct{})
	c.changed.Store(&ch)
	if err := c.listenGossip(ctx, l.Addr()); err != nil {
		l.Close()
		return nil, fmt.Errorf("controller: %w", err)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.probes = &http.Client{Transport: &http.Transport{TLSClientConfig: cfg.AgentTLS, IdleConnTimeout: time.Minute}}

	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewControllerHandler(&service{c: c}, append(limits(), connect.WithInterceptors(&c.counted.requests, agentauth.RequireToken(cfg.Token,
		quarrypbconnect.ControllerOpenSessionProcedure, quarrypbconnect.ControllerRegisterNodeProcedure)))...))
	mux.HandleFunc("GET /healthz", c.health)
	if cfg.Pages != nil {
		mux.Handle("/", cfg.Pages)
	}
	c.server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, BaseContext: func(net.Listener) context.Context { return c.ctx }}
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	c.server.Protocols = &p
	c.watchConnections(c.server)
	if cfg.TLS != nil {
		l = tls.NewListener(l, cfg.TLS)
	}
	c.wg.Go(func() {
		if err := c.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			c.failed <- fmt.Errorf("controller on %s: %w", c.url, err)
		}
	})
	c.wg.Go(c.campaign)
	if c.gossip.port != nil {
		c.wg.Go(c.joinGossip)
		c.wg.Go(c.watchLeader)
	}
	return c, nil
}

// URL is where the controller is reached.
func (c *Controller) URL() string { return c.url }

// Leads says whether this controller leads now.
func (c *Controller) Leads() bool { return c.term.Load() != nil }

// Err yields at most one error: the port has failed.
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

// health answers 200 while this controller leads or knows who does.
func (c *Controller) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(lifeHeader, strconv.FormatUint(c.gossip.life, 10))
	w.Header().Set(quarrypb.VersionHeader, Version)
	if c.term.Load() == nil && c.leader.Load().URL == "" {
		http.Error(w, "no leader known", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// signal tells waiters that the leadership has changed.
func (c *Controller) signal() {
	ch := make(chan struct{})
	close(*c.changed.Swap(&ch))
}

// Close stops serving, gives the leadership up and returns when all is quiet.
func (c *Controller) Close() error {
	c.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	err := c.server.Shutdown(ctx)
	if err != nil {
		err = c.server.Close()
	}
	c.wg.Wait()
	c.probes.CloseIdleConnections()
	return err
}

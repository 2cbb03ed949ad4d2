package console

import (
	"context"
	"crypto/tls"
	"net/http"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/control"
)

// Config of a Console.
type Config struct {
	// Token that controllers are shown.
	Token string
	TLS   *tls.Config
	// Jobs lists jobs for the page; nil shows none.
	Jobs func(ctx context.Context, controllers []string) ([]Job, error)
}

// Job is a row of the page.
type Job struct {
	ID     uint64 `json:"id"`
	Plugin string `json:"plugin"`
	State  string `json:"state"`
	Phase  string `json:"phase"`
	Input  string `json:"input"`
	Output string `json:"output"`

	Priority string `json:"priority"`
}

const (
	every = time.Second
	// watched is how long the Console keeps asking after the last request for the page.
	watched   = 15 * time.Second
	askFor    = 3 * time.Second
	maxEvents = 200
	maxRates  = 120 // of each node: two minutes
)

// Console gathers what the page shows.
type Console struct {
	cfg     Config
	http    *http.Client
	handler http.Handler
	look    chan struct{} // a request for the page has come

	urls []string // of controllers; set before Run gathers

	mu     sync.Mutex
	last   time.Time // of the last request for the page
	snap   Snapshot
	before map[uint32]totals // of nodes
	known  bool              // snap is from a controller, so that changes are events
}

// totals of a node, to make rates of.
type totals struct {
	at                   time.Time
	verbs, read, written uint64
}

// New makes a Console. Run makes it gather.
func New(cfg Config) *Console {
	c := &Console{cfg: cfg, look: make(chan struct{}, 1), before: map[uint32]totals{}}
	c.http = control.Client(&http.Transport{TLSClientConfig: cfg.TLS})
	c.snap.Rates = map[uint32][]Rate{}
	c.handler = c.routes()
	return c
}

func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.handler.ServeHTTP(w, r) }

// Run gathers until the context ends: once a second while the page is open. Otherwise it reads the status once in
// watched, for the events of the time before; nodes are asked nothing. It asks the controllers at these URLs.
func (c *Console) Run(ctx context.Context, controllers ...string) {
	c.urls = controllers
	defer c.http.CloseIdleConnections()
	for {
		wait, open := watched, c.open()
		if open {
			wait = every
		}
		c.gather(ctx, open)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		case <-c.look:
		}
	}
}

// open says whether a page has asked lately.
func (c *Console) open() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Since(c.last) <= watched
}

// ask puts a question to the controllers.
func ask[Q, A any](ctx context.Context, c *Console, q *Q, method control.Method[Q, A]) (*A, error) {
	a, _, err := control.Ask(ctx, control.Controllers{URLs: c.urls, HTTP: c.http, Token: c.cfg.Token}, q, method)
	return a, err
}

package beamio

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
)

// Cluster is where a tree is. It is part of the pipeline, which runners store: secrets are not in it.
type Cluster struct {
	// Controllers are the URLs of controllers; none: those of the workers' environment.
	Controllers []string
	// Tenant of the tree; "": that of the workers' environment, or the one that their token has grants in.
	Tenant string
}

// Connect opens the client of a worker: by default with the variables of its environment that client.ConfigFromEnvironment reads, among them the token,
// certificates and keys of payloads. A program that gets them by other means replaces it before beam.Init.
var Connect = func(ctx context.Context, at Cluster) (*client.Client, error) {
	cfg, err := client.ConfigFromEnvironment()
	if err != nil {
		return nil, err
	}
	if len(at.Controllers) > 0 {
		cfg.Controllers = at.Controllers
	}
	if at.Tenant != "" {
		cfg.Tenant = at.Tenant
	}
	return client.Connect(ctx, cfg)
}

// A call of the store may last as long: runners bound bundles by their own means.
const longest = 24 * time.Hour

// shared is a client that the functions of one process share.
type shared struct {
	mu    sync.Mutex // held while the client is opened
	c     *client.Client
	users int // guarded by clientsMu
}

var (
	clientsMu sync.Mutex
	clients   = map[string]*shared{} // by Cluster
)

// acquire returns the process's client of a cluster; release ends the use of it.
func acquire(ctx context.Context, at Cluster) (c *client.Client, release func(), err error) {
	b, err := json.Marshal(at)
	if err != nil {
		return nil, nil, err
	}
	key := string(b)
	clientsMu.Lock()
	s := clients[key]
	if s == nil {
		s = &shared{}
		clients[key] = s
	}
	s.users++
	clientsMu.Unlock()
	release = sync.OnceFunc(func() {
		clientsMu.Lock()
		defer clientsMu.Unlock()
		if s.users--; s.users > 0 {
			return
		}
		delete(clients, key)
		if s.c != nil {
			_ = s.c.Close() // its session ends with its lease otherwise
		}
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c == nil {
		if s.c, err = Connect(ctx, at); err != nil {
			s.c = nil
			release()
			return nil, nil, fmt.Errorf("quarry: %w", err)
		}
	}
	return s.c, release, nil
}

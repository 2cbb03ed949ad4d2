package pool

import (
	"context"
	"encoding/hex"
	"os"
	"strings"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// world is what a Set is in: a machine, and a cluster. A test simulates one.
type world struct {
	c      *client.Client // nil: a set has no pools of its cluster
	boot   [16]byte       // of the machine's start; zero: not known
	medium func(path string, m pmem.Mapping) medium
	// openPool opens a pool whose owner calls own before it writes.
	openPool func(ctx context.Context, name string, local []byte, attr *Attr) (poolReplica, error)
	// makePool makes a pool whose last owner has a token, and opens it.
	makePool func(ctx context.Context, name string, local []byte, o Options, last string, torn bool) (poolReplica, error)
}

// in is the world of a Client.
func in(c *client.Client) *world {
	w := &world{
		c:      c,
		medium: func(_ string, m pmem.Mapping) medium { return mapped{m.Flusher} },
		openPool: func(ctx context.Context, name string, local []byte, attr *Attr) (poolReplica, error) {
			p, err := open(ctx, c, name, local, uint64(len(local)), attr, true)
			if err != nil {
				return nil, err
			}
			return p, nil
		},
		makePool: func(ctx context.Context, name string, local []byte, o Options, last string, torn bool) (poolReplica, error) {
			p, err := create(ctx, c, name, local, uint64(len(local)), o, last, torn)
			if err != nil {
				return nil, err
			}
			return p, nil
		},
	}
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		if b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(id)), "-", "")); err == nil {
			copy(w.boot[:], b)
		}
	}
	return w
}

package controller

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/time/rate"

	"github.com/quarrystore/quarry/controller/state"
)

// NameLimits bound what clients put into the placement library. The leader applies both. The size
// of etcd is a third limit: see upkeep.go.
type NameLimits struct {
	// Most is how many names there may be; 0 means DefaultMostNames.
	Most uint64
	// BytesPerSecond bounds the changes of one client host, counted in bytes of records;
	// bursts of nameBurst seconds are let through. 0 means DefaultNameBytesPerSecond.
	BytesPerSecond uint64
}

// Defaults of NameLimits.
const (
	DefaultMostNames          = 1 << 20
	DefaultNameBytesPerSecond = 1 << 20
)

const (
	nameBurst    = 8 // seconds
	maxNameHosts = 4096
)

// nameCount counts names. Only the leader changes names: it counts them once, and then keeps the
// count by its own changes.
type nameCount struct {
	mu       sync.Mutex    // guards the fields below; not held while etcd is asked
	known    bool          // n was counted in this term
	n        uint64        // with names that were deleted while they were counted
	counting chan struct{} // closed when the names have been counted; nil: they are not being counted
	again    bool          // a change without an answer was made meanwhile
}

// reserve takes the places of n names, if there are as many.
func (k *nameCount) reserve(ctx context.Context, c *Controller, n int) error {
	if err := k.await(ctx, c); err != nil {
		return err
	}
	defer k.mu.Unlock()
	if k.n+uint64(n) > c.cfg.Names.Most {
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("there are %d names, the most there can be (--max-names of the controllers): delete some", k.n))
	}
	k.n += uint64(n)
	return nil
}

// await returns with mu held when the names are counted. It counts them, or waits for who does.
func (k *nameCount) await(ctx context.Context, c *Controller) error {
	for {
		k.mu.Lock()
		if k.known {
			return nil
		}
		counting := k.counting
		if counting == nil {
			k.counting, k.again = make(chan struct{}), false
		}
		k.mu.Unlock()
		if counting == nil {
			if err := k.count(ctx, c); err != nil {
				return err
			}
			continue
		}
		select {
		case <-counting:
		case <-ctx.Done():
			return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
		}
	}
}

// count counts the names of all tenants.
func (k *nameCount) count(ctx context.Context, c *Controller) (err error) {
	var n uint64
	for _, prefix := range []string{c.nameKey(0, ""), c.cfg.Prefix + state.TenantNames} {
		var res *clientv3.GetResponse
		if res, err = c.cfg.Etcd.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil {
			err = etcdError(err)
			break
		}
		n += uint64(res.Count)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.counting)
	k.counting = nil
	k.n, k.known = n, err == nil && !k.again
	return err
}

// lost says that the count is not known any more: a change had no answer.
func (k *nameCount) lost() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.known, k.again = false, true
}

// gone gives the places of n names back.
func (k *nameCount) gone(n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.n -= min(k.n, uint64(n))
}

// nameRates bounds the changes of each client host.
type nameRates struct {
	mu    sync.Mutex
	hosts map[string]*rate.Limiter
}

// allow takes bytes from a host's allowance; false: it has not so many left. host is the address
// of a connection.
func (r *nameRates) allow(peer string, bytes int, perSecond uint64) error {
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		host = peer
	}
	now := time.Now()
	r.mu.Lock()
	l := r.hosts[host]
	if l == nil {
		if len(r.hosts) >= maxNameHosts {
			r.forget(now)
		}
		l = rate.NewLimiter(rate.Limit(perSecond), int(perSecond)*nameBurst)
		r.hosts[host] = l
	}
	r.mu.Unlock()
	if l.AllowN(now, bytes) {
		return nil
	}
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%s changes names too fast: at most %d bytes a second (--name-rate of the controllers)", host, perSecond))
}

// forget drops hosts that have their whole allowance again; all hosts if there are none such.
func (r *nameRates) forget(now time.Time) {
	for h, l := range r.hosts {
		if l.TokensAt(now) >= float64(l.Burst()) {
			delete(r.hosts, h)
		}
	}
	if len(r.hosts) >= maxNameHosts {
		clear(r.hosts)
	}
}

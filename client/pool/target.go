package pool

import (
	"context"
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// RemotePool is a pool of a Set in a cluster that a host reaches.
type RemotePool struct {
	Host string // as Host.Name
	Name string
}

func (r RemotePool) String() string { return r.Host + " " + r.Name }

// poolReplica is a replica that is a pool.
type poolReplica interface {
	replica
	// discard closes and removes a pool that was made in vain.
	discard() error
}

// target is a pool that a Set names.
type target interface {
	// open opens the pool, whose owner calls own before it writes.
	open(ctx context.Context, local []byte, attr *Attr) (poolReplica, error)
	// make makes a pool whose last owner has a token, and opens it.
	make(ctx context.Context, local []byte, o Options, last string, torn bool) (poolReplica, error)
	Stat(ctx context.Context) (Info, error)
	remove(ctx context.Context) error
	check(ctx context.Context, local []byte, progress func(done uint64)) (Report, error)
	String() string // by which Restore names it
}

// in is the world of a set's calls with a Client.
func (s *Set) in(ctx context.Context, c *client.Client) (*world, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if c == nil && len(s.Pools) > 0 {
		return nil, fmt.Errorf("%w: pool set %s has pools of the client's cluster, and there is no client", client.ErrArgument, s.Path)
	}
	return in(c), nil
}

// targets are the pools of a set: those of the world's cluster, and then the others.
func (w *world) targets(s *Set) (all []target) {
	for _, name := range s.Pools {
		all = append(all, near{w, name})
	}
	for _, r := range s.Remotes {
		all = append(all, far{s.Host(r.Host), r})
	}
	return all
}

// Host is a host of the set, with the set's commands.
func (s *Set) Host(name string) Host { return Host{Name: name, SSH: s.SSH, Agent: s.Agent} }

// near is a pool of the world's cluster.
type near struct {
	w    *world
	name string
}

func (n near) open(ctx context.Context, local []byte, attr *Attr) (poolReplica, error) {
	return n.w.openPool(ctx, n.name, local, attr)
}

func (n near) make(ctx context.Context, local []byte, o Options, last string, torn bool) (poolReplica, error) {
	return n.w.makePool(ctx, n.name, local, o, last, torn)
}

func (n near) Stat(ctx context.Context) (Info, error) { return Stat(ctx, n.w.c, n.name) }
func (n near) remove(ctx context.Context) error       { return Remove(ctx, n.w.c, n.name) }
func (n near) String() string                         { return n.name }
func (n near) check(ctx context.Context, local []byte, progress func(done uint64)) (Report, error) {
	return Check(ctx, n.w.c, n.name, local, progress)
}

// far is a pool of a cluster that a host reaches.
type far struct {
	h Host
	RemotePool
}

func (f far) open(ctx context.Context, local []byte, attr *Attr) (poolReplica, error) {
	r, err := f.h.open(ctx, f.Name, local, attr, true)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (f far) make(ctx context.Context, local []byte, o Options, last string, torn bool) (poolReplica, error) {
	r, err := f.h.create(ctx, f.Name, local, o, last, torn)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (f far) Stat(ctx context.Context) (Info, error) { return f.h.Stat(ctx, f.Name) }
func (f far) remove(ctx context.Context) error       { return f.h.Remove(ctx, f.Name) }
func (f far) check(ctx context.Context, local []byte, progress func(done uint64)) (Report, error) {
	return f.h.Check(ctx, f.Name, local, progress)
}

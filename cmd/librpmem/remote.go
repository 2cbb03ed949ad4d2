package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

// headerBytes is what librpmem keeps for itself at the start of a pool.
const headerBytes = 4096

// mostLanes is the largest number of lanes that a caller is told.
const mostLanes = 64

// remote is a pool that a program has open.
type remote interface {
	Write(b []byte, off uint64) error
	DeepWrite(b []byte, off uint64) error
	Read(dst []byte, off uint64) error
	SetAttr(a pool.Attr) error
	Attr() pool.Attr
	Bytes() uint64
	Dirty() bool
	Reconcile(ctx context.Context) (pool.Report, error)
	Close(ctx context.Context) error
}

// opened is a remote with what it needs.
type opened struct {
	remote
	local []byte // at most as large as the pool
	lanes uint
	end   func() error // behind Close
}

// pools are the open ones by their numbers, which C keeps.
var pools struct {
	sync.RWMutex
	last uint64
	open map[uint64]*opened
}

func add(o *opened) (number uint64) {
	pools.Lock()
	defer pools.Unlock()
	if pools.open == nil {
		pools.open = map[uint64]*opened{}
	}
	pools.last += 16 // a pointer, to C
	pools.open[pools.last] = o
	return pools.last
}

var errHandle = fmt.Errorf("%w: the pool is closed, or was never open", client.ErrArgument)

func find(number uint64) (*opened, error) {
	pools.RLock()
	defer pools.RUnlock()
	if o := pools.open[number]; o != nil {
		return o, nil
	}
	return nil, errHandle
}

// take removes a pool from the open ones.
func take(number uint64) (*opened, error) {
	pools.Lock()
	defer pools.Unlock()
	o := pools.open[number]
	delete(pools.open, number)
	if o == nil {
		return nil, errHandle
	}
	return o, nil
}

// Options of new pools are variables: librpmem has no words for them.
const (
	replicasVariable = "QUARRY_POOL_CREATE_REPLICAS"
	durableVariable  = "QUARRY_POOL_CREATE_DURABLE"
)

// optionsOf are the options of a new pool.
func optionsOf(a pool.Attr) (o pool.Options, err error) {
	o.Attr = a
	if s := os.Getenv(replicasVariable); s != "" {
		if o.Replicas, err = strconv.Atoi(s); err != nil {
			return o, fmt.Errorf("%w: %s=%q: want 1 to 3", client.ErrArgument, replicasVariable, s)
		}
	}
	if s := os.Getenv(durableVariable); s != "" {
		if o.Durable, err = strconv.ParseBool(s); err != nil {
			return o, fmt.Errorf("%w: %s=%q: want true or false", client.ErrArgument, durableVariable, s)
		}
	}
	return o, nil
}

// connect opens a client as the environment says.
func connect(lanes uint) (c *client.Client, timeout time.Duration, err error) {
	cfg, err := client.ConfigFromEnvironment()
	if err != nil {
		return nil, 0, err
	}
	cfg.Lanes = int(lanes)
	timeout = cmp.Or(cfg.Timeout, client.DefaultTimeout)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err = client.Connect(ctx, cfg)
	return c, timeout, err
}

// fenceWait bounds the wait for the end of a program that had the pool open and was killed: its session is fenced when its lease is over.
const fenceWait = 30 * time.Second

// get creates or opens a pool. attr is nil for Open.
func get(target, name string, local []byte, lanes uint, create bool, attr pool.Attr) (o *opened, err error) {
	o = &opened{local: local, lanes: min(lanes, mostLanes), end: func() error { return nil }}
	options, err := optionsOf(attr)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	h := pool.Host{Name: target}
	var c *client.Client
	if target == pool.Cluster {
		if c, _, err = connect(o.lanes); err != nil {
			return nil, err
		}
		o.end = c.Close
	}
	try := func() (err error) {
		switch {
		case c != nil && create:
			o.remote, err = pool.Create(ctx, c, name, local, options)
		case c != nil:
			o.remote, err = pool.OpenBare(ctx, c, name)
		case create:
			o.remote, err = h.Create(ctx, name, local, options)
		default:
			o.remote, err = h.OpenBare(ctx, name)
		}
		return err
	}
	err = try()
	for began := time.Now(); errors.Is(err, pool.ErrOpen) && time.Since(began) < fenceWait; err = try() {
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		return nil, errors.Join(err, o.end())
	}
	if o.Bytes() < uint64(len(local)) {
		return nil, errors.Join(fmt.Errorf("%w: pool %q has %d bytes, the local memory %d", pool.ErrMismatch, name, o.Bytes(), len(local)), o.close())
	}
	if o.Dirty() { // its replicas may differ where a program was killed
		if _, err := o.Reconcile(ctx); err != nil {
			return nil, errors.Join(err, o.close())
		}
	}
	return o, nil
}

// closeTimeout bounds what ends a pool.
const closeTimeout = 30 * time.Second

func (o *opened) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return errors.Join(o.Close(ctx), o.end())
}

// removePool removes a pool.
func removePool(target, name string) error {
	if target != pool.Cluster {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		return pool.Host{Name: target}.Remove(ctx, name)
	}
	c, timeout, err := connect(1)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return errors.Join(pool.Remove(ctx, c, name), c.Close())
}

// persist sends a range, or has it on stable storage.
func (o *opened) persist(off, n uint64, lane uint, deep bool) error {
	switch {
	case lane >= o.lanes:
		return fmt.Errorf("%w: lane %d, the pool has %d", client.ErrArgument, lane, o.lanes)
	case off < headerBytes:
		return fmt.Errorf("%w: offset %d: the first %d bytes of a pool are not the program's", client.ErrArgument, off, headerBytes)
	case off > uint64(len(o.local)) || n > uint64(len(o.local))-off:
		return fmt.Errorf("%w: %d bytes at %d, the local memory has %d", pool.ErrRange, n, off, len(o.local))
	case deep:
		return o.DeepWrite(o.local[off:off+n], off)
	}
	return o.Write(o.local[off:off+n], off)
}

// errnos are looked through in order: an error may wrap several.
var errnos = []struct {
	err error
	is  syscall.Errno
}{
	{client.ErrUnknown, syscall.ECONNRESET},
	{client.ErrNoName, syscall.ENOENT},
	{client.ErrNameExists, syscall.EEXIST},
	{pool.ErrOpen, syscall.EBUSY},
	{pool.ErrNotDurable, syscall.ENOTSUP},
	{pool.ErrAgent, syscall.ECONNREFUSED},
	{client.ErrNoSpace, syscall.ENOSPC},
	{client.ErrReadOnly, syscall.EROFS},
	{client.ErrFenced, syscall.ESHUTDOWN},
	{client.ErrUnreachable, syscall.EHOSTUNREACH},
	{client.ErrArgument, syscall.EINVAL},
	{pool.ErrMismatch, syscall.EINVAL},
	{pool.ErrNotPool, syscall.EINVAL},
	{context.DeadlineExceeded, syscall.ETIMEDOUT},
}

// errnoOf is the errno that stands for an error.
func errnoOf(err error) syscall.Errno {
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return e.is
		}
	}
	return syscall.EIO
}

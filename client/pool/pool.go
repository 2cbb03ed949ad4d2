package pool

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

// Errors of this package. They mean that the call has changed nothing.
var (
	// ErrNotPool: the name is not that of a pool.
	ErrNotPool = errors.New("not a pool")
	// ErrOpen: the pool has an owner.
	ErrOpen = errors.New("the pool is open")
	// ErrMismatch: the local memory has another size, or the pool other attributes, than the caller expects.
	ErrMismatch = errors.New("the pool does not match")
	// ErrUnfinished: Create or Remove of the pool did not return. Remove it.
	ErrUnfinished = errors.New("the pool is not whole")
	// ErrRange: the range is not in the pool. It is also a client.ErrArgument.
	ErrRange = fmt.Errorf("%w: range outside of the pool", client.ErrArgument)
	// ErrNotDurable: the pool is in memory that does not survive a loss of power.
	ErrNotDurable = errors.New("the pool is not durable")
	// ErrNotPart: the file is not a local part of this pool set.
	ErrNotPart = errors.New("not a part of the pool set")
	// ErrNoPart: a local part of a pool set is missing.
	ErrNoPart = errors.New("no local part")
	// ErrBehind: the local part has what was persisted, and a replica may lack it. Sync, or the next Open, brings it there.
	ErrBehind = errors.New("a replica of the memory is behind")
	// ErrTorn: a Sync of the replica has not returned, or a Persist has failed there and later ones may not have.
	ErrTorn = errors.New("the replica is torn")
	// ErrClosed: Close was called.
	ErrClosed = errors.New("the pool is closed")
)

// MaxNameBytes is how long the name of a pool can be.
const MaxNameBytes = 200

// Options of a new pool.
type Options struct {
	Attr        Attr
	Replicas    int    // 0: as client.Config.Replicas, and the cluster's default
	RegionBytes uint64 // as space.Options.RegionBytes
	Durable     bool   // what Persist acknowledges survives a loss of power
}

// Pool is an open pool, whose owner is the Client's session. Safe for concurrent use.
type Pool struct {
	c     *client.Client
	local []byte // nil in an agent, which gets the bytes of each range
	size  uint64
	s     *space.Space
	base  uint64
	name  string
	claim *claim
	// failed counts what may have left the pool without bytes of the local memory; clean is how many of these Sync or Restore has made good.
	failed, clean atomic.Uint64

	mu       sync.RWMutex // held for writing by Close
	closed   bool         // Close was called
	released bool         // and has given the pool up

	setting sync.Mutex // guards attr
	attr    Attr
}

// newToken tells the calls of a session, and the spaces of a name, apart.
func newToken() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Create makes a pool of the size of the local memory and opens it. The pool is all zero and Dirty: Sync sends it what the memory holds.
//
// Errors: client.ErrNameExists; client.ErrNoSpace; client.ErrUnknown: a pool that is not whole may be left, for Remove.
func Create(ctx context.Context, c *client.Client, name string, local []byte, o Options) (*Pool, error) {
	return create(ctx, c, name, local, uint64(len(local)), o, newToken(), false)
}

// create is Create of a pool of some size; last is the token of the pool's last writer. torn: what it has until own is called is nobody's memory.
func create(ctx context.Context, c *client.Client, name string, local []byte, size uint64, o Options, last string, torn bool) (*Pool, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(name) > MaxNameBytes {
		return nil, fmt.Errorf("%w: the name of a pool has at most %d bytes, not %d", client.ErrArgument, MaxNameBytes, len(name))
	}
	if size == 0 {
		return nil, fmt.Errorf("%w: a pool of 0 bytes", client.ErrArgument)
	}
	if c.ReadOnly() {
		return nil, client.ErrReadOnly
	}
	k, err := bind(ctx, c)
	if err != nil {
		return nil, err
	}
	p := &Pool{c: c, local: local, size: size, name: name, claim: k, attr: o.Attr}
	p.failed.Add(1)
	if err := p.make(ctx, name, o, last, torn); err != nil {
		k.end()
		return nil, err
	}
	return p, nil
}

// make makes the object, the name and the space, in this order: what is there of a pool can be found by its name.
func (p *Pool) make(ctx context.Context, name string, o Options, last string, torn bool) (err error) {
	k := p.claim
	ctx, cancel := k.within(ctx)
	defer cancel()
	durability := client.Volatile
	if o.Durable {
		durability = client.Durable
	}
	h := head{magic, p.size, o.Attr}
	ref, err := p.c.Alloc(ctx, h.encode(), client.AllocOptions{Replicas: o.Replicas, Durability: durability})
	if err != nil {
		return err
	}
	token := newToken()
	k.n = note{State: Making, Space: name + "/pool-" + token, Owner: k.me, Token: token, Dirty: true, Torn: torn, Last: last}
	made, err := p.c.Names().CreateMany(ctx, []client.Name{k.n.with(client.Name{Name: name, Kind: NameKind, Ref: ref})})
	if errors.Is(err, client.ErrUnknown) {
		if e, n, lerr := lookup(ctx, p.c, name); lerr == nil && n == k.n {
			made, err = []client.Name{e}, nil
		}
	}
	if err != nil {
		if !errors.Is(err, client.ErrUnknown) {
			_ = p.c.Free(ctx, ref) // of no use to anybody
		}
		return err
	}
	k.e = made[0]
	if p.s, err = space.Create(ctx, p.c, k.n.Space, p.size, space.Options{Replicas: o.Replicas, RegionBytes: o.RegionBytes, Durable: o.Durable}); err == nil {
		p.base = p.s.Base()
		ready := k.n
		ready.State = Ready
		if err = k.change(ctx, ready); err == nil || errors.Is(err, client.ErrUnknown) {
			return err // it may be whole
		}
	}
	tidy, done := k.tidy()
	defer done()
	if uerr := k.unmake(tidy); uerr != nil {
		err = k.giveBack(fmt.Errorf("%w: pool %q may be left, and is not whole: remove it: %w", client.ErrUnknown, name, errors.Join(err, uerr)), true)
	}
	return err
}

// unmake removes what there is of a pool, the name at last, so that it can be called again.
func (k *claim) unmake(ctx context.Context) error {
	if err := space.Delete(ctx, k.c, k.n.Space); err != nil && !errors.Is(err, client.ErrNoName) {
		return err
	}
	if err := k.c.Free(ctx, k.e.Ref); err != nil && !errors.Is(err, client.ErrFreed) && !errors.Is(err, client.ErrNoRegion) {
		return err
	}
	return k.c.Names().Delete(ctx, k.e.Name, k.e.Revision)
}

// Open opens a pool with local memory of its size. attr, unless it is nil, is what the pool's attributes have to be.
//
// Errors: client.ErrNoName, ErrNotPool, ErrOpen, ErrMismatch, ErrUnfinished; client.ErrUnknown: the Client's session may be the owner, until it ends.
func Open(ctx context.Context, c *client.Client, name string, local []byte, attr *Attr) (*Pool, error) {
	return open(ctx, c, name, local, uint64(len(local)), attr, false)
}

// OpenBare opens a pool without local memory: for Write, DeepWrite, Read, SetAttr, Reconcile and Close.
func OpenBare(ctx context.Context, c *client.Client, name string) (*Pool, error) {
	return open(ctx, c, name, nil, anySize, nil, false)
}

// anySize of open is that of the pool.
const anySize = 1<<64 - 1

// errBare: a pool has no local memory.
var errBare = fmt.Errorf("%w: the pool was opened without local memory", client.ErrArgument)

// open is Open of a pool of some size. keep: the caller calls own before it writes.
func open(ctx context.Context, c *client.Client, name string, local []byte, size uint64, attr *Attr, keep bool) (*Pool, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if c.ReadOnly() {
		return nil, client.ErrReadOnly
	}
	k, err := bind(ctx, c)
	if err != nil {
		return nil, err
	}
	k.keep = keep
	p := &Pool{c: c, local: local, size: size, name: name, claim: k}
	if err := p.open(ctx, name, attr); err != nil {
		k.end()
		return nil, err
	}
	return p, nil
}

func (p *Pool) open(ctx context.Context, name string, attr *Attr) error {
	k := p.claim
	ctx, cancel := k.within(ctx)
	defer cancel()
	e, n, err := lookup(ctx, p.c, name)
	if err != nil {
		return err
	}
	if n.State == Ready {
		err = p.match(ctx, e, attr)
	} else {
		err = fmt.Errorf("%w: pool %q: %s", ErrUnfinished, name, n.State)
	}
	if err != nil {
		return err
	}
	if err := k.take(ctx, e, n, Ready); err != nil {
		return err
	}
	if k.n.Dirty {
		p.failed.Add(1)
	}
	if err = p.match(ctx, e, attr); err == nil { // a former owner may have set the attributes meanwhile
		p.s, err = space.Open(ctx, p.c, n.Space)
	}
	if err != nil {
		return k.giveBack(err, k.n.Dirty)
	}
	p.base = p.s.Base()
	return nil
}

// match reads the attributes of a pool and compares them, and the size, with what the caller expects.
func (p *Pool) match(ctx context.Context, e client.Name, attr *Attr) error {
	h, err := readHead(ctx, p.c, e)
	switch {
	case err != nil:
		return err
	case p.size == anySize:
		p.size = h.Bytes
	case h.Bytes != p.size:
		return fmt.Errorf("%w: pool %q has %d bytes, the local memory %d", ErrMismatch, e.Name, h.Bytes, p.size)
	case attr != nil && *attr != h.Attr:
		return fmt.Errorf("%w: pool %q has other attributes: signature %q, version %d", ErrMismatch, e.Name, h.Attr.Signature, h.Attr.Major)
	}
	p.attr = h.Attr
	return nil
}

// readHead reads the object of a pool's name.
func readHead(ctx context.Context, c *client.Client, e client.Name) (head, error) {
	b, err := c.Read(ctx, e.Ref, nil)
	if err != nil {
		return head{}, fmt.Errorf("pool %q: %w", e.Name, err)
	}
	h, err := decodeHead(b)
	if err != nil {
		err = fmt.Errorf("pool %q: %w", e.Name, err)
	}
	return h, err
}

// Remove removes a pool that nobody has open, with what it holds. A Remove that failed can be made again.
//
// Errors: client.ErrNoName, ErrNotPool, ErrOpen; others: the pool is there, whole, or ErrUnfinished, or, with client.ErrUnknown, it may be gone.
func Remove(ctx context.Context, c *client.Client, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.ReadOnly() {
		return client.ErrReadOnly
	}
	k, err := bind(ctx, c)
	if err != nil {
		return err
	}
	defer k.end()
	ctx, cancel := k.within(ctx)
	defer cancel()
	e, n, err := lookup(ctx, c, name)
	if err != nil {
		return err
	}
	if err := k.take(ctx, e, n, Removing); err != nil {
		return err
	}
	if err := k.unmake(ctx); err != nil {
		return k.giveBack(err, true) // it can be removed again, also by another session
	}
	return nil
}

// Close gives the pool up when the calls that are running have ended; others fail from now on. It does not persist anything. After an error the
// Client's session may have the pool until it ends; Close can be called again. Behind the first success it does nothing.
func (p *Pool) Close(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// Invariant: no write begins behind a release that may have arrived.
	p.closed = true
	if p.released {
		return nil
	}
	if err := p.claim.release(ctx, p.Dirty()); err != nil {
		return fmt.Errorf("pool %q: %w", p.name, err)
	}
	p.released = true
	p.claim.end()
	return nil
}

// enter begins a call on a range. The caller calls p.mu.RUnlock at its end, unless there is an error.
func (p *Pool) enter(off, n uint64) error {
	p.mu.RLock()
	var err error
	if p.closed {
		err = ErrClosed
	} else {
		err = inRange(off, n, p.size, p.name)
	}
	if err != nil {
		p.mu.RUnlock()
	}
	return err
}

// inRange refuses what is not in a pool.
func inRange(off, n, size uint64, name string) error {
	if off > size || n > size-off {
		return fmt.Errorf("%w: %d bytes at %d, pool %q has %d", ErrRange, n, off, name, size)
	}
	return nil
}

// Persist copies the range [off, off+n) of the local memory to the pool. nil: all replicas have it, on stable storage if the pool is durable.
// client.ErrUnknown: any of the bytes may be there; others: none is. Persist may be called again. Nobody changes the range during the call.
func (p *Pool) Persist(off, n uint64) error {
	if err := p.enter(off, n); err != nil {
		return err
	}
	defer p.mu.RUnlock()
	if p.local == nil {
		return errBare
	}
	return p.send(p.claim.bound, off, n)
}

// Write is Persist of other bytes than those of the local memory.
func (p *Pool) Write(b []byte, off uint64) error {
	if err := p.enter(off, uint64(len(b))); err != nil {
		return err
	}
	defer p.mu.RUnlock()
	return p.write(p.claim.bound, b, off)
}

func (p *Pool) put(b []byte, off uint64) error { return p.Write(b, off) }

// DeepWrite is DeepPersist of other bytes than those of the local memory.
func (p *Pool) DeepWrite(b []byte, off uint64) error {
	if err := p.enter(off, uint64(len(b))); err != nil {
		return err
	}
	defer p.mu.RUnlock()
	return p.deepPut(b, off)
}

// send writes a range of the local memory.
func (p *Pool) send(ctx context.Context, off, n uint64) error {
	return p.write(ctx, p.local[off:off+n], off)
}

func (p *Pool) write(ctx context.Context, b []byte, off uint64) error {
	done, err := p.s.Write(ctx, b, p.base+off)
	if err == nil {
		return nil
	}
	p.failed.Add(1)
	if done > 0 && !errors.Is(err, client.ErrUnknown) {
		err = fmt.Errorf("%w: %w", client.ErrUnknown, err)
	}
	return fmt.Errorf("pool %q: %d of %d bytes at %d are persisted: %w", p.name, done, len(b), off, p.claim.because(err))
}

// DeepPersist is Persist and has all that was persisted in the range on stable storage. ErrNotDurable: no byte is sent.
func (p *Pool) DeepPersist(off, n uint64) error {
	if err := p.enter(off, n); err != nil {
		return err
	}
	defer p.mu.RUnlock()
	if p.local == nil {
		return errBare
	}
	return p.deepPut(p.local[off:off+n], off)
}

// deepPut is DeepPersist of bytes of the caller. Preconditions: enter.
func (p *Pool) deepPut(b []byte, off uint64) error {
	n := uint64(len(b))
	if !p.s.Info().Durable {
		return fmt.Errorf("%w: %q", ErrNotDurable, p.name)
	}
	if err := p.write(p.claim.bound, b, off); err != nil {
		return err
	}
	if err := p.s.Flush(p.claim.bound, p.base+off, n); err != nil {
		return p.claim.because(fmt.Errorf("%w: pool %q: flush of %d bytes at %d: %w", client.ErrUnknown, p.name, n, off, err))
	}
	return nil
}

// Read reads bytes of the pool from an offset on.
func (p *Pool) Read(dst []byte, off uint64) error {
	if err := p.enter(off, uint64(len(dst))); err != nil {
		return err
	}
	defer p.mu.RUnlock()
	_, err := p.s.Read(p.claim.bound, dst, p.base+off)
	return p.claim.because(err)
}

// SetAttr gives the pool other attributes, at once. client.ErrUnknown: it may have them.
func (p *Pool) SetAttr(a Attr) error {
	if err := p.enter(0, 0); err != nil {
		return err
	}
	defer p.mu.RUnlock()
	p.setting.Lock()
	defer p.setting.Unlock()
	h := head{magic, p.size, a}
	err := p.c.Write(p.claim.bound, p.claim.e.Ref, h.encode())
	if err == nil {
		p.attr = a
	}
	return p.claim.because(err)
}

// Attr are the attributes that the pool had when it was opened, or got by SetAttr since.
func (p *Pool) Attr() Attr {
	p.setting.Lock()
	defer p.setting.Unlock()
	return p.attr
}

// Bytes is the size of the pool.
func (p *Pool) Bytes() uint64 { return p.size }

// Dirty says that the pool was not closed in order, or that a Persist failed, and neither Sync nor Restore has been made since.
func (p *Pool) Dirty() bool { return p.failed.Load() != p.clean.Load() }

// behind has the pool Dirty until the next Sync.
func (p *Pool) behind() { p.failed.Add(1) }

// owner is the token of the pool's last writer.
func (p *Pool) owner() string { return p.claim.n.Last }

// own makes a token that of the pool's last writer.
func (p *Pool) own(ctx context.Context, token string, torn bool) error {
	return p.claim.own(ctx, token, torn)
}

func (p *Pool) torn() bool { return p.claim.n.Torn }

func (p *Pool) set() [16]byte { return p.Attr().PoolsetUUID }

func (p *Pool) String() string { return "pool " + p.name }

// Info describes a pool.
type Info struct {
	Name     string `json:"name"`
	State    string `json:"state"`
	Bytes    uint64 `json:"bytes"`
	Replicas int    `json:"replicas"`
	Durable  bool   `json:"durable"`
	Dirty    bool   `json:"dirty"`           // it is open, or was not closed in order
	Torn     bool   `json:"torn,omitempty"`  // a Sync of its set has not returned, or a Persist has failed
	Owner    uint32 `json:"owner,omitempty"` // number of the session that has, or had, it open
	Space    string `json:"space"`
	Problem  string `json:"problem,omitempty"` // why the rest is not known
	Attr     Attr   `json:"-"`
}

// Stat describes a pool.
func Stat(ctx context.Context, c *client.Client, name string) (Info, error) {
	if err := ctx.Err(); err != nil {
		return Info{}, err
	}
	e, n, err := lookup(ctx, c, name)
	if err != nil {
		return Info{}, err
	}
	i := Info{Name: name, State: n.State, Dirty: n.Dirty || n.Owner.Serial != 0, Owner: n.Owner.Number, Torn: n.Torn, Space: n.Space}
	if n.State != Ready {
		return i, nil
	}
	h, err := readHead(ctx, c, e)
	if err != nil {
		return i, err
	}
	s, err := space.Open(ctx, c, n.Space)
	if err != nil {
		return i, err
	}
	i.Bytes, i.Attr, i.Replicas, i.Durable = h.Bytes, h.Attr, s.Info().Replicas, s.Info().Durable
	return i, nil
}

// List describes all pools of the Client's tenant, by name. One that cannot be described has a Problem.
func List(ctx context.Context, c *client.Client) (out []Info, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var names []string
	if err := c.Names().List(ctx, "", NameKind, func(e client.Name) error { names = append(names, e.Name); return nil }); err != nil {
		return nil, err
	}
	for _, name := range names {
		i, err := Stat(ctx, c, name)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if i.State == "" && errors.Is(err, client.ErrNoName) {
			continue // removed meanwhile
		}
		if i.Name = name; err != nil {
			i.Problem = err.Error()
		}
		out = append(out, i)
	}
	return out, nil
}

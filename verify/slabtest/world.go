package slabtest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/slab"
)

var key = keyring.NewSigner([32]byte{7})

// World is one region on R nodes.
type World struct {
	T        testing.TB
	Nodes    []*Node
	Geometry proto.Geometry
	uuid     [16]byte
	dialer   rdma.Dialer
	// persistent: the memory survives a loss of power.
	persistent bool

	serial atomic.Uint64
	mu     sync.Mutex
	epoch  uint64 // that nodes serve
	fenced map[uint32]bool
	lanes  []*Port
}

// Node is one storage node.
type Node struct {
	Access Access
	Memory *host.Memory
	Ledger *pmem.Ledger // of Memory; nil: it has none
	addr   string
}

// Access is the access control of the server of the node's region.
type Access interface {
	OpenRegion(ctx context.Context, region uint32, epoch uint64, m *host.Memory) error
	Fence(ctx context.Context, serials ...uint64) error
}

// New starts a world with a region of 16 MiB on r nodes, reached over tcp.
//
// If the environment variable RXE_DEVICE names an RDMA device and the build has verbs, the
// region is reached over that device instead. The tests of the slab protocol run unchanged
// on a real kernel RDMA stack that way.
func New(t testing.TB, r int) *World {
	if HasDevice() {
		return onVerbs(t, r, verbs.Config{}, volatile)
	}
	return with(t, r, tcp.Dialer{}, volatile)
}

// NewLedgers is New over tcp, with memory of which ledgers know what a loss of power leaves.
func NewLedgers(t testing.TB, r int) *World {
	w := with(t, r, tcp.Dialer{}, host.NewLedgerMemory)
	w.persistent = true
	return w
}

// NewOnFiles is New over a provider, with regions in files that are flushed through ledgers, also by clients that map them.
// Preconditions: no other ledgers of files are in use.
func NewOnFiles(t testing.TB, r int, d rdma.Dialer) *World {
	dir, regions := t.TempDir(), 0
	ledgers, err := pmem.UseLedgers(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ledgers.Close()) })
	w := with(t, r, d, func(_ string, bytes uint64) (*host.Memory, *pmem.Ledger, error) {
		regions++
		path := filepath.Join(dir, fmt.Sprint("region-", regions))
		m, err := host.OpenMemory(path, bytes, true)
		if err != nil {
			return nil, nil, err
		}
		l, err := ledgers.Of(path)
		return m, l, err
	})
	w.persistent = true
	return w
}

// NewFlushedBy is New in this process, without a socket, with memory whose ranges are flushed so, and which survives no loss of power: for
// measurements.
func NewFlushedBy(t testing.TB, r int, f pmem.Flusher) *World {
	w := with(t, r, shm.NewInproc(), func(name string, bytes uint64) (*host.Memory, *pmem.Ledger, error) {
		m, err := host.NewFlushedMemory(name, bytes, f)
		return m, nil, err
	})
	w.persistent = true
	return w
}

// volatile memory has no ledger.
func volatile(name string, bytes uint64) (*host.Memory, *pmem.Ledger, error) {
	m, err := host.NewMemory(name, bytes)
	return m, nil, err
}

// HasDevice says whether worlds are on an RDMA device.
func HasDevice() bool { return verbs.Built && os.Getenv("RXE_DEVICE") != "" }

// NewFlushed is New on a device, with memory that a ledger keeps, which clients make durable by a method.
// Preconditions: HasDevice.
func NewFlushed(t testing.TB, r int, m rdma.FlushMethod) *World {
	w := onVerbs(t, r, verbs.Config{Windows: verbs.WindowsOff, Flush: m}, host.NewLedgerMemory)
	w.persistent = true
	return w
}

// Stride is the distance between two of the cases that a test tries of many that are alike, such as the death of a session behind
// each verb: 1 over tcp, short with -short, device on an RDMA device. Over tcp the tests of this repository try all of them, some of them
// without -short alone, that is without the race detector: one session works at a time. Which case it is
// does not depend on the provider: a lane that dies posts a chain that is cut before. And a connection takes a tenth of a second where the
// processor of a machine with a device is emulated.
func Stride(t testing.TB, short, device int) int {
	switch {
	case HasDevice():
		t.Logf("on an RDMA device: one of %d cases", device)
		return device
	case testing.Short() && short > 1:
		t.Logf("-short: one of %d cases", short)
		return short
	}
	return 1
}

// Posted is how many parts of chains have been posted, and what was done to make WRITEs durable. Preconditions: HasDevice.
func (w *World) Posted() verbs.Stats { return w.dialer.(*verbs.Dialer).Stats() }

// NewSHM is New with the regions mapped into this process, as for clients on the same host.
func NewSHM(t testing.TB, r int) *World { return with(t, r, shm.NewDialer(), volatile) }

func empty(t testing.TB, d rdma.Dialer) *World {
	g, err := proto.NewGeometry(proto.MinRegionBytes)
	require.NoError(t, err)
	return &World{T: t, epoch: 1, dialer: d, uuid: [16]byte{1}, fenced: map[uint32]bool{}, Geometry: g}
}

// windows is what the first server of this process has found out about the device's windows. Each server that finds it out again takes a fifth of a
// second for it where the processor is emulated.
var windows atomic.Int32

// found is what a server has chosen.
func found(s *verbs.Server) verbs.Windows {
	if s.Caps().Enforced == "bounds and queue pair" {
		return verbs.WindowsOn
	}
	return verbs.WindowsOff
}

// onVerbs makes the world of New on an RDMA device.
func onVerbs(t testing.TB, r int, c verbs.Config, memory func(name string, bytes uint64) (*host.Memory, *pmem.Ledger, error)) *World {
	d, err := verbs.NewDialer(verbs.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	w := empty(t, d)
	for i := range r {
		if c.Windows == verbs.WindowsAuto {
			c.Windows = verbs.Windows(windows.Load())
		}
		s, err := verbs.NewServer([16]byte{9}, keyring.NewRing(key.Public()), uint32(i+1), 1, host.Limits{}, c, nil)
		require.NoError(t, err)
		if c.Windows == verbs.WindowsAuto {
			windows.Store(int32(found(s)))
		}
		m, ledger, err := memory("test", proto.MinRegionBytes)
		require.NoError(t, err)
		require.NoError(t, s.OpenRegion(t.Context(), 1, 1, m))
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		go s.Serve(l)
		t.Cleanup(func() {
			require.NoError(t, s.Close(context.Background()))
			require.NoError(t, m.Close()) // registration has allocated all its pages
		})
		w.Nodes = append(w.Nodes, &Node{s, m, ledger, l.Addr().String()})
	}
	return w
}

func with(t testing.TB, r int, d rdma.Dialer, memory func(name string, bytes uint64) (*host.Memory, *pmem.Ledger, error)) *World {
	w := empty(t, d)
	for i := range r {
		a := host.New([16]byte{9}, keyring.NewRing(key.Public()), uint32(i+1), 1, host.Limits{})
		m, ledger, err := memory("test", proto.MinRegionBytes)
		require.NoError(t, err)
		require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
		t.Cleanup(func() { // behind the server's
			require.NoError(t, a.Close(context.Background()))
			require.NoError(t, m.Close())
		})
		log := slog.New(slog.DiscardHandler)
		var addr string
		if local, ok := d.(*shm.Inproc); ok {
			addr = fmt.Sprint("node", i)
			local.Add(addr, a)
		} else if d.Provider() == "tcp" {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			s := tcp.NewServer(a, log)
			go s.Serve(l)
			t.Cleanup(s.Close)
			addr = l.Addr().String()
		} else {
			addr = filepath.Join(t.TempDir(), "shm")
			l, err := shm.Listen(addr)
			require.NoError(t, err)
			s := shm.NewServer(a, log)
			go s.Serve(l)
			t.Cleanup(func() { s.Close() })
		}
		w.Nodes = append(w.Nodes, &Node{a, m, ledger, addr})
	}
	return w
}

// Fence ends a session on every node.
func (w *World) Fence(session uint32) {
	w.mu.Lock()
	var serials []uint64
	for _, p := range w.lanes {
		if p.session == session {
			serials = append(serials, p.serial)
		}
	}
	w.mu.Unlock()
	for _, n := range w.Nodes {
		require.NoError(w.T, n.Access.Fence(w.T.Context(), serials...))
	}
	w.mu.Lock()
	w.fenced[session] = true
	w.mu.Unlock()
}

// Port is the slab.Port of one lane. Tests set its hooks.
type Port struct {
	World    *World
	Lane     *slab.Lane
	Alloc    *alloc.Allocator
	BeforeDo func(round int, r *rdma.Round) // round counts from 1 within the Port
	AfterDo  func(round int, r *rdma.Round) // may change what a READ returned, as far as a fabric may
	OnPost   func(r *rdma.Round)            // of a round that is not waited for
	OnPause  func(attempt int) error        // an error ends the wait
	OnBuffer func(bytes int) error          // an error: there is no memory
	OnRegion func() error                   // an error: the region cannot be used, or is gone
	Later    uint64                         // epoch of the table, before the region can be used under it; 0: none
	Lease    atomic.Bool
	Ended    error

	session  uint32
	serial   uint64
	seq      uint64
	rounds   int
	region   *slab.Region
	targets  []rdma.Target
	late     *rdma.Round // posted and not awaited
	arena    *rdma.Arena
	deadline time.Time
}

// Lane opens a lane of a session.
func (w *World) Lane(session uint32) *Port {
	p := &Port{World: w, session: session, serial: w.serial.Add(1)}
	p.Lease.Store(true)
	var err error
	p.arena, err = rdma.NewArena(64 << 20)
	require.NoError(w.T, err)
	w.mu.Lock()
	epoch := w.epoch
	w.mu.Unlock()
	p.region = &slab.Region{ID: 1, Epoch: epoch, Seed: proto.RegionSeed(w.uuid), Geometry: w.Geometry, N: len(w.Nodes), Headers: slab.NewHeaders(w.Geometry.Blocks)}
	p.targets = make([]rdma.Target, len(w.Nodes))
	ticket := rdma.Issue(key, rdma.Ticket{Cluster: [16]byte{9}, Session: session, Serial: p.serial, Rights: rdma.ReadWrite})
	for i, n := range w.Nodes {
		c, err := w.dialer.Dial(context.Background(), n.addr, ticket, 0)
		require.NoError(w.T, err)
		w.T.Cleanup(func() { c.Close() })
		win, err := c.Open(context.Background(), 1, epoch)
		require.NoError(w.T, err)
		p.targets[i] = rdma.Target{Conn: c, Window: win}
		p.region.To[i] = &p.targets[i]
	}
	p.Lane, err = slab.NewLane(p)
	require.NoError(w.T, err)
	p.Alloc, err = alloc.New(p.Lane, p)
	require.NoError(w.T, err)
	w.mu.Lock()
	w.lanes = append(w.lanes, p)
	w.mu.Unlock()
	return p
}

// NextEpoch opens the region under the next epoch on every node. Only this lane learns of
// it, and lanes that are opened later. Claims of the epoch before are void. Nothing is reconciled.
func (p *Port) NextEpoch() {
	next := *p.region
	next.Epoch++
	next.Headers = slab.NewHeaders(next.Geometry.Blocks)
	p.targets = make([]rdma.Target, len(p.World.Nodes))
	for i, n := range p.World.Nodes {
		require.NoError(p.World.T, n.Access.OpenRegion(context.Background(), 1, next.Epoch, n.Memory))
		conn := p.region.To[i].Conn
		win, err := conn.Open(context.Background(), 1, next.Epoch)
		require.NoError(p.World.T, err)
		p.targets[i] = rdma.Target{Conn: conn, Window: win}
		next.To[i] = &p.targets[i]
	}
	p.region = &next
	p.World.mu.Lock()
	p.World.epoch = next.Epoch
	p.World.mu.Unlock()
}

// Rebuild empties the blocks of replica k, and has this lane take it for one that is rebuilt.
func (p *Port) Rebuild(k int) {
	next := *p.region
	next.Rebuilding[k] = true
	p.region = &next
	for b := range next.Geometry.Blocks {
		clear(p.World.Nodes[k].Memory.Bytes()[next.Geometry.BlockOff(b):][:proto.BlockBytes])
	}
}

// Rebuilding has this lane take replica k for one that is rebuilt, with what it has.
func (p *Port) Rebuilding(k int) {
	next := *p.region
	next.Rebuilding[k] = true
	p.region = &next
}

// Compares says whether replica k answers VERIFY, and is worth asking.
func (p *Port) Compares(k int) bool { return p.region.To[k].Compares() }

// Compare has this lane's reconcile and copy compare replicas by hashes before they move bytes.
func (p *Port) Compare() {
	next := *p.region
	for i := range next.N {
		next.Compares[i] = true
	}
	p.region = &next
}

// Raw has this lane take the region for a raw one.
func (p *Port) Raw() { p.RawOf(proto.MinRegionBytes) }

// RawOf has this lane take the region for a raw one of so many bytes, which may be more than there are.
func (p *Port) RawOf(bytes uint64) {
	next := *p.region
	var err error
	next.Raw = true
	next.Geometry, err = proto.GeometryOf(proto.RegionRaw, bytes)
	require.NoError(p.World.T, err)
	p.region = &next
}

// View is the lane's view of the region.
func (p *Port) View() *slab.Region { return p.region }

// Durable has this lane take the region for one on persistent memory. Where the memory is volatile,
// FLUSHes ask for visibility alone.
func (p *Port) Durable() {
	next := *p.region
	next.Durable = true
	p.region = &next
	if p.World.persistent {
		return
	}
	p.BeforeDo = func(_ int, r *rdma.Round) {
		for i := range r.Len() {
			for j := range r.At(i).Verbs {
				r.At(i).Verbs[j].Kind = rdma.Visible
			}
		}
	}
}

// OpenWords has this lane take the region for one with open words, and read at replica from.
func (p *Port) OpenWords(from int) {
	next := *p.region
	next.OpenWords, next.From = true, from
	p.region = &next
}

// ReadOnly has this lane take its session for one that may not write.
func (p *Port) ReadOnly() {
	next := *p.region
	next.ReadOnly = true
	p.region = &next
}

// Wants has this lane take the region for one that is to have so many replicas.
func (p *Port) Wants(replicas int) {
	next := *p.region
	next.Want = replicas
	p.region = &next
}

// Raise raises the reclaim epoch: the lane's cached block headers are dropped.
func (p *Port) Raise() {
	next := *p.region
	next.Headers = slab.NewHeaders(next.Geometry.Blocks)
	p.region = &next
}

// ErrDied is the value of the panic that ends a lane which a test kills in an operation.
var ErrDied = errors.New("client died")

func (p *Port) Do(r *rdma.Round) {
	p.rounds++
	if p.BeforeDo != nil {
		p.BeforeDo(p.rounds, r)
	}
	r.Deadline = 0
	if p.late != nil {
		rdma.DoBehind(p.late, r)
		p.late = nil
	} else {
		rdma.Do(r)
	}
	if p.AfterDo != nil {
		p.AfterDo(p.rounds, r)
	}
}

// Post posts a round that the lane does not wait for; see slab.Poster.
func (p *Port) Post(r *rdma.Round) {
	if p.OnPost != nil {
		p.OnPost(r)
	}
	rdma.Post(r)
	p.late = r
}

// Await waits for it.
func (p *Port) Await(r *rdma.Round) {
	if r.Deadline = 0; p.late == r {
		rdma.Await(r)
		p.late = nil
	}
}

func (p *Port) Region(id uint32) (*slab.Region, error) {
	if id != 1 {
		return nil, slab.ErrNoRegion
	}
	if p.OnRegion != nil {
		if err := p.OnRegion(); err != nil {
			return nil, err
		}
	}
	return p.region, p.Ended
}

// EpochOf is the epoch of the table.
func (p *Port) EpochOf(uint32) uint64 { return max(p.Later, p.region.Epoch) }

func (p *Port) Settle(_ *slab.Region, r *rdma.Round) error {
	for i := range r.Len() {
		switch c := r.At(i); {
		case c.Err == nil, errors.Is(c.Err, rdma.ErrKey): // its epoch is over: Region tells
		case errors.Is(c.Err, rdma.ErrRefused):
			return c.Err
		default:
			if err := c.To.Conn.Reset(context.Background()); err != nil {
				return err
			}
		}
	}
	return p.Ended
}

func (p *Port) Pause(attempt int) error {
	if attempt <= 1 {
		p.deadline = time.Now().Add(10 * time.Second)
	}
	if time.Now().After(p.deadline) {
		return context.DeadlineExceeded
	}
	if p.OnPause != nil {
		if err := p.OnPause(attempt); err != nil {
			return err
		}
	}
	runtime.Gosched()
	return p.Ended
}

func (p *Port) HolderFenced(_, session uint32, _ int) bool {
	p.World.mu.Lock()
	defer p.World.mu.Unlock()
	return p.World.fenced[session]
}

func (p *Port) LeaseValid() bool { return p.Lease.Load() }

func (p *Port) Reservation() proto.R {
	p.seq++
	return proto.MakeR(p.session, p.serial<<32|p.seq)
}

func (p *Port) EndSession(err error) { p.Ended = err }
func (p *Port) Buffer(n int) ([]byte, error) {
	if p.OnBuffer != nil {
		if err := p.OnBuffer(n); err != nil {
			return nil, err
		}
	}
	return p.arena.Alloc(n)
}

func (p *Port) Regions(alloc.Home) []uint32   { return []uint32{1} }
func (p *Port) Grow(alloc.Home, uint32) error { return alloc.ErrNoSpace }
func (p *Port) Random() uint64                { return rand.Uint64() }

// Rounds returns how many rounds the lane has done.
func (p *Port) Rounds() int { return p.rounds }

package pool

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// This file simulates what a Set is in: a machine whose processes are killed and whose power fails at any step, files that can be lost and copied, and pools whose writes can
// fail. The files, their headers and mappings, and all of a Set are real; media and pools are simulated. simrun_test.go has the schedules.

var errKilled = errors.New("the process was killed")

// simWorld is a machine and a cluster.
type simWorld struct {
	*world
	r      *rand.Rand
	dir    string
	pools  map[string]*simPool
	clean  map[uint64]map[int]uint64 // words that a flush which failed has left out, and that the kernel takes for written, by inode
	shadow map[uint64][]byte         // what a loss of power leaves of a file for sure, by inode

	mu      sync.Mutex
	session int // of the process that runs
	durable bool
	fuse    int // steps until the process is killed; negative: it is not
	dead    bool
	frozen  map[string]string // names of files when the process was killed, and links to these
	fate    map[string]fate   // of the next writes to a replica
}

// fate is what becomes of writes to a replica: left more of them succeed, then one has an effect in part and others none.
type fate struct {
	left  int
	half  bool
	names bool // its owner cannot be changed either
	flush bool // of a local part: flushes fail
}

func newSimWorld(r *rand.Rand, dir string) *simWorld {
	w := &simWorld{r: r, dir: dir, pools: map[string]*simPool{}, clean: map[uint64]map[int]uint64{}, shadow: map[uint64][]byte{}, session: 1, durable: true, fuse: -1, fate: map[string]fate{}}
	w.world = &world{boot: [16]byte{1}, medium: func(path string, m pmem.Mapping) medium { return w.newMedium(path, m) }, openPool: w.open, makePool: w.make}
	return w
}

// step may kill the process.
func (w *simWorld) step() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fuse == 0 {
		w.kill()
	}
	if w.dead {
		return errKilled
	}
	w.fuse--
	return nil
}

// kill ends the process: nothing that it does from now on has an effect. Preconditions: mu is held.
func (w *simWorld) kill() {
	if w.dead {
		return
	}
	w.dead, w.frozen = true, map[string]string{}
	entries, err := os.ReadDir(w.dir)
	for i, e := range entries {
		if e.Type().IsRegular() {
			link := filepath.Join(w.dir, "frozen", fmt.Sprint(i))
			err = errors.Join(err, os.Link(filepath.Join(w.dir, e.Name()), link))
			w.frozen[e.Name()] = link
		}
	}
	if err != nil {
		panic(err)
	}
}

// again starts the next process behind a kill. Preconditions: the former one has closed its files.
func (w *simWorld) again() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.session++
	w.fuse, w.fate = -1, map[string]fate{}
	if !w.dead {
		return nil
	}
	w.dead = false
	entries, err := os.ReadDir(w.dir)
	for _, e := range entries {
		if e.Type().IsRegular() {
			err = errors.Join(err, os.Remove(filepath.Join(w.dir, e.Name())))
		}
	}
	for name, link := range w.frozen {
		err = errors.Join(err, os.Rename(link, filepath.Join(w.dir, name)))
	}
	return err
}

func inode(path string) uint64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Sys().(*syscall.Stat_t).Ino
}

// powerFails has each file lose some of what was not flushed. Preconditions: no process runs.
func (w *simWorld) powerFails() error {
	w.boot[0]++
	for _, c := range w.clean {
		clear(c)
	}
	entries, err := os.ReadDir(w.dir)
	for _, e := range entries {
		path := filepath.Join(w.dir, e.Name())
		sure := w.shadow[inode(path)]
		if !e.Type().IsRegular() || sure == nil {
			continue
		}
		b, rerr := os.ReadFile(path)
		if err = errors.Join(err, rerr); err != nil {
			return err
		}
		chance := w.r.IntN(3)
		for at := 0; at < len(b); at += 8 {
			if w.r.IntN(2) >= chance {
				copy(b[at:at+8], sure[at:])
			}
		}
		f, ferr := os.OpenFile(path, os.O_RDWR, 0)
		if err = errors.Join(err, ferr); err != nil {
			return err
		}
		_, werr := f.WriteAt(b, 0)
		copy(sure, b)
		err = errors.Join(err, werr, f.Close())
	}
	return err
}

// simMedium is a mapped file.
type simMedium struct {
	w     *simWorld
	path  string
	sure  []byte
	clean map[int]uint64
}

func (w *simWorld) newMedium(path string, m pmem.Mapping) medium {
	w.mu.Lock()
	defer w.mu.Unlock()
	ino := inode(path)
	if w.shadow[ino] == nil {
		w.shadow[ino], w.clean[ino] = bytes.Clone(m.Mem), map[int]uint64{}
	}
	return &simMedium{w, path, w.shadow[ino], w.clean[ino]}
}

func (m *simMedium) persistent() bool { return m.w.durable }

func (m *simMedium) persist(mem []byte, off, n uint64) error {
	if err := m.w.step(); err != nil {
		return err
	}
	if !m.w.durable {
		return nil
	}
	fails := m.w.flushFails(m.path, off)
	for at := int(off &^ 7); at < int(off+n); at += 8 {
		word := binary.LittleEndian.Uint64(mem[at:])
		if left, is := m.clean[at]; fails {
			m.clean[at] = word
		} else if !is || left != word {
			delete(m.clean, at)
			copy(m.sure[at:at+8], mem[at:])
		}
	}
	if fails {
		return errors.New("the disk has failed")
	}
	return nil
}

func (m *simMedium) rewrite(mem []byte) error {
	clear(m.clean)
	return m.persist(mem, 0, uint64(len(mem)))
}

func (m *simMedium) store(mem []byte, off uint64, b []byte) error {
	if err := m.w.step(); err != nil {
		return err
	}
	if off < HeaderBytes && m.w.silent(m.path) {
		return errors.New("the medium has failed")
	}
	if n, err := m.w.befall(m.path, len(b)); off >= HeaderBytes && err != nil {
		copy(mem[off:], b[:n])
		return err
	}
	copy(mem[off:], b)
	return m.persist(mem, off, uint64(len(b)))
}

// simPool is a pool of the cluster.
type simPool struct {
	memory      []byte
	attr        Attr
	owner       int // session; 0: nobody
	last        string
	dirty, torn bool
}

// simHandle is a pool that a process has open.
type simHandle struct {
	*simPool
	w      *simWorld
	name   string
	mine   int
	local  []byte
	failed atomic.Bool
}

func (w *simWorld) open(_ context.Context, name string, local []byte, _ *Attr) (poolReplica, error) {
	if err := w.step(); err != nil {
		return nil, err
	}
	p := w.pools[name]
	switch {
	case p == nil:
		return nil, client.ErrNoName
	case p.owner == w.session:
		return nil, ErrOpen
	case p.owner != 0: // it was killed, and is fenced
		p.dirty = true
	}
	p.owner = w.session
	return w.handle(p, name, local), w.step()
}

func (w *simWorld) make(_ context.Context, name string, local []byte, o Options, last string, torn bool) (poolReplica, error) {
	if err := w.step(); err != nil {
		return nil, err
	}
	p := &simPool{memory: make([]byte, len(local)), attr: o.Attr, owner: w.session, last: last, dirty: true, torn: torn}
	w.pools[name] = p
	return w.handle(p, name, local), w.step()
}

func (w *simWorld) handle(p *simPool, name string, local []byte) *simHandle {
	h := &simHandle{simPool: p, w: w, name: name, mine: w.session, local: local}
	h.failed.Store(p.dirty)
	return h
}

// becomes gives the next writes to a replica a fate; nil: they succeed.
func (w *simWorld) becomes(replica string, f *fate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if delete(w.fate, replica); f != nil {
		w.fate[replica] = *f
	}
}

// flushFails says that a flush of the memory of a local part fails.
func (w *simWorld) flushFails(path string, off uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return off >= HeaderBytes && w.fate[path].flush
}

// befall says how many bytes of a write to a replica have an effect, and whether it fails.
func (w *simWorld) befall(replica string, bytes int) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f, has := w.fate[replica]
	switch {
	case w.dead:
		return 0, errKilled
	case !has:
		return bytes, nil
	case f.left > 0:
		w.fate[replica] = fate{f.left - 1, f.half, f.names, false}
		return bytes, nil
	case !f.half:
		return 0, errors.New("the write has failed")
	}
	w.fate[replica] = fate{0, false, f.names, false}
	return bytes / 16 * 8, errors.New("the write has failed in the middle")
}

// silent says that the owner of a replica cannot be changed.
func (w *simWorld) silent(replica string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fate[replica].names
}

func (h *simHandle) put(b []byte, off uint64) error {
	n, err := h.w.befall(h.name, len(b))
	copy(h.memory[off:], b[:n])
	if err != nil {
		h.failed.Store(true)
	}
	return err
}

func (h *simHandle) check(ctx context.Context, progress func(uint64)) (Report, error) {
	return comparePart(ctx, h.local, h.memory, progress)
}

func (h *simHandle) Sync(ctx context.Context, progress func(uint64)) (Report, error) {
	h.failed.Store(true)
	r, err := eachPart(ctx, h.local, h.memory, progress, func(a, b []byte, _ uint64) error {
		if err := h.w.step(); err != nil {
			return err
		}
		copy(b, a)
		return nil
	})
	h.failed.Store(err != nil)
	return r, err
}

func (h *simHandle) Restore(ctx context.Context, progress func(uint64)) (Report, error) {
	r, err := eachPart(ctx, h.local, h.memory, progress, func(a, b []byte, _ uint64) error { copy(a, b); return h.w.step() })
	h.failed.Store(h.failed.Load() && err != nil)
	return r, err
}

func (h *simHandle) owner() string { return h.last }

// own takes effect at a step, or is not known to have one.
func (h *simHandle) own(_ context.Context, token string, torn bool) error {
	if h.w.silent(h.name) {
		return errors.New("the controllers do not answer")
	}
	if err := h.w.step(); err != nil {
		return err
	}
	h.last, h.simPool.torn = token, torn
	return h.w.step()
}

func (h *simHandle) Close(context.Context) error {
	if h.simPool.owner != h.mine {
		return nil
	}
	if err := h.w.step(); err != nil {
		return err
	}
	h.simPool.owner, h.dirty = 0, h.failed.Load()
	return h.w.step()
}

func (h *simHandle) set() [16]byte  { return h.attr.PoolsetUUID }
func (h *simHandle) torn() bool     { return h.simPool.torn }
func (h *simHandle) behind()        { h.failed.Store(true) }
func (h *simHandle) Dirty() bool    { return h.failed.Load() }
func (h *simHandle) String() string { return "pool " + h.name }
func (h *simHandle) discard() error { return errors.New("not simulated") }

// wordsOf are the words of a memory.
func wordsOf(b []byte) []uint64 {
	out := make([]uint64, len(b)/8)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return out
}

package host

import (
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

// Runner executes the chains of one lane, wherever that happens: in the node's
// process (tcp, inproc) or in the client's (shm). One goroutine at a time.
type Runner struct {
	page     *page      // the lane's gate, shared with the other side over shm
	busy     uint64     // own copy of page.busy
	windows  []window   // by slot; used by the goroutine that runs chains
	writable bool       // rights of the ticket; false: WRITE, CAS and FETCH_ADD are refused
	dirty    bool       // plain stores since the last barrier
	order    uint64     // target of barriers
	hasher   *Hasher    // of VERIFYs; nil until the first one
	chain    rdma.Chain // through an adapter
	relay    RelayLane  // the way through an adapter; nil until Lane.Open has made it
}

// window is memory that chains may touch as long as the key is right.
type window struct {
	mem    []byte       // of the region; nil: nothing is mapped
	key    *uint64      // in the gate page
	last   uint64       // the key it was opened with: what still uses it is late, not hostile
	flush  pmem.Flusher // zero: no persistent FLUSH is possible
	target *rdma.Target // not nil: only the adapter may touch mem
}

// NewRunner makes the runner of a lane whose gate page is mapped at mem. The page
// stays mapped as long as the runner is reachable, and is unmapped then.
func NewRunner(mem []byte, rights rdma.Rights) (*Runner, error) {
	r := &Runner{}
	return r, r.init(mem, rights)
}

// init takes over the gate page of a lane, which is unmapped with the Runner.
func (r *Runner) init(mem []byte, rights rdma.Rights) error {
	if len(mem) < PageBytes {
		return fmt.Errorf("gate page of %d bytes: want %d", len(mem), PageBytes)
	}
	r.page, r.writable = pageAt(mem), rights == rdma.ReadWrite
	runtime.AddCleanup(r, func(mem []byte) { unix.Munmap(mem) }, mem)
	return nil
}

// Map puts the memory of a window into a slot. flush is how this mapping of it is made durable.
// Preconditions: len(mem) is a multiple of 8, mem is aligned to 8, slot < MaxWindows.
func (r *Runner) Map(slot int32, key uint64, mem []byte, flush pmem.Flusher) {
	for int(slot) >= len(r.windows) {
		r.windows = append(r.windows, window{key: &r.page.keys[len(r.windows)]})
	}
	w := &r.windows[slot]
	w.mem, w.last, w.flush, w.target = mem, key, flush, nil
}

// Valid says whether the key of a slot is valid now.
func (r *Runner) Valid(slot int32) bool {
	return int(slot) < len(r.windows) && atomic.LoadUint64(r.windows[slot].key) == r.windows[slot].last
}

// Shut ends the runner's access and returns when nothing executes any more. It may
// be called from any goroutine; the memory of the windows may be unmapped then.
func (r *Runner) Shut() {
	r.page.shutGate(closed)
	r.page.awaitIdle()
	runtime.KeepAlive(r)
}

// Lose is Shut for a client whose connection to the node has ended.
func (r *Runner) Lose() {
	r.page.shutGate(gone)
	r.page.awaitIdle()
	runtime.KeepAlive(r)
}

// Run executes verbs in order and returns how many have run, and why it stopped.
func (r *Runner) Run(slot int32, key uint64, verbs []rdma.Verb) (done int, err error) {
	p := r.page
	if err := rdma.WithinLimits(verbs); err != nil {
		return 0, r.refuse(err, true)
	}
	if uint(slot) >= uint(len(r.windows)) {
		return 0, r.refuse(r.why(rdma.ErrKey), true)
	}
	w := &r.windows[slot]

	r.busy++
	atomic.StoreUint64(&p.busy, r.busy) // 1, see doc.go
	if atomic.LoadUint64(&p.shut) != open || atomic.LoadUint64(w.key) != key || key == 0 {
		r.leave()
		return 0, r.refuse(r.why(rdma.ErrKey), key == 0 || key != w.last)
	}
	if w.target != nil {
		done, err = r.pass(w, verbs)
		r.leave()
		if err != nil {
			return done, r.refuse(err, err != rdma.ErrNotPersistent && err != rdma.ErrKey)
		}
		runtime.KeepAlive(r)
		return done, nil
	}
	done, err = r.execute(w, verbs)
	r.leave()
	if err != nil {
		return done, r.refuse(err, err != rdma.ErrNotPersistent && err != rdma.ErrKey)
	}
	runtime.KeepAlive(r)
	return done, nil
}

// execute runs verbs on the memory of a window until one fails, and counts them.
// Preconditions: the runner is busy, so the memory stays mapped.
func (r *Runner) execute(w *window, verbs []rdma.Verb) (done int, err error) {
	var read, written, verified, persisted uint64
	seen := 1 // verbs whose memory has been asked for, the first by its own copy
	for done = range verbs {
		v := &verbs[done]
		if seen < len(verbs) && seen <= done+aheadVerbs/4 {
			if verbs[seen].Op != rdma.Read {
				seen++
			} else {
				seen = w.prefetch(verbs[:min(len(verbs), done+aheadVerbs)], seen)
			}
		}
		if err = r.check(w, v); err != nil {
			break
		}
		switch v.Op {
		case rdma.Read:
			r.barrier()
			copyOut(v.Buf, w.mem, v.Off)
			read += uint64(len(v.Buf))
		case rdma.Write:
			if !strongOrder {
				r.barrier()
			}
			if len(v.Buf) >= pmem.StreamBytes && w.flush.Streams() && (v.Off|uint64(len(v.Buf)))&7 == 0 {
				w.flush.Stream(w.mem, v.Off, v.Buf)
			} else {
				copyIn(w.mem, v.Off, v.Buf)
			}
			r.dirty = true
			written += uint64(len(v.Buf))
		case rdma.CompareSwap:
			v.Old = compareSwap(wordAt(w.mem, v.Off), v.Expect, v.New)
			r.dirty = false
		case rdma.FetchAdd:
			v.Old = atomic.AddUint64(wordAt(w.mem, v.Off), v.New) - v.New
			r.dirty = false
		case rdma.Verify:
			r.barrier()
			v.Old = r.hash(w.mem, v)
			verified += v.Bytes
		case rdma.Flush:
			r.barrier()
			if v.Kind == rdma.Persistent {
				err = r.persist(w, v.Off, v.Bytes, &persisted)
			}
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		done = len(verbs)
	}
	p := r.page
	put(&p.verbs, p.verbs+uint64(done))
	put(&p.read, p.read+read)
	put(&p.written, p.written+written)
	if verified > 0 {
		put(&p.verified, p.verified+verified)
	}
	return done, err
}

// persistBytes is how much of a chain is made durable until it is looked whether the lane still has access: the end of that waits for no
// more.
const persistBytes = 64 << 20

// persist makes a range durable. A chain may flush a whole region in each of its verbs, so that it goes on only while the lane has access.
// since is how much the chain has made durable since that was looked at last.
// Preconditions: the range is within the window, the runner is busy, so the memory stays mapped.
func (r *Runner) persist(w *window, off, bytes uint64, since *uint64) error {
	for bytes > 0 {
		if *since == persistBytes {
			if atomic.LoadUint64(&r.page.shut) != open || atomic.LoadUint64(w.key) != w.last {
				return r.why(rdma.ErrKey)
			}
			*since = 0
		}
		n := min(bytes, persistBytes-*since)
		if err := w.flush.Persist(w.mem, off, n); err != nil {
			return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
		}
		off, bytes, *since = off+n, bytes-n, *since+n
	}
	return nil
}

// aheadVerbs bounds how many verbs the memory is ahead of the one that runs.
const aheadVerbs = 8

// check says whether a verb may run. Nothing has been touched yet.
func (r *Runner) check(w *window, v *rdma.Verb) error {
	n := v.Len()
	size := uint64(len(w.mem))
	if n == 0 || v.Off >= size || n > size-v.Off { // never v.Off+n, which can overflow
		return rdma.ErrBounds
	}
	switch v.Op {
	case rdma.CompareSwap, rdma.FetchAdd:
		if v.Off&7 != 0 {
			return rdma.ErrAlign
		}
		fallthrough
	case rdma.Write:
		if !r.writable {
			return rdma.ErrReadOnly
		}
	case rdma.Flush:
		if v.Kind == rdma.Persistent && !w.flush.Persistent() {
			return rdma.ErrNotPersistent
		}
	case rdma.Verify:
		if w.target != nil && !w.target.Window.Verifies {
			return rdma.ErrUnsupported
		}
	}
	return nil
}

// strongOrder: on amd64 stores are seen in order by everyone, and so are loads;
// only a load may overtake an earlier store.
const strongOrder = runtime.GOARCH == "amd64"

// barrier orders the next verb behind the stores of earlier ones (and, on arm64,
// behind their loads): an atomic read-modify-write is a full barrier on both.
func (r *Runner) barrier() {
	if r.dirty || !strongOrder {
		atomic.AddUint64(&r.order, 1)
		r.dirty = false
	}
}

// leave marks the lane idle; all that was executed is visible before.
func (r *Runner) leave() {
	r.busy++
	atomic.StoreUint64(&r.page.busy, r.busy)
	r.dirty = false
}

// why is the error of a lane whose gate is shut, or otherwise.
func (r *Runner) why(otherwise error) error {
	switch atomic.LoadUint64(&r.page.shut) {
	case open:
		return otherwise
	case revoked:
		return rdma.ErrRevoked
	}
	return rdma.ErrBroken
}

// refuse counts a refusal. An offence is one that a correct client does not cause.
func (r *Runner) refuse(err error, offence bool) error {
	p := r.page
	put(&p.refused, p.refused+1)
	if offence && err != rdma.ErrRevoked && err != rdma.ErrBroken {
		put(&p.offence, p.offence+1)
	}
	runtime.KeepAlive(r)
	return err
}

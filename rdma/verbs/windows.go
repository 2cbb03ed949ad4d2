//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// grant is a lane's window onto a region. It is of type 2B: it can be used on that lane's queue
// pair only.
type grant struct {
	window *C.struct_ibv_mw // allocated once for a lane and region, bound anew in each epoch
	rkey   uint32           // of the present binding; its low byte changes with each
}

var errStopped = errors.New("the lane has ended")

// errWindow: the device refuses a window, which no other lane would change.
var errWindow = errors.New("the device refuses a window")

// bind gives a lane a window onto the whole region under a key that has not been used before.
// Preconditions: mu is held, the region is served.
func (r *region) bind(ctx context.Context, l *lane, mr *C.struct_ibv_mr) (rkey uint32, err error) {
	if g := r.grants[l]; g != nil {
		return g.rkey, nil
	}
	for old := range r.grants {
		if old.ended() { // its window went with it
			delete(r.grants, old)
		}
	}
	g, err := l.window(r.number, r.past)
	if err != nil {
		return 0, err
	}
	err = l.execute(ctx, func(id C.uint64_t) C.int {
		return C.q_bind(l.qp, g.window, mr, C.uint32_t(g.rkey), C.uint64_t(l.server.device.base(r.memory.Bytes())), C.uint64_t(len(r.memory.Bytes())), l.access(), id)
	})
	if err != nil {
		return 0, fmt.Errorf("binding a window: %w", err)
	}
	r.grants[l] = g
	return g.rkey, nil
}

// takeBack ends a grant. When it returns nil no verb of the lane reaches the region.
func (l *lane) takeBack(ctx context.Context, g *grant) error {
	err := l.execute(ctx, func(id C.uint64_t) C.int { return C.q_invalidate(l.qp, C.uint32_t(g.rkey), id) })
	if err == nil {
		return nil
	}
	// Its queue pair is in the error state, or should be: then the drain is the end of all.
	if err := l.stop(rdma.ErrBroken); err != nil {
		return err
	}
	l.nc.Close() // its goroutine does the rest
	select {
	case <-l.flushed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("lane %d of session %d has not drained: %w", l.number, l.ticket.Session, ctx.Err())
	}
}

// ended says that the queue pair is destroyed, and the windows with it.
func (l *lane) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.qp == nil
}

// window makes a window that is not bound yet, with a key that is not in past.
func (l *lane) window(region uint32, past []uint32) (*grant, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped != nil || l.qp == nil {
		return nil, errStopped
	}
	g := l.granted[region]
	if g == nil {
		w := C.q_window(l.domain.pd)
		if w == nil {
			return nil, fmt.Errorf("%w: it has no more", errWindow)
		}
		if l.granted == nil {
			l.granted = make(map[uint32]*grant)
		}
		g = &grant{window: w, rkey: uint32(w.rkey)}
		l.granted[region] = g
	}
	// The low byte of a key is the owner's.
	for range 256 {
		g.rkey = g.rkey&^0xff | (g.rkey+1)&0xff
		if !slices.Contains(past, g.rkey) {
			return g, nil
		}
	}
	// All have been used: the client comes back on a lane with another window.
	return nil, errors.New("the window has no keys left")
}

// execute posts a bind or an invalidation and waits for it. If it does not complete in time,
// or before ctx ends, the lane's queue pair goes to the error state, so that the caller, who
// holds the region's lock, can continue.
func (l *lane) execute(ctx context.Context, post func(id C.uint64_t) C.int) error {
	l.bindMu.Lock()
	defer l.bindMu.Unlock()
	l.mu.Lock()
	if l.stopped != nil || l.drained || l.qp == nil || l.cm == nil {
		l.mu.Unlock()
		return errStopped
	}
	err := problem("posting", post(C.uint64_t(l.id|bindID)))
	l.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%w: %w", errWindow, err)
	}
	limit := time.NewTimer(l.server.binding)
	defer limit.Stop()
	select {
	case status := <-l.bound:
		switch status {
		case C.IBV_WC_SUCCESS:
			return nil
		case C.IBV_WC_WR_FLUSH_ERR:
			return errStopped
		}
		return fmt.Errorf("%w: %s", errWindow, C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(status))))
	case <-l.flushed:
		return errStopped
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-limit.C:
		err = fmt.Errorf("no completion within %v", l.server.binding)
	}
	// Whether it took effect is unknown, so the queue pair must not run on.
	err = errors.Join(fmt.Errorf("bind or invalidation of a window: %w", err), l.stop(rdma.ErrBroken))
	l.nc.Close() // its goroutine does the rest
	return err
}

// withoutWindows serves a region by its memory regions from now on, because the device refuses a
// window. All sessions of a tenant have the same key then. Lanes that have windows onto the
// region lose them, and ask for access again.
// Preconditions: r.mu is held, the region is served.
func (s *Server) withoutWindows(ctx context.Context, r *region, why error) error {
	s.plain.Store(true)
	s.log.Error("verbs fabric: no windows from now on: sessions of one tenant share keys", "device", s.device.caps.Device, "region", r.number, "error", why)
	s.forgive()
	m := r.memory
	if err := r.letGo(ctx, false); err != nil {
		return err
	}
	r.memory, r.windows = m, false
	return s.registerFor(r)
}

// tryWindow binds a window onto the whole of a region on a queue pair of the node's own, whose
// far end sends nothing: if that is refused, the device is to blame and not a client.
// refused is only meaningful without an error.
func (s *Server) tryWindow(r *region, d *domain, mr *C.struct_ibv_mr) (refused bool, err error) {
	dialer, err := NewDialer(s.device.own())
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, dialer.Close()) }()
	_, far, leave, err := s.pair(dialer, d, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, leave()) }()
	g, err := far.window(r.number, nil)
	if err == nil {
		err = far.execute(s.ctx, func(id C.uint64_t) C.int {
			return C.q_bind(far.qp, g.window, mr, C.uint32_t(g.rkey), C.uint64_t(s.device.base(r.memory.Bytes())), C.uint64_t(len(r.memory.Bytes())), far.access(), id)
		})
	}
	if errors.Is(err, errWindow) || errors.Is(err, errStopped) && s.ctx.Err() == nil {
		return true, nil
	}
	return false, err
}

// chooseWindows decides whether lanes get windows: as Config.Windows says, or where a probe shows
// that the device keeps a window to its bounds and to its queue pair.
func (s *Server) chooseWindows() {
	caps := &s.device.caps
	if use := s.device.config.Windows; use != WindowsAuto {
		s.windows = use == WindowsOn
		return
	}
	caps.Enforced = "nothing"
	if !caps.Windows2B {
		return
	}
	bounds, owner, err := s.probeWindows()
	if err != nil {
		// A device that cannot do what it says gets memory regions.
		s.log.Warn("verbs fabric: windows of type 2B cannot be used", "device", caps.Device, "error", err)
		return
	}
	switch {
	case bounds && owner:
		caps.Enforced, s.windows = "bounds and queue pair", true
	case bounds:
		caps.Enforced = "bounds"
	case owner:
		caps.Enforced = "queue pair"
	}
	s.log.Info("verbs fabric: windows of type 2B", "device", caps.Device, "enforced", caps.Enforced, "used", s.windows)
}

// What the probe's window covers of its memory.
const (
	probeFrom  = 4096
	probeBytes = proto.MinRegionBytes
)

// probeWindows binds a window of the size of a small region, with the rights of a session that
// writes. It reads, writes and adds inside of it, and reads outside of it and on a queue pair that is not the window's. Larger
// regions would be pinned for it: a bind that their size or number makes fail is met by
// withoutWindows.
func (s *Server) probeWindows() (bounds, owner bool, err error) {
	dialer, err := NewDialer(s.device.own())
	if err != nil {
		return false, false, err
	}
	defer func() { err = errors.Join(err, dialer.Close()) }()
	mem, err := unix.Mmap(-1, 0, probeBytes+4*probeFrom, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return false, false, err
	}
	defer unix.Munmap(mem)
	s.mu.Lock()
	d, err := s.domain(0)
	s.mu.Unlock()
	if err != nil {
		return false, false, err
	}
	mr, err := register(d.pd, mem, 0, C.IBV_ACCESS_LOCAL_WRITE|C.IBV_ACCESS_MW_BIND)
	if err != nil {
		return false, false, err
	}
	defer func() { err = errors.Join(err, problem("deregistering the probe", C.q_deregister(mr))) }()
	into, err := register(dialer.buffers.pd, mem, addressOf(mem), C.IBV_ACCESS_LOCAL_WRITE)
	if err != nil {
		return false, false, err
	}
	defer func() { err = errors.Join(err, problem("deregistering the probe", C.q_deregister(into))) }()

	mine, answers, leave, err := s.pair(dialer, d, 0)
	if err != nil {
		return false, false, err
	}
	defer func() { err = errors.Join(err, leave()) }()
	other, _, leaveOther, err := s.pair(dialer, d, 1)
	if err != nil {
		return false, false, err
	}
	defer func() {
		err = errors.Join(err, leaveOther())
		s.access.Store(0) // the refusals were asked for
	}()
	g, err := answers.window(0, nil)
	if err != nil {
		return false, false, err
	}
	err = answers.execute(s.ctx, func(id C.uint64_t) C.int {
		return C.q_bind(answers.qp, g.window, mr, C.uint32_t(g.rkey), probeFrom, probeBytes, answers.access(), id)
	})
	if err != nil {
		return false, false, err
	}
	try := func(l *C.q_lane, op C.uint8_t, bytes C.uint32_t, sequence, off uint64) error {
		l.verbs[0] = C.q_verb{op: op, len: bytes, local: C.uint64_t(addressOf(mem)), lkey: into.lkey, remote: C.uint64_t(off), rkey: C.uint32_t(g.rkey), value: 1}
		var taken C.int
		switch how := C.q_once(l, 1, C.uint64_t(sequence), &taken, C.int64_t(connectTimeout), C.int64_t(connectTimeout)); {
		case how == C.Q_DONE:
			return nil
		case how == C.Q_FAILED && (l.status == C.IBV_WC_REM_ACCESS_ERR || l.status == C.IBV_WC_REM_INV_REQ_ERR):
			return rdma.ErrKey
		case how == C.Q_FAILED:
			return errors.New(C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(l.status))))
		default:
			return fmt.Errorf("no outcome (%d)", how)
		}
	}
	inside := []C.uint8_t{C.Q_READ, C.Q_WRITE, C.Q_FAA}
	if s.acts != nil {
		inside = inside[:2]
	}
	for i, op := range inside {
		if err := try(mine, op, 8, uint64(i+1), probeFrom+probeBytes-8); err != nil {
			return false, false, fmt.Errorf("verb %d inside of a window: %w", op, err)
		}
	}
	outside := try(mine, C.Q_READ, 64, 4, probeFrom+probeBytes)
	foreign := try(other, C.Q_READ, 64, 1, probeFrom)
	for _, err := range []error{outside, foreign} {
		if err != nil && !errors.Is(err, rdma.ErrKey) {
			return false, false, err
		}
	}
	return outside != nil, foreign != nil, nil
}

// pair connects a queue pair of a dialer with one of the node's own.
func (s *Server) pair(dialer *Dialer, d *domain, number uint32) (near *C.q_lane, far *lane, leave func() error, err error) {
	nc, unused := net.Pipe() // a lane has a socket; this one has no other end
	unused.Close()
	far = s.newLane(nc, number, 0, &rdma.Ticket{Serial: host.LoopSerial, Rights: rdma.ReadWrite})
	s.mu.Lock()
	s.add(far, d)
	s.mu.Unlock()
	if err := far.create(); err != nil {
		s.forget(far)
		return nil, nil, nil, err
	}
	near, err = dialer.openLane(leastDepth)
	leave = func() error {
		var err error
		if near != nil {
			err = closeLane(near)
		}
		ctx, cancel := context.WithTimeout(s.ctx, connectTimeout)
		defer cancel()
		err = errors.Join(err, far.finish(ctx, rdma.ErrBroken))
		return err
	}
	if err == nil {
		own := claim{lane: number, nonce: far.nonce}
		err = dialer.device.join(near, endpoint{port: s.port, addr: s.device.caps.GID.As16()}, own.append(nil), connectTimeout)
	}
	if err != nil {
		return nil, nil, nil, errors.Join(err, leave())
	}
	return near, far, leave, nil
}

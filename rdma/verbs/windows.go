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

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// grant is a lane's window onto a region. Of type 2B: it is good on that lane's queue pair alone.
type grant struct {
	window *C.struct_ibv_mw
	rkey   uint32
}

var errStopped = errors.New("the lane has ended")

// bind gives a lane a window onto the whole region under a key that has not been used before.
// Preconditions: mu is held, the region is served.
func (r *region) bind(l *lane, mr *C.struct_ibv_mr) (rkey uint32, err error) {
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
	err = l.execute(func(id C.uint64_t) C.int {
		return C.q_bind(l.qp, g.window, mr, C.uint32_t(g.rkey), 0, C.uint64_t(len(r.memory.Bytes())), l.access(), id)
	})
	if err != nil {
		return 0, fmt.Errorf("binding a window: %w", err)
	}
	r.grants[l] = g
	return g.rkey, nil
}

// takeBack ends a grant. When it returns nil no verb of the lane reaches the region.
func (l *lane) takeBack(ctx context.Context, g *grant) error {
	err := l.execute(func(id C.uint64_t) C.int { return C.q_invalidate(l.qp, C.uint32_t(g.rkey), id) })
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

// window is an unbound window with a key that is not in past.
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
			return nil, errors.New("the device has no more windows")
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

// execute posts a bind or an invalidation and waits for it.
func (l *lane) execute(post func(id C.uint64_t) C.int) error {
	l.bindMu.Lock()
	defer l.bindMu.Unlock()
	l.mu.Lock()
	if l.stopped != nil || l.drained || l.qp == nil {
		l.mu.Unlock()
		return errStopped
	}
	err := problem("posting", post(C.uint64_t(l.id|bindID)))
	l.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case status := <-l.bound:
		if status != C.IBV_WC_SUCCESS {
			return errors.New(C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(status))))
		}
		return nil
	case <-l.flushed:
		return errStopped
	}
}

// chooseWindows decides whether lanes are given windows: where the device is seen to keep
// them to their bounds and to their queue pair.
func (s *Server) chooseWindows(use windowUse) {
	caps := &s.device.caps
	if use != windowsProbed {
		s.windows = use == windowsAlways
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
	probeBytes = 2048
)

// probeWindows binds a window over part of some memory and reads inside of it, outside of
// it, and inside of it on a queue pair that is not the window's.
func (s *Server) probeWindows() (bounds, owner bool, err error) {
	caps := s.device.caps
	dialer, err := NewDialer(Config{Device: caps.Device, Port: caps.Port, GID: caps.GID})
	if err != nil {
		return false, false, err
	}
	defer func() { err = errors.Join(err, dialer.Close()) }()
	mem, err := unix.Mmap(-1, 0, 4*probeFrom, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
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
	defer func() { err = errors.Join(err, leaveOther()) }()
	g, err := answers.window(0, nil)
	if err != nil {
		return false, false, err
	}
	err = answers.execute(func(id C.uint64_t) C.int {
		return C.q_bind(answers.qp, g.window, mr, C.uint32_t(g.rkey), probeFrom, probeBytes, C.IBV_ACCESS_REMOTE_READ, id)
	})
	if err != nil {
		return false, false, err
	}
	read := func(l *C.q_lane, sequence, off uint64) error {
		l.verbs[0] = C.q_verb{op: C.Q_READ, len: 64, local: C.uint64_t(addressOf(mem)), lkey: into.lkey, remote: C.uint64_t(off), rkey: C.uint32_t(g.rkey)}
		var taken C.int
		switch how := C.q_once(l, 1, C.uint64_t(sequence), &taken, 0, C.int64_t(connectTimeout)); {
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
	if err := read(mine, 1, probeFrom); err != nil {
		return false, false, fmt.Errorf("reading inside of a window: %w", err)
	}
	outside := read(mine, 2, probeFrom+probeBytes)
	foreign := read(other, 1, probeFrom)
	for _, err := range []error{outside, foreign} {
		if err != nil && !errors.Is(err, rdma.ErrKey) {
			return false, false, err
		}
	}
	return outside != nil, foreign != nil, nil
}

// pair connects a queue pair of a dialer with one of the node's own, for READs.
func (s *Server) pair(dialer *Dialer, d *domain, number uint32) (near *C.q_lane, far *lane, leave func() error, err error) {
	nc, unused := net.Pipe() // a lane has a socket; nobody listens at this one
	unused.Close()
	far = s.newLane(nc, number, 0, &rdma.Ticket{Serial: host.LoopSerial})
	s.mu.Lock()
	err = s.add(far, d)
	s.mu.Unlock()
	if err != nil {
		return nil, nil, nil, err
	}
	near, err = dialer.openLane()
	leave = func() error {
		var err error
		if near != nil {
			err = closeLane(near)
		}
		ctx, cancel := context.WithTimeout(s.ctx, connectTimeout)
		defer cancel()
		err = errors.Join(err, far.finish(ctx, rdma.ErrBroken))
		s.access.Store(0) // the refusals were asked for
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
